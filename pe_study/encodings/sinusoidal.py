"""Sinusoidal absolute positions. Vaswani et al. 2017, arXiv:1706.03762, section 3.5."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from pe_study.encodings.base import At, Dimensions, Encoding
from pe_study.rescales import LOGN


def angles(positions: Tensor, d_model: int) -> Tensor:
    """Positions (...) -> float32 angles (..., d_model/2): p / 10000^(2i/d_model)."""
    exponent = torch.arange(0, d_model, 2, dtype=torch.float64) / d_model
    frequency = (10000.0**-exponent).to(positions.device)
    return (positions[..., None].double() * frequency).float()


def table(num_positions: int, d_model: int) -> Tensor:
    """(num_positions, d_model), PE(p, 2i) = sin, PE(p, 2i+1) = cos of one angle; amplitude 1."""
    return encode(torch.arange(num_positions), d_model)


def encode(positions: Tensor, d_model: int) -> Tensor:
    """Positions (...) -> (..., d_model), sine and cosine of each frequency interleaved; amplitude 1."""
    angle = angles(positions, d_model)
    return torch.stack((angle.sin(), angle.cos()), dim=-1).flatten(-2)


class Sinusoidal(Encoding):
    """The table times sqrt(2) * initializer_range is added to the token embeddings.

    A sine has RMS 1/sqrt(2), so at step 0 what is added has the RMS of the token embedding. `linear:S`
    divides positions by S.
    """

    rescales = ("linear", LOGN)

    def __init__(self, dims: Dimensions) -> None:
        super().__init__(dims)
        if dims.d_model % 2:
            raise ValueError(f"sinusoidal positions need an even d_model, found {dims.d_model}")

    def embed(self, x_BTD: Tensor, at: At) -> Tensor:
        with torch.autocast(x_BTD.device.type, enabled=False):
            amplitude = math.sqrt(2.0) * self.dims.initializer_range
            added_BTD = amplitude * encode(at.q_positions_BT.double() / self.stretch, self.dims.d_model)
        return x_BTD + added_BTD.to(x_BTD.dtype)
