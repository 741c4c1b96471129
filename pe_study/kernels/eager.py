"""The eager kernel: every score in float32 (or better), dense. The oracle of all others.

Shape legend: B batch, H query heads, G key heads, T queries, S keys, K head width.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from pe_study.kernels.scoring import Result, Scoring, allowed, masked_value, repeat_heads


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


def eager_in_chunks(
    q_BHTK: Tensor, k_BGSK: Tensor, v_BGSK: Tensor, scoring: Scoring, chunk: int = 128
) -> Result:
    """The oracle over chunks of queries, recomputed in the backward pass: linear memory, any encoding."""
    outs = []
    for start in range(0, q_BHTK.shape[2], chunk):
        rows = torch.arange(start, min(start + chunk, q_BHTK.shape[2]), device=q_BHTK.device)
        part = q_BHTK[:, :, start : start + chunk]
        outs.append(checkpoint(_eager_rows, part, k_BGSK, v_BGSK, scoring, rows, use_reentrant=False))
    return torch.cat([out for out, _ in outs], 2), torch.cat([lse for _, lse in outs], 2)
