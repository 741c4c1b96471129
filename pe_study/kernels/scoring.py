"""What every kernel is told beside q, k and v, and the mask as a rule on indices.

Shape legend: B batch, H query heads, G key heads, T queries, S keys, K head width.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from pe_study.encodings.base import At, Encoding

Result = tuple[Tensor, Tensor | None]
"""(out (B,H,T,K), logsumexp (B,H,T) or None where a kernel does not tell)."""


class Segments(NamedTuple):
    """Who may see whom beside causality: query t sees key s where their numbers agree."""

    q_BT: Tensor
    k_BS: Tensor


@dataclass(frozen=True)
class Mask:
    """Causal, with query 0 at index `offset` of the keys; `segments` hides padding and other documents."""

    offset: int = 0
    segments: Segments | None = None

    @property
    def kind(self) -> str:
        return "causal" if self.segments is None else "segments"


@dataclass(frozen=True)
class Scoring:
    """What a kernel needs beside q, k, v: the encoding, where it stands, and the query before rotation."""

    encoding: Encoding
    at: At
    unrotated_BHTK: Tensor
    scale: float
    mask: Mask


def masked_value(dtype: torch.dtype) -> float:
    """What a hidden score is set to: finite, so that a row with nothing to see stays finite, and far enough
    down that its weight underflows to zero beside any real score."""
    return max(torch.finfo(dtype).min / 2, -1e30)


def allowed(mask: Mask, b: Tensor, t: Tensor, s: Tensor) -> Tensor:
    """A FlexAttention mask_mod, and on broadcast grids the dense mask: True where query t may see key s."""
    seen = s <= t + mask.offset
    if mask.segments is not None:
        seen = seen & (mask.segments.q_BT[b, t] == mask.segments.k_BS[b, s])
    return seen


def repeat_heads(x_BGSK: Tensor, num_heads: int) -> Tensor:
    """(B,G,S,K) -> (B,H,S,K): each key head serves H / G query heads, as a view where torch can."""
    batch, groups, length, width = x_BGSK.shape
    if groups == num_heads:
        return x_BGSK
    expanded = x_BGSK[:, :, None].expand(batch, groups, num_heads // groups, length, width)
    return expanded.reshape(batch, num_heads, length, width)
