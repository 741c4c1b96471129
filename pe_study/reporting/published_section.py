"""The section that lays papers' printed numbers beside ours."""

from __future__ import annotations

import pandas as pd

from pe_study.reporting import published
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
    found = published.agreements(tables_of, material.curves)
    if not found:
        return section
    section.notes.append(published.agreement_sentence(found))
    frame = published.agreement_table(found)
    note = "rerun: the same weights; ratio and ordering: other weights; disputed: shown, never counted."
    section.tables.append(plain("published", "Printed numbers and ours", frame, note))
    sources = {one.table for one in found}
    for table in tables_of:
        if {table.id, table.data.get("ratio_group")} & sources:
            section.tables.append(printed_table(table))
    return section


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
    note = f"{table.paper} ({table.source}), {where}. A dash: out of memory, not given, or beyond the scale."
    return plain(f"printed-{table.id}", str(table.data["title"]), data, note)
