"""The decoder: Llama-shaped (pre-RMSNorm, SwiGLU, no biases, tied head), its encoding a part passed in.

Shape legend: B batch, T tokens of this call, S keys (cached and new), D model width, H query heads,
G key heads, K head width, V vocabulary.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.cache_utils import Cache, DynamicCache
from transformers.generation import GenerationMixin
from transformers.modeling_outputs import CausalLMOutputWithPast

from pe_study import attention
from pe_study.configuration import PEStudyConfig
from pe_study.encodings.base import At, Encoding, Rotary
from pe_study.errors import LengthError
from pe_study.kernels.scoring import Mask
from pe_study.layers import Layer, RMSNorm
from pe_study.loading.declared import check_cache, embedded_prompt
from pe_study.placing import Controls, check_positions, place

__all__ = ["CACHE_FIELD", "PEStudyConfig", "PEStudyForCausalLM", "next_token_loss"]

CACHE_FIELD = "cache" if "cache" in CausalLMOutputWithPast.__dataclass_fields__ else "past_key_values"


class PEStudyForCausalLM(PreTrainedModel, GenerationMixin):
    """The decoder with its tied language-model head."""

    config: PEStudyConfig
    config_class = PEStudyConfig
    base_model_prefix = ""
    supports_gradient_checkpointing = True
    _no_split_modules: ClassVar = ["Layer"]
    _tied_weights_keys: ClassVar = {"lm_head.weight": "embedding.weight"}

    def __init__(self, config: PEStudyConfig) -> None:
        super().__init__(config)
        self.embedding = nn.Embedding(config.vocab_size, config.d_model)
        shared = config.build_encoding()
        # A model-wide encoding is a submodule of the root, handed down as an argument.
        self.encoding = None if shared.per_layer else shared
        own = [config.build_encoding() if shared.per_layer else None for _ in range(config.num_layers)]
        self.layers = nn.ModuleList(Layer(config, i, own[i]) for i in range(config.num_layers))
        self.norm = RMSNorm(config.d_model, config.rms_norm_eps)
        self.lm_head = nn.Linear(config.d_model, config.vocab_size, bias=False)
        self.gradient_checkpointing = False
        self.controls = Controls()
        self.post_init()
        self.draw_weights()

    def _init_weights(self, module: nn.Module) -> None:
        """Weights are drawn by name in `draw_weights`, not module by module."""

    @torch.no_grad()
    def draw_weights(self) -> None:
        """Every matrix, and all that an encoding adds, ~ N(0, initializer_range), from its own generator
        seeded by (seed, name); norms stay ones.

        Two models that share a weight's name, shape and seed share its values bit for bit.
        """
        position = {name for name, _ in self.position_parameters()}
        for name, parameter in self.named_parameters():
            if parameter.is_meta or (parameter.ndim < 2 and name not in position):
                continue
            digest = hashlib.sha256(f"{self.config.seed}/{name}".encode()).digest()
            generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
            drawn = torch.empty(parameter.shape).normal_(
                0, self.config.initializer_range, generator=generator
            )
            parameter.copy_(drawn)

    def get_input_embeddings(self) -> nn.Module:
        return self.embedding

    def set_input_embeddings(self, value: nn.Embedding) -> None:
        self.embedding = value

    def get_output_embeddings(self) -> nn.Module:
        return self.lm_head

    def set_output_embeddings(self, value: nn.Linear) -> None:
        self.lm_head = value

    def layer_encodings(self) -> Iterator[Encoding]:
        """The encoding of each layer; one object for all where it is model-wide."""
        for layer in self.layers:
            encoding = self.encoding if layer.encoding is None else layer.encoding
            assert isinstance(encoding, Encoding)
            yield encoding

    @property
    def first_encoding(self) -> Encoding:
        return next(self.layer_encodings())

    @property
    def max_length(self) -> int | None:
        """The longest sequence the encoding has positions for; None = any."""
        return self.first_encoding.max_length

    def supports_rescale(self, spec: str) -> bool:
        """Whether the encoding knows a rescale, such as `linear:4` or `yarn:4+logn`."""
        return self.first_encoding.takes(spec)

    @property
    def rotary(self) -> Rotary | None:
        """Rotary width and base, None where the encoding does not rotate."""
        return self.first_encoding.rotary

    def untrained_rows(self, length: int) -> int:
        """Rows of position tables that `length` tokens use and training never reached, over all tables."""
        distinct = {id(encoding): encoding for encoding in self.layer_encodings()}
        return sum(encoding.untrained_rows(length) for encoding in distinct.values())

    def position_parameters(self) -> list[tuple[str, nn.Parameter]]:
        """The parameters that an encoding adds."""
        return [(n, p) for n, p in self.named_parameters() if "encoding" in n.split(".")[:-1]]

    def parameter_groups(
        self, *, weight_decay: float, lr_total: float, lr_mult: float | str = "auto"
    ) -> list[dict[str, Any]]:
        """AdamW groups `decay`, `no_decay` (norms, embedding) and `position` (no decay, its own `lr_mult`).

        `lr_total` is the sum of the learning rate over training, which `lr_mult: auto` may need.
        """
        position = dict(self.position_parameters())
        rest = [(n, p) for n, p in self.named_parameters() if n not in position]
        decayed = [p for n, p in rest if p.ndim >= 2 and not n.startswith(("embedding.", "lm_head."))]
        plain = [p for n, p in rest if p.ndim < 2 or n.startswith(("embedding.", "lm_head."))]
        mult = self.first_encoding.auto_lr_mult(lr_total) if lr_mult == "auto" else float(lr_mult)
        groups = [
            {"name": "decay", "params": decayed, "weight_decay": weight_decay, "lr_mult": 1.0},
            {"name": "no_decay", "params": plain, "weight_decay": 0.0, "lr_mult": 1.0},
            {"name": "position", "params": list(position.values()), "weight_decay": 0.0, "lr_mult": mult},
        ]
        return [group for group in groups if group["params"]]

    def resolved_kernel(
        self,
        device: torch.device | str | None = None,
        mask_kind: str = "causal",
        dtype: torch.dtype | None = None,
        *,
        consecutive: bool = True,
    ) -> str:
        """The kernel that runs on `device` (None: where the model is) in `dtype` (None: the weights';
        autocast's where it is on). `consecutive` is that of `At`."""
        where = self.device if device is None else torch.device(device)
        return attention.resolve(
            self.config.kernel,
            where,
            dtype or self.dtype,
            self.first_encoding,
            mask_kind,
            consecutive=consecutive,
        )

    def gradient_checkpointing_enable(self, gradient_checkpointing_kwargs: dict | None = None) -> None:
        """Recompute each layer in the backward pass; always non-reentrant."""
        self.gradient_checkpointing = True

    def gradient_checkpointing_disable(self) -> None:
        self.gradient_checkpointing = False

    @property
    def is_gradient_checkpointing(self) -> bool:
        return self.gradient_checkpointing

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        cache: Cache | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        shift_labels: Tensor | None = None,
        num_items_in_batch: Tensor | int | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        segment_ids: Tensor | None = None,
        **kwargs: Any,
    ) -> CausalLMOutputWithPast:
        """Ids (B, T) -> logits (B, T or `logits_to_keep`, V).

        `attention_mask` (B, S) is 1 for tokens and 0 for padding on either side, of the cached and new tokens
        together. `labels` (B, T) are aligned with the ids and shifted here; `shift_labels` are the next
        tokens already; -100 is ignored; the loss is a sum over targets divided by `num_items_in_batch` (None:
        their number). `segment_ids` (B, T), >= 0, keep packed documents apart. LengthError past the
        declared length.
        """
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("give either input_ids or inputs_embeds")
        x_BTD = self.embedding(input_ids) if inputs_embeds is None else inputs_embeds
        cache = past_key_values if cache is None else cache
        keep_cache = self.config.use_cache if use_cache is None else use_cache
        if cache is None and keep_cache and not self.training:
            cache = DynamicCache(config=self.config)
        past = 0 if cache is None else int(cache.get_seq_length())  # StaticCache counts in place
        self._check_length(past + x_BTD.shape[1])
        if cache is not None and self.first_encoding.depends_on_length:
            check_cache(cache, past, self.first_encoding.dims.resolved_length)
        if position_ids is not None and self.max_length is not None:
            self._check_positions(int(position_ids.max()) + 1)
        declared = self.config.length or self.config.train_length
        at, mask = place(x_BTD, past, declared, attention_mask, position_ids, segment_ids)
        if cache is not None:
            follow = True
            if position_ids is not None and past == 0:
                usual, _ = place(x_BTD, past, declared, attention_mask, None, segment_ids)
                follow = bool((at.k_positions_BS == usual.k_positions_BS).all())
            check_positions(cache, past, follow)
        hidden_BTD = self._run_layers(x_BTD, *self.controls.apply(at, mask), cache)
        rows = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits = self.lm_head(self.norm(hidden_BTD[:, rows]))
        if shift_labels is None and labels is not None:
            shift_labels = F.pad(labels[:, 1:], (0, 1), value=-100)
        loss = None if shift_labels is None else next_token_loss(logits, shift_labels, num_items_in_batch)
        return CausalLMOutputWithPast(loss=loss, logits=logits, **{CACHE_FIELD: cache})

    def _run_layers(self, x_BTD: Tensor, at: At, mask: Mask, cache: Cache | None) -> Tensor:
        x_BTD = self.first_encoding.embed(x_BTD, at)
        if self.config.dropout:
            x_BTD = F.dropout(x_BTD, self.config.dropout, training=self.training)
        for layer, encoding in zip(self.layers, self.layer_encodings(), strict=True):
            if self.gradient_checkpointing and self.training:
                x_BTD = checkpoint(layer, x_BTD, encoding, at, mask, None, use_reentrant=False)
            else:
                x_BTD = layer(x_BTD, encoding, at, mask, cache)
        return x_BTD

    def declare(self, length: int | None) -> None:
        """Makes `length` the declared length (None: none declared); every constant is rebuilt for it."""
        self.config.length = length
        for encoding in self.layer_encodings():
            encoding.declare(length)

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """As transformers generates; where no length is declared, prompt + new tokens are, for this call."""
        declared = self.config.length
        try:
            return super().generate(*args, **kwargs)
        finally:
            if self.config.length != declared:
                self.declare(declared)

    @staticmethod
    def create_masks_for_generate(*, attention_mask: Tensor | None = None, **kwargs: Any) -> Tensor | None:
        """The mask as (B, S), also for preallocated caches, where transformers would expand it."""
        return attention_mask

    def _prepare_generated_length(self, *args: Any, **kwargs: Any) -> Any:
        """transformers' own moment of knowing the whole length, before the first token is read."""
        prepared = super()._prepare_generated_length(*args, **kwargs)
        total = prepared.max_length + embedded_prompt(**kwargs)
        if self.config.length is None and self.first_encoding.depends_on_length:
            self.declare(max(total, self.config.train_length))
        self._check_length(total)
        return prepared

    def _check_length(self, total: int) -> None:
        declared = self.config.length
        if declared is None and self.first_encoding.depends_on_length:
            declared = self.config.train_length
        if declared is not None and total > declared:
            raise LengthError(
                f"{total} tokens cross the declared length {declared}; "
                f"load the model with length={total} or more"
            )
        self._check_positions(total)

    def _check_positions(self, total: int) -> None:
        if self.max_length is not None and total > self.max_length:
            raise LengthError(
                f"{total} tokens, but {self.config.encoding_name} has positions for {self.max_length}"
            )


def next_token_loss(logits_BTV: Tensor, targets_BT: Tensor, num_items: Tensor | int | None) -> Tensor:
    """Cross entropy in float32, summed over targets that are not -100, over `num_items` (None: as many)."""
    logits = logits_BTV.flatten(0, 1).float()
    reduction = "mean" if num_items is None else "sum"
    loss = F.cross_entropy(
        logits, targets_BT.flatten().to(logits.device), ignore_index=-100, reduction=reduction
    )
    return loss if num_items is None else loss / num_items


AutoModelForCausalLM.register(PEStudyConfig, PEStudyForCausalLM, exist_ok=True)
