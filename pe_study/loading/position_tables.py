"""Learned tables of absolute positions: the one hard limit on the length that a model can read."""

from __future__ import annotations

from typing import Any

from torch import nn

POSITION_TABLES = (
    "wpe",
    "embed_positions",
    "positions_embed",
    "position_embeddings",
    "position_embedding",
    "pos_embed",
)


def max_length(model: Any) -> int | None:
    """The longest context that a model has positions for; None where nothing limits it.

    Our models say so; of others, a learned table of absolute positions is the only hard limit.
    """
    if hasattr(model, "max_length"):
        return model.max_length
    if not isinstance(model, nn.Module):
        return None
    limits = [
        module.num_embeddings - _rows_before_the_first(module)
        for name, module in model.named_modules()
        if isinstance(module, nn.Embedding) and name.rsplit(".", 1)[-1] in POSITION_TABLES
    ]
    return min(limits, default=None)


def _rows_before_the_first(table: nn.Embedding) -> int:
    """Rows of a position table that no position has: OPT's offset, RoBERTa's up to its padding row."""
    return getattr(table, "offset", 0) + (0 if table.padding_idx is None else table.padding_idx + 1)
