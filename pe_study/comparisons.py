"""Differences between encodings at lengths declared in advance, and where a gain comes from."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd

from pe_study import stats
from pe_study.stats import Array, Interval, Variance
from pe_study.tables import LATE
from pe_study.verdicts import FAMILY, Losses, fails, over_seeds_of, read_losses

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

    Several seeds: level (b), the pooled encoding x seed residual between encodings that do not fail there,
    Welch's interval where one does. One seed: level (a), paired documents. Levels do not mix in a family.
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
    num_seeds = max((loss.num_seeds for loss in losses.values()), default=0)
    found = []
    for length in (start * times for times in declared):
        here = {label: loss for label, loss in losses.items() if _usable(loss, start, length, num_seeds)}
        residual = _residual(here, start, length)
        for label, other in itertools.combinations(here, 2):
            interval, method = _difference(here[label], here[other], start, length, residual)
            level = "b" if num_seeds > 1 else "a"
            found.append(Comparison(*names, length, label, other, level, interval, method))
    return found


def _usable(loss: Losses, start: int, length: int, num_seeds: int) -> bool:
    return loss.num_seeds == num_seeds and start in loss.value_SD and length in loss.value_SD


def _residual(losses: Mapping[str, Losses], start: int, length: int) -> Variance:
    """The pooled residual over encodings that do not fail at `length`."""
    holding = [loss for loss in losses.values() if not _fails(loss, start, length)]
    if len(holding) < 2:
        return Variance(math.nan, 0)
    return stats.pooled_residual(np.column_stack([over_seeds_of(loss, length) for loss in holding]))


def _fails(loss: Losses, start: int, length: int) -> bool:
    start_S = over_seeds_of(loss, start)
    return fails(over_seeds_of(loss, length) - start_S, start_S)


def _difference(
    loss: Losses, other: Losses, start: int, length: int, residual: Variance
) -> tuple[Interval, str]:
    if loss.num_seeds == 1:
        shared, left, right = np.intersect1d(loss.documents, other.documents, return_indices=True)
        difference_D = loss.value_SD[length][0, left] - other.value_SD[length][0, right]
        return stats.over_documents(difference_D, loss.weight_D[left]), f"paired over {shared.size} documents"
    value_S, other_S = over_seeds_of(loss, length), over_seeds_of(other, length)
    if _fails(loss, start, length) or _fails(other, start, length) or residual.df <= 0:
        return stats.welch(value_S, other_S), "Welch over seeds"
    return stats.seed_difference(value_S, other_S, residual), "pooled residual over seeds"


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
    """Every unrescaled series that ran both protocols, at every length past the training length."""
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
    shared = sorted(set(windowed.value_SD) & set(exact.value_SD))
    if start not in shared or windowed.num_seeds != exact.num_seeds:
        return []
    _, left, right = np.intersect1d(windowed.documents, exact.documents, return_indices=True)
    weight_D = windowed.weight_D[left]
    found = []
    for length in (n for n in shared if n > start):
        total_SD = (windowed.value_SD[length] - windowed.value_SD[start])[:, left]
        context_SD = (exact.value_SD[length] - exact.value_SD[start])[:, right]
        found.append(
            Decomposition(
                study=names[0],
                label=names[1],
                length=length,
                train_length=start,
                total=own_interval(total_SD, weight_D),
                early=own_interval(total_SD - context_SD, weight_D),
                context=own_interval(context_SD, weight_D),
                same_range=same,
                num_seeds=windowed.num_seeds,
            )
        )
    return found


def own_interval(difference_SD: Array, weight_D: Array) -> Interval:
    """Of a difference (seeds, documents): level (a) for one seed, (c) with the seeds' own spread for more."""
    if difference_SD.shape[0] == 1:
        return stats.over_documents(difference_SD[0], weight_D)
    seed_S = difference_SD @ (weight_D / weight_D.sum())
    variance = Variance(float(seed_S.var(ddof=1)) / seed_S.size, seed_S.size - 1)
    return stats.over_both(difference_SD, weight_D, variance)


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
