"""What `pe-study tune` prints: the losses at each rate, what was chosen, and what has to be known of it."""

from __future__ import annotations

import itertools
import textwrap
from collections.abc import Iterator, Mapping
from typing import Any

from pe_study import chosen_rates
from pe_study.commands import layout

LONGEST = 16  # letters of a name in a line of the table; more go on in the next


def text(tuning: Mapping[str, Any]) -> str:
    """The table, notes below it and the change of order, within 80 columns."""
    rows = chosen_rates.table(tuning)
    lines = [line for row in rows for line in _lines(row, tuning["trials"])]
    if not any(line["mult"] for line in lines):
        lines = [{key: cell for key, cell in line.items() if key != "mult"} for line in lines]
    notes = [layout.hanging("", f"{row['encoding']}: {row['note']}") for row in rows if row["note"]]
    return "\n".join([layout.table(lines), *notes, layout.hanging("", chosen_rates.order_change(tuning))])


def _lines(row: Mapping[str, str], trials: list[Mapping[str, Any]]) -> Iterator[dict[str, str]]:
    """A line for each multiplier of position parameters that was tried, and for each part of a long name."""
    own = [trial for trial in trials if trial["label"] == row["encoding"]]
    mults = list(dict.fromkeys(trial["lr_mult"] for trial in own))
    names = textwrap.wrap(row["encoding"], LONGEST)
    for place, (name, mult) in enumerate(itertools.zip_longest(names, mults)):
        yield {
            "encoding": name or "",
            "mult": "" if len(mults) < 2 or mult is None else mult if mult == "auto" else f"{mult:g}",
            **{
                key: chosen_rates.losses([trial for trial in own if trial["lr_mult"] == mult], float(key[1:]))
                for key in row
                if key.startswith("x")
            },
            "lr": row["lr"] if place == 0 else "",
            "lr_mult": row["lr_mult"] if place == 0 else "",
        }
