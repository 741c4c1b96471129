"""What a table of a page is: the text of its cells, what they sort by, its CSV; and tables of judgements."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pandas as pd

from pe_study.reporting import rates
from pe_study.reporting.comparisons import Comparison, Decomposition, comparison_table, decomposition_table
from pe_study.reporting.outcomes import speaks_of
from pe_study.reporting.verdicts import Verdict, verdict_table

METRIC_NAMES = {"perplexity": "perplexity", "bits_per_byte": "bits per byte", "nll": "loss (nats)"}
MOST_ROWS = 24  # of a table that is open at first
MOST_SHOWN = 200  # of a table at all; the CSV has every row
DASH = "\u2013"


@dataclass(frozen=True)
class Cell:
    """One cell: its text, what it sorts by, and "n" (a number), "best", "status" or nothing."""

    text: str
    key: float | None = None
    kind: str = ""


@dataclass(frozen=True)
class Column:
    text: str
    numeric: bool = False


@dataclass(frozen=True)
class Table:
    """A table of the page; `metric` and `protocol` are "" where it holds for all; `chosen` shows first."""

    name: str
    title: str
    columns: list[Column]
    rows: list[list[Cell]]
    data: pd.DataFrame
    note: str = ""
    metric: str = ""
    protocol: str = ""
    chosen: bool = True

    @property
    def folded(self) -> bool:
        """Whether the page shows it on request only."""
        return len(self.rows) > MOST_ROWS


def plain(
    name: str,
    title: str,
    frame: pd.DataFrame,
    note: str = "",
    data: pd.DataFrame | None = None,
    keys: Mapping[str, Iterable[float]] | None = None,
) -> Table:
    """A frame as a table: numbers to the right, a dash for a missing value. `data`: its CSV.

    keys: by column, the numbers that its words stand for ("+0.012 [+0.003, +0.021]"): it sorts by them.
    """
    numeric = [pd.api.types.is_numeric_dtype(frame[column]) for column in frame.columns]
    rows = [
        [_cell(value, is_number) for value, is_number in zip(row, numeric, strict=True)]
        for row in frame.head(MOST_SHOWN).itertuples(index=False)
    ]
    for column, values in (keys or {}).items():
        place = list(frame.columns).index(column)
        numeric[place] = True
        for row, value in zip(rows, values, strict=False):
            row[place] = Cell(row[place].text, float(value) if math.isfinite(value) else None, "n")
    for place in range(1, len(numeric)):  # the first column is the name of a row
        if not numeric[place]:
            _sorted_by_number(rows, place)
    if len(frame) > MOST_SHOWN:
        note = f"The first {MOST_SHOWN} of {len(frame):,} rows; the CSV has all. {note}".strip()
    columns = [Column(str(c).replace("_", " "), n) for c, n in zip(frame.columns, numeric, strict=True)]
    return Table(name, title, columns, rows, frame if data is None else data, note)


def _cell(value: Any, is_number: bool) -> Cell:
    if value is None or value is pd.NA or (isinstance(value, float) and math.isnan(value)):
        return Cell(DASH, kind="n" if is_number else "")
    if not is_number:
        return Cell(str(value))
    text = f"{int(value):,}" if float(value).is_integer() else f"{value:,.4g}"
    return Cell(text, float(value), "n")


def _sorted_by_number(rows: list[list[Cell]], place: int) -> None:
    """Words that all begin with a number ("1.05 to 1.61 at about 2\u00d7") sort by it."""
    begins = [re.match(r"[+\u2212-]?\d[\d,]*(?:\.\d+)?(?:e[+-]?\d+)?", row[place].text) for row in rows]
    if all(hit or row[place].text == DASH for hit, row in zip(begins, rows, strict=True)):
        for hit, row in zip(begins, rows, strict=True):
            if hit:
                value = float(hit[0].replace(",", "").replace("\u2212", "-"))
                row[place] = replace(row[place], key=value)


def interval_text(estimate: float, low: float, high: float) -> str:
    """ "+0.012 [+0.003, +0.021]", or the estimate alone where there is no interval."""
    if math.isnan(estimate):
        return DASH
    bounds = f" [{low:+.3f}, {high:+.3f}]" if low == low else ""
    return f"{estimate:+.3f}{bounds}"


def verdicts_table(found: Sequence[Verdict]) -> Table:
    """How far each series holds, at both margins."""
    data = verdict_table(list(found))
    longest = data[["change_at_longest", "change_low", "change_high", "longest"]].to_numpy().tolist()
    rows = []
    for name, change, (_, row) in zip(_named(data), longest, data.iterrows(), strict=True):
        at = f"{interval_text(*change[:3])} at {int(change[3]):,}"
        rows.append(
            [
                Cell(name),
                _two_margins(row["survives_0.5%"], row["survives_2%"]),
                _two_margins(row["fails_by_0.5%"], row["fails_by_2%"]),
                _two_margins(row["gains_to"]),
                Cell(at if change[0] == change[0] else DASH, change[0] if change[0] == change[0] else None),
                Cell(row["cannot"] or DASH),
            ]
        )
    lost = any(data["cannot"])
    return Table(
        name="verdicts",
        title=f"How far each holds ({_protocols(found)})",
        columns=[
            Column("encoding"),
            Column("survives 0.5 % | 2 %", numeric=True),
            Column("fails by 0.5 % | 2 %", numeric=True),
            Column("gains to", numeric=True),
            Column("change at the longest, nats"),
            *([Column("no number")] if lost else []),
        ],
        rows=rows if lost else [row[:-1] for row in rows],
        data=data,
        note="Survives: up to this length, every length has an upper simultaneous 95 % bound of the rise of "
        "its loss below the margin (0.5 % or 2 % of the loss at the training length). Fails by: the first "
        "length with a lower bound above it, or without a finite loss in some seed. Gains to: the last "
        "length L with a lower bound of loss(L/2) - loss(L) above zero. Bounds speak of "
        f"{speaks_of(found)}. A dash: not reached.",
    )


def _two_margins(*lengths: Any) -> Cell:
    """ "96 | 128": a length at each margin, a dash where it is not reached."""
    known = [length if length == length and length is not None else None for length in lengths]
    if not any(known):
        return Cell(DASH, kind="n")
    text = " | ".join(DASH if length is None else f"{int(length):,}" for length in known)
    return Cell(text, float(known[0] or 0), "n")


def _protocols(found: Sequence[Verdict | Comparison]) -> str:
    return " or ".join(dict.fromkeys(one.protocol for one in found))


def _named(data: pd.DataFrame) -> list[str]:
    """The names of series, with their study and protocol where there are several."""
    more = [column for column in ("study", "protocol") if data[column].nunique() > 1]
    names = []
    for _, row in data.iterrows():
        name = row["label"] if row["rescale"] == "none" else f"{row['label']}, {row['rescale']}"
        names.append(f"{name} ({', '.join(row[more])})" if more else name)
    return names


def comparisons_table(found: Sequence[Comparison]) -> Table:
    """Every declared pair and length."""
    data = comparison_table(found)
    names = zip(data["difference"], data["low"], data["high"], strict=True)
    frame = pd.DataFrame(
        {
            "pair": [f"{a} \u2212 {b}" for a, b in zip(data["label"], data["other"], strict=True)],
            "length": data["length"],
            "difference and 95 % interval, nats": [interval_text(*values) for values in names],
            "p, Holm": data["p_holm"],
            "differs": [
                rates.DEPENDS if one.depends_on_rate else "yes" if one.differs else "not shown"
                for one in found
            ],
            "interval from": data["method"],
        }
    )
    for column, values in {"protocol": [one.protocol for one in found], "study": data["study"]}.items():
        if len(set(values)) > 1:
            frame.insert(1, column, list(values))
    table = plain(
        "comparisons",
        f"Differences between encodings ({_protocols(found)})",
        frame,
        f"Declared in advance: every pair at 2, 4 and 8 training lengths; Holm's correction over all "
        f"{len(found)}. Negative: the first has the lower loss. Speaks of {speaks_of(found)}.",
        data,
        {"difference and 95 % interval, nats": data["difference"]},
    )
    place = list(frame.columns).index("p, Holm")
    for row in table.rows:
        value = row[place].key
        if value is not None:
            row[place] = Cell("< 0.001" if value < 0.001 else f"{value:.3f}", value, "n")
    return table


def decompositions_table(found: Sequence[Decomposition]) -> Table:
    """N = C + X at every length."""
    data = decomposition_table(found)
    frame = data[["label", "length"]].copy()
    if data["study"].nunique() > 1:
        frame.insert(1, "study", data["study"])
    keys = {}
    for name, title in (
        ("total", "N: nonoverlapping"),
        ("early", "C: early tokens"),
        ("context", "X: context"),
    ):
        values = data[[name, f"{name}_low", f"{name}_high"]].to_numpy().tolist()
        frame[title] = [interval_text(*row) for row in values]
        keys[title] = data[name]
    return plain(
        "decompositions",
        "Where a change of the nonoverlapping loss comes from",
        frame,
        "N(L) - N(L') = [C(L) - C(L')] + [X(L) - X(L')], L' the training length; nats, with 95 % intervals.",
        data,
        keys,
    )
