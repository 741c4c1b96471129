"""What a page does not compare, and why: lengths not run, seeds or documents that no two encodings share."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence

import pandas as pd

from pe_study.reporting.captions import joined, listed
from pe_study.reporting.choices import CHOOSES
from pe_study.reporting.comparisons import DECLARED, Pair, pairs_by_protocol
from pe_study.reporting.judging import ONE_TEXT
from pe_study.reporting.losses import difference, read_losses
from pe_study.tables import LATE

MOST_NAMED = 6  # pairs in a sentence


def unmade(rows: pd.DataFrame, protocol: str | None = None, declared: Sequence[int] = DECLARED) -> list[str]:
    """Why comparisons that were declared in advance are not there: sentences a study.

    protocol: as in `compare`.
    """
    plain = rows[rows["rescale"] == "none"]
    plain = plain if protocol is None else plain[plain["protocol"] == protocol]
    several = plain["study"].nunique() > 1
    said = []
    for key, text in plain.groupby(ONE_TEXT, dropna=False, observed=True, sort=False):
        names = dict(zip(ONE_TEXT, key, strict=True))
        where = f" in {names['study']}" if several else ""
        for name, pairs in pairs_by_protocol(text, protocol).items():
            if pairs:
                said += _of_a_family(text[text["protocol"] == name], pairs, declared, where)
        said += _under_no_protocol(text, protocol, where)
    return list(dict.fromkeys(said))


def _of_a_family(
    family: pd.DataFrame, pairs: Sequence[Pair], declared: Sequence[int], where: str
) -> list[str]:
    start = int(family["train_length"].iloc[0])
    if start <= 0:
        return [f"No encodings were compared{where}: their training length is not known."]
    said = _strangers(family, pairs, where)
    grid = {int(length) for length in family["length"]}
    said += _without_documents(family, pairs, [start * times for times in declared], where)
    absent = [times for times in declared if start * times not in grid]
    if absent:
        lengths = listed(start * times for times in absent)
        said.append(
            f"Encodings were not compared{where} at {lengths} ({_times(absent)} the training length of "
            f"{start:,}): not on the grid of lengths."
        )
    return said


def _strangers(family: pd.DataFrame, pairs: Sequence[Pair], where: str) -> list[str]:
    """Pairs of encodings that no seed pairs."""
    seeds = _seeds(family)
    apart = [pair for pair in pairs if not seeds[pair[0]] & seeds[pair[1]]]
    return [f"Not compared{where}, having no seed in common: {_named(apart)}."] if apart else []


def _without_documents(
    family: pd.DataFrame, pairs: Sequence[Pair], lengths: Sequence[int], where: str
) -> list[str]:
    """Pairs of encodings with numbers at a length, but none on the same documents there."""
    seeds = _seeds(family)
    losses = {str(label): read_losses(part) for label, part in family.groupby("label", observed=True)}
    apart: dict[Pair, list[int]] = {}
    for length in lengths:
        here = {label: loss.at(length) for label, loss in losses.items()}
        for one, other in pairs:
            both = seeds[one] & seeds[other] & {*here[one].index} & {*here[other].index}
            if both and difference(here[one], here[other]).empty:
                apart.setdefault((one, other), []).append(length)
    groups: dict[tuple[int, ...], list[Pair]] = {}
    for pair, at in apart.items():
        groups.setdefault(tuple(at), []).append(pair)
    return [
        f"Not compared{where} at {listed(at)}, sharing no documents: {_named(of)}."
        for at, of in groups.items()
    ]


def _under_no_protocol(text: pd.DataFrame, protocol: str | None, where: str) -> list[str]:
    """Pairs of encodings without a protocol that both ran."""
    taken = {frozenset(pair) for pairs in pairs_by_protocol(text, protocol).values() for pair in pairs}
    labels = [str(label) for label, _ in text.groupby("label", observed=True)]
    apart = [pair for pair in itertools.combinations(labels, 2) if frozenset(pair) not in taken]
    reason = "no protocol with the same targets at every length ran for both"
    return [f"Not compared{where}, since {reason}: {_named(apart)}."] if apart else []


def across_choices(rows: pd.DataFrame) -> list[str]:
    """What is not computed, for it would pair documents of plans that may have chosen others: a line a study.

    rows: united, with `choice` (`choices.told_apart`).
    """
    plain = rows[rows["rescale"] == "none"]
    said = []
    for _, text in plain.groupby(CHOOSES, dropna=False, observed=True, sort=False):
        if text["choice"].nunique() < 2:
            continue
        study = str(text["study"].iloc[0])
        parts = [*_pairs_apart(text), *_terms_apart(text)]
        if parts:
            plans = joined([str(plan) for plan in dict.fromkeys(text["plan"].astype(str))])
            said.append(
                f"{study}: plans {plans} are not known to have measured the same documents (a document's "
                "number is its place in its plan's choice), so nothing is computed across them: "
                f"{'; '.join(parts)}. Measure all of them by one plan."
            )
    return said


def _pairs_apart(text: pd.DataFrame) -> list[str]:
    found = []
    for name, pairs in pairs_by_protocol(text).items():
        choices = _choices(text[text["protocol"] == name])
        apart = [(a, b) for a, b in pairs if not choices[a] & choices[b]]
        found += [f"no difference under {name} of {_named(apart)}"] if apart else []
    return found


def _terms_apart(text: pd.DataFrame) -> list[str]:
    """Decompositions whose two protocols were measured on other documents."""
    exact = _choices(text[text["protocol"] == "exact-context"])
    late = _choices(text[text["protocol"] == LATE])
    windowed = {**_choices(text[text["protocol"] == "nonoverlapping"]), **late}
    apart = [label for label, of in exact.items() if label in windowed and not of & windowed[label]]
    return [f"no decomposition for {joined(apart)}"] if apart else []


def _choices(rows: pd.DataFrame) -> Mapping[str, set[int]]:
    scored = rows[rows["num_tokens"] > 0]
    return {str(label): {*part} for label, part in scored.groupby("label", observed=True)["choice"]}


def _seeds(rows: pd.DataFrame) -> Mapping[str, set[int]]:
    return {str(label): {*part} for label, part in rows.groupby("label", observed=True)["seed"]}


def _named(pairs: Sequence[Pair]) -> str:
    told = "; ".join(f"{a} and {b}" for a, b in pairs[:MOST_NAMED])
    return told + (f"; and {len(pairs) - MOST_NAMED} pairs more" if len(pairs) > MOST_NAMED else "")


def _times(numbers: Iterable[int]) -> str:
    return joined([f"{number}\u00d7" for number in numbers])
