"""Rescaling RoPE: a spec -> (inverse frequencies, attention factor).

`none | linear:S | ntk:S | ntk-by-parts:S | dynamic[:S] | yarn:S | llama3:S | longrope:FILE`, options after
colons (`yarn:4:beta_fast=32`). S is a number >= 1 or `auto` (declared length / original length, at least 1).
What transformers computes, it computes; ntk, ntk-by-parts and longrope's file are ours. Torch is imported
only where frequencies are built, so that plans and reports can parse a spec without it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pe_study import longrope
from pe_study.errors import RescaleError, did_you_mean

if TYPE_CHECKING:
    from torch import Tensor

_OPTIONS: dict[str, dict[str, type]] = {
    "none": {},
    "linear": {},
    "ntk": {},
    "ntk-by-parts": {"beta_fast": float, "beta_slow": float},
    "dynamic": {},
    "yarn": {
        "beta_fast": float,
        "beta_slow": float,
        "attention_factor": float,
        "mscale": float,
        "mscale_all_dim": float,
        "truncate": bool,
    },
    "llama3": {"low_freq_factor": float, "high_freq_factor": float},
    "longrope": {"attention_factor": float},
}
KINDS: dict[str, str] = {
    "none": "the frequencies of training",
    "linear": "every frequency / S (position interpolation, Chen 2023)",
    "ntk": "base * S^(d/(d-2)): the lowest frequency / S, the highest kept (bloc97 2023)",
    "ntk-by-parts": "/ S below beta_slow turns, kept above beta_fast, a ramp between (YaRN, section 3.2)",
    "dynamic": "ntk with a base for the declared length, unscaled up to the original one (emozilla 2023)",
    "yarn": "a ramp over dimensions, and an attention factor 1 + 0.1 ln S (Peng 2023)",
    "llama3": "/ S for long waves, kept for short ones, smooth between (Meta 2024)",
    "longrope": "a factor a frequency from a JSON file, short or long by the declared length (Ding 2024)",
}
assert KINDS.keys() == _OPTIONS.keys()
_BETAS = (("beta_fast", 32.0), ("beta_slow", 1.0))
_ORDERED = {  # the first must be above the second, or there is no ramp between them
    "ntk-by-parts": _BETAS,
    "yarn": _BETAS,
    "llama3": (("high_freq_factor", 4.0), ("low_freq_factor", 1.0)),
}


@dataclass(frozen=True)
class Rescale:
    """A parsed spec. `factor` is a number, "auto", or None where the kind has none; `file` is longrope's."""

    kind: str
    factor: float | str | None = None
    options: tuple[tuple[str, Any], ...] = ()
    file: str | None = None

    @property
    def depends_on_length(self) -> bool:
        """Whether the frequencies are another for another declared length."""
        return self.kind in ("dynamic", "longrope") or self.factor == "auto"

    def resolved_factor(self, original_length: int, length: int) -> float:
        """S as a number, for a declared length; 1.0 for `none`."""
        if self.factor == "auto":
            return max(1.0, length / original_length)
        return 1.0 if self.factor is None else float(self.factor)

    @property
    def label(self) -> str:
        """The spec in its canonical spelling; parses to an equal Rescale."""
        parts = [self.kind]
        if self.file is not None:
            parts.append(self.file)
        if self.factor is not None:
            parts.append(_spell(self.factor))
        parts += [f"{key}={_spell(value)}" for key, value in self.options]
        return ":".join(parts)


def _spell(value: Any) -> str:
    if isinstance(value, float):
        return repr(value).removesuffix(".0")
    return str(value).lower()


def parse(spec: str | Rescale) -> Rescale:
    """A spec such as `yarn:4:beta_fast=16`; RescaleError says what is wrong with it."""
    if isinstance(spec, Rescale):
        return spec
    kind, *parts = str(spec).strip().split(":")
    if kind not in _OPTIONS:
        raise RescaleError(f"rescale {spec!r}: unknown kind {kind!r}; {did_you_mean(kind, KINDS)}")
    positional = [part for part in parts if "=" not in part]
    if parts[: len(positional)] != positional:
        raise RescaleError(f"rescale {spec!r}: the factor comes first, options after it")
    options = tuple(_option(spec, kind, part) for part in parts[len(positional) :])
    if len(dict(options)) < len(options):
        raise RescaleError(f"rescale {spec!r}: an option is given twice")
    _check_ramp(spec, kind, dict(options))
    if kind == "longrope":
        if len(positional) != 1 or not positional[0]:
            raise RescaleError(f"rescale {spec!r}: longrope takes one JSON file of factors, longrope:FILE")
        return Rescale(kind, None, options, positional[0])
    return Rescale(kind, _factor(spec, kind, positional), options)


def _factor(spec: str, kind: str, positional: list[str]) -> float | str | None:
    if kind == "none" or (kind == "dynamic" and not positional):
        if positional:
            raise RescaleError(f"rescale {spec!r}: none takes no factor")
        return None if kind == "none" else 1.0
    if len(positional) != 1:
        raise RescaleError(f"rescale {spec!r}: write {kind}:S with one number S >= 1, or {kind}:auto")
    if positional[0] == "auto":
        return "auto"
    factor = _number(spec, "factor", positional[0])
    if factor < 1:
        raise RescaleError(f"rescale {spec!r}: the factor must be >= 1, found {positional[0]}")
    return factor


def _option(spec: str, kind: str, part: str) -> tuple[str, Any]:
    key, _, text = part.partition("=")
    known = _OPTIONS[kind]
    if key not in known:
        hint = did_you_mean(key, known) if known else f"{kind} takes no options"
        raise RescaleError(f"rescale {spec!r}: unknown option {key!r}; {hint}")
    if known[key] is bool:
        if text not in ("true", "false"):
            raise RescaleError(f"rescale {spec!r}: {key} must be true or false, found {text!r}")
        return key, text == "true"
    value = _number(spec, key, text)
    if value < 0 or (value == 0 and not key.startswith("mscale")):  # mscale 0 means: not given
        raise RescaleError(f"rescale {spec!r}: {key} must be positive, found {text}")
    return key, value


def _check_ramp(spec: str, kind: str, given: dict[str, Any]) -> None:
    if kind in _ORDERED:
        (upper, high), (lower, low) = ((key, given.get(key, default)) for key, default in _ORDERED[kind])
        if high <= low:
            raise RescaleError(
                f"rescale {spec!r}: {kind} needs {upper} > {lower}, found {high:g} and {low:g}"
            )


def _number(spec: str, key: str, text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise RescaleError(f"rescale {spec!r}: {key} must be a finite number, found {text!r}")
    return value


def depends_on_length(spec: str | Rescale) -> bool:
    """Whether the frequencies are another for another declared length."""
    return parse(spec).depends_on_length


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
    if rescale.kind == "none" or (factor == 1.0 and rescale.kind != "dynamic"):
        return unscaled(rotary_dim, base), float(options.get("attention_factor", 1.0))
    if rescale.kind == "dynamic" and length <= original_length:
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

    beta_fast, beta_slow = (options.get(key, default) for key, default in _BETAS)
    theta = base ** (-torch.arange(0, rotary_dim, 2, dtype=torch.float64) / rotary_dim)
    turns = original_length * theta / (2 * math.pi)
    gamma = ((turns - beta_slow) / (beta_fast - beta_slow)).clamp(0, 1)
    return ((1 - gamma) * theta / factor + gamma * theta).float()


def pair_counts(
    spec: str | Rescale, *, rotary_dim: int, base: float, original_length: int, length: int
) -> dict[str, int]:
    """How many frequency pairs are kept, blended, or interpolated (divided by the whole S)."""
    rescale = parse(spec)
    theta = unscaled(rotary_dim, base).double()
    scaled, _ = frequencies(
        rescale, rotary_dim=rotary_dim, base=base, original_length=original_length, length=length
    )
    ratio = theta / scaled.double()
    factor = rescale.resolved_factor(original_length, length)
    kept = int((ratio < 1 + 1e-5).sum())
    interpolated = int((ratio > factor * (1 - 1e-5)).sum()) if factor > 1 else 0
    return {"kept": kept, "blended": rotary_dim // 2 - kept - interpolated, "interpolated": interpolated}
