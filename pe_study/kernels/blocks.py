"""One chunk of queries: which keys it sees, its masks, and its near and far block, forward and backward.

Shape legend: B batch, H heads, T queries, S keys, K head width, C queries of a chunk, W width of the band.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from pe_study.kernels.scoring import LOG2_E, Segments, masked_value

_fused = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_fused_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


@dataclass(frozen=True)
class Layout:
    """The static part of one call. `offset` is the index of query 0 among the keys; `width` W of the band;
    `reach` the first distance that no query sees (None: all are seen), which the biases hide."""

    scale: float
    offset: int
    width: int
    chunk: int
    reach: int | None = None


class Chunk(NamedTuple):
    """Queries [start, stop); the slice of flipped keys that starts at the last query's own."""

    start: int
    stop: int
    first_key: int
    num_keys: int

    @property
    def queries(self) -> slice:
        return slice(self.start, self.stop)

    @property
    def size(self) -> int:
        return self.stop - self.start

    def near(self, width: int) -> slice:
        return slice(self.first_key, self.first_key + self.size + width - 1)

    def far(self, width: int) -> slice:
        return slice(self.first_key + width, self.first_key + self.num_keys)


def chunks(num_queries: int, num_keys: int, layout: Layout) -> list[Chunk]:
    found = []
    for start in range(0, num_queries, layout.chunk):
        stop = min(start + layout.chunk, num_queries)
        last = layout.offset + stop - 1
        seen = last + 1 if layout.reach is None else min(last + 1, stop - start - 1 + layout.reach)
        found.append(Chunk(start, stop, num_keys - 1 - last, seen))
    return found


class Masks:
    """The additive masks of a call, as views of vectors over the distances -(C-1) .. S-1."""

    def __init__(self, bias_HS: Tensor, segments: Segments | None, layout: Layout) -> None:
        self.layout, self.segments = layout, segments
        self.hidden = masked_value(bias_HS.dtype)
        heads = bias_HS.shape[0]
        before = bias_HS.new_full((heads, layout.chunk - 1), self.hidden)
        self.far_vector = torch.cat((before, bias_HS), dim=1)
        self.far_vector[:, layout.chunk - 1 : layout.chunk - 1 + layout.width] = self.hidden
        self.near_vector = torch.zeros(layout.chunk + layout.chunk + layout.width, dtype=bias_HS.dtype)
        self.near_vector[: layout.chunk - 1] = self.hidden
        self.near_vector[layout.chunk - 1 + layout.width :] = self.hidden

    def far(self, chunk: Chunk, batch: int) -> Tensor:
        """(B, H or 1, C, keys of the far slice)."""
        keys = chunk.far(self.layout.width)
        num_keys = keys.stop - keys.start
        heads = self.far_vector.shape[0]
        skip = self.layout.chunk - chunk.size + self.layout.width
        view = self.far_vector.as_strided(
            (batch, heads, chunk.size, num_keys), (0, self.far_vector.stride(0), 1, 1), skip
        )
        return self._hide(view, chunk, keys)

    def near(self, chunk: Chunk) -> Tensor:
        """(1 or B, 1, C, C + W - 1): zero inside the band, hidden outside and before the first key."""
        keys = chunk.near(self.layout.width)
        width = keys.stop - keys.start
        view = self.near_vector.as_strided(
            (1, 1, chunk.size, width), (0, 0, 1, 1), self.layout.chunk - chunk.size
        )
        if width > chunk.num_keys:
            view = view.clone()
            view[..., chunk.num_keys :] = self.hidden
        return self._hide(view, chunk, keys)

    def _hide(self, view: Tensor, chunk: Chunk, keys: slice) -> Tensor:
        if self.segments is None:
            return view
        same = self.segments.q_BT[:, None, chunk.queries, None] == self.segments.k_BS[:, None, None, keys]
        return torch.where(same, view, self.hidden)


def diagonals(block_BHCN: Tensor, width: int) -> Tensor:
    """The view (B,H,C,W) of a near block whose [..., i, d] is query i's key at distance d."""
    batch, heads, size, columns = block_BHCN.shape
    strides = (heads * size * columns, size * columns, columns - 1, 1)
    return block_BHCN.as_strided((batch, heads, size, width), strides, block_BHCN.storage_offset() + size - 1)


def band_of(band_BHTW: Tensor, chunk: Chunk) -> Tensor:
    return band_BHTW if band_BHTW.shape[2] == 1 else band_BHTW[:, :, chunk.queries]


def near_scores(q: Tensor, k: Tensor, band: Tensor, masks: Masks, chunk: Chunk, layout: Layout) -> Tensor:
    """(B,H,C,C + W - 1) scores over ln 2: weights are then powers of two, whose vector code has no slow path
    where they underflow (MKL's exp takes 20 times as long there)."""
    dtype = masks.near_vector.dtype
    rows, keys = q[:, :, chunk.queries].to(dtype), k[:, :, chunk.near(layout.width)].to(dtype)
    scores = torch.matmul(rows * (layout.scale * LOG2_E), keys.mT).add_(masks.near(chunk))
    diagonals(scores, layout.width).add_(band_of(band, chunk), alpha=LOG2_E)
    return scores


def near_forward(scores: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Scores over ln 2 (overwritten) and the block's values -> its softmax-weighted mean, its logsumexp over
    ln 2."""
    top = scores.amax(-1, keepdim=True)
    weights = scores.sub_(top).exp2_()
    total = weights.sum(-1, keepdim=True)
    return (weights.to(v.dtype) @ v).div_(total), total.log2().add_(top).squeeze(-1)


def far_forward(
    q: Tensor, k: Tensor, v: Tensor, masks: Masks, chunk: Chunk, layout: Layout
) -> tuple[Tensor, Tensor]:
    keys = chunk.far(layout.width)
    mask = masks.far(chunk, q.shape[0])
    out, lse = _fused(
        q[:, :, chunk.queries], k[:, :, keys], v[:, :, keys], 0.0, False, attn_mask=mask, scale=layout.scale
    )
    return out, lse


def far_backward(
    grads: tuple[Tensor, ...],
    grad_out: Tensor,
    saved: tuple[Tensor, ...],
    masks: Masks,
    chunk: Chunk,
    layout: Layout,
) -> None:
    grad_q, grad_k, grad_v = grads
    q, k, v, out, lse = saved
    rows, keys = chunk.queries, chunk.far(layout.width)
    mask = masks.far(chunk, q.shape[0])
    pieces = _fused_backward(
        grad_out[:, :, rows],
        q[:, :, rows],
        k[:, :, keys],
        v[:, :, keys],
        out[:, :, rows],
        lse[:, :, rows],
        0.0,
        False,
        attn_mask=mask,
        scale=layout.scale,
    )
    grad_q[:, :, rows] += pieces[0]
    grad_k[:, :, keys] += pieces[1]
    grad_v[:, :, keys] += pieces[2]


def near_backward(
    grads: tuple[Tensor, ...],
    grad_out: Tensor,
    saved: tuple[Tensor, ...],
    weights: Tensor,
    chunk: Chunk,
    layout: Layout,
) -> Tensor:
    """Adds the near block's share to the gradients; returns that of its scores (B,H,C,C + W - 1)."""
    grad_q, grad_k, grad_v = grads
    q, k, v, out = saved
    rows, keys = chunk.queries, chunk.near(layout.width)
    grad_rows = grad_out[:, :, rows]
    low = weights.to(v.dtype)
    grad_v[:, :, keys] += low.mT @ grad_rows
    inner = (grad_rows * out[:, :, rows]).sum(-1, keepdim=True, dtype=weights.dtype)
    grad_scores = (grad_rows @ v[:, :, keys].mT).to(weights.dtype).sub_(inner).mul_(weights)
    scaled = grad_scores.to(q.dtype) * layout.scale
    grad_q[:, :, rows] += scaled @ k[:, :, keys]
    grad_k[:, :, keys] += scaled.mT @ q[:, :, rows]
    return grad_scores


def add_reduced(total: Tensor, addend: Tensor) -> None:
    """total += addend, summed over the dimensions where total has size 1."""
    dims = [i for i, size in enumerate(total.shape) if size == 1 and addend.shape[i] > 1]
    total += addend.sum(dims, keepdim=True) if dims else addend
