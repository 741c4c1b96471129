"""Differences between encodings at lengths declared in advance, and where a gain comes from."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd

from pe_study import stats
from pe_study.reporting.captions import joined, listed
from pe_study.reporting.losses import NOT_FINITE, Losses, contrast, difference, read_losses
from pe_study.reporting.verdicts import FAMILY, fails
from pe_study.stats import Interval, Variance, own_interval
from pe_study.tables import LATE

DECLARED = (2, 4, 8)  # multiples of the training length at which encodings are compared


@dataclass(frozen=True)
class Comparison:
    """label - other at one length, in nats: negative means that `label` has the lower loss."""

    study: str
    protocol: str
    length: int
    label: str
    other: str
    level: str  # "a": these runs, new documents; "b": new seeds; "c": both
    interval: Interval
    method: str
    p_holm: float = math.nan
    depends_on_rate: bool = False  # another sign in a study of other learning rates

    @property
    def differs(self) -> bool:
        return self.p_holm < 1 - stats.CONFIDENCE


def compare(rows: pd.DataFrame, protocol: str, declared: Sequence[int] = DECLARED) -> list[Comparison]:
    """Every pair of unrescaled encodings at every declared length, Holm-adjusted over all of them.

    Seeds are paired by number. Where a pair shares several: level (b), on the documents that all encodings
    compared there share, the pooled encoding x seed residual between encodings that do not fail there,
    Welch's interval where one does. Else level (a), paired documents. Levels do not mix in a family.
    """
    found: list[Comparison] = []
    plain = rows[(rows["protocol"] == protocol) & (rows["rescale"] == "none")]
    for _, family in plain.groupby(FAMILY, dropna=False, observed=True, sort=False):
        losses = {str(label): read_losses(part) for label, part in family.groupby("label", observed=True)}
        found += _compare_family(losses, family, declared)
    adjusted = stats.holm([comparison.interval.p_value for comparison in found])
    return [_adjusted(one, float(p)) for one, p in zip(found, adjusted, strict=True)]


def _compare_family(
    losses: Mapping[str, Losses], family: pd.DataFrame, declared: Sequence[int]
) -> list[Comparison]:
    start = int(family["train_length"].iloc[0])
    names = (str(family["study"].iloc[0]), str(family["protocol"].iloc[0]))
    pairs = itertools.combinations(losses.values(), 2)
    several = any(len({*one.seeds} & {*other.seeds}) > 1 for one, other in pairs)
    compared = _over_seeds if several else _over_documents
    return [
        Comparison(*names, start * times, *pair, "b" if several else "a", interval, method)
        for times in declared
        for pair, (interval, method) in compared(losses, start, start * times).items()
    ]


Found = dict[tuple[str, str], tuple[Interval, str]]


def _over_documents(losses: Mapping[str, Losses], start: int, length: int) -> Found:
    """Level (a): each pair on the documents that both have, of the first seed that both have."""
    del start
    here = {label: loss.at(length) for label, loss in losses.items()}
    found: Found = {}
    for label, other in itertools.combinations(here, 2):
        values = contrast(difference(here[label], here[other]).head(1).dropna(axis=1), losses[label].tokens)
        if values is not None:
            num = values.weight_D.size
            found[label, other] = (
                own_interval(values.value_SD, values.weight_D),
                f"paired over {num} documents",
            )
    return found


def _over_seeds(losses: Mapping[str, Losses], start: int, length: int) -> Found:
    """Level (b): the seeds that each pair shares, on the documents that all encodings share."""
    here = {label: loss.at(length) for label, loss in losses.items()}
    shared = shared_documents(here)
    if shared.empty:
        return {}
    weight_D = next(losses[label].tokens for label, part in here.items() if len(part)).reindex(shared)
    mean_SE = pd.DataFrame(
        {label: part[shared] @ (weight_D / weight_D.sum()) for label, part in here.items() if len(part)}
    )
    failing = {label for label in mean_SE if _fails(losses[str(label)], start, length)}
    residual = stats.pooled_residual(mean_SE.drop(columns=list(failing)).to_numpy())
    found: Found = {}
    for label, other in itertools.combinations(mean_SE, 2):
        pair_S = mean_SE[[label, other]].dropna().to_numpy()
        if len(pair_S):
            found[str(label), str(other)] = _difference(pair_S, residual, not failing & {label, other})
    return found


def shared_documents(here: Mapping[str, pd.DataFrame]) -> pd.Index:
    """The documents that every encoding with a number has, in every seed of it."""
    columns = [part.dropna(axis=1).columns for part in here.values() if len(part)]
    shared = columns[0] if columns else pd.Index([])
    for other in columns[1:]:
        shared = shared.intersection(other)
    return shared


def _fails(loss: Losses, start: int, length: int) -> bool:
    """Whether an encoding fails at `length`, or cannot be shown to hold there."""
    base = loss.at(start)
    change = contrast(difference(loss.at(length), base), loss.tokens)
    level = contrast(base.dropna(axis=1), loss.tokens)
    infinite = NOT_FINITE in {*loss.why(length).values(), *loss.why(start).values()}
    if change is None or level is None or infinite:
        return True
    return fails(change, float(level.over_seeds().mean()))


def _difference(pair_S: np.ndarray, residual: Variance, holding: bool) -> tuple[Interval, str]:
    value_S, other_S = pair_S.T
    if len(pair_S) == 1 and (not holding or residual.df <= 0):
        return Interval(float(value_S[0] - other_S[0])), "one seed in common: no interval"
    if not holding or residual.df <= 0:
        return stats.welch(value_S, other_S), "Welch over seeds"
    return stats.seed_difference(value_S, other_S, residual), "pooled residual over seeds"


def unmade(rows: pd.DataFrame, protocol: str, declared: Sequence[int] = DECLARED) -> list[str]:
    """Why comparisons that were declared in advance are not there: a sentence a study."""
    said = []
    plain = rows[(rows["protocol"] == protocol) & (rows["rescale"] == "none")]
    several = plain["study"].nunique() > 1
    for (study, start), family in plain.groupby(["study", "train_length"], observed=True, sort=False):
        if family["label"].nunique() < 2:
            continue
        where = f" in {study}" if several else ""
        if start <= 0:
            said.append(f"No encodings were compared{where}: their training length is not known.")
            continue
        grid = {int(length) for length in family["length"]}
        said += _strangers(family, where)
        absent = [times for times in declared if int(start) * times not in grid]
        if absent:
            lengths = listed(int(start) * times for times in absent)
            said.append(
                f"Encodings were not compared{where} at {lengths} ({_times(absent)} the training length of "
                f"{int(start):,}): not on the grid of lengths."
            )
    return said


def _strangers(family: pd.DataFrame, where: str) -> list[str]:
    """Pairs of encodings that no seed pairs."""
    seeds = {str(label): {*part} for label, part in family.groupby("label", observed=True)["seed"]}
    apart = [f"{a} and {b}" for a, b in itertools.combinations(seeds, 2) if not seeds[a] & seeds[b]]
    return [f"Not compared{where}, having no seed in common: {'; '.join(apart)}."] if apart else []


def _times(numbers: Sequence[int]) -> str:
    return joined([f"{number}\u00d7" for number in numbers])


def _adjusted(one: Comparison, p_holm: float) -> Comparison:
    return Comparison(**{**one.__dict__, "p_holm": p_holm})


def comparison_table(found: Sequence[Comparison]) -> pd.DataFrame:
    """The comparisons as a table; bounds are each pair's own 95 % interval, p is Holm's over all."""
    records = []
    for one in found:
        low, high = one.interval.bounds()
        records.append(
            {
                "study": one.study,
                "label": one.label,
                "other": one.other,
                "length": one.length,
                "difference": one.interval.estimate,
                "low": low,
                "high": high,
                "df": one.interval.df,
                "p": one.interval.p_value,
                "p_holm": one.p_holm,
                "differs": one.differs,
                "level": one.level,
                "method": one.method,
            }
        )
    return pd.DataFrame(records)


# --- where a gain comes from -----------------------------------------------------------------------------


@dataclass(frozen=True)
class Decomposition:
    """N(L) - N(L') = [C(L) - C(L')] + [X(L) - X(L')], L' the training length, all in nats."""

    study: str
    label: str
    length: int
    train_length: int
    total: Interval  # N(L) - N(L'): nonoverlapping
    early: Interval  # C = N - X: what early tokens of a window cost
    context: Interval  # X(L) - X(L'): exact-context
    same_range: bool  # whether N and X score targets of one index range
    num_seeds: int


def decompose(rows: pd.DataFrame) -> list[Decomposition]:
    """Every unrescaled series that ran both protocols, at every length past the training length.

    Over the seeds and documents that have all four numbers of a length.
    """
    plain = rows[rows["rescale"] == "none"]
    keys = [name for name in FAMILY if name != "protocol"] + ["label"]
    found = []
    both = plain[plain["protocol"].isin([LATE, "nonoverlapping", "exact-context"])]
    for _, part in both.groupby(keys, dropna=False, observed=True, sort=False):
        windowed = LATE if (part["protocol"] == LATE).any() else "nonoverlapping"
        sides = [read_losses(part[part["protocol"] == name]) for name in (windowed, "exact-context")]
        start = int(part["train_length"].iloc[0])
        names = (str(part["study"].iloc[0]), str(part["label"].iloc[0]))
        found += _decompose(sides[0], sides[1], start, names, windowed == LATE)
    return found


def _decompose(
    windowed: Losses, exact: Losses, start: int, names: tuple[str, str], same: bool
) -> list[Decomposition]:
    found = []
    for length in sorted(n for n in windowed.nll if n > start):
        totals, contexts = (difference(side.at(length), side.at(start)) for side in (windowed, exact))
        shared = difference(totals, contexts)
        early = contrast(shared, windowed.tokens)
        if early is None:
            continue
        total_SD, context_SD = (
            side.loc[shared.index, shared.columns].to_numpy(dtype=np.float64) for side in (totals, contexts)
        )
        found.append(
            Decomposition(
                study=names[0],
                label=names[1],
                length=length,
                train_length=start,
                total=own_interval(total_SD, early.weight_D),
                early=early.interval(),
                context=own_interval(context_SD, early.weight_D),
                same_range=same,
                num_seeds=len(early.seeds),
            )
        )
    return found


def decomposition_table(found: Sequence[Decomposition]) -> pd.DataFrame:
    """The decompositions as a table."""
    records = []
    for one in found:
        record: dict[str, object] = {"study": one.study, "label": one.label, "length": one.length}
        for name, interval in (("total", one.total), ("early", one.early), ("context", one.context)):
            low, high = interval.bounds()
            record |= {name: interval.estimate, f"{name}_low": low, f"{name}_high": high}
        records.append({**record, "num_seeds": one.num_seeds, "one_index_range": one.same_range})
    return pd.DataFrame(records)
