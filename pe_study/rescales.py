"""What a rescale is called: the grammar of `linear:4`, `yarn:auto:beta_fast=16+logn`. No torch here.

`none | linear:S | ntk:S | ntk-by-parts:S | dynamic[:S] | yarn:S | llama3:S | longrope:FILE`, options
after colons (`yarn:4:beta_fast=32`), then `+logn` to multiply scores; `logn` alone is `none+logn`.
S is a number >= 1 or `auto` (declared length / original length, at least 1). Which kinds a model takes, its
encoding says.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from pe_study.errors import RescaleError, did_you_mean

if TYPE_CHECKING:
    from torch import Tensor

LOGN = "logn"
OPTIONS: dict[str, dict[str, type]] = {
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
    "linear": "positions / S (Chen 2023): frequencies of RoPE, slopes of ALiBi, distances of T5 and Shaw",
    "ntk": "base * S^(d/(d-2)): the lowest frequency / S, the highest kept (bloc97 2023)",
    "ntk-by-parts": "/ S below beta_slow turns, kept above beta_fast, a ramp between (YaRN, section 3.2)",
    "dynamic": "ntk with a base for the declared length, unscaled up to the original one (emozilla 2023)",
    "yarn": "a ramp over dimensions, and an attention factor 1 + 0.1 ln S (Peng 2023)",
    "llama3": "/ S for long waves, kept for short ones, smooth between (Meta 2024)",
    "longrope": "a factor a frequency from a JSON file, short or long by the declared length (Ding 2024)",
    LOGN: "scores * max(1, ln n / ln L), n keys seen, L trained at; any encoding, also yarn:4+logn (Su 2021)",
}
assert KINDS.keys() == OPTIONS.keys() | {LOGN}
BETAS = (("beta_fast", 32.0), ("beta_slow", 1.0))
_ORDERED = {  # the first must be above the second, or there is no ramp between them
    "ntk-by-parts": BETAS,
    "yarn": BETAS,
    "llama3": (("high_freq_factor", 4.0), ("low_freq_factor", 1.0)),
}


@dataclass(frozen=True)
class Rescale:
    """A parsed spec. `factor` is a number, "auto", or None where the kind has none; `file` is longrope's.

    `logn`: the scores of a query that sees n keys are multiplied by max(1, ln n / ln L), L trained at.
    """

    kind: str
    factor: float | str | None = None
    options: tuple[tuple[str, Any], ...] = ()
    file: str | None = None
    logn: bool = False

    @property
    def kinds(self) -> frozenset[str]:
        """What a model must know to take it: names of KINDS other than none."""
        return frozenset({self.kind, *([LOGN] if self.logn else ())}) - {"none"}

    @property
    def depends_on_length(self) -> bool:
        """Whether the frequencies are another for another declared length."""
        return self.kind in ("dynamic", "longrope") or self.factor == "auto"

    def resolved_factor(self, original_length: int, length: int) -> float:
        """S as a number, for a declared length; 1.0 for `none`."""
        if self.factor == "auto":
            return max(1.0, length / original_length)
        return 1.0 if self.factor is None else float(self.factor)

    def keeps_frequencies(self, original_length: int, length: int) -> bool:
        """S = 1, or a length that the kind does not act on: nothing changes, whatever the options."""
        if self.kind == "dynamic":
            return length <= original_length
        return self.kind != "longrope" and self.resolved_factor(original_length, length) == 1.0

    @property
    def label(self) -> str:
        """The spec in its canonical spelling; parses to an equal Rescale."""
        if self.logn:
            return LOGN if self.kind == "none" else f"{replace(self, logn=False).label}+{LOGN}"
        parts = [self.kind]
        if self.file is not None:
            parts.append(self.file)
        if self.factor is not None:
            parts.append(_spell(self.factor))
        parts += [f"{key}={_spell(value)}" for key, value in self.options]
        return ":".join(parts)


def logn_factor(num_keys: Tensor, train_length: int) -> Tensor:
    """What logn multiplies the scores of queries that see `num_keys` (...) keys by, float32 (...)."""
    ratio = num_keys.clamp(min=1).double().log() / math.log(max(train_length, 2))
    return ratio.clamp(min=1).float()


def _spell(value: Any) -> str:
    if isinstance(value, float):
        return repr(value).removesuffix(".0")
    return str(value).lower()


def parse(spec: str | Rescale) -> Rescale:
    """A spec such as `yarn:4:beta_fast=16+logn`; RescaleError says what is wrong with it."""
    if isinstance(spec, Rescale):
        return spec
    text = str(spec).strip()
    if text == LOGN:
        return Rescale("none", logn=True)
    alone = text.removesuffix(f"+{LOGN}")
    if text.startswith(f"{LOGN}:") or alone == LOGN:
        raise RescaleError(
            f"rescale {spec!r}: logn takes no factor and no options; accepted: logn, yarn:4+logn"
        )
    added = re.search(r"\+[^\d]", alone)  # not 1e+2
    if added and not alone.startswith("longrope:"):
        first = alone[: added.start()]
        raise RescaleError(f"rescale {spec!r}: only logn is added to a rescale; accepted: {first}+logn")
    return replace(_parse(spec, alone), logn=alone != text)


def _parse(spec: str, text: str) -> Rescale:
    kind, *parts = text.split(":")
    if kind not in OPTIONS:
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
    known = OPTIONS[kind]
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
