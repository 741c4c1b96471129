"""Rotary position embeddings. Su et al. 2021, arXiv:2104.09864, equation 34.

Pairs are (i, i + E/2) as Hugging Face rotates them; the paper's consecutive pairs differ by a permutation.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pe_study import rope_scaling
from pe_study.encodings.base import At, Dimensions, Encoding


class RoPE(Encoding):
    """Turns pair i of queries and keys by position * theta_i, theta_i = base^(-2i / rotary width).

    `fraction` of the head's width is rotated, the rest passes through. The rescale of `dims` changes the
    frequencies and multiplies cosine and sine by its attention factor.
    """

    is_relative = True
    rescales = rope_scaling.KINDS

    def __init__(self, dims: Dimensions, *, base: float = 10000.0, fraction: float = 1.0) -> None:
        super().__init__(dims)
        self.base, self.fraction = base, fraction
        self.rotary_dim = int(dims.head_dim * fraction)
        if base <= 1 or self.rotary_dim < 2 or self.rotary_dim % 2 or fraction > 1:
            raise ValueError(
                f"rope needs base > 1 and an even rotary width of at least 2 within the head's {dims.head_dim}, "
                f"found base {base:g}, fraction {fraction:g} (width {self.rotary_dim})"
            )
        self.rescale = rope_scaling.parse(dims.rescale)
        # A plain attribute, not a buffer: no cast of the model and no checkpoint may touch it.
        self.inv_freq, self.attention_factor = rope_scaling.frequencies(
            self.rescale,
            rotary_dim=self.rotary_dim,
            base=base,
            original_length=dims.train_length,
            length=dims.resolved_length,
        )

    @property
    def depends_on_length(self) -> bool:
        return self.rescale.depends_on_length

    def rotate(self, q_BHTK: Tensor, k_BGTK: Tensor, at: At) -> tuple[Tensor, Tensor]:
        if "rope" not in at.memo:
            at.memo["rope"] = self._cos_sin(at.q_positions_BT, q_BHTK.dtype)
        cos, sin = at.memo["rope"]
        return turn(q_BHTK, cos, sin, self.rotary_dim), turn(k_BGTK, cos, sin, self.rotary_dim)

    def _cos_sin(self, positions_BT: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """(B, 1, T, E) each, in the dtype of the queries; angles in float32 whatever it is."""
        with torch.autocast(positions_BT.device.type, enabled=False):
            angle = positions_BT[:, None, :, None].float() * self.inv_freq.to(positions_BT.device)
            angle = torch.cat((angle, angle), dim=-1)
            return (angle.cos() * self.attention_factor).to(dtype), (angle.sin() * self.attention_factor).to(
                dtype
            )


def turn(x: Tensor, cos: Tensor, sin: Tensor, rotary_dim: int) -> Tensor:
    """x (B, H, T, K) with its first `rotary_dim` dimensions rotated by cos, sin (B, 1, T, rotary_dim)."""
    turned, passed = x[..., :rotary_dim], x[..., rotary_dim:]
    first, second = turned.chunk(2, dim=-1)
    turned = turned * cos + torch.cat((-second, first), dim=-1) * sin
    return torch.cat((turned, passed), dim=-1) if rotary_dim < x.shape[-1] else turned
