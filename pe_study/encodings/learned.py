"""Learned absolute positions: a table of rows. Gehring et al. 2017, arXiv:1705.03122; as in GPT-2."""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor, nn

from pe_study.encodings.base import At, Dimensions, Encoding
from pe_study.rescales import LOGN

Beyond = Literal["untrained", "clamp", "interpolate", "error"]


class Learned(Encoding):
    """Row p of a table of `max_positions` rows is added to token p.

    Past the rows that training touched, `beyond` decides: `untrained` uses the rows as they were drawn,
    `clamp` repeats the last trained row, `interpolate` squeezes the declared length onto the trained rows
    (position p becomes p * trained / length, linearly between rows), `error` supports no such length. Under
    `linear:S` position p reads place p / S of the table, linearly between rows, which then serves S times as
    many tokens.
    """

    rescales = ("linear", LOGN)

    def __init__(self, dims: Dimensions, *, beyond: Beyond = "untrained") -> None:
        super().__init__(dims)
        if dims.max_positions < dims.train_length:
            raise ValueError(
                f"learned positions need max_positions >= the training length, found "
                f"{dims.max_positions} rows for length {dims.train_length}"
            )
        self.beyond = beyond
        self.weight = nn.Parameter(torch.empty(dims.max_positions, dims.d_model))

    @property
    def max_length(self) -> int | None:
        rows = {"untrained": self.dims.max_positions, "error": self.dims.train_length}.get(self.beyond)
        return None if rows is None else int(rows * self.stretch)

    @property
    def depends_on_length(self) -> bool:
        return self.beyond == "interpolate" or super().depends_on_length

    def embed(self, x_BTD: Tensor, at: At) -> Tensor:
        return x_BTD + self._rows(at.q_positions_BT, at.length).to(x_BTD.dtype)

    def _rows(self, positions_BT: Tensor, length: int) -> Tensor:
        last = self.dims.train_length - 1
        squeezed = self.beyond == "interpolate" and length > self.dims.train_length * self.stretch
        if self.beyond == "clamp" and self.stretch == 1:
            return self.weight[positions_BT.clamp(max=last)]
        if squeezed or self.stretch != 1:
            last = last if self.beyond in ("clamp", "interpolate") else self.weight.shape[0] - 1
            exact_BT = positions_BT.double()
            squeezed_BT = exact_BT * self.dims.train_length / length
            return self._between(squeezed_BT if squeezed else exact_BT / self.stretch, last)
        return self.weight[positions_BT]

    def _between(self, place_BT: Tensor, last: int) -> Tensor:
        """Linear interpolation between the rows on both sides of a place; the row `last` past it."""
        place_BT = place_BT.clamp(max=last)
        below = place_BT.long()
        share = (place_BT - below)[..., None].to(self.weight.dtype)
        return torch.lerp(self.weight[below], self.weight[(below + 1).clamp(max=last)], share)

    def untrained_rows(self, length: int) -> int:
        if self.beyond != "untrained":
            return 0
        used = math.ceil((length - 1) / self.stretch) + 1
        return max(0, min(used, self.dims.max_positions) - self.dims.train_length)
