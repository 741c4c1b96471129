"""Rotary position embeddings. Su et al. 2021, arXiv:2104.09864, equation 34.

Pairs are (i, i + E/2) as Hugging Face rotates them; the paper's consecutive pairs differ by a permutation.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pe_study import rope_scaling
from pe_study.encodings.base import At, Dimensions, Encoding, Rotary
from pe_study.pointwise import rotate_halves


class RoPE(Encoding):
    """Turns pair i of queries and keys by position * theta_i, theta_i = base^(-2i / rotary width).

    `fraction` of the head's width is rotated, the rest passes through. The rescale of `dims` changes the
    frequencies and multiplies cosine and sine by its attention factor.
    """

    is_relative = True
    rescales = tuple(rope_scaling.KINDS)

    def __init__(self, dims: Dimensions, *, base: float = 10000.0, fraction: float = 1.0) -> None:
        super().__init__(dims)
        self.base, self.fraction = base, fraction
        self.rotary_dim = int(dims.head_dim * fraction)
        if not base > 1 or self.rotary_dim < 2 or self.rotary_dim % 2 or fraction > 1:
            raise ValueError(
                f"rope needs base > 1 and an even rotary width from 2 to the head's {dims.head_dim}, "
                f"found base {base:g}, fraction {fraction:g} (width {self.rotary_dim})"
            )
        self.declare(dims.length)

    def declare(self, length: int | None) -> None:
        super().declare(length)
        # A plain attribute, not a buffer: no cast of the model and no checkpoint may touch it.
        self.inv_freq, self.attention_factor = rope_scaling.frequencies(
            self.rescale,
            rotary_dim=self.rotary_dim,
            base=self.base,
            original_length=self.dims.train_length,
            length=self.dims.resolved_length,
        )

    @property
    def rotary(self) -> Rotary:
        return Rotary(self.rotary_dim, self.base)

    def rotate(self, q_BHTK: Tensor, k_BGTK: Tensor, at: At) -> tuple[Tensor, Tensor]:
        if "rope" not in at.memo:
            at.memo["rope"] = self._cos_sin(at.q_positions_BT, q_BHTK.dtype)
        cos, sin = at.memo["rope"]
        return rotate_halves(q_BHTK, cos, sin), rotate_halves(k_BGTK, cos, sin)

    def _cos_sin(self, positions_BT: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """(B, 1, T, K) and (B, 1, T, E/2) in the dtype of the queries; angles in float32 whatever it is."""
        with torch.autocast(positions_BT.device.type, enabled=False):
            angle = positions_BT[:, None, :, None].float() * self.inv_freq.to(positions_BT.device)
            cos, sin = angle.cos() * self.attention_factor, angle.sin() * self.attention_factor
            passed = cos.new_ones(*cos.shape[:-1], self.dims.head_dim - self.rotary_dim)
            return torch.cat((cos, cos, passed), dim=-1).to(dtype), sin.to(dtype)
