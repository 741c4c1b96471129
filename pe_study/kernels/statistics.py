"""Statistics of attention weights, streamed: entropy, largest score, mass by distance.

No T x S matrix is kept. Queries are read in blocks, newest first, so that mask and bias of a block are one
strided view of a vector over distances, and the weights at one distance another: each is summed in place.

Shape legend: B batch, H query heads, G key heads, T queries, S keys, K head width, C queries of a block, R
keys of a block and as many hidden ones behind them as two of its queries lie apart, P bins of positions, N
bins of distances.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import pairwise

import torch
from torch import Tensor

from pe_study.kernels.scoring import LOG2_E, masked_value

BLOCK = 1 << 20
"""Scores held at once."""
DENSE = 128
"""Below this index every query is measured, whatever the step."""

Modify = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
"""(scores (B,H,C,S), query numbers (C,)) -> (scores changed, which keys are seen, broadcast to them)."""


@dataclass(frozen=True)
class Bins:
    """Contexts of queries by powers of two (bin p: 2^p to 2^(p+1) - 1 tokens), distances by 0, 1, 2-3, 4-7, …

    `train_length` cuts mass in two (None: not asked), `step` measures every so manieth query from DENSE on.
    """

    length: int
    train_length: int | None = None
    step: int = 1

    @property
    def num_positions(self) -> int:
        return self.length.bit_length()

    @property
    def distances(self) -> list[tuple[int, int]]:
        """Half-open bins of distances that cover 0 .. length - 1."""
        edges = [0, *(1 << n for n in range((self.length - 1).bit_length() + 1))]
        return list(pairwise(edges))


@dataclass
class Sums:
    """Sums over the measured queries of one layer, in float64."""

    entropy_ratio_PH: Tensor
    beyond_PH: Tensor
    mass_PHN: Tensor
    max_score_PH: Tensor
    num_queries_P: Tensor
    num_ratios_P: Tensor

    @classmethod
    def zeros(cls, bins: Bins, num_heads: int) -> Sums:
        shape = (bins.num_positions, num_heads)
        zeros = torch.zeros(*shape, dtype=torch.float64)
        return cls(
            zeros,
            zeros.clone(),
            torch.zeros(*shape, len(bins.distances), dtype=torch.float64),
            torch.full(shape, -math.inf, dtype=torch.float64),
            torch.zeros(shape[0], dtype=torch.int64),
            torch.zeros(shape[0], dtype=torch.int64),
        )


@dataclass
class Collector:
    """The statistics of each layer, over all calls of `add`."""

    bins: Bins
    layers: dict[int, Sums] = field(default_factory=dict)

    @torch.no_grad()
    def add(
        self,
        layer: int,
        q_BHTK: Tensor,
        k_BGSK: Tensor,
        scale: float,
        *,
        bias_HS: Tensor | None = None,
        window: int | None = None,
        modify: Modify | None = None,
    ) -> None:
        """One layer's queries and keys; the last query sees the last key, each one before it a key fewer.

        `bias_HS` (H or 1, S) is added at distances 0 .. S-1, queries see the last `window` keys; or `modify`
        changes scores that are no function of the distance and says which keys are seen.
        """
        q_BHTK, k_BGSK = q_BHTK.float(), k_BGSK.float()
        offset = k_BGSK.shape[2] - q_BHTK.shape[2]
        sums = self.layers.setdefault(layer, Sums.zeros(self.bins, q_BHTK.shape[1]))
        padded_BGSK = torch.nn.functional.pad(k_BGSK, (0, 0, 0, self.bins.step))
        size = max(1, BLOCK // (q_BHTK.shape[0] * q_BHTK.shape[1] * padded_BGSK.shape[2]))
        for rows in _blocks(offset, k_BGSK.shape[2], self.bins.step, size):
            block = _Block(rows, offset)
            scores_BHCR = block.scores(q_BHTK, padded_BGSK, scale)
            if modify is None:
                _add_vector(scores_BHCR, block, bias_HS, window)
                seen_C = (block.indices + 1).clamp(max=window or k_BGSK.shape[2])
            else:
                scores_BHCR, seen_C = _modified(scores_BHCR, block, modify)
            _accumulate(sums, scores_BHCR, seen_C, block, self.bins)


class _Block:
    """Queries `rows` by the index of their own key, taken newest first."""

    def __init__(self, rows: range, offset: int) -> None:
        self.step, self.last, self.size = rows.step, rows[-1], len(rows)
        self.first_query = rows[0] - offset
        self.num_keys = self.last + 1
        self.indices = torch.tensor(rows[::-1])

    def scores(self, q_BHTK: Tensor, padded_BGSK: Tensor, scale: float) -> Tensor:
        """Scaled scores (B,H,C,R) over ln 2, nothing hidden yet."""
        batch, heads, _, width = q_BHTK.shape
        stop = self.first_query + (self.size - 1) * self.step + 1
        q = q_BHTK[:, :, self.first_query : stop : self.step].flip(2) * (scale * LOG2_E)
        k = padded_BGSK[:, :, : self.num_keys + self.step]
        grouped = q.reshape(batch, k.shape[1], -1, width)
        return torch.matmul(grouped, k.mT).view(batch, heads, self.size, -1)

    def by_distance(self, x_BHCR: Tensor) -> Tensor:
        """The view (B,H,C,num_keys) whose [..., num_keys - 1 - d] is each query's key at distance d; hidden
        columns of the row before stand where a query has no key so far back."""
        batch, heads, size, columns = x_BHCR.shape
        strides = (heads * size * columns, size * columns, columns - self.step, 1)
        return x_BHCR.as_strided((batch, heads, size, self.num_keys), strides)


def _blocks(first: int, stop: int, step: int, size: int) -> Iterator[range]:
    """The measured indices of [first, stop), in runs of one step, at most `size` of each."""
    dense = range(first, min(stop, DENSE))
    start = max(first, DENSE)
    sparse = range(start + -start % step, stop, step)
    for run in (dense, sparse):
        for at in range(0, len(run), size):
            yield run[at : at + size]


def _add_vector(scores_BHCR: Tensor, block: _Block, bias_HS: Tensor | None, window: int | None) -> None:
    """Adds mask and bias, a strided view of a vector over the distances last, last - 1, … and hidden ones."""
    batch, _, size, columns = scores_BHCR.shape
    num_heads = 1 if bias_HS is None else bias_HS.shape[0]
    hidden = masked_value(scores_BHCR.dtype)
    vector = scores_BHCR.new_full((num_heads, columns + (size - 1) * block.step), hidden)
    reach = block.num_keys if window is None else min(window, block.num_keys)
    near = slice(block.num_keys - reach, block.num_keys)
    vector[:, near] = 0.0 if bias_HS is None else bias_HS[:, :reach].flip(1).to(vector.dtype) * LOG2_E
    shape, strides = (batch, num_heads, size, columns), (0, vector.stride(0), block.step, 1)
    scores_BHCR.add_(vector.as_strided(shape, strides))


def _modified(scores_BHCR: Tensor, block: _Block, modify: Modify) -> tuple[Tensor, Tensor]:
    """The scores as `modify` makes them, over ln 2, and how many keys each query sees (…, C)."""
    queries = torch.arange(block.size - 1, -1, -1) * block.step + block.first_query
    queries = queries.to(scores_BHCR.device)
    shown = scores_BHCR[..., : block.num_keys] / LOG2_E
    shown, seen = modify(shown, queries)
    hidden = masked_value(scores_BHCR.dtype)
    scores_BHCR = torch.full_like(scores_BHCR, hidden)
    scores_BHCR[..., : block.num_keys] = (shown * LOG2_E).masked_fill_(~seen, hidden)
    return scores_BHCR, seen.sum(-1)


def _accumulate(sums: Sums, scores_BHCR: Tensor, seen: Tensor, block: _Block, bins: Bins) -> None:
    top_BHC1 = scores_BHCR.amax(-1, keepdim=True)
    weights_BHCR = scores_BHCR.sub_(top_BHC1).exp2()
    entropy_BHC = scores_BHCR.mul_(weights_BHCR).sum(-1)
    parts, beyond_BHC = _masses(block.by_distance(weights_BHCR), bins)
    mass_BHCN = torch.stack(parts, dim=-1)
    total_BHC = mass_BHCN.sum(-1)
    entropy_BHC = total_BHC.log() - entropy_BHC / total_BHC / LOG2_E
    seen = seen.to(entropy_BHC.device).expand(entropy_BHC.shape)
    ratio_BHC = torch.where(seen > 1, entropy_BHC / seen.clamp(min=2).log(), 0.0)
    bins_C = torch.tensor([int(index + 1).bit_length() - 1 for index in block.indices.tolist()])
    for bin_ in bins_C.unique().tolist():
        rows, batch = bins_C == bin_, len(scores_BHCR)
        sums.entropy_ratio_PH[bin_] += _total(ratio_BHC, rows)
        sums.beyond_PH[bin_] += _total(beyond_BHC / total_BHC, rows)
        sums.mass_PHN[bin_] += _total(mass_BHCN / total_BHC[..., None], rows)
        highest_H = top_BHC1[:, :, rows, 0].amax((0, 2)).double().cpu() / LOG2_E
        sums.max_score_PH[bin_] = torch.maximum(sums.max_score_PH[bin_], highest_H)
        sums.num_queries_P[bin_] += batch * int(rows.sum())
        sums.num_ratios_P[bin_] += int((seen[:, 0, rows] > 1).sum())


def _total(x_BHC: Tensor, rows: Tensor) -> Tensor:
    """Summed over the batch and the queries that `rows` picks, in float64 on the CPU."""
    return x_BHC[:, :, rows].sum((0, 2), dtype=torch.float64).cpu()


def _masses(by_distance_BHCN: Tensor, bins: Bins) -> tuple[list[Tensor], Tensor]:
    """Sums of weights in each bin of distances, and at `train_length` and beyond, (B,H,C) each."""
    num_keys = by_distance_BHCN.shape[-1]

    def between(lo: int, hi: int) -> Tensor:
        return by_distance_BHCN[..., max(0, num_keys - hi) : max(0, num_keys - lo)].sum(-1)

    cut = bins.length if bins.train_length is None else bins.train_length
    parts, beyond = [], by_distance_BHCN.new_zeros(by_distance_BHCN.shape[:-1])
    for lo, hi in bins.distances:
        far = between(max(lo, cut), hi) if hi > cut else torch.zeros_like(beyond)
        parts.append(far + between(lo, min(hi, max(lo, cut))))
        beyond = beyond + far
    return parts, beyond
