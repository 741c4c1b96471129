"""One `attend`, four kernels: eager (the oracle), sdpa, flex, flash.

Shape legend: B batch, H query heads, G key heads, T queries, S keys, K head width.
Every kernel returns (out (B,H,T,K), logsumexp (B,H,T) or None). A mask is causal first: query t, at index
`offset` + t among the keys, sees the keys up to itself; segments restrict it further.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from pe_study.chunked_attention import Layout, Segments, attend_in_chunks, masked_value
from pe_study.encodings.base import At, Encoding
from pe_study.errors import UsageError, did_you_mean

Kernel = Literal["auto", "eager", "sdpa", "flex", "flash"]
KERNELS = ("eager", "sdpa", "flex", "flash")
SHORT = 256
"""Up to this many keys a dense T x S block is small; past it, chunks."""

Result = tuple[Tensor, Tensor | None]


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


def resolve(kernel: str, device: torch.device, dtype: torch.dtype, encoding: Encoding, mask_kind: str) -> str:
    """The kernel that runs; UsageError where an explicit one cannot do what is asked. Nothing falls back."""
    if kernel not in (*KERNELS, "auto"):
        raise UsageError(f"kernel {kernel!r}: {did_you_mean(kernel, (*KERNELS, 'auto'))}")
    biased = encoding.has_distance_bias or encoding.has_query_bias
    can = [
        name
        for name in KERNELS
        if name in ("eager", "sdpa")
        or (name == "flex" and not encoding.has_value_term)
        or (name == "flash" and _flash_fits(device, dtype) and not biased and mask_kind == "causal")
    ]
    if kernel != "auto":
        if kernel not in can:
            raise UsageError(
                f"kernel {kernel} cannot run {type(encoding).__name__} with a {mask_kind} mask in "
                f"{str(dtype).removeprefix('torch.')} on {device.type}; these can: {', '.join(can)}"
            )
        return kernel
    if device.type != "cuda":
        return "sdpa"
    if "flash" in can:
        return "flash"
    return "flex" if biased and "flex" in can else "sdpa"


def _flash_fits(device: torch.device, dtype: torch.dtype) -> bool:
    return device.type == "cuda" and dtype in (torch.float16, torch.bfloat16)


def attend(q_BHTK: Tensor, k_BGSK: Tensor, v_BGSK: Tensor, scoring: Scoring, kernel: str) -> Result:
    """softmax(scale * q k^T + bias) v under the mask, by a resolved kernel."""
    run = {"eager": eager, "sdpa": sdpa, "flex": flex, "flash": flash}[kernel]
    with torch.autocast(q_BHTK.device.type, enabled=False):
        return run(q_BHTK, k_BGSK, v_BGSK, scoring)


def repeat_heads(x_BGSK: Tensor, num_heads: int) -> Tensor:
    """(B,G,S,K) -> (B,H,S,K): each key head serves H / G query heads, as a view where torch can."""
    batch, groups, length, width = x_BGSK.shape
    if groups == num_heads:
        return x_BGSK
    expanded = x_BGSK[:, :, None].expand(batch, groups, num_heads // groups, length, width)
    return expanded.reshape(batch, num_heads, length, width)


def eager(q_BHTK: Tensor, k_BGSK: Tensor, v_BGSK: Tensor, scoring: Scoring) -> Result:
    """The oracle: every score in float32, dense, T x S at once."""
    rows = torch.arange(q_BHTK.shape[2], device=q_BHTK.device)
    return _eager_rows(q_BHTK, k_BGSK, v_BGSK, scoring, rows)


def _eager_rows(q_BHTK: Tensor, k_BGSK: Tensor, v_BGSK: Tensor, scoring: Scoring, rows_T: Tensor) -> Result:
    """The attention of the queries `rows_T` alone; q holds those, `scoring` speaks of all."""
    num_heads = q_BHTK.shape[1]
    k_BHSK, v_BHSK = repeat_heads(k_BGSK, num_heads), repeat_heads(v_BGSK, num_heads)
    with torch.autocast(q_BHTK.device.type, enabled=False):
        at_least = torch.float32 if q_BHTK.dtype.itemsize < 4 else q_BHTK.dtype
        scores_BHTS = (q_BHTK.to(at_least) @ k_BHSK.to(at_least).mT) * scoring.scale
        b, h, t, s = _grids(scores_BHTS, rows_T)
        modify = scoring.encoding.score_mod(scoring.unrotated_BHTK, scoring.at)
        if modify is not None:
            scores_BHTS = modify(scores_BHTS, b, h, t, s)
        hidden = masked_value(scores_BHTS.dtype)
        scores_BHTS = scores_BHTS.masked_fill(~allowed(scoring.mask, b, t, s), hidden)
        weights_BHTS = scores_BHTS.softmax(-1)
        out_BHTK = weights_BHTS.to(v_BHSK.dtype) @ v_BHSK
        if scoring.encoding.has_value_term:
            out_BHTK = out_BHTK + scoring.encoding.value_term(weights_BHTS, rows_T, scoring.at).to(
                v_BHSK.dtype
            )
    return out_BHTK, scores_BHTS.logsumexp(-1)


def _grids(scores_BHTS: Tensor, rows_T: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    batch, heads, _, keys = scores_BHTS.shape
    index = torch.arange(max(batch, heads, keys), device=rows_T.device)
    return (
        index[:batch].view(-1, 1, 1, 1),
        index[:heads].view(1, -1, 1, 1),
        rows_T.view(1, 1, -1, 1),
        index[:keys].view(1, 1, 1, -1),
    )


def allowed(mask: Mask, b: Tensor, t: Tensor, s: Tensor) -> Tensor:
    """A FlexAttention mask_mod, and on broadcast grids the dense mask: True where query t may see key s."""
    seen = s <= t + mask.offset
    if mask.segments is not None:
        seen = seen & (mask.segments.q_BT[b, t] == mask.segments.k_BS[b, s])
    return seen


def sdpa(q_BHTK: Tensor, k_BGSK: Tensor, v_BGSK: Tensor, scoring: Scoring) -> Result:
    """torch's fused kernels. On a CPU biases come as strided views and bands, in chunks of queries."""
    encoding, mask, num_queries = scoring.encoding, scoring.mask, q_BHTK.shape[2]
    biased = encoding.has_distance_bias or encoding.has_query_bias or encoding.has_value_term
    if not biased and mask.segments is None and (mask.offset == 0 or num_queries == 1):
        grouped = k_BGSK.shape[1] != q_BHTK.shape[1]
        out = F.scaled_dot_product_attention(
            q_BHTK, k_BGSK, v_BGSK, is_causal=num_queries > 1, scale=scoring.scale, enable_gqa=grouped
        )
        return out, None
    wide = encoding.has_query_bias and encoding.constant_beyond is None
    if (
        q_BHTK.device.type != "cpu"
        or encoding.has_value_term
        or wide
        or (biased and not scoring.at.consecutive)
    ):
        return _eager_in_chunks(q_BHTK, k_BGSK, v_BGSK, scoring)
    num_heads = q_BHTK.shape[1]
    bias_HS, band_BHTW = _bias_and_band(scoring, k_BGSK.shape[2])
    width = 0 if band_BHTW is None else band_BHTW.shape[3]
    if band_BHTW is not None and band_BHTW.requires_grad and mask.offset == 0 and num_queries <= SHORT:
        return _dense_band(q_BHTK, k_BGSK, v_BGSK, band_BHTW, scoring), None
    layout = Layout(scoring.scale, mask.offset, width, _chunk_size(num_queries, k_BGSK.shape[2]))
    k_BHSK, v_BHSK = repeat_heads(k_BGSK, num_heads), repeat_heads(v_BGSK, num_heads)
    return attend_in_chunks(q_BHTK, k_BHSK, v_BHSK, bias_HS, band_BHTW, mask.segments, layout)


def _chunk_size(num_queries: int, num_keys: int) -> int:
    """Queries of a chunk: few where its scores must stay in the cache, many where keys are many."""
    if num_keys <= SHORT:
        return num_queries
    return min(num_queries, 128 if num_keys <= 4096 else 512)


def _dense_band(q_BHTK: Tensor, k_BGSK: Tensor, v_BGSK: Tensor, band_BHTW: Tensor, scoring: Scoring) -> Tensor:
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

    Rows are padded to one more than the width of the result and read as rows of that width: each shifts by one.
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
        reach = width + 1 if learned else num_keys
        bias_HR = encoding.distance_bias(torch.arange(reach, device=device))
        assert bias_HR is not None
        if not learned:
            return bias_HR.to(dtype), None
        # Softmax ignores a constant: what is constant beyond the band is subtracted inside it.
        return nothing, (bias_HR[:, :width] - bias_HR[:, width:]).to(dtype)[None, :, None, :]


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


def _eager_in_chunks(
    q_BHTK: Tensor, k_BGSK: Tensor, v_BGSK: Tensor, scoring: Scoring, chunk: int = 128
) -> Result:
    """The oracle over chunks of queries, recomputed in the backward pass: linear memory, any encoding."""
    outs = []
    for start in range(0, q_BHTK.shape[2], chunk):
        rows = torch.arange(start, min(start + chunk, q_BHTK.shape[2]), device=q_BHTK.device)
        part = q_BHTK[:, :, start : start + chunk]
        outs.append(checkpoint(_eager_rows, part, k_BGSK, v_BGSK, scoring, rows, use_reentrant=False))
    return torch.cat([out for out, _ in outs], 2), torch.cat([lse for _, lse in outs], 2)


def flex(q_BHTK: Tensor, k_BGSK: Tensor, v_BGSK: Tensor, scoring: Scoring) -> Result:
    """FlexAttention: compiled on CUDA; on a CPU uncompiled, forward only, for comparison with the oracle."""
    from torch.nn.attention.flex_attention import AuxRequest, flex_attention

    on_cpu = q_BHTK.device.type == "cpu"
    if on_cpu and torch.is_grad_enabled() and q_BHTK.requires_grad:
        raise UsageError("kernel flex has no backward pass on a CPU; these can train here: eager, sdpa")
    run = flex_attention if on_cpu else _compiled_flex()
    with _uncompiled_flex() if on_cpu else nullcontext():
        out, aux = run(
            q_BHTK,
            k_BGSK,
            v_BGSK,
            score_mod=scoring.encoding.score_mod(scoring.unrotated_BHTK, scoring.at),
            block_mask=_block_mask(q_BHTK, k_BGSK.shape[2], scoring),
            scale=scoring.scale,
            enable_gqa=k_BGSK.shape[1] != q_BHTK.shape[1],
            return_aux=AuxRequest(lse=True),
        )
    return out, aux.lse


@contextmanager
def _uncompiled_flex() -> Iterator[None]:
    """FlexAttention's own switch: its definition, operation by operation, and no graph traced at each call."""
    from torch.nn.attention import flex_attention as module

    before, module._FLEX_ATTENTION_DISABLE_COMPILE_DEBUG = module._FLEX_ATTENTION_DISABLE_COMPILE_DEBUG, True
    try:
        yield
    finally:
        module._FLEX_ATTENTION_DISABLE_COMPILE_DEBUG = before


@lru_cache(maxsize=1)
def _compiled_flex() -> Any:
    """One compilation for lengths of any kind; running into the recompile limit is an error, not a warning."""
    from torch._dynamo import config
    from torch.nn.attention.flex_attention import flex_attention

    config.fail_on_recompile_limit_hit = True
    return torch.compile(flex_attention, dynamic=True)


def compilations() -> int:
    """How many graphs torch has compiled since the start or the last `reset_compilations`."""
    from torch._dynamo.utils import counters

    return int(counters["stats"]["unique_graphs"])


def reset_compilations() -> None:
    """Forgets every compiled graph: what one run compiled must not count against the next."""
    from torch._dynamo.utils import counters

    torch.compiler.reset()
    counters.clear()


def _block_mask(q_BHTK: Tensor, num_keys: int, scoring: Scoring) -> Any:
    """The mask as FlexAttention wants it, built once a forward pass."""
    from torch.nn.attention.flex_attention import create_block_mask

    memo, mask = scoring.at.memo, scoring.mask
    if "block_mask" not in memo:
        batch = None if mask.segments is None else q_BHTK.shape[0]
        memo["block_mask"] = create_block_mask(
            lambda b, h, t, s: allowed(mask, b, t, s),
            batch,
            None,
            q_BHTK.shape[2],
            num_keys,
            device=q_BHTK.device,
        )
    return memo["block_mask"]


def flash(q_BHTK: Tensor, k_BGSK: Tensor, v_BGSK: Tensor, scoring: Scoring) -> Result:
    """SDPA's FlashAttention backend and nothing else; CUDA, half precision, no bias."""
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.nn.attention.bias import causal_lower_right

    num_queries, num_keys = q_BHTK.shape[2], k_BGSK.shape[2]
    # is_causal aligns the mask top-left, which would hide a cache (pytorch#108108)
    aligned = num_queries in (1, num_keys)
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        out = F.scaled_dot_product_attention(
            q_BHTK,
            k_BGSK,
            v_BGSK,
            attn_mask=None if aligned else causal_lower_right(num_queries, num_keys),
            is_causal=aligned and num_queries > 1,
            scale=scoring.scale,
            enable_gqa=k_BGSK.shape[1] != q_BHTK.shape[1],
        )
    return out, None
