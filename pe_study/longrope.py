"""LongRoPE's factors, read from a JSON file. Ding et al. 2024, arXiv:2402.13753."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pe_study.errors import RescaleError

if TYPE_CHECKING:
    from torch import Tensor


_NUMBERS: dict[str, tuple[str, Callable[[float], bool]]] = {
    "factor": ("a number of at least 1", lambda value: value >= 1),
    "attention_factor": ("a positive number", lambda value: True),
    "original_max_position_embeddings": (
        "a whole number of at least 2",
        lambda value: value >= 2 and value == int(value),
    ),
}


def frequencies(
    file: str,
    attention_factor: float | None,
    *,
    rotary_dim: int,
    base: float,
    original_length: int,
    length: int,
) -> tuple[Tensor, float]:
    """The short factors up to the original length, the long ones past it; sqrt(1 + ln s / ln L0) on both."""
    import torch

    content = read(file)
    original = int(content.get("original_max_position_embeddings") or original_length)
    name = "long_factor" if length > original else "short_factor"
    if len(content[name]) != rotary_dim // 2:
        raise RescaleError(
            f"{file}: {name} has {len(content[name])} factors, this model rotates {rotary_dim // 2} pairs"
        )
    factors = torch.tensor(content[name], dtype=torch.float32)
    exponents = torch.arange(0, rotary_dim, 2, dtype=torch.int64).float() / rotary_dim
    scale = float(content.get("factor") or max(1.0, length / original))
    computed = math.sqrt(1 + math.log(scale) / math.log(original)) if scale > 1 else 1.0
    stated = attention_factor or content.get("attention_factor") or computed
    return 1.0 / (factors * base**exponents), float(stated)


def read(file: str) -> dict[str, Any]:
    """A JSON object with `short_factor` and `long_factor`; may state `factor`, `attention_factor` and
    `original_max_position_embeddings`, null as if it did not. RescaleError naming file and key."""
    try:
        content = json.loads(Path(file).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise RescaleError(f"{file}: cannot read longrope factors: {error}") from None
    for name in ("short_factor", "long_factor"):
        values = content.get(name) if isinstance(content, dict) else None
        if not isinstance(values, list) or not all(_is_positive(value) for value in values):
            raise RescaleError(f"{file}: {name} must be a list of positive numbers, one a rotated pair")
    for name, (accepted, fits) in _NUMBERS.items():
        value = content.get(name)
        if value is not None and not (_is_positive(value) and fits(value)):
            raise RescaleError(f"{file}: {name} must be {accepted} (or null), found {json.dumps(value)}")
    return content


def _is_positive(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < math.inf
