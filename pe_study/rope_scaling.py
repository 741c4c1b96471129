"""Rescaling RoPE: a spec of `pe_study.rescales` -> (inverse frequencies, attention factor).

What transformers computes, it computes; ntk, ntk-by-parts and longrope's file are ours. Torch is imported
only where frequencies are built, so that plans and reports can parse a spec without it.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from pe_study import longrope
from pe_study.errors import RescaleError
from pe_study.rescales import BETAS, KINDS, Rescale, depends_on_length, parse

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["KINDS", "Rescale", "count_pairs", "depends_on_length", "frequencies", "pair_counts", "parse"]


def frequencies(
    spec: str | Rescale, *, rotary_dim: int, base: float, original_length: int, length: int
) -> tuple[Tensor, float]:
    """Inverse frequencies (rotary_dim / 2,) in float32 on the CPU, and the factor on cosine and sine.

    `length` is the declared length in tokens, `original_length` the one that training saw. S = 1 gives the
    unscaled frequencies bit for bit. Sources: linear Chen 2023 (2306.15595); ntk and dynamic bloc97, emozilla
    2023; ntk-by-parts and yarn Peng 2023 (2309.00071), sections 3.2 and 3.4; llama3 Meta 2024; longrope Ding
    2024 (2402.13753).
    """
    import torch

    rescale = parse(spec)
    with torch.device("cpu"):
        return _build(rescale, rotary_dim, float(base), original_length, length)


def _build(
    rescale: Rescale, rotary_dim: int, base: float, original_length: int, length: int
) -> tuple[Tensor, float]:
    factor = rescale.resolved_factor(original_length, length)
    options = dict(rescale.options)
    if rescale.kind == "longrope":
        assert rescale.file is not None
        return longrope.frequencies(
            rescale.file,
            options.get("attention_factor"),
            rotary_dim=rotary_dim,
            base=base,
            original_length=original_length,
            length=length,
        )
    if rescale.keeps_frequencies(original_length, length):
        return unscaled(rotary_dim, base), 1.0
    if rescale.kind == "ntk":
        return unscaled(rotary_dim, ntk_base(base, factor, rotary_dim)), 1.0
    if rescale.kind == "ntk-by-parts":
        return _ntk_by_parts(rotary_dim, base, factor, original_length, options), 1.0
    parameters = {"rope_type": rescale.kind, "factor": factor, **_defaults(rescale.kind), **options}
    return _from_transformers(parameters, rotary_dim, base, original_length, length)


def unscaled(rotary_dim: int, base: float) -> Tensor:
    """theta_i = base^(-2i / rotary_dim), computed in float32 as transformers does."""
    import torch

    return 1.0 / (base ** (torch.arange(0, rotary_dim, 2, dtype=torch.int64).float() / rotary_dim))


def ntk_base(base: float, factor: float, rotary_dim: int) -> float:
    """b' = b * S^(d / (d - 2)): the lowest frequency is divided by S, the highest is kept."""
    if rotary_dim <= 2:
        raise RescaleError(f"ntk needs a rotary width above 2, found {rotary_dim}")
    return base * factor ** (rotary_dim / (rotary_dim - 2))


def _defaults(kind: str) -> dict[str, Any]:
    return {"low_freq_factor": 1.0, "high_freq_factor": 4.0} if kind == "llama3" else {}


def _from_transformers(
    parameters: dict[str, Any], rotary_dim: int, base: float, original_length: int, length: int
) -> tuple[Tensor, float]:
    """What ROPE_INIT_FUNCTIONS computes for one head of `rotary_dim` dimensions."""
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    if rotary_dim <= 2 and parameters["rope_type"] == "dynamic":
        raise RescaleError(f"dynamic needs a rotary width above 2, found {rotary_dim}")
    anchored = parameters["rope_type"] in ("yarn", "llama3")
    original = {"original_max_position_embeddings": original_length} if anchored else {}
    config = LlamaConfig(
        hidden_size=rotary_dim,
        num_attention_heads=1,
        head_dim=rotary_dim,
        # `dynamic` reads the original length here, the anchored types only compare it with the factor
        max_position_embeddings=math.ceil(original_length * parameters["factor"])
        if anchored
        else original_length,
        rope_parameters={"rope_theta": base, **original, **parameters},
    )
    inv_freq, attention_factor = ROPE_INIT_FUNCTIONS[parameters["rope_type"]](config, "cpu", seq_len=length)
    return inv_freq, float(attention_factor)


def _ntk_by_parts(
    rotary_dim: int, base: float, factor: float, original_length: int, options: dict[str, Any]
) -> Tensor:
    """theta' = (1 - gamma) theta / S + gamma theta (YaRN, equations 18-19).

    gamma is a ramp in the turns r = L0 theta / 2 pi that a pair makes over the original length.
    """
    import torch

    beta_fast, beta_slow = (options.get(key, default) for key, default in BETAS)
    theta = base ** (-torch.arange(0, rotary_dim, 2, dtype=torch.float64) / rotary_dim)
    turns = original_length * theta / (2 * math.pi)
    gamma = ((turns - beta_slow) / (beta_fast - beta_slow)).clamp(0, 1)
    return ((1 - gamma) * theta / factor + gamma * theta).float()


def pair_counts(
    spec: str | Rescale, *, rotary_dim: int, base: float, original_length: int, length: int
) -> dict[str, int]:
    """How many frequency pairs are kept, blended, or interpolated (divided by the whole S)."""
    rescale = parse(spec)
    scaled, _ = frequencies(
        rescale, rotary_dim=rotary_dim, base=base, original_length=original_length, length=length
    )
    return count_pairs(scaled, base, rescale.resolved_factor(original_length, length))


def count_pairs(inv_freq: Tensor, base: float, factor: float) -> dict[str, int]:
    """How many of these frequency pairs are those of `base`, divided by the whole `factor`, or between."""
    pairs = len(inv_freq)
    ratio = unscaled(2 * pairs, base).double() / inv_freq.double()
    kept = int((ratio < 1 + 1e-5).sum())
    interpolated = int((ratio > factor * (1 - 1e-5)).sum()) if factor > 1 else 0
    return {"kept": kept, "blended": pairs - kept - interpolated, "interpolated": interpolated}
