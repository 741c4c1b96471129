"""The main table of a page: labels and rescales down, lengths across."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from typing import Any

import pandas as pd

from pe_study import tables
from pe_study.reporting import likeness
from pe_study.reporting.curves import number
from pe_study.reporting.page_tables import METRIC_NAMES, Cell, Column, Table

MOST_LENGTHS = 10


def main_table(
    curves: pd.DataFrame, metric: str, protocol: str, lengths: Sequence[int] | None, *, chosen: bool
) -> Table:
    """Labels and rescales down, lengths across; the best of a column is marked.

    lengths: the columns that were asked for, all of them shown; None takes those of `columns_of`.
    """
    shown = curves[(curves["protocol"] == protocol) & (curves["rescale"] != tables.TRUNCATION)]
    over = tables.in_bytes(shown)
    in_unit = "" if over is None else " in bytes"
    data, shown = shown, shown if over is None else over
    have = sorted({int(n) for n in shown["length"] if lengths is None or n in lengths})
    columns = have if lengths is not None else columns_of(have, _ends(data, shown["length"]))
    frame = tables.main_table(shown, metric, columns)
    several = frame.index.get_level_values("study").nunique() > 1
    reason = likeness.unlike(shown, metric)
    best = {n: math.nan if reason else _best(frame[n]) for n in frame.columns}
    rows = []
    for (study, label, rescale), values in frame.iterrows():
        name = str(label) if rescale == "none" else f"{label}, {rescale}"
        cells = [Cell(f"{name} ({study})" if several else name)]
        rows.append(cells + [_value(values[n], best[n], metric) for n in frame.columns])
    most = int(shown["num_seeds"].max()) if len(shown) else 0
    marked = f"none is marked, not being like for like ({reason})." if reason else "the best is marked."
    seeds = "One seed." if most <= 1 else f"Means over up to {most} seeds."
    fewer = f" {len(columns)} of {len(have)} lengths; the CSV has all." if len(columns) < len(have) else ""
    return Table(
        name=f"main-{protocol}-{metric}",
        title=f"{METRIC_NAMES[metric].capitalize()} by length{in_unit} ({protocol})",
        columns=[Column("encoding"), *(Column(f"{n:,}", numeric=True) for n in frame.columns)],
        rows=rows,
        data=data.drop(columns=["corpus_hash", "tokenizer_hash"]),
        note=f"{tables.METRICS[metric].capitalize()}; lower is better; {marked} {seeds}{fewer}",
        metric=metric,
        protocol=protocol,
        chosen=chosen,
    )


def _ends(data: pd.DataFrame, columns: pd.Series) -> set[int]:
    """The columns of the training length and of the longest length of every study and training length."""
    ends = columns[data["length"] == data["train_length"]]
    longest = columns.groupby([data["study"], data["train_length"]], observed=True).max()
    return {int(n) for n in (*ends, *longest)}


def columns_of(lengths: Sequence[int], always: Collection[int]) -> list[int]:
    """Ascending `lengths`, thinned evenly to `MOST_LENGTHS`; those of `always` stay, be they more."""
    others = [n for n in lengths if n not in always]
    places = max(MOST_LENGTHS - (len(lengths) - len(others)), 0)
    if places < len(others):
        others = [others[math.floor((place + 0.5) * len(others) / places)] for place in range(places)]
    return sorted({*others, *(n for n in lengths if n in always)})


def _best(column: pd.Series) -> float:
    return min(
        (value for value in column if isinstance(value, float) and math.isfinite(value)), default=math.nan
    )


def _value(value: Any, best: float, metric: str) -> Cell:
    if not isinstance(value, float):
        return Cell(str(value), kind="status")
    if math.isnan(value):
        return Cell("not run", kind="status")
    digits = 2 if metric == "perplexity" else 3
    text = number(value) if metric == "perplexity" and value >= 1000 else f"{value:.{digits}f}"
    return Cell(text, value, "best" if value == best else "n")
