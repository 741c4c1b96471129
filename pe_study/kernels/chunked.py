"""Causal attention with biases on a CPU, in memory that grows linearly with the length.

Queries are read in chunks. Keys are flipped, so that the bias of (query i, flipped key j) depends on i + j:
a whole chunk's mask is then a strided view of one vector, never a copy, and a chunk sees only the keys up to
its last query. Distances below `width` form the near block: dense, small, with a bias that may depend on the
query and may be learned. The far rest goes through torch's fused CPU kernel. The two are merged by their
log-sum-exp (Milakov, Gimelshein 2018, arXiv:1805.02867), and the backward pass recomputes the near block
from the merged log-sum-exp as FlashAttention does (Dao 2023, arXiv:2307.08691, algorithm 2).

Shape legend: B batch, H heads, T queries, S keys, K head width, C queries of a chunk, W width of the band.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from pe_study.kernels.blocks import (
    Layout,
    Masks,
    add_reduced,
    band_of,
    chunks,
    diagonals,
    far_backward,
    far_forward,
    near_backward,
    near_forward,
    near_scores,
)
from pe_study.kernels.scoring import Segments, merge


def attend_in_chunks(
    q_BHTK: Tensor,
    k_BHSK: Tensor,
    v_BHSK: Tensor,
    bias_HS: Tensor,
    band_BHTW: Tensor | None,
    segments: Segments | None,
    layout: Layout,
) -> tuple[Tensor, Tensor]:
    """-> (out (B,H,T,K), logsumexp (B,H,T) float32, no gradient).

    `bias_HS` (H or 1, S) is added at distances 0..S-1 and takes no gradient; `band_BHTW`, whose batch, head
    and query sizes may be 1, is added at distances 0..W-1 instead of it, and does.
    """
    k_flipped, v_flipped = _flip(k_BHSK, layout.width), _flip(v_BHSK, layout.width)
    own, others = (None, None) if segments is None else segments
    flipped = None if others is None else _flip_segments(others, layout.width)
    return _ChunkedAttention.apply(
        q_BHTK,
        k_flipped,
        v_flipped,
        bias_HS,
        band_BHTW,
        own,
        flipped,
        layout.scale,
        layout.offset,
        layout.width,
        layout.chunk,
        layout.reach,
    )


def _flip(x_BHSK: Tensor, width: int) -> Tensor:
    """Newest key first; W - 1 rows of zeros behind the oldest, so that a band never leaves the block."""
    flipped = x_BHSK.flip(2)
    return torch.nn.functional.pad(flipped, (0, 0, 0, width - 1)) if width > 1 else flipped


def _flip_segments(k_BS: Tensor, width: int) -> Tensor:
    flipped = k_BS.flip(1)
    return torch.nn.functional.pad(flipped, (0, width - 1), value=-1) if width > 1 else flipped


@torch.library.custom_op("pe_study::chunked_attention", mutates_args=())
def _forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias_HS: Tensor,
    band: Tensor | None,
    q_segments: Tensor | None,
    k_segments: Tensor | None,
    scale: float,
    offset: int,
    width: int,
    chunk: int,
    reach: int | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """(out, logsumexp, logsumexp over ln 2). An operator of its own, as is the backward pass: torch.compile
    keeps it whole, where it would unroll the chunks of one length and compile again for the next."""
    layout = Layout(scale, offset, width, chunk, reach)
    masks = Masks(bias_HS, _segments(q_segments, k_segments), layout)
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    lse = q.new_empty(q.shape[:3], dtype=bias_HS.dtype)
    lse2 = torch.empty_like(lse)
    for part in chunks(q.shape[2], bias_HS.shape[1], layout):
        far = near = None
        if part.num_keys > width:
            far = far_forward(q, k, v, masks, part, layout)
        if band is not None:
            scores = near_scores(q, k, band, masks, part, layout)
            near = near_forward(scores, v[:, :, part.near(width)])
        rows = part.queries
        out[:, :, rows], lse[:, :, rows], lse2[:, :, rows] = merge(far, near)
    return out, lse, lse2


@_forward.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, bias_HS: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
    lse = q.new_empty(q.shape[:3], dtype=bias_HS.dtype)
    return torch.empty_like(q, memory_format=torch.contiguous_format), lse, torch.empty_like(lse)


@torch.library.custom_op("pe_study::chunked_attention_backward", mutates_args=())
def _backward(
    grad_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias_HS: Tensor,
    band: Tensor | None,
    q_segments: Tensor | None,
    k_segments: Tensor | None,
    out: Tensor,
    lse: Tensor,
    lse2: Tensor,
    scale: float,
    offset: int,
    width: int,
    chunk: int,
    reach: int | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The gradients of q, k, v and the band (empty without one)."""
    layout = Layout(scale, offset, width, chunk, reach)
    masks = Masks(bias_HS, _segments(q_segments, k_segments), layout)
    grads = (torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v))
    grad_band = q.new_empty(0) if band is None else torch.zeros_like(band)
    grad_out = grad_out.contiguous()
    for part in chunks(q.shape[2], bias_HS.shape[1], layout):
        if part.num_keys > width:
            far_backward(grads, grad_out, (q, k, v, out, lse), masks, part, layout)
        if band is not None:
            scores = near_scores(q, k, band, masks, part, layout)
            # No weight is above 1, whatever the rounding of a huge score.
            weights = scores.sub_(lse2[:, :, part.queries, None]).clamp_(max=0).exp2_()
            grad_scores = near_backward(grads, grad_out, (q, k, v, out), weights, part, layout)
            add_reduced(band_of(grad_band, part), diagonals(grad_scores, width))
    return *grads, grad_band


@_backward.register_fake
def _(
    grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, bias_HS: Tensor, band: Tensor | None, *_: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    grad_band = q.new_empty(0) if band is None else torch.zeros_like(band)
    return torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v), grad_band


def _segments(q_BT: Tensor | None, k_BS: Tensor | None) -> Segments | None:
    return None if q_BT is None or k_BS is None else Segments(q_BT, k_BS)


class _ChunkedAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        bias_HS: Tensor,
        band: Tensor | None,
        q_segments: Tensor | None,
        k_segments: Tensor | None,
        *layout: Any,
    ) -> tuple[Tensor, Tensor]:
        told = (q, k, v, bias_HS, band, q_segments, k_segments)
        out, lse, lse2 = _forward(*told, *layout)
        ctx.save_for_backward(*told, out, lse, lse2)
        ctx.layout = layout
        ctx.mark_non_differentiable(lse)
        return out, lse

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_out: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        saved = ctx.saved_tensors  # read once, as checkpointing wants it
        *grads, grad_band = _backward(grad_out, *saved, *ctx.layout)
        return *grads, None, None if saved[4] is None else grad_band, *[None] * (2 + len(ctx.layout))
