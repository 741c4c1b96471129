"""LongRoPE's factors, read from a JSON file. Ding et al. 2024, arXiv:2402.13753."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pe_study.errors import RescaleError

if TYPE_CHECKING:
    from torch import Tensor


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
    original = int(content.get("original_max_position_embeddings", original_length))
    name = "long_factor" if length > original else "short_factor"
    if len(content[name]) != rotary_dim // 2:
        raise RescaleError(
            f"{file}: {name} has {len(content[name])} factors, this model rotates {rotary_dim // 2} pairs"
        )
    factors = torch.tensor(content[name], dtype=torch.float32)
    exponents = torch.arange(0, rotary_dim, 2, dtype=torch.int64).float() / rotary_dim
    scale = float(content.get("factor", max(1.0, length / original)))
    computed = math.sqrt(1 + math.log(scale) / math.log(original)) if scale > 1 else 1.0
    stated = content.get("attention_factor", computed) if attention_factor is None else attention_factor
    return 1.0 / (factors * base**exponents), float(stated)


def read(file: str) -> dict[str, Any]:
    """A JSON object with `short_factor` and `long_factor`; may state `factor`, `attention_factor` and
    `original_max_position_embeddings`. RescaleError where it does not."""
    try:
        content = json.loads(Path(file).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise RescaleError(f"{file}: cannot read longrope factors: {error}") from None
    for name in ("short_factor", "long_factor"):
        values = content.get(name) if isinstance(content, dict) else None
        if not isinstance(values, list) or not all(_is_positive(value) for value in values):
            raise RescaleError(f"{file}: {name} must be a list of positive numbers, one a rotated pair")
    return content


def _is_positive(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < math.inf
