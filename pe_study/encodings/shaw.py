"""Relative position representations. Shaw, Uszkoreit, Vaswani 2018, arXiv:1803.02155, equations 3-5."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn

from pe_study.encodings.base import At, Dimensions, Encoding, ScoreMod, position_at


def clipped_index(distance: Tensor, clip: int) -> Tensor:
    """Distances i - j (...) -> rows of a table of 2 * clip + 1: clip(j - i, -k, k) + k."""
    return (-distance).clamp(-clip, clip) + clip


class Shaw(Encoding):
    """e_ij = q_i · (k_j + a_clip(j-i)) / sqrt(K): one table a layer, shared by its heads.

    A causal decoder sees j <= i alone, so only rows 0..clip of the paper's 2 * clip + 1 exist here.
    """

    is_relative = True
    per_layer = True

    def __init__(self, dims: Dimensions, *, clip: int | Literal["auto"] = "auto") -> None:
        super().__init__(dims)
        self.clip = max(1, min(16, dims.train_length // 4)) if clip == "auto" else clip
        if self.clip < 1:
            raise ValueError(f"shaw needs clip >= 1, found {clip}")
        self.keys = nn.Parameter(torch.empty(self.clip + 1, dims.head_dim))

    @property
    def constant_beyond(self) -> int:
        return self.clip

    def score_mod(self, q_BHTK: Tensor, at: At) -> ScoreMod:
        with torch.autocast(q_BHTK.device.type, enabled=False):
            scale = self.dims.head_dim**-0.5
            by_row_BHTR = (q_BHTK.float() @ self.keys.float().T) * scale
        q_positions_BT, k_positions_BS = at.q_positions_BT, at.k_positions_BS

        def add_key_term(score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
            distance = position_at(q_positions_BT, b, q) - position_at(k_positions_BS, b, k)
            return score + by_row_BHTR[b, h, q, clipped_index(distance.clamp(min=0), self.clip)]

        return add_key_term

    def untrained_rows(self, length: int) -> int:
        return max(0, min(length - 1, self.clip) - (self.dims.train_length - 1))
