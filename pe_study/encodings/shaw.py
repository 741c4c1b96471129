"""Relative position representations. Shaw, Uszkoreit, Vaswani 2018, arXiv:1803.02155, equations 3-5."""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor, nn

from pe_study.encodings.base import At, Dimensions, Encoding, ScoreMod, divided, position_at, reach_of
from pe_study.rescales import LOGN


def clipped_index(distance: Tensor, clip: int) -> Tensor:
    """Distances i - j (...) -> rows of a table of 2 * clip + 1: clip(j - i, -k, k) + k."""
    return (-distance).clamp(-clip, clip) + clip


class Shaw(Encoding):
    """e_ij = q_i · (k_j + a_clip(j-i)) / sqrt(K): one table a layer, shared by its heads.

    A causal decoder sees j <= i alone, so only rows 0..clip of the paper's 2 * clip + 1 exist here.
    `values: true` adds the paper's second table to the values (equation 3): it needs the weights themselves,
    which fused kernels never hold. `linear:S` reads distance d as floor(d / S), for keys and values.
    """

    is_relative = True
    rescales = ("linear", LOGN)
    per_layer = True

    def __init__(
        self, dims: Dimensions, *, clip: int | Literal["auto"] = "auto", values: bool = False
    ) -> None:
        super().__init__(dims)
        self.clip = max(1, min(16, dims.train_length // 4)) if clip == "auto" else clip
        if self.clip < 1:
            raise ValueError(f"shaw needs clip >= 1, found {clip}")
        self.keys = nn.Parameter(torch.empty(self.clip + 1, dims.head_dim))
        self.values = nn.Parameter(torch.empty(self.clip + 1, dims.head_dim)) if values else None

    @property
    def constant_beyond(self) -> int:
        return reach_of(self.clip, self.stretch)

    def _row(self, distance: Tensor) -> Tensor:
        return clipped_index(divided(distance.clamp(min=0), self.stretch), self.clip)

    def score_mod(self, q_BHTK: Tensor, at: At) -> ScoreMod:
        with torch.autocast(q_BHTK.device.type, enabled=False):
            scale = self.dims.head_dim**-0.5
            by_row_BHTR = (q_BHTK.float() @ self.keys.float().T) * scale
        q_positions_BT, k_positions_BS = at.q_positions_BT, at.k_positions_BS

        def add_key_term(score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
            distance = position_at(q_positions_BT, b, q) - position_at(k_positions_BS, b, k)
            return score + by_row_BHTR[b, h, q, self._row(distance)]

        return add_key_term

    @property
    def has_value_term(self) -> bool:
        return self.values is not None

    def value_term(self, weights_BHTS: Tensor, rows_T: Tensor, at: At) -> Tensor:
        assert self.values is not None
        distance_BTS = at.q_positions_BT[:, rows_T, None] - at.k_positions_BS[:, None, :]
        row_B1TS = self._row(distance_BTS)[:, None].expand_as(weights_BHTS)
        by_row_BHTR = weights_BHTS.new_zeros(*weights_BHTS.shape[:3], self.clip + 1)
        return by_row_BHTR.scatter_add(-1, row_B1TS, weights_BHTS) @ self.values.to(weights_BHTS.dtype)

    def untrained_rows(self, length: int) -> int:
        reached = math.floor((length - 1) / self.stretch)
        tables = 1 if self.values is None else 2
        return tables * max(0, min(reached, self.clip) - (self.dims.train_length - 1))
