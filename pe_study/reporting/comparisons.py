"""Differences between encodings at lengths declared in advance, and where a gain comes from."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass

import numpy as np
import pandas as pd

from pe_study import stats
from pe_study.reporting.judging import ONE_TEXT, protocol_order
from pe_study.reporting.losses import NOT_FINITE, Losses, contrast, difference, read_losses
from pe_study.reporting.verdicts import fails
from pe_study.stats import Interval, Variance, own_interval
from pe_study.tables import LATE

DECLARED = (2, 4, 8)  # multiples of the training length at which encodings are compared
Pair = tuple[str, str]


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


def compare(
    rows: pd.DataFrame, protocol: str | None = None, declared: Sequence[int] = DECLARED
) -> list[Comparison]:
    """Every pair of unrescaled encodings at every declared length, Holm-adjusted over all of them.

    protocol: that of all pairs; None takes for each pair the first that both ran (`pairs_by_protocol`). Seeds
    are paired by number, on the documents that both encodings have. Where a pair of a family shares several
    seeds: level (b), the encoding x seed residual on these documents pooled over encodings that have them and
    do not fail there, Welch's interval where one does. Else level (a), paired documents. Levels do not mix in
    a family.
    """
    found: list[Comparison] = []
    plain = rows[rows["rescale"] == "none"]
    plain = plain if protocol is None else plain[plain["protocol"] == protocol]
    for _, text in plain.groupby(ONE_TEXT, dropna=False, observed=True, sort=False):
        for name, pairs in pairs_by_protocol(text, protocol).items():
            found += _compare_family(text[text["protocol"] == name], pairs, declared)
    adjusted = stats.holm([comparison.interval.p_value for comparison in found])
    return [_adjusted(one, float(p)) for one, p in zip(found, adjusted, strict=True)]


def pairs_by_protocol(text: pd.DataFrame, protocol: str | None = None) -> dict[str, list[Pair]]:
    """The pairs of encodings of one study and text that are compared under each protocol: the first that both
    ran, beginning with the one of most encodings."""
    taken: set[Pair] = set()
    found: dict[str, list[Pair]] = {}
    for name in [protocol] if protocol else protocol_order(text):
        labels = [str(label) for label, _ in text[text["protocol"] == name].groupby("label", observed=True)]
        found[name] = [pair for pair in itertools.combinations(labels, 2) if pair not in taken]
        taken |= {*found[name], *((b, a) for a, b in found[name])}
    return found


def _compare_family(family: pd.DataFrame, pairs: Sequence[Pair], declared: Sequence[int]) -> list[Comparison]:
    if not pairs:
        return []
    losses = {str(label): read_losses(part) for label, part in family.groupby("label", observed=True)}
    start = int(family["train_length"].iloc[0])
    names = (str(family["study"].iloc[0]), str(family["protocol"].iloc[0]))
    several = any(len({*losses[a].seeds} & {*losses[b].seeds}) > 1 for a, b in pairs)
    compared = _over_seeds if several else _over_documents
    return [
        Comparison(*names, start * times, *pair, "b" if several else "a", interval, method)
        for times in declared
        for pair, (interval, method) in compared(losses, start, start * times, pairs).items()
    ]


Found = dict[Pair, tuple[Interval, str]]


def _over_documents(losses: Mapping[str, Losses], start: int, length: int, pairs: Sequence[Pair]) -> Found:
    """Level (a): each pair on the documents that both have, of the first seed that both have."""
    del start
    here = {label: loss.at(length) for label, loss in losses.items()}
    found: Found = {}
    for label, other in pairs:
        values = contrast(difference(here[label], here[other]).head(1).dropna(axis=1), losses[label].tokens)
        if values is not None:
            num = values.weight_D.size
            found[label, other] = (
                own_interval(values.value_SD, values.weight_D),
                f"paired over {num} documents",
            )
    return found


def _over_seeds(losses: Mapping[str, Losses], start: int, length: int, pairs: Sequence[Pair]) -> Found:
    """Level (b): the seeds that each pair shares, on the documents that both have in all of them."""
    here = {label: loss.at(length) for label, loss in losses.items()}
    failing = {label for label in here if len(here[label]) and _fails(losses[label], start, length)}
    means: dict[tuple[int, ...], tuple[pd.DataFrame, Variance]] = {}
    found: Found = {}
    for pair in pairs:
        both = difference(*(here[label] for label in pair))
        if both.empty:
            continue
        shared = both.columns
        weight_D = losses[pair[0]].tokens.reindex(shared)
        key = (*shared, *weight_D)
        if key not in means:
            means[key] = _means(here, weight_D / weight_D.sum(), failing)
        mean_SE, residual = means[key]
        interval, method = _difference(mean_SE[[*pair]].dropna().to_numpy(), residual, not failing & {*pair})
        most = max(here[label].shape[1] for label in pair)
        some = f", on {len(shared)} of {most} documents" if len(shared) < most else ""
        found[pair] = (interval, method + some)
    return found


def _means(
    here: Mapping[str, pd.DataFrame], share_D: pd.Series, failing: Set[str]
) -> tuple[pd.DataFrame, Variance]:
    """The mean loss of every seed (rows) and encoding that has these documents, and the pooled residual of
    those that do not fail."""
    parts = {label: part.reindex(columns=share_D.index).dropna() for label, part in here.items() if len(part)}
    mean_SE = pd.DataFrame({label: part @ share_D for label, part in parts.items() if len(part)})
    holding = [label for label in mean_SE if label not in failing]
    return mean_SE, stats.pooled_residual(mean_SE[holding].to_numpy())


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

    Over the seeds and documents that have all four numbers of a length; a document weighs in all three terms
    what it does in X, so that they add up and X is that of the verdict.
    """
    plain = rows[rows["rescale"] == "none"]
    found = []
    both = plain[plain["protocol"].isin([LATE, "nonoverlapping", "exact-context"])]
    for _, part in both.groupby([*ONE_TEXT, "label"], dropna=False, observed=True, sort=False):
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
        early = contrast(shared, exact.tokens)
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
