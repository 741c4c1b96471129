"""No position encoding: the control. Kazemnejad et al. 2023, arXiv:2305.19466."""

from __future__ import annotations

from pe_study.encodings.base import Encoding


class NoPE(Encoding):
    """Nothing is added; order is known from the causal mask alone."""

    is_relative = True
