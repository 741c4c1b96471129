"""Which inputs predict which targets: the five protocols, and one part of one, planned in integers alone.

A document is read as a *sequence*: its ids, with one BOS in front when the policy says so. Inputs
`sequence[start:stop]` predict `sequence[start + 1 : stop + 1]`: N = len(sequence) - 1 targets, target v being
`sequence[v + 1]`. A window starts its positions at 0, and with BOS on its first input is BOS, whatever
stands there in the sequence. The context of a target is its offset in the window plus one, BOS counted.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from pe_study.errors import UsageError, did_you_mean
from pe_study.rows import LATE as LATE


class Windows(NamedTuple):
    """Three int64 arrays (W,): a window reads `[start, stop)` and scores its offsets from `first` on."""

    start: np.ndarray
    stop: np.ndarray
    first: np.ndarray

    @property
    def num_targets(self) -> int:
        return int((self.stop - self.start - self.first).sum())


@dataclass(frozen=True)
class Protocol:
    """A protocol with its options, None where it has no such option.

    stride: sliding's step in tokens. num_targets: draws a document (exact-context) or targets a block
    (fixed-target). anchors: blocks a document. seed: of the exact-context draw.
    """

    name: str
    stride: int | None = None
    num_targets: int | None = None
    anchors: int | None = None
    seed: int = 0

    @property
    def past_longest(self) -> bool:
        """Whether its targets are those past the longest length of the comparison, or drawn from them."""
        return self.num_targets is not None or self.name == LATE

    def plan(self, cut: Cut) -> Windows:
        """The windows of one document; none where it is too short for the protocol."""
        if cut.num_targets <= 0:
            return _windows([], [], [])
        return _PLANNERS[self.name](self, cut)


@dataclass(frozen=True)
class Cut:
    """What is cut: a document of `num_targets` targets, into contexts of `length` tokens (BOS counted).

    longest: the longest length of the comparison, which decides the targets of the sampling protocols.
    entropy: tells documents apart in the exact-context draw.
    """

    num_targets: int
    length: int
    longest: int
    bos: bool = False
    entropy: int = 0

    @property
    def num_tokens(self) -> int:
        """Tokens of the document itself."""
        return self.num_targets if self.bos else self.num_targets + 1


def protocol(
    name: str,
    *,
    stride: int | None = None,
    num_targets: int | None = None,
    anchors: int | None = None,
    seed: int = 0,
) -> Protocol:
    """A checked protocol, defaults filled in (64 draws; one block of 200 at the end), or UsageError."""
    if name not in _PLANNERS:
        raise UsageError(f'unknown protocol "{name}"; {did_you_mean(name, _PLANNERS)}')
    given = {"stride": stride, "num_targets": num_targets, "anchors": anchors}
    for option, value in given.items():
        if value is None:
            continue
        if option not in _OPTIONS[name]:
            accepted = ", ".join(_OPTIONS[name]) or "none"
            raise UsageError(f"protocol {name} takes no {option} (its options: {accepted})")
        if isinstance(value, bool) or value != int(value) or value < 1:
            raise UsageError(f"protocol {name}: {option} is {value!r}; expected a whole number of at least 1")
    if name == "sliding" and stride is None:
        raise UsageError("protocol sliding needs a stride (tokens a window moves on)")
    filled = {option: given[option] or default for option, default in _OPTIONS[name].items()}
    return Protocol(name, seed=seed, **filled)


def check_length(spec: Protocol, length: int) -> None:
    """UsageError where a context of `length` makes no sense under the protocol."""
    if isinstance(length, bool) or length != int(length) or length < 1:
        raise UsageError(f"length is {length!r}; expected a whole number of tokens, at least 1")
    if spec.stride is not None and spec.stride > length:
        raise UsageError(
            f"protocol sliding: stride {spec.stride} is above the length {length}, "
            "the targets between two windows would be lost"
        )
    if spec.name == "fixed-target" and spec.num_targets is not None and spec.num_targets >= length:
        raise UsageError(
            f"protocol fixed-target: length {length} must be above num_targets ({spec.num_targets}), "
            "or the first targets have no context"
        )


def context_bins(first: int, width: int) -> tuple[np.ndarray, np.ndarray]:
    """Where the offsets `first..width-1` of a window change bin, and which bin each part is.

    Bin b is half-open in the context size c = offset + 1: 2^b <= c < 2^(b+1).
    Returns (splits, bins): splits count from the first scored offset.
    """
    contexts = np.arange(first + 1, width + 1)
    exponents = np.frexp(contexts.astype(np.float64))[1] - 1
    splits = np.flatnonzero(np.diff(exponents, prepend=-1))
    return splits, exponents[splits]


def draw_indices(num_tokens: int, longest: int, count: int, seed: Sequence[int]) -> np.ndarray:
    """A sorted uniform draw without replacement of indices in [longest, num_tokens); all where fewer."""
    eligible = num_tokens - longest
    if eligible <= count:
        return np.arange(longest, max(num_tokens, longest), dtype=np.int64)
    chosen = np.random.default_rng(list(seed)).choice(eligible, size=count, replace=False)
    return np.sort(chosen).astype(np.int64) + longest


def anchor_indices(num_tokens: int, longest: int, block: int, anchors: int) -> np.ndarray:
    """Last target of each block: the document's end, then evenly back to `longest`, no two overlapping."""
    last = num_tokens - 1
    if last < longest:
        return np.empty(0, dtype=np.int64)
    count = min(anchors, 1 + (last - longest) // block)
    step = (last - longest) // (count - 1) if count > 1 else 0
    return last - step * np.arange(count, dtype=np.int64)[::-1]


def _windows(start: ArrayLike, stop: ArrayLike, first: ArrayLike) -> Windows:
    return Windows(*(np.asarray(values, dtype=np.int64) for values in (start, stop, first)))


def _strided(cut: Cut, stride: int) -> Windows:
    count = 1 + -(-max(cut.num_targets - cut.length, 0) // stride)
    start = np.arange(count, dtype=np.int64) * stride
    first = np.full(count, cut.length - stride, dtype=np.int64)
    first[0] = 0
    return Windows(start, np.minimum(start + cut.length, cut.num_targets), first)


def _nonoverlapping(spec: Protocol, cut: Cut) -> Windows:
    return _strided(cut, cut.length)


def _nonoverlapping_late(spec: Protocol, cut: Cut) -> Windows:
    """Of the nonoverlapping windows, the targets that are tokens `longest` and later, as in exact-context."""
    earliest = cut.longest - 1 + int(cut.bos)
    every = _strided(cut, cut.length)
    late = every.stop > earliest
    start = every.start[late]
    return Windows(start, every.stop[late], np.maximum(earliest - start, 0))


def _sliding(spec: Protocol, cut: Cut) -> Windows:
    assert spec.stride is not None
    return _strided(cut, spec.stride)


def _prefix(spec: Protocol, cut: Cut) -> Windows:
    return _windows([0], [min(cut.length, cut.num_targets)], [0])


def _ending_at(indices: np.ndarray, cut: Cut, scored: int) -> Windows:
    """Windows whose last target is the document's token `index`, their last `scored` targets counted."""
    stop = indices + int(cut.bos)
    return Windows(stop - cut.length, stop, np.full(len(stop), cut.length - scored, dtype=np.int64))


def _exact_context(spec: Protocol, cut: Cut) -> Windows:
    assert spec.num_targets is not None
    indices = draw_indices(cut.num_tokens, cut.longest, spec.num_targets, (spec.seed, cut.entropy))
    return _ending_at(indices, cut, 1)


def _fixed_target(spec: Protocol, cut: Cut) -> Windows:
    assert spec.num_targets is not None and spec.anchors is not None
    indices = anchor_indices(cut.num_tokens, cut.longest, spec.num_targets, spec.anchors)
    return _ending_at(indices, cut, spec.num_targets)


_PLANNERS: dict[str, Callable[[Protocol, Cut], Windows]] = {
    "nonoverlapping": _nonoverlapping,
    "sliding": _sliding,
    "prefix": _prefix,
    "exact-context": _exact_context,
    "fixed-target": _fixed_target,
    LATE: _nonoverlapping_late,
}
_OPTIONS: dict[str, dict[str, int | None]] = {
    "nonoverlapping": {},
    "sliding": {"stride": None},
    "prefix": {},
    "exact-context": {"num_targets": 64},
    "fixed-target": {"num_targets": 200, "anchors": 1},
    LATE: {},
}
PROTOCOLS = tuple(name for name in _PLANNERS if name != LATE)
