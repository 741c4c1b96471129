"""A Hugging Face decoder behind the surface that training uses of ours, so that one loop trains both."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from pe_study.checkpoints import Checkpoint, loading
from pe_study.errors import UsageError
from pe_study.loading import hf_rope
from pe_study.model import next_token_loss

if TYPE_CHECKING:
    from pe_study.recipe import Recipe, RunSpec

ENCODING = "rope"  # what a decoder of another library may have for its positions
DROPOUTS = re.compile(r"dropout|(attention|attn|hidden|resid|residual|embd|embed)_\w*p?drop(out)?\w*")
QUERY_NORM = re.compile(r"\.(q|query)_?(layer_?)?norm\.")


def check(recipe: Recipe, run: RunSpec, checkpoint: Checkpoint) -> None:
    """UsageError naming every key of a recipe that says another decoder than the checkpoint's."""
    where, spec = f"{recipe.path or recipe.name}", run.encoding
    if recipe.data.packing == "isolate":
        raise UsageError(f"{where}: data.packing: isolate needs our own decoder; use within-document")
    if checkpoint.rotary is None:
        raise UsageError(
            f"{where}: init.from: {checkpoint.source} {hf_rope.why_not(checkpoint.config)}; "
            "accepted: a checkpoint with RoPE, or a run"
        )
    if spec.name != ENCODING:
        raise UsageError(
            f"{where}: encodings: found {spec.name}; accepted: {ENCODING}, which {checkpoint.source} has"
        )
    there = _sizes(recipe, checkpoint)
    said = {key: getattr(recipe.model, key.removeprefix("model.")) for key in there} | {
        f"encodings.0.{key}": spec.options[key] for key in ("base", "fraction")
    }
    there |= _rotary_options(spec.options, checkpoint)
    differing = [key for key, value in there.items() if value != said[key]]
    if differing:
        raise UsageError(
            f"{where}: model and encodings have to be those of {checkpoint.source}: "
            f"{'; '.join(f'{key} is {there[key]} there, found {said[key]}' for key in differing)}"
        )
    if recipe.model.dropout and not _dropouts(checkpoint.config):
        raise UsageError(
            f"{where}: model.dropout: found {recipe.model.dropout}; "
            f"{checkpoint.config.model_type} has none; accepted: 0"
        )


def set_dropout(config: Any, dropout: float) -> None:
    """Give every dropout of an architecture one probability, in its config, before it is built."""
    for name in _dropouts(config):
        setattr(config.get_text_config(), name, dropout)


def _dropouts(config: Any) -> list[str]:
    facts = config.get_text_config().to_dict()
    return [key for key, value in facts.items() if DROPOUTS.fullmatch(key) and isinstance(value, int | float)]


def _sizes(recipe: Recipe, checkpoint: Checkpoint) -> dict[str, Any]:
    """What the keys of `model` have to say for a checkpoint."""
    config, wanted = checkpoint.config.get_text_config(), recipe.model
    positions = getattr(config, "max_position_embeddings", None) or 0
    drawn = getattr(config, "initializer_range", None)
    unsaid = type(wanted).model_fields["initializer_range"].default  # no weight is drawn
    return {
        "model.num_layers": config.num_hidden_layers,
        "model.d_model": config.hidden_size,
        "model.num_heads": config.num_attention_heads,
        "model.num_kv_heads": getattr(config, "num_key_value_heads", None) or config.num_attention_heads,
        "model.d_ff": getattr(config, "intermediate_size", None) or wanted.d_ff,
        "model.max_positions": max(positions, recipe.train.length),
        "model.qk_norm": _norms_queries(checkpoint),
        "model.initializer_range": drawn if wanted.initializer_range != unsaid and drawn else unsaid,
    }


def _norms_queries(checkpoint: Checkpoint) -> bool:
    """Whether queries and keys are normed, as the names of weights say on a copy that holds no memory."""
    from transformers import AutoModelForCausalLM

    with loading(checkpoint.source), torch.device("meta"):
        model = AutoModelForCausalLM.from_config(checkpoint.config)
    return any(QUERY_NORM.search(name) for name, _ in model.named_parameters())


def _rotary_options(options: Mapping[str, Any], checkpoint: Checkpoint) -> dict[str, Any]:
    """What base and rotated fraction have to say."""
    rotary, text = checkpoint.rotary, checkpoint.config.get_text_config()
    assert rotary is not None
    head_dim = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    same = int(head_dim * options["fraction"]) == rotary.rotary_dim
    fraction = options["fraction"] if same else rotary.rotary_dim / head_dim
    return {"encodings.0.base": rotary.base, "encodings.0.fraction": fraction}


class ForeignDecoder(nn.Module):
    """Wraps a causal language model; its weights are saved in its own format."""

    def __init__(self, decoder: Any) -> None:
        super().__init__()
        self.decoder = decoder
        self.config = decoder.config
        there = {type(module).__name__ for module in decoder.modules()}  # a family names all it may have
        self._no_split_modules = sorted(there.intersection(decoder._no_split_modules or ()))  # for FSDP

    def forward(
        self,
        input_ids: Tensor,
        shift_labels: Tensor,
        num_items_in_batch: int,
        segment_ids: None = None,
        use_cache: bool = False,
    ) -> Any:
        """Ids (B, T) and next tokens (B, T) -> the loss, a sum over targets over `num_items_in_batch`."""
        assert segment_ids is None, "recipes with init refuse packing: isolate for foreign decoders"
        logits_BTV = self.decoder(input_ids=input_ids, use_cache=use_cache).logits
        return SimpleNamespace(loss=next_token_loss(logits_BTV, shift_labels, num_items_in_batch))

    def parameter_groups(
        self, *, weight_decay: float, lr_total: float, lr_mult: float | str = "auto"
    ) -> list[dict[str, Any]]:
        """AdamW groups as our decoder's: matrices decay, norms, biases and embeddings do not."""
        embeddings = {id(weight) for weight in self._embedding_weights()}
        decayed = [p for p in self.parameters() if p.ndim >= 2 and id(p) not in embeddings]
        plain = [p for p in self.parameters() if p.ndim < 2 or id(p) in embeddings]
        return [
            {"name": "decay", "params": decayed, "weight_decay": weight_decay, "lr_mult": 1.0},
            {"name": "no_decay", "params": plain, "weight_decay": 0.0, "lr_mult": 1.0},
        ]

    def _embedding_weights(self) -> Iterator[nn.Parameter]:
        for module in (self.decoder.get_input_embeddings(), self.decoder.get_output_embeddings()):
            if module is not None:
                yield module.weight

    def position_parameters(self) -> list[tuple[str, nn.Parameter]]:
        """None is told apart in a foreign model."""
        return []

    def resolved_kernel(
        self,
        device: torch.device | str | None = None,
        mask_kind: str = "causal",
        dtype: torch.dtype | None = None,
        *,
        consecutive: bool = True,
    ) -> str:
        """The name of its attention implementation, as transformers calls it."""
        return str(self.config._attn_implementation)

    def gradient_checkpointing_enable(self) -> None:
        """Recompute each layer in the backward pass; always non-reentrant."""
        enable = getattr(self.decoder, "activation_checkpointing_enable", None)  # its name from 5.24 on
        (enable or self.decoder.gradient_checkpointing_enable)()

    def save_pretrained(self, folder: Path, *, state_dict: dict[str, Tensor]) -> None:
        """Write the decoder as `from_pretrained` loads it."""
        own = {name.removeprefix("decoder."): tensor for name, tensor in state_dict.items()}
        self.decoder.save_pretrained(folder, state_dict=own)
