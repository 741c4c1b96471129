"""How far each series holds: survives, fails by, gains to. From rows alone; definitions, not impressions.

At one protocol, with L0 the training length and X(L) the loss at length L on the same targets:

- *survives* the largest grid length with every grid length up to it having an upper simultaneous 95 % bound
  of X(L) - X(L0) below delta, which is 0.5 % (or 2 %) of X(L0);
- *fails by* the smallest grid length with a lower bound above delta;
- *gains to* the largest grid length with a lower bound of X(L/2) - X(L) above zero.

Simultaneous means Bonferroni over the grid lengths past L0. With one seed the bounds are
of level (a), and speak of that run; with more of level (c), and speak of the encoding (see `stats`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import pandas as pd

from pe_study import stats
from pe_study.stats import Array, Interval, Variance
from pe_study.tables import LOST, SERIES, TRUNCATION, protocols_of

DELTA, WIDE_DELTA = 0.005, 0.02
PREFERRED = ("exact-context", "fixed-target", "nonoverlapping", "sliding")  # protocols with the same targets
FAMILY = [name for name in SERIES if name not in ("encoding", "label", "rescale")]


@dataclass(frozen=True)
class Losses:
    """Loss of one series on the documents that every seed and length share: length -> (seeds, documents)."""

    value_SD: Mapping[int, Array]
    weight_D: Array
    documents: Array
    status: Mapping[int, str]  # of the lengths that have no number

    @property
    def num_seeds(self) -> int:
        return next(iter(self.value_SD.values())).shape[0] if self.value_SD else 0


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
    change: Mapping[int, Interval]  # X(L) - X(L0)
    survives: int | None
    survives_wide: int | None
    fails_by: int | None
    fails_by_wide: int | None
    gains_to: int | None
    cannot: tuple[tuple[int, str], ...]  # lengths that have a status instead

    @property
    def about_encoding(self) -> bool:
        """Whether sentences may speak of the encoding; otherwise of this run."""
        return self.num_seeds > 1


def protocol_for(rows: pd.DataFrame) -> str | None:
    """The protocol to judge by: `exact-context` where it was run, else the next with the same targets."""
    ran = protocols_of(rows)
    return next((name for wanted in PREFERRED for name in ran if name.partition("_")[0] == wanted), None)


def verdicts(rows: pd.DataFrame, protocol: str) -> list[Verdict]:
    """A verdict for every series of `protocol` that has a number at its training length."""
    found = []
    judged_rows = rows[(rows["protocol"] == protocol) & (rows["rescale"] != TRUNCATION)]
    for _, family in judged_rows.groupby(FAMILY, dropna=False, observed=True, sort=False):
        losses = {
            key: read_losses(part)
            for key, part in family.groupby(["label", "encoding", "rescale"], observed=True, sort=False)
        }
        start = int(family["train_length"].iloc[0])
        judged = {key: loss for key, loss in losses.items() if start in loss.value_SD}
        lengths = sorted({n for loss in judged.values() for n in loss.value_SD if n > start})
        spread = {n: _seed_spread(judged, start, n) for n in lengths}
        family_names = (str(family["study"].iloc[0]), protocol, start)
        found += [_judge(key, loss, spread, family_names) for key, loss in judged.items()]
    return found


def read_losses(rows: pd.DataFrame) -> Losses:
    """Mean loss by length, seed and document, of the seeds and documents with a number at every length."""
    lost = rows[rows["status"].isin(LOST)].groupby("length")["status"].first()
    scored = rows[(rows["num_tokens"] > 0) & ~rows["length"].isin(lost.index)]
    sums = scored.groupby(["length", "seed", "document"])[["nll_sum", "num_tokens"]].sum(min_count=1)
    nll = (sums["nll_sum"] / sums["num_tokens"]).where(np.isfinite(sums["nll_sum"])).unstack("document")
    complete = nll.notna().any(axis=1).groupby("seed").all()
    nll = nll[nll.index.get_level_values("seed").isin(complete.index[complete])].dropna(axis=1)
    tokens = sums["num_tokens"].groupby("document").max().reindex(nll.columns)
    value_SD = {int(length): part.to_numpy() for length, part in nll.groupby("length") if part.size}
    documents = nll.columns.to_numpy()
    return Losses(value_SD, tokens.to_numpy(float), documents, {int(n): str(s) for n, s in lost.items()})


def _seed_spread(
    judged: Mapping[tuple[str, str, str], Losses], start: int, length: int
) -> dict[tuple, Variance]:
    """Seed variance of X(length) - X(start) by series: pooled over those that do not fail, else its own."""
    spread: dict[tuple, Variance] = {}
    pool: dict[tuple, Array] = {}
    most = max(loss.num_seeds for loss in judged.values())
    for key, loss in judged.items():
        if length not in loss.value_SD or loss.num_seeds < 2:
            continue
        change_S = over_seeds_of(loss, length) - over_seeds_of(loss, start)
        spread[key] = Variance(float(change_S.var(ddof=1)), loss.num_seeds - 1)
        if key[2] == "none" and loss.num_seeds == most and not fails(change_S, over_seeds_of(loss, start)):
            pool[key] = change_S
    if len(pool) > 1:
        pooled = stats.pooled_within(np.column_stack(list(pool.values())))
        spread |= dict.fromkeys(pool, pooled)
    return spread


def fails(change_S: Array, start_S: Array) -> bool:
    """Whether a change is so large that its spread over seeds is of another kind: over 2 % of the loss."""
    return bool(change_S.mean() > WIDE_DELTA * start_S.mean())


def over_seeds_of(loss: Losses, length: int) -> Array:
    """The loss of each seed at one length, (seeds,)."""
    return loss.value_SD[length] @ (loss.weight_D / loss.weight_D.sum())


def contrast(loss: Losses, difference_SD: Array, spread: Variance | None) -> Interval:
    """The interval of a contrast of lengths: level (a) for one seed, level (c) for more."""
    if loss.num_seeds == 1 or spread is None:
        return stats.over_documents(difference_SD[0], loss.weight_D)
    return stats.over_both(difference_SD, loss.weight_D, Variance(spread.value / loss.num_seeds, spread.df))


def _judge(key: tuple, loss: Losses, spread: Mapping[int, Mapping[tuple, Variance]], names: tuple) -> Verdict:
    label, encoding, rescale = map(str, key)
    study, protocol, start = names
    past = sorted(n for n in loss.value_SD if n > start)
    change = {n: contrast(loss, loss.value_SD[n] - loss.value_SD[start], spread[n].get(key)) for n in past}
    alpha = (1 - stats.CONFIDENCE) / max(len(spread), 1)
    level = float(over_seeds_of(loss, start).mean())
    halves = {
        n: _halving(loss, n, start)
        for n in past
        if n // 2 in loss.value_SD and n % 2 == 0 and n // 2 >= start
    }
    gains = [n for n, interval in halves.items() if interval.lower(alpha) > 0]
    bounds = {n: (interval.lower(alpha), interval.upper(alpha)) for n, interval in change.items()}
    return Verdict(
        study, label, encoding, rescale, protocol, start, level, loss.num_seeds, loss.weight_D.size,
        longest=max(loss.value_SD),
        change=change,
        survives=_survives(bounds, loss.status, DELTA * level),
        survives_wide=_survives(bounds, loss.status, WIDE_DELTA * level),
        fails_by=_fails_by(bounds, DELTA * level),
        fails_by_wide=_fails_by(bounds, WIDE_DELTA * level),
        gains_to=max(gains, default=None),
        cannot=tuple(sorted(loss.status.items())),
    )  # fmt: skip


def _halving(loss: Losses, length: int, start: int) -> Interval:
    """X(L/2) - X(L), with the spread over seeds of its own."""
    difference_SD = loss.value_SD[length // 2] - loss.value_SD[length]
    if loss.num_seeds == 1:
        return stats.over_documents(difference_SD[0], loss.weight_D)
    seed_S = difference_SD @ (loss.weight_D / loss.weight_D.sum())
    return contrast(loss, difference_SD, Variance(float(seed_S.var(ddof=1)), loss.num_seeds - 1))


def _survives(
    bounds: Mapping[int, tuple[float, float]], status: Mapping[int, str], delta: float
) -> int | None:
    largest = None
    for length in sorted({*bounds, *(n for n in status)}):
        if length not in bounds or not bounds[length][1] < delta:
            return largest
        largest = length
    return largest


def _fails_by(bounds: Mapping[int, tuple[float, float]], delta: float) -> int | None:
    return next((length for length, (low, _) in sorted(bounds.items()) if low > delta), None)


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
        "cannot": "; ".join(f"{n}: {status}" for n, status in verdict.cannot),
    }
