"""The sdpa kernel: torch's fused kernels. On a CPU biases come as strided views and bands, in chunks.

Shape legend: B batch, H query heads, G key heads, T queries, S keys, K head width.
W is the width of a band: the distances below which a bias is learned or knows the query.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from pe_study.kernels.blocks import Layout
from pe_study.kernels.chunked import attend_in_chunks
from pe_study.kernels.eager import eager_in_chunks
from pe_study.kernels.scoring import Result, Scoring, allowed, masked_value, repeat_heads, same_width

SHORT = 256
"""Up to this many keys a dense T x S block is small; past it, chunks."""
WIDEST = 512
"""A band of so many distances or more, a number a query and distance, would be no band."""


def sdpa(q_BHTK: Tensor, k_BGSK: Tensor, v_BGSK: Tensor, scoring: Scoring) -> Result:
    """torch's fused kernels. On a CPU biases come as strided views and bands, in chunks of queries."""
    encoding, mask, num_queries = scoring.encoding, scoring.mask, q_BHTK.shape[2]
    biased = encoding.has_distance_bias or encoding.has_query_bias or encoding.has_value_term
    plain = (
        not biased
        and mask.segments is None
        and mask.window is None
        and (mask.offset == 0 or num_queries == 1)
        and not _chunks_win(q_BHTK)
    )
    wide = encoding.has_query_bias and (encoding.constant_beyond or WIDEST) >= WIDEST
    if not plain and (
        q_BHTK.device.type != "cpu"
        or encoding.has_value_term
        or wide
        or (biased and not scoring.at.consecutive)
    ):
        return eager_in_chunks(q_BHTK, k_BGSK, v_BGSK, scoring)
    if q_BHTK.shape[-1] != v_BGSK.shape[-1]:
        out_BHTK, lse_BHT = sdpa(*same_width(q_BHTK, k_BGSK, v_BGSK), scoring)
        return out_BHTK[..., : v_BGSK.shape[-1]], lse_BHT
    if plain:
        grouped = k_BGSK.shape[1] != q_BHTK.shape[1]
        is_causal = True
        if num_queries == 1:  # a branch, since torch.compile may not know the length
            is_causal = False
        out = F.scaled_dot_product_attention(
            q_BHTK, k_BGSK, v_BGSK, is_causal=is_causal, scale=scoring.scale, enable_gqa=grouped
        )
        return out, None
    num_heads = q_BHTK.shape[1]
    bias_HS, band_BHTW = _bias_and_band(scoring, k_BGSK.shape[2])
    width = 0 if band_BHTW is None else band_BHTW.shape[3]
    if band_BHTW is not None and band_BHTW.requires_grad and mask.offset == 0 and num_queries <= SHORT:
        return _dense_band(q_BHTK, k_BGSK, v_BGSK, band_BHTW, scoring), None
    if mask.window is not None:
        bias_HS = _hide_past(mask.window, bias_HS)
        band_BHTW = None if band_BHTW is None else _hide_past(mask.window, band_BHTW)
    chunk = _chunk_size(num_queries, k_BGSK.shape[2], width)
    layout = Layout(scoring.scale, mask.offset, width, chunk, mask.window)
    k_BHSK, v_BHSK = repeat_heads(k_BGSK, num_heads), repeat_heads(v_BGSK, num_heads)
    return attend_in_chunks(q_BHTK, k_BHSK, v_BHSK, bias_HS, band_BHTW, mask.segments, layout)


def _hide_past(window: int, bias: Tensor) -> Tensor:
    """A bias over distances (the last dimension) that hides those from `window` on."""
    if bias.shape[-1] <= window:
        return bias
    hidden = torch.arange(bias.shape[-1], device=bias.device) >= window
    return bias.masked_fill(hidden, masked_value(bias.dtype))


def _chunks_win(q_BHTK: Tensor) -> bool:
    """Whether a plain causal training step is faster in chunks than in one fused call (measured)."""
    eager = q_BHTK.device.type == "cpu" and not torch.compiler.is_compiling()
    return eager and q_BHTK.requires_grad and SHORT < q_BHTK.shape[2] <= 2 * SHORT


def _chunk_size(num_queries: int, num_keys: int, width: int) -> int:
    """Queries of a chunk, as measured: few where its scores must stay in the cache, many for many keys."""
    if num_keys <= SHORT:
        return num_queries
    if num_keys > 16 * SHORT:
        return min(num_queries, 512 if width else 1024)
    if width == 0 or num_keys > 4 * SHORT:
        return min(num_queries, 256)
    return min(num_queries, 64 if width <= 64 else 128)


def _dense_band(
    q_BHTK: Tensor, k_BGSK: Tensor, v_BGSK: Tensor, band_BHTW: Tensor, scoring: Scoring
) -> Tensor:
    """Training at short lengths with a learned bias: torch's own math path, the bias a dense mask."""
    mask, num_queries = scoring.mask, q_BHTK.shape[2]
    index = torch.arange(num_queries, device=q_BHTK.device)
    b = torch.arange(q_BHTK.shape[0], device=q_BHTK.device)[:, None, None, None]
    seen = allowed(mask, b, index[:, None], index)
    bias = shear(band_BHTW, num_queries).masked_fill(~seen, masked_value(band_BHTW.dtype))
    q, k, v = (x.to(band_BHTW.dtype) for x in (q_BHTK, k_BGSK, v_BGSK))
    grouped = k.shape[1] != q.shape[1]
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=bias, scale=scoring.scale, enable_gqa=grouped)
    return out.to(v_BGSK.dtype)


def shear(band_BHTW: Tensor, num_queries: int) -> Tensor:
    """(B,H,T or 1,W) -> (B,H,T,T) whose [..., i, j] is the band at query i and distance i - j, 0 elsewhere.

    Rows are padded to one more than the result's width and read as rows of that width: each shifts by one.
    """
    batch, heads, _, width = band_BHTW.shape
    rows = band_BHTW.flip(-1).expand(batch, heads, num_queries, width)
    line = F.pad(rows, (0, num_queries)).flatten(-2)
    columns = num_queries + width - 1
    return line[..., : num_queries * columns].unflatten(-1, (num_queries, columns))[..., width - 1 :]


def _bias_and_band(scoring: Scoring, num_keys: int) -> tuple[Tensor, Tensor | None]:
    """The bias as a vector over distances (H or 1, S), and a band where it is learned or knows the query."""
    encoding, device = scoring.encoding, scoring.unrotated_BHTK.device
    dtype = torch.promote_types(torch.float32, scoring.unrotated_BHTK.dtype)
    nothing = torch.zeros(1, num_keys, device=device, dtype=dtype)
    with torch.autocast(device.type, enabled=False):
        if encoding.has_query_bias:
            assert encoding.constant_beyond is not None
            return nothing, _query_band(scoring, encoding.constant_beyond).to(dtype)
        if not encoding.has_distance_bias:
            return nothing, None
        learned = torch.is_grad_enabled() and any(p.requires_grad for p in encoding.parameters())
        width = num_keys if encoding.constant_beyond is None else min(encoding.constant_beyond, num_keys)
        beyond = encoding.constant_beyond is not None
        reach = width + beyond if learned else num_keys
        bias_HR = encoding.distance_bias(torch.arange(reach, device=device))
        assert bias_HR is not None
        if not learned:
            return bias_HR.to(dtype), None
        # Softmax ignores a constant: what is constant beyond the band is subtracted inside it.
        band_HW = bias_HR[:, :width] - bias_HR[:, width:] if beyond else bias_HR
        return nothing, band_HW.to(dtype)[None, :, None, :]


def _query_band(scoring: Scoring, width: int) -> Tensor:
    """(B,H,T,W): the score_mod's addend at distances 0..W-1 less that at distance W.

    Where a sequence is too short for a distance the index is clamped: such keys are hidden anyway, and a
    wrong constant of a query that has no key so far back is a constant that softmax ignores.
    """
    q_BHTK = scoring.unrotated_BHTK
    modify = scoring.encoding.score_mod(q_BHTK, scoring.at)
    assert modify is not None
    batch, heads, num_queries, _ = q_BHTK.shape
    index = torch.arange(max(batch, heads, num_queries, width + 1), device=q_BHTK.device)
    b, h, t = index[:batch].view(-1, 1, 1, 1), index[:heads].view(-1, 1, 1), index[:num_queries].view(-1, 1)
    keys = (t + scoring.mask.offset - index[: width + 1]).clamp(min=0)
    zero = torch.zeros((), device=q_BHTK.device)
    addend = modify(zero, b, h, t, keys).expand(batch, heads, num_queries, width + 1)
    return addend[..., :width] - addend[..., width:]
