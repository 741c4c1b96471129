"""The section that lays papers' printed numbers beside ours."""

from __future__ import annotations

from collections.abc import Sequence

import pandas as pd

from pe_study.reporting import agreements, holding, published
from pe_study.reporting.agreements import Unheld
from pe_study.reporting.page_parts import Material, Section
from pe_study.reporting.page_tables import Table, plain
from pe_study.reporting.published import PublishedTable


def beside(material: Material) -> Section:
    """Printed tables of the same corpus or checkpoint (or all, if asked for), held against ours."""
    section = Section("published", "Beside published numbers")
    if not material.wants_table("published"):
        return section
    tables_of = published.read_published()
    if not material.view.published:
        tables_of = published.alike(tables_of, material.rows)
    if not tables_of:
        return section
    found, unheld = holding.held(tables_of, material.curves)
    section.notes.append(agreements.agreement_sentence(found))
    if found:
        frame = agreements.agreement_table(found)
        note = "rerun: the same weights; ratio and ordering: other weights; disputed: shown, never counted."
        section.tables.append(plain("published", "Printed numbers and ours", frame, note))
    if unheld:
        section.tables.append(unheld_table(unheld))
    section.tables += [printed_table(table) for table in tables_of]
    return section


def unheld_table(unheld: Sequence[Unheld]) -> Table:
    """The printed tables that stand beside ours for the eye alone."""
    frame = pd.DataFrame(
        {
            "published": [one.table.id for one in unheld],
            "prints": [str(one.table.data["title"]) for one in unheld],
            "not held against ours, since": [one.reason for one in unheld],
        }
    )
    return plain("published-only", "Printed tables that ours cannot be held against", frame)


def printed_table(table: PublishedTable) -> Table:
    """A paper's table as printed; every row with the kind of comparison that it allows."""
    keys = list(dict.fromkeys(key for row in table.rows for key in row["values"]))
    data = pd.DataFrame(
        [
            {"row": str(row["name"]), "compare": table.compare(row)}
            | {str(key): row["values"].get(key) for key in keys}
            for row in table.rows
        ]
    )
    numbers = [str(key) for key in keys]
    data[numbers] = data[numbers].astype("float64")
    where = ", ".join(str(table.data[key]) for key in ("where", "setting") if table.data.get(key))
    note = (
        f"{table.paper} ({table.source}), {where}. {_unit(table)}A dash: out of memory, not given, or beyond"
    )
    return plain(f"printed-{table.id}", str(table.data["title"]), data, f"{note} the scale.")


def _unit(table: PublishedTable) -> str:
    """What the numbers are, and of what."""
    if not table.unit:
        return ""
    return f"Perplexity per {table.unit}. " if table.data["metric"] == "perplexity" else f"In {table.unit}. "
