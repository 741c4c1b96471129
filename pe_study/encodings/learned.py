"""Learned absolute positions: a table of rows. Gehring et al. 2017, arXiv:1705.03122; as in GPT-2."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn

from pe_study.encodings.base import At, Dimensions, Encoding

Beyond = Literal["untrained", "clamp", "interpolate", "error"]


class Learned(Encoding):
    """Row p of a table of `max_positions` rows is added to token p.

    Past the rows that training touched, `beyond` decides: `untrained` uses the rows as they were drawn,
    `clamp` repeats the last trained row, `interpolate` squeezes the declared length onto the trained rows
    (position p becomes p * trained / length, linearly between rows), `error` supports no such length.
    """

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
        return {"untrained": self.dims.max_positions, "error": self.dims.train_length}.get(self.beyond)

    @property
    def depends_on_length(self) -> bool:
        return self.beyond == "interpolate"

    def embed(self, x_BTD: Tensor, at: At) -> Tensor:
        return x_BTD + self._rows(at.q_positions_BT, at.length).to(x_BTD.dtype)

    def _rows(self, positions_BT: Tensor, length: int) -> Tensor:
        last = self.dims.train_length - 1
        if self.beyond == "clamp":
            return self.weight[positions_BT.clamp(max=last)]
        if self.beyond == "interpolate" and length > self.dims.train_length:
            place = (positions_BT.double() * self.dims.train_length / length).clamp(max=last)
            below = place.long()
            share = (place - below)[..., None].to(self.weight.dtype)
            return torch.lerp(self.weight[below], self.weight[(below + 1).clamp(max=last)], share)
        return self.weight[positions_BT]

    def untrained_rows(self, length: int) -> int:
        if self.beyond != "untrained":
            return 0
        return max(0, min(length, self.dims.max_positions) - self.dims.train_length)
