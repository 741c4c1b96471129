"""Where the tokens of a call stand: their positions, who may see whom, and how many there may be."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from pe_study.encodings.base import At
from pe_study.kernels.scoring import Mask, Segments


@dataclass
class Controls:
    """What an evaluation changes, or looks at, in a model's attention; nothing by default.

    window: keys that each query sees, the last ones, its own counted. positions_BS: int64 positions of all
    tokens of a sequence, cached ones counted, in place of their order. observe: called by every layer with
    its queries (B,H,T,E), keys (B,G,S,E) and `Scoring`.
    """

    window: int | None = None
    positions_BS: Tensor | None = None
    observe: Callable[[Tensor, Tensor, Any], None] | None = None

    def apply(self, at: At, mask: Mask) -> tuple[At, Mask]:
        """Placing and mask of a call under these controls."""
        if self.positions_BS is not None:
            k_positions_BS = self.positions_BS[:, : at.k_positions_BS.shape[1]].to(at.k_positions_BS.device)
            q_positions_BT = k_positions_BS[:, mask.offset :]
            at = replace(at, q_positions_BT=q_positions_BT, k_positions_BS=k_positions_BS, consecutive=False)
        if self.window is not None:
            mask = replace(mask, window=self.window)
        return replace(at, observe=self.observe) if self.observe is not None else at, mask


def place(
    x_BTD: Tensor,
    past: int,
    declared: int,
    attention_mask: Tensor | None,
    position_ids: Tensor | None,
    segment_ids: Tensor | None,
) -> tuple[At, Mask]:
    """Positions and mask of T new tokens behind `past` cached ones.

    `attention_mask` (B, past + T) is 0 at padding; positions count real tokens, from 0 in each packed
    document, unless `position_ids` (B, T) say otherwise. Padding is a segment that no query belongs to.
    ValueError where the three contradict.
    """
    length = x_BTD.shape[1]
    if length == 0:
        raise ValueError("there is no token to read: the input has length 0")
    if segment_ids is not None and past:
        raise ValueError("segment_ids (packed documents) cannot be continued through a cache")
    if attention_mask is not None and attention_mask.ndim != 2:
        raise ValueError(f"attention_mask has {attention_mask.ndim} dimensions; accepted: (batch, tokens)")
    if attention_mask is not None and attention_mask.shape[-1] != past + length:
        raise ValueError(
            f"attention_mask covers {attention_mask.shape[-1]} tokens, cache and input hold {past + length}"
        )
    segments = None if segment_ids is None else Segments(segment_ids, segment_ids)
    k_positions_BS = torch.arange(past + length, device=x_BTD.device)[None]
    padded = attention_mask is not None and not bool(attention_mask.all())
    if attention_mask is not None and padded:
        k_positions_BS = (attention_mask.long().cumsum(-1) - 1).clamp(min=0)
        own = torch.zeros_like(k_positions_BS[:, past:]) if segment_ids is None else segment_ids
        shown = torch.zeros_like(k_positions_BS) if segment_ids is None else segment_ids
        segments = Segments(own, torch.where(attention_mask.bool(), shown, -1))
    if segment_ids is not None and position_ids is None:
        k_positions_BS = _restart(k_positions_BS, segment_ids)
    position_ids = None if position_ids is None else _real(position_ids, attention_mask)
    moved = position_ids is not None and not _same(position_ids, k_positions_BS[:, past:])
    if position_ids is not None and moved:
        if past:
            raise ValueError("position_ids behind a cache must be those that follow from the attention mask")
        k_positions_BS = position_ids
    plain = segment_ids is None and not (padded or moved)
    consecutive = plain or _consecutive(k_positions_BS, segments)
    return At(0, k_positions_BS[:, past:], k_positions_BS, declared, consecutive), Mask(past, segments)


def _real(position_ids_BT: Tensor, attention_mask_BS: Tensor | None) -> Tensor:
    """Positions as given, those of padding at least 0. ValueError for a token before position 0."""
    before_BT = position_ids_BT < 0
    if attention_mask_BS is not None:
        before_BT = before_BT & attention_mask_BS[:, -position_ids_BT.shape[-1] :].bool()
    if bool(before_BT.any()):
        raise ValueError(f"position_ids go down to {int(position_ids_BT.min())}; accepted: 0 and above")
    return position_ids_BT.clamp(min=0)


def check_positions(cache: Any, past: int, follow: bool) -> None:
    """ValueError where a cache was begun with positions that its order and padding do not give (`follow`):
    what continues it could not know them. An empty cache is marked."""
    if past == 0:
        cache.positions_follow = follow
    elif not getattr(cache, "positions_follow", True):
        raise ValueError(
            "the cache was begun with position_ids of its own and cannot be continued; "
            "read the whole sequence at once, with use_cache=False"
        )


def _restart(positions_BT: Tensor, segment_ids_BT: Tensor) -> Tensor:
    """Positions counted from the first token of each packed document: its numbers must not depend on what
    lies before it, nor on how much."""
    begins_BT = torch.ones_like(segment_ids_BT, dtype=torch.bool)
    begins_BT[:, 1:] = segment_ids_BT[:, 1:] != segment_ids_BT[:, :-1]
    return positions_BT - torch.where(begins_BT, positions_BT, 0).cummax(dim=-1).values


def _consecutive(positions_BS: Tensor, segments: Segments | None) -> bool:
    """Whether distances follow from indices: among tokens of one segment, position - index is one number."""
    shift_BS = positions_BS - torch.arange(positions_BS.shape[1], device=positions_BS.device)
    if segments is None:
        return bool((shift_BS == shift_BS[:, :1]).all())
    order_BS = segments.k_BS.argsort(dim=-1, stable=True)
    sorted_BS, shift_BS = segments.k_BS.gather(1, order_BS), shift_BS.expand_as(order_BS).gather(1, order_BS)
    together = (sorted_BS[:, 1:] == sorted_BS[:, :-1]) & (sorted_BS[:, 1:] >= 0)  # -1 is padding
    return bool(((shift_BS[:, 1:] == shift_BS[:, :-1]) | ~together).all())


def _same(given_BT: Tensor, derived_BT: Tensor) -> bool:
    return given_BT.shape[-1] == derived_BT.shape[-1] and bool((given_BT == derived_BT).all())
