"""The losses of one series by length, seed and document, and their differences.

Seeds are paired by their numbers and documents by theirs, which `choices` has made equal for documents alone
that are known to be the same: a difference uses those that both sides have. A cell (one length and seed)
without a number keeps the reason why.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np
import pandas as pd

from pe_study import stats
from pe_study.reporting.captions import joined
from pe_study.stats import Array, Interval, Variance
from pe_study.tables import LOST

NOT_FINITE = "no finite loss"
NOT_RUN = "not run"


_NOTHING = pd.DataFrame(index=pd.Index([], dtype="int64"), dtype="float64")


@dataclass(frozen=True)
class Losses:
    """Mean loss of one series in nats per target.

    `nll` has, by length, a row a seed with a number and a column a document, nan where it was not measured;
    `tokens` the targets of each document; `lost` the (length, seed) without a number, and why.
    """

    nll: Mapping[int, pd.DataFrame]
    tokens: pd.Series
    lost: Mapping[tuple[int, int], str]
    seeds: tuple[int, ...]

    @property
    def num_seeds(self) -> int:
        return len(self.seeds)

    def at(self, length: int) -> pd.DataFrame:
        """The loss of each seed (rows) on each document (columns); empty where there is none."""
        return self.nll.get(length, _NOTHING)

    def weights(self, length: int) -> Array:
        """The targets of the documents that every seed has at `length`."""
        return self.tokens.reindex(self.at(length).dropna(axis=1).columns).to_numpy(dtype=np.float64)

    def why(self, length: int) -> dict[int, str]:
        """The seeds without a number at `length`, and why: a status, not finite, or not run."""
        have = {*self.at(length).index}
        return {seed: self.lost.get((length, seed), NOT_RUN) for seed in self.seeds if seed not in have}


@dataclass(frozen=True)
class Contrast:
    """A difference of losses, (seeds, documents), complete."""

    value_SD: Array
    weight_D: Array
    seeds: tuple[int, ...]

    def over_seeds(self) -> Array:
        """Of each seed, (seeds,), its documents weighted by their targets."""
        return self.value_SD @ (self.weight_D / self.weight_D.sum())

    def interval(self, spread: Variance | None = None) -> Interval:
        """Level (a) for one seed, (c), or (b) on one document, for more; see `stats.own_interval`."""
        return stats.own_interval(self.value_SD, self.weight_D, spread)


def read_losses(rows: pd.DataFrame) -> Losses:
    """The losses of the rows of one series. A cell with one document that is not finite has no number."""
    cell = ["length", "seed"]
    seen = rows.groupby(cell, observed=True)["status"].first().astype(object)
    statuses = rows[rows["status"].isin(LOST)].groupby(cell, observed=True)["status"].first()
    scored = rows[rows["num_tokens"] > 0]
    scored = scored.assign(nll_sum=scored["nll_sum"].astype("float64").fillna(np.inf))
    sums = scored.groupby([*cell, "document"], observed=True)[["nll_sum", "num_tokens"]].sum()
    nll = (sums["nll_sum"] / sums["num_tokens"].astype("float64")).unstack("document")
    infinite = nll.index[np.isinf(nll).any(axis=1)]
    untold = seen.index.difference(nll.index)
    lost = {
        **{key: "no targets" if seen[key] == "ok" else str(seen[key]) for key in untold},
        **dict.fromkeys(infinite, NOT_FINITE),
        **{key: str(status) for key, status in statuses.items()},
    }
    known = nll[~nll.index.isin(list(lost))]
    return Losses(
        nll={int(length): part.droplevel("length") for length, part in known.groupby("length")},
        tokens=sums["num_tokens"].groupby("document", observed=True).max().astype("float64"),
        lost={(int(length), int(seed)): why for (length, seed), why in lost.items()},
        seeds=tuple(sorted({int(seed) for _, seed in seen.index})),
    )


def difference(left: pd.DataFrame, right: pd.DataFrame) -> pd.DataFrame:
    """left - right, (seeds, documents): the seeds of both, and documents that all of those have in both."""
    if left.index.equals(right.index) and left.columns.equals(right.columns):
        value_SD = left.to_numpy() - right.to_numpy()
        if value_SD.size and not np.isnan(value_SD).any():
            return pd.DataFrame(value_SD, left.index, left.columns)
    both = left - right
    return both.dropna(how="all").dropna(axis=1)


def contrast(values: pd.DataFrame, tokens: pd.Series) -> Contrast | None:
    """A difference as arrays with the targets of its documents; None where nothing is shared."""
    if values.empty:
        return None
    weight_D = tokens.reindex(values.columns).to_numpy(dtype=np.float64)
    return Contrast(values.to_numpy(dtype=np.float64), weight_D, tuple(int(s) for s in values.index))


def reasons(why: Mapping[int, str], num_seeds: int) -> str:
    """ "oom" where every seed has that reason, else "oom, seed 2", "oom, seeds 0 and 1; not run, seed 2"."""
    told: dict[str, list[int]] = {}
    for seed, reason in why.items():
        told.setdefault(reason, []).append(seed)
    return "; ".join(
        reason if len(seeds) == num_seeds else f"{reason}, {numbered(seeds)}"
        for reason, seeds in told.items()
    )


def numbered(seeds: Iterable[int]) -> str:
    """ "seed 2", "seeds 0 and 1"."""
    names = [str(seed) for seed in sorted(seeds)]
    return f"seed{'s' * (len(names) > 1)} {joined(names)}"
