"""A Hugging Face decoder behind the surface that training uses of ours, so that one loop trains both."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from pe_study.model import next_token_loss


class ForeignDecoder(nn.Module):
    """Wraps a causal language model; its weights are saved in its own format."""

    def __init__(self, decoder: Any) -> None:
        super().__init__()
        self.decoder = decoder
        self.config = decoder.config
        self._no_split_modules = decoder._no_split_modules  # what FSDP shards by

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
