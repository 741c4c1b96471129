"""How far each series holds: survives, fails by, gains to. From rows alone; definitions, not impressions.

At one protocol, with L0 the training length and X(L) the loss at length L on the same targets:

- *survives* the largest grid length with every grid length up to it having an upper simultaneous 95 % bound
  of X(L) - X(L0) below delta, which is 0.5 % (or 2 %) of X(L0);
- *fails by* the smallest grid length with a lower bound above delta, or without a finite loss in some seed;
- *gains to* the largest grid length with a lower bound of X(L/2) - X(L) above zero;
- *flat to* the largest length that it survives, where every length up to it has upper bounds of X(L/2) - X(L)
  and X(L0) - X(L) below delta: a gain that matters is ruled out, not only not shown.

The grid is every length that some series of that study and protocol has. A length that a series lacks, or
at which one of its seeds has no number, ends what it survives. Simultaneous means Bonferroni over the grid
lengths past L0. With one seed the bounds are of level (a), and speak of that run; with more of level (c), or
(b) on one document, and speak of the encoding (see `stats`). One seed on one document has no bounds.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd

from pe_study import stats
from pe_study.reporting.losses import NOT_FINITE, Contrast, Losses, contrast, difference, read_losses, reasons
from pe_study.stats import Interval, Variance
from pe_study.tables import SERIES, TRUNCATION

DELTA, WIDE_DELTA = 0.005, 0.02
PREFERRED = ("exact-context", "fixed-target", "nonoverlapping", "sliding")  # protocols with the same targets
FAMILY = [name for name in SERIES if name not in ("encoding", "label", "rescale")]

Key = tuple[str, str, str]  # label, encoding, rescale


@dataclass(frozen=True)
class Verdict:
    """What one series does past its training length. Lengths are None where not reached."""

    study: str
    label: str
    encoding: str
    rescale: str
    protocol: str
    train_length: int
    start: float  # X(L0), nats
    num_seeds: int
    num_documents: int
    longest: int  # the longest grid length with a number
    change: Mapping[int, Interval]  # X(L) - X(L0), over the seeds and documents that both have
    survives: int | None
    survives_wide: int | None
    fails_by: int | None
    fails_by_wide: int | None
    gains_to: int | None
    gains_tested: tuple[int, ...]  # lengths L of which L/2 is on the grid, too
    not_finite: tuple[tuple[int, str], ...]  # lengths at which some seed has no finite loss, and which
    cannot: tuple[tuple[int, str], ...]  # lengths without a number in some seed, and why: a status, not run
    flat_to: int | None = None  # a gain of delta is ruled out up to there
    dominated: bool = False  # one document has most of the targets, which leaves no interval
    aside: bool = False  # under another protocol than it is judged by, beside rescales that ran there alone

    @property
    def about_encoding(self) -> bool:
        """Whether sentences may speak of the encoding; otherwise of this run."""
        return self.num_seeds > 1

    @property
    def level(self) -> str:
        """Of its intervals: "a", "b" or "c" (see `stats`); "-" where one document has most of the targets;
        nothing for one seed on one document."""
        if self.dominated:
            return "-"
        if self.num_documents > 1:
            return "c" if self.num_seeds > 1 else "a"
        return "b" if self.num_seeds > 1 else ""


@dataclass(frozen=True)
class _Series:
    """One series against the grid of its study and protocol."""

    losses: Losses
    start: int
    change: Mapping[int, Contrast]  # X(L) - X(L0)
    halves: Mapping[int, Contrast]  # X(L/2) - X(L), where both have a number in every seed
    level: float  # X(L0)


def verdicts(rows: pd.DataFrame, protocol: str) -> list[Verdict]:
    """A verdict for every series of `protocol` that has a number at its training length."""
    found = []
    judged_rows = rows[(rows["protocol"] == protocol) & (rows["rescale"] != TRUNCATION)]
    for _, family in judged_rows.groupby(FAMILY, dropna=False, observed=True, sort=False):
        start = int(family["train_length"].iloc[0])
        grid = sorted({int(length) for length in family["length"] if length >= start})
        keyed = family.groupby(["label", "encoding", "rescale"], observed=True, sort=False)
        losses = {(str(key[0]), str(key[1]), str(key[2])): read_losses(part) for key, part in keyed}
        series = {key: _series(loss, start, grid) for key, loss in losses.items() if not loss.at(start).empty}
        spread = {
            n: pooled_spread(
                {k: s.change[n] for k, s in series.items() if n in s.change},
                [k for k, s in series.items() if _holds(s, n)],
            )
            for n in grid
        }
        halves = {n: pooled_spread({k: s.halves[n] for k, s in series.items() if n in s.halves},
                                   [k for k, s in series.items() if _holds(s, n) and _holds(s, n // 2)])
                  for n in grid}  # fmt: skip
        names = (str(family["study"].iloc[0]), protocol)
        found += [_judge(key, one, grid, (spread, halves), names) for key, one in series.items()]
    return found


def _series(loss: Losses, start: int, grid: Sequence[int]) -> _Series:
    base = loss.at(start)
    at = {length: loss.at(length) for length in grid}
    change = {
        length: contrast(difference(at[length], base), loss.tokens) for length in grid if length > start
    }
    whole = {length for length in grid if not loss.why(length)}
    halves = {
        length: contrast(difference(at[length // 2], at[length]), loss.tokens)
        for length in grid
        if length % 2 == 0 and {length, length // 2} <= whole
    }
    level = contrast(base.dropna(axis=1), loss.tokens)
    return _Series(
        loss,
        start,
        {length: one for length, one in change.items() if one is not None},
        {length: one for length, one in halves.items() if one is not None},
        math.nan if level is None else float(level.over_seeds().mean()),
    )


def _holds(one: _Series, length: int) -> bool:
    """Whether a series may lend its spread over seeds: where it fails, that is of another kind."""
    if length == one.start:
        return not one.losses.why(length)
    return length in one.change and not fails(one.change[length], one.level) and not one.losses.why(length)


def fails(change: Contrast, level: float) -> bool:
    """Whether a change is so large that its spread over seeds is of another kind: over 2 % of the loss."""
    return bool(change.over_seeds().mean() > WIDE_DELTA * level)


def pooled_spread(contrasts: Mapping[Key, Contrast], holding: Collection[Key]) -> dict[Key, Variance]:
    """Variance over seeds of a contrast, pooled over unrescaled series that hold and have every seed."""
    every = {seed for one in contrasts.values() for seed in one.seeds}
    pool = {
        key: one.over_seeds()
        for key, one in contrasts.items()
        if key[2] == "none" and key in holding and len(one.seeds) == len(every) > 1
    }
    if len(pool) < 2:
        return {}
    return dict.fromkeys(pool, stats.pooled_within(np.column_stack(list(pool.values()))))


def _judge(
    key: Key, one: _Series, grid: Sequence[int], spreads: tuple[Mapping[int, Mapping[Key, Variance]], ...],
    names: tuple[str, str],
) -> Verdict:  # fmt: skip
    spread, spread_of_halves = spreads
    change = {n: _interval(part, spread[n].get(key), one) for n, part in one.change.items()}
    halves = {n: part.interval(spread_of_halves[n].get(key)) for n, part in one.halves.items()}
    alpha = (1 - stats.CONFIDENCE) / max(sum(bool(n > one.start) for n in grid), 1)
    why = {n: one.losses.why(n) for n in grid if one.losses.why(n)}
    infinite = {n: {s: r for s, r in of.items() if r == NOT_FINITE} for n, of in why.items()}
    absent = {n: {s: r for s, r in of.items() if r != NOT_FINITE} for n, of in why.items()}
    broken = [n for n, of in infinite.items() if of]
    upper = {n: math.inf if n in why else interval.upper(alpha) for n, interval in change.items()}
    lower = {n: interval.lower(alpha) for n, interval in change.items()} | dict.fromkeys(broken, math.inf)
    past = [n for n in grid if n > one.start] if one.start not in why else []
    seeds = one.losses.num_seeds
    return Verdict(
        *names[:1], *key, names[1], one.start, one.level, seeds, _num_documents(one),
        longest=max([one.start, *change]),
        change=change,
        survives=_survives(past, upper, DELTA * one.level),
        survives_wide=_survives(past, upper, WIDE_DELTA * one.level),
        fails_by=_fails_by(lower, DELTA * one.level),
        fails_by_wide=_fails_by(lower, WIDE_DELTA * one.level),
        gains_to=max((n for n, interval in halves.items() if interval.lower(alpha) > 0), default=None),
        gains_tested=tuple(n for n, interval in halves.items() if interval.error == interval.error),
        not_finite=tuple((n, reasons(of, seeds)) for n, of in infinite.items() if of),
        cannot=tuple((n, reasons(of, seeds)) for n, of in absent.items() if of),
        flat_to=_flat_to(past, upper, change, halves, (alpha, DELTA * one.level)),
        dominated=stats.dominates(one.losses.weights(one.start)),
    )  # fmt: skip


def _interval(part: Contrast, spread: Variance | None, one: _Series) -> Interval:
    """Of a change; where one seed of several is left it has none, for that would be of another level."""
    if len(part.seeds) == 1 < one.losses.num_seeds:
        return Interval(float(part.over_seeds()[0]))
    return part.interval(spread)


def _num_documents(one: _Series) -> int:
    return int(one.losses.at(one.start).dropna(axis=1).shape[1])


def _survives(past: Sequence[int], upper: Mapping[int, float], delta: float) -> int | None:
    largest = None
    for length in past:
        if not upper.get(length, math.inf) < delta:
            return largest
        largest = length
    return largest


def _flat_to(
    past: Sequence[int], upper: Mapping[int, float], change: Mapping[int, Interval],
    halves: Mapping[int, Interval], bound: tuple[float, float],
) -> int | None:  # fmt: skip
    """How far a gain of delta is ruled out; None where some length or half up to there does not."""
    alpha, delta = bound
    largest = _survives(past, upper, delta)
    within = [n for n in past if n <= (largest or 0)]
    known = [
        *(-change[n].lower(alpha) for n in within),
        *(halves[n].upper(alpha) for n in within if n in halves),
    ]
    return largest if known and all(gain < delta for gain in known) else None


def _fails_by(lower: Mapping[int, float], delta: float) -> int | None:
    return next((length for length, low in sorted(lower.items()) if low > delta), None)


def verdict_table(found: list[Verdict]) -> pd.DataFrame:
    """The verdicts as a table, a row each, numbers plain."""
    return pd.DataFrame([_record(verdict) for verdict in found])


def _record(verdict: Verdict) -> dict[str, object]:
    low, high = (
        verdict.change[verdict.longest].bounds()
        if verdict.longest in verdict.change
        else (math.nan, math.nan)
    )
    change = verdict.change[verdict.longest].estimate if verdict.longest in verdict.change else math.nan
    return {
        "study": verdict.study,
        "label": verdict.label,
        "rescale": verdict.rescale,
        "protocol": verdict.protocol,
        "train_length": verdict.train_length,
        "num_seeds": verdict.num_seeds,
        "num_documents": verdict.num_documents,
        "nll_at_training_length": verdict.start,
        "survives_0.5%": verdict.survives,
        "fails_by_0.5%": verdict.fails_by,
        "survives_2%": verdict.survives_wide,
        "fails_by_2%": verdict.fails_by_wide,
        "gains_to": verdict.gains_to,
        "longest": verdict.longest,
        "change_at_longest": change,
        "change_low": low,
        "change_high": high,
        "cannot": "; ".join(f"{n}: {why}" for n, why in sorted((*verdict.not_finite, *verdict.cannot))),
    }
