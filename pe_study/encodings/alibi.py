"""ALiBi: attention with linear biases. Press, Smith, Lewis 2021, arXiv:2108.12409, section 3."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from pe_study.encodings.base import At, Encoding, ScoreMod, position_at
from pe_study.rescales import LOGN


def slopes(num_heads: int) -> Tensor:
    """(num_heads,) float32, in the paper's order: 2^(-8/n), 2^(-16/n), … for n a power of two.

    Other head counts take the slopes of the power of two below, then every second slope of the one above.
    """
    power = 2 ** math.floor(math.log2(num_heads))
    exponents = [8.0 * (i + 1) / power for i in range(power)]
    exponents += [4.0 * (2 * i + 1) / power for i in range(num_heads - power)]
    return torch.tensor([2.0**-e for e in exponents], dtype=torch.float64).float()


class ALiBi(Encoding):
    """Head h adds -slope_h * distance to its scaled score; nothing is learned. `linear:S` divides slopes."""

    is_relative = True
    rescales = ("linear", LOGN)

    def distance_slopes(self, device: torch.device) -> Tensor:
        return (slopes(self.dims.num_heads).double() / self.stretch).float().to(device)

    def distance_bias(self, distance: Tensor) -> Tensor:
        head_slopes = self.distance_slopes(distance.device)
        return -head_slopes.view(-1, *[1] * distance.ndim) * distance.abs().float()

    def score_mod(self, q_BHTK: Tensor, at: At) -> ScoreMod:
        """Arithmetic instead of a table look-up: what a fused kernel computes fastest."""
        head_slopes = self.distance_slopes(q_BHTK.device)
        q_positions_BT, k_positions_BS = at.q_positions_BT, at.k_positions_BS

        def add_bias(score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
            distance = position_at(q_positions_BT, b, q) - position_at(k_positions_BS, b, k)
            return score - head_slopes[h] * distance.abs()

        return add_bias

    @property
    def has_query_bias(self) -> bool:
        return False
