"""Rows of several evaluation plans of one study: one set, in which no target counts twice."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import pandas as pd

from pe_study.reporting.choices import EVERY_TARGET, same_cells
from pe_study.rows import LATE

CELL = ["length", "seed"]
# Protocols whose targets depend on the longest length of the plan (docs/definitions.md).
PAST_LONGEST = ("exact-context", "fixed-target", LATE)


def united(rows: pd.DataFrame, series: Sequence[str]) -> tuple[pd.DataFrame, list[str]]:
    """Rows in which every cell (series, length, seed) comes from one plan, and what was left out, in words.

    Documents are told apart before (`choices`). Plans of a series join where they scored the same targets;
    the others are left out, whole, in favour of the plan of most cells. Of two plans with one cell, the one
    with a number counts.
    """
    if rows.empty or rows["plan"].nunique() < 2:
        return rows, []
    work = rows.assign(plan=rows["plan"].astype(str)).reset_index(drop=True)
    keep = np.ones(len(work), bool)
    left: dict[tuple[str, str, str], tuple[set[str], set[int]]] = {}
    for _, part in work.groupby(list(series), dropna=False, observed=True, sort=False):
        if part["plan"].nunique() < 2:
            continue
        of_plan = dict(list(part.groupby("plan", sort=True)))
        order = sorted(of_plan, key=lambda plan: (-_num_cells(of_plan[plan]), plan))
        alike = [plan for plan in order if _same_targets(of_plan[order[0]], of_plan[plan])]
        keep[part.index] = False
        keep[_one_plan_a_cell([of_plan[plan] for plan in alike])] = True
        for plan in order:
            if plan not in alike:
                key = (str(part["study"].iloc[0]), plan, order[0])
                protocols, lengths = left.setdefault(key, (set(), set()))
                protocols.add(str(part["protocol"].iloc[0]))
                lengths.update(of_plan[plan]["length"])
    return rows[keep], [_said(key, *what) for key, what in left.items()]


def _said(key: tuple[str, str, str], protocols: set[str], lengths: set[int]) -> str:
    study, plan, kept = key
    said = ", ".join(f"{length:,}" for length in sorted(lengths))
    return (
        f"{study}: {', '.join(sorted(protocols))} of plan {plan} (lengths {said}) is left out, "
        f"since plan {kept} is not known to have scored the same targets; report one plan's folder to see it "
        "alone."
    )


def _num_cells(part: pd.DataFrame) -> int:
    return len(part.loc[part["num_tokens"] > 0, CELL].drop_duplicates())


def _one_plan_a_cell(parts: Sequence[pd.DataFrame]) -> np.ndarray:
    """The index of the rows to keep: each cell from the first plan with a number, else from the first."""
    taken: dict[tuple[int, int], int] = {}
    for scored in (True, False):
        for place, part in enumerate(parts):
            rows = part[part["num_tokens"] > 0] if scored else part
            for cell in rows[CELL].drop_duplicates().itertuples(index=False, name=None):
                taken.setdefault(cell, place)
    kept = []
    for place, part in enumerate(parts):
        cells = zip(part["length"], part["seed"], strict=True)
        kept.append(part.index[[taken[cell] == place for cell in cells]])
    return np.concatenate(kept)


def _same_targets(first: pd.DataFrame, other: pd.DataFrame) -> bool:
    """Whether two plans of one series scored the same targets, as far as their rows can tell.

    Their documents have equal numbers only where they are known to be the same (`choices`).
    """
    if first is other:
        return True
    one, two = _documents(first), _documents(other)
    if one.empty or two.empty:
        return True  # nothing was scored there: statuses only
    if set(one.index.unique("document")) != set(two.index.unique("document")) or not _strides(first, other):
        return False
    shared = one.merge(two, left_index=True, right_index=True, suffixes=("_one", "_two"))
    if len(shared):
        return same_cells(shared)
    protocol = str(first["protocol"].iloc[0]).partition("_")[0]
    if protocol in PAST_LONGEST and first["length"].max() != other["length"].max():
        return False
    return protocol in (*PAST_LONGEST, *EVERY_TARGET) and _counts(one) == _counts(two)


def _documents(part: pd.DataFrame) -> pd.DataFrame:
    """Targets, bytes and loss by length, seed and document."""
    scored = part[part["num_tokens"] > 0]
    columns = ["num_tokens", "num_bytes", "nll_sum"]
    return scored.groupby([*CELL, "document"], observed=True)[columns].sum(min_count=1)


def _counts(documents: pd.DataFrame) -> Mapping[int, set[float]]:
    """The numbers of targets of each document, over lengths and seeds."""
    return {int(document): set(part) for document, part in documents["num_tokens"].groupby(level="document")}


def _strides(first: pd.DataFrame, other: pd.DataFrame) -> bool:
    """Whether two plans slide alike: by as many tokens, or by the same share of the length."""
    sets = [
        (set(part["stride"].dropna()), set((part["stride"] / part["length"]).dropna()))
        for part in (first, other)
    ]
    return sets[0][0] == sets[1][0] or sets[0][1] == sets[1][1]
