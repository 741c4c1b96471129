"""Two studies that differ in their learning rates alone: what a change of rates turns round. No torch here.

`pe-study tune` chooses a rate for each encoding; a page of the common and the tuned study tells which
comparisons of encodings depend on it.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from pe_study.reporting.comparisons import Comparison
from pe_study.reporting.studies import Run, Study

# Keys of `train` that decide no weight.
_APART = ("lr", "log_every", "eval_every", "snapshot_every", "keep_snapshots", "keep_at", "log_with")
DEPENDS = "depends on the learning rate"


def pairs(studies: Sequence[Study]) -> Iterator[tuple[Study, Study]]:
    """Studies whose common runs differ in learning rates, and in nothing else that decides their weights."""
    for one, other in itertools.combinations(studies, 2):
        both = [(run, match) for run in one.runs for match in other.runs if _key(run) == _key(match)]
        alike = [_conditions(run) == _conditions(match) for run, match in both]
        if both and all(alike) and any(_rates(run) != _rates(match) for run, match in both):
            yield one, other


def marked(found: Sequence[Comparison], studies: Sequence[Study]) -> list[Comparison]:
    """The comparisons, those marked that have another sign in a study of other rates."""
    turned = {id(each) for _, _, one, other in _turned(found, studies) for each in (one, other)}
    return [dataclasses.replace(each, depends_on_rate=id(each) in turned) for each in found]


def sentences(found: Sequence[Comparison], studies: Sequence[Study]) -> list[str]:
    """The rates side by side, and a sentence for every comparison that they turn round."""
    said = []
    for one, other in pairs(studies):
        said.append(
            f"**{one.name} and {other.name}** differ in learning rates alone ({_rates_of(one)}; against "
            f"{_rates_of(other)})."
        )
        turned = [
            (a, b) for first, second, a, b in _turned(found, studies) if (first, second) == (one, other)
        ]
        said += [_sentence(a, b) for a, b in turned]
        if not turned:
            said.append(
                f"No difference between encodings that is shown in {one.name} or {other.name} has "
                "another sign in the other."
            )
    return said


def _turned(
    found: Sequence[Comparison], studies: Sequence[Study]
) -> Iterator[tuple[Study, Study, Comparison, Comparison]]:
    """Comparisons of both studies with opposite signs, at least one of them shown to differ."""
    for one, other in pairs(studies):
        theirs = {_place(each): each for each in found if each.study == other.name}
        for each in found:
            match = theirs.get(_place(each))
            if each.study != one.name or match is None or not (each.differs or match.differs):
                continue
            same = 1 if match.label == each.label else -1
            if each.interval.estimate * match.interval.estimate * same < 0:
                yield one, other, each, match


def _sentence(one: Comparison, other: Comparison) -> str:
    pair = f"**{one.label} against {one.other}** at {one.length:,}"
    return f"{pair} {DEPENDS}: {_lower(one)}, {_lower(other)}."


def _lower(one: Comparison) -> str:
    best = one.label if one.interval.estimate < 0 else one.other
    shown = "" if one.differs else ", not shown"
    return f"in {one.study} {best} is lower by {abs(one.interval.estimate):.3f} nats{shown}"


def _place(one: Comparison) -> tuple[Any, ...]:
    return one.protocol, one.length, one.level, frozenset((one.label, one.other))


def _key(run: Run) -> tuple[str, int]:
    return run.label, run.seed


def _conditions(run: Run) -> Mapping[str, Any]:
    train = {key: value for key, value in run.train.items() if key not in _APART}
    own = run.recipe["encodings"][0]
    encoding = {key: value for key, value in own.items() if key not in ("label", "lr_mult", "lr")}
    return {
        "train": train,
        "encoding": encoding,
        **{key: run.recipe.get(key) for key in ("model", "data", "init")},
    }


def _rates(run: Run) -> tuple[Any, Any]:
    return run.train.get("lr"), run.recipe["encodings"][0].get("lr_mult")


def _rates_of(study: Study) -> str:
    """`rope 0.003, t5 0.006 with lr_mult 1`, or the one rate that all share."""
    rates = {run.label: _rates(run) for run in study.runs}
    if len(set(rates.values())) == 1:
        return f"{next(iter(rates.values()))[0]:g} for all"
    mult = {
        label: "" if mult in (None, "auto") else f" with lr_mult {mult:g}"
        for label, (_, mult) in rates.items()
    }
    return ", ".join(f"{label} {lr:g}{mult[label]}" for label, (lr, _) in rates.items())
