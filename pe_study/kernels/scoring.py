"""What every kernel is told beside q, k and v, and the mask as a rule on indices.

Shape legend: B batch, H query heads, G key heads, T queries, S keys, K head width.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pe_study.encodings.base import At, Encoding, ScoreMod, position_at

LOG2_E = math.log2(math.e)
Result = tuple[Tensor, Tensor | None]
"""(out (B,H,T,K), logsumexp (B,H,T) or None where a kernel does not tell)."""


class Segments(NamedTuple):
    """Who may see whom beside causality: query t sees key s where their numbers agree."""

    q_BT: Tensor
    k_BS: Tensor


@dataclass(frozen=True)
class Mask:
    """Causal, with query 0 at index `offset` of the keys; `segments` hides padding and other documents,
    `window` all but the last so many keys of each query, its own counted."""

    offset: int = 0
    segments: Segments | None = None
    window: int | None = None

    @property
    def kind(self) -> str:
        if self.window is not None:
            return "window"
        return "causal" if self.segments is None else "segments"


@dataclass(frozen=True)
class Tempered:
    """An encoding as kernels see it, every score (bias included) times a factor of its query (B or 1, T)."""

    encoding: Encoding
    factor_BT: Tensor
    has_distance_bias = False
    has_query_bias = True
    constant_beyond = None

    def score_mod(self, q_BHTK: Tensor, at: At) -> ScoreMod:
        modify = self.encoding.score_mod(q_BHTK, at)
        assert modify is not None

        def multiply(score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
            return modify(score, b, h, q, k) * position_at(self.factor_BT, b, q)

        return multiply

    def __getattr__(self, name: str) -> Any:
        return getattr(self.encoding, name)


@dataclass(frozen=True)
class Scoring:
    """What a kernel needs beside q, k, v: the encoding, where it stands, and the query before rotation."""

    encoding: Encoding | Tempered
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
    if mask.window is not None:
        seen = seen & (s > t + mask.offset - mask.window)
    if mask.segments is not None:
        seen = seen & (mask.segments.q_BT[b, t] == mask.segments.k_BS[b, s])
    return seen


def blind(mask: Mask, num_queries: int, num_keys: int, device: torch.device) -> Tensor | None:
    """Which queries see no key, bool (B, T), as padding before a row does. None: every query sees one."""
    if mask.segments is None:
        return None
    own = mask.segments.k_BS[:, mask.offset : mask.offset + num_queries] == mask.segments.q_BT
    if bool(own.all()):
        return None
    return keys_seen(mask, num_queries, num_keys, device) == 0


def keys_seen(mask: Mask, num_queries: int, num_keys: int, device: torch.device) -> Tensor:
    """How many keys each query sees, int64 (B or 1, T)."""
    rows = torch.arange(num_queries, device=device)
    if mask.segments is None:
        return (rows + mask.offset + 1).clamp(max=mask.window or num_keys)[None]
    b = torch.arange(len(mask.segments.k_BS), device=device)[:, None, None]
    s = torch.arange(num_keys, device=device)
    return torch.cat([allowed(mask, b, part[:, None], s).sum(-1) for part in rows.split(128)], dim=-1)


def tempered(q_BHTK: Tensor, num_keys: int, scoring: Scoring) -> tuple[Tensor, Scoring]:
    """Queries and scoring of an encoding that multiplies scores: without a bias the queries carry it."""
    encoding, memo = scoring.encoding, scoring.at.memo
    if not encoding.rescale.logn or num_keys <= encoding.dims.train_length:  # up to there the factor is 1
        return q_BHTK, scoring
    if "score_factor" not in memo:
        seen_BT = keys_seen(scoring.mask, q_BHTK.shape[2], num_keys, q_BHTK.device)
        memo["score_factor"] = encoding.score_factor(seen_BT)
    factor_BT = memo["score_factor"]
    if encoding.has_distance_bias or encoding.has_query_bias:
        assert isinstance(encoding, Encoding)
        return q_BHTK, replace(scoring, encoding=Tempered(encoding, factor_BT))
    return q_BHTK * factor_BT[:, None, :, None].to(q_BHTK.dtype), scoring


def merge(
    far: tuple[Tensor, Tensor] | None, near: tuple[Tensor, Tensor] | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Softmax parts over disjoint keys -> (out, logsumexp, logsumexp over ln 2) of the whole.

    `far` is (out, logsumexp), `near` (out, logsumexp over ln 2). Where one part alone counts, its own number
    is kept as it is: a change of base rounds in proportion to it.
    """
    if near is None:
        assert far is not None
        return *far, far[1] * LOG2_E
    if far is None:
        return near[0], near[1] / LOG2_E, near[1]
    far_lse2 = far[1] * LOG2_E
    lse, lse2 = torch.logaddexp(far[1], near[1] / LOG2_E), torch.logaddexp2(far_lse2, near[1])
    share = (far_lse2 - lse2).exp2_().to(far[0].dtype)[..., None]
    return torch.lerp(near[0], far[0], share), lse, lse2


def same_width(q_BHTE: Tensor, k_BGSE: Tensor, v_BGSK: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """With zeros behind the narrower ones, which change no score: fused kernels want one width. The output
    is that of v in its first K columns."""
    width = max(q_BHTE.shape[-1], v_BGSK.shape[-1])
    q, k, v = (
        x if x.shape[-1] == width else torch.nn.functional.pad(x, (0, width - x.shape[-1]))
        for x in (q_BHTE, k_BGSE, v_BGSK)
    )
    return q, k, v


def repeat_heads(x_BGSK: Tensor, num_heads: int) -> Tensor:
    """(B,G,S,K) -> (B,H,S,K): each key head serves H / G query heads, as a view where torch can."""
    batch, groups, length, width = x_BGSK.shape
    if groups == num_heads:
        return x_BGSK
    expanded = x_BGSK[:, :, None].expand(batch, groups, num_heads // groups, length, width)
    return expanded.reshape(batch, num_heads, length, width)
