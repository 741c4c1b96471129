"""Load any causal language model (run directory, Hugging Face id or folder, GGUF) at one declared length."""

from __future__ import annotations

from typing import Any

from torch import nn


def max_length(model: Any) -> int | None:
    """The longest context that a model has positions for; None where nothing limits it.

    Our models say so; of others, a learned table of absolute positions is the only hard limit.
    """
    if hasattr(model, "max_length"):
        return model.max_length
    if not isinstance(model, nn.Module):
        return None
    limits = [
        module.num_embeddings - getattr(module, "offset", 0)
        for name, module in model.named_modules()
        if isinstance(module, nn.Embedding) and name.rsplit(".", 1)[-1] in POSITION_TABLES
    ]
    return min(limits, default=None)


POSITION_TABLES = ("wpe", "embed_positions", "position_embeddings", "position_embedding", "pos_embed")


def vocabulary_size(model: Any) -> int | None:
    """Rows of the input embedding, None where a model has none to show."""
    find = getattr(model, "get_input_embeddings", None)
    table = find() if find is not None else None
    return getattr(table, "num_embeddings", None)
