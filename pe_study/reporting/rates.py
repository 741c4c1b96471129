"""Two studies that differ in their learning rates alone: what a change of rates turns round. No torch here.

`pe-study tune` chooses a rate for each encoding; a page of the common and the tuned study tells which
comparisons of encodings depend on it.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import pandas as pd

from pe_study.reporting.captions import joined
from pe_study.reporting.comparisons import Comparison, compare
from pe_study.reporting.likeness import TEXT
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


def marked(found: Sequence[Comparison], studies: Sequence[Study], rows: pd.DataFrame) -> list[Comparison]:
    """The comparisons, those marked that have another sign in a study of other rates.

    rows: those that were compared; their `origin` is the study's own name where `study` also tells texts.
    """
    turned = {id(each) for both in _matched(found, studies, rows) for each in both if _depends(*both)}
    return [dataclasses.replace(each, depends_on_rate=id(each) in turned) for each in found]


def sentences(found: Sequence[Comparison], studies: Sequence[Study], rows: pd.DataFrame) -> list[str]:
    """The rates side by side, and what they turn round: at the lengths of `found` and the training length.

    Rates are chosen at the training length, so encodings are compared there, too; Holm's correction is then
    over the comparisons at that length, and leaves those declared in advance as they are.
    """
    apart = list(pairs(studies))
    everywhere = [*compare(rows, declared=(1,)), *found] if apart else []
    said = []
    for one, other in apart:
        said.append(
            f"**{one.name} and {other.name}** differ in learning rates alone ({_rates_of(one)}; against "
            f"{_rates_of(other)})."
        )
        texts: dict[tuple[str, str], list[tuple[Comparison, Comparison]]] = {}
        for a, b in _matched(everywhere, (one, other), rows):
            texts.setdefault((a.study, b.study), []).append((a, b))
        for both in texts.values():
            said += _of_a_text(both)
        if not texts:
            said.append(
                f"No comparison of encodings is in both {one.name} and {other.name}: none is on one text, by "
                "one protocol, at one length."
            )
    return said


def _of_a_text(both: Sequence[tuple[Comparison, Comparison]]) -> list[str]:
    """What the rates turn round in two studies on one text."""
    one, other = (each.study for each in both[0])
    turned = sorted((two for two in both if _turned(*two)), key=lambda two: two[0].length)
    said = [_sentence(*two) for two in turned if _depends(*two)]
    if not said:
        said.append(
            f"At {_lengths(a for a, _ in both)}, no difference between encodings that is shown in {one} or "
            f"{other} has another sign in the other."
        )
    unshown: dict[str, list[Comparison]] = {}
    for a, b in turned:
        if not _depends(a, b):
            unshown.setdefault(f"{a.label} against {a.other}", []).append(a)
    if unshown:
        each = "; ".join(f"{pair} at {_lengths(found)}" for pair, found in unshown.items())
        said.append(f"Not shown in {one} or {other}, but of another sign in the other: {each}.")
    return said


def _matched(
    found: Sequence[Comparison], studies: Sequence[Study], rows: pd.DataFrame
) -> Iterator[tuple[Comparison, Comparison]]:
    """Comparisons of two encodings on one text at one length, in studies of other rates."""
    apart = list(pairs(studies))
    if not apart:
        return
    origins = _origins(rows)
    places: dict[str, dict[tuple[Any, ...], Comparison]] = {}
    for each in found:
        study, text = origins[each.study, each.protocol]
        pair = frozenset((each.label, each.other))
        places.setdefault(study, {})[each.protocol, text, each.length, pair] = each
    for one, other in apart:
        theirs = places.get(other.name, {})
        for place, each in places.get(one.name, {}).items():
            if place in theirs:
                yield each, theirs[place]


def _origins(rows: pd.DataFrame) -> dict[tuple[str, str], tuple[str, tuple[str, ...]]]:
    """(study as shown, protocol) -> (the study itself, what tells its text)."""
    named = rows if "origin" in rows else rows.assign(origin=rows["study"])
    kinds = named[["study", "protocol", "origin", *TEXT]].drop_duplicates().astype(str)
    return {
        (shown, protocol): (study, tuple(text))
        for shown, protocol, study, *text in kinds.itertuples(index=False, name=None)
    }


def _turned(one: Comparison, other: Comparison) -> bool:
    same = 1 if other.label == one.label else -1
    return one.interval.estimate * other.interval.estimate * same < 0


def _depends(one: Comparison, other: Comparison) -> bool:
    return _turned(one, other) and (one.differs or other.differs)


def _sentence(one: Comparison, other: Comparison) -> str:
    pair = f"**{one.label} against {one.other}** at {one.length:,}"
    return f"{pair} {DEPENDS}: {_lower(one)}, {_lower(other)}."


def _lower(one: Comparison) -> str:
    best = one.label if one.interval.estimate < 0 else one.other
    shown = "" if one.differs else ", not shown"
    return f"in {one.study} {best} is lower by {abs(one.interval.estimate):.3f} nats{shown}"


def _lengths(found: Iterable[Comparison]) -> str:
    """`64, 128 and 256`."""
    return joined([f"{length:,}" for length in sorted({each.length for each in found})])


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
