"""Papers' printed tables: those of reports/published/*.yaml, and which are of what was evaluated.

The schema is at the top of alibi.yaml; `agreements` holds them against ours.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from pe_study import shipped
from pe_study.errors import UsageError
from pe_study.reporting.printed import plain_name, read_paper, same_corpus

FOLDER = "reports/published"


@dataclass(frozen=True)
class PublishedTable:
    """One table of one paper, as printed."""

    paper: str
    source: str
    data: Mapping[str, Any]

    @property
    def id(self) -> str:
        return str(self.data["id"])

    @property
    def rows(self) -> Sequence[Mapping[str, Any]]:
        return list(self.data["rows"])

    @property
    def unit(self) -> str:
        """ "word of a vocabulary of 267,735": what a perplexity is per; "" where the table does not say."""
        return str(self.data.get("unit_of_metric") or "").removeprefix("a ")

    def compare(self, row: Mapping[str, Any]) -> str:
        return str(row.get("compare", self.data["compare"]))


def read_published(paths: Sequence[Path | str] | None = None) -> list[PublishedTable]:
    """Every table of the given files, or of those that come with pe_study and of reports/published/ here.

    UsageError in a line, naming file, key and what is accepted; also for two tables of one id.
    """
    names = {*shipped.names(FOLDER), *(str(path) for path in Path(FOLDER).glob("*.yaml"))}
    found: list[PublishedTable] = []
    seen: dict[str, Path] = {}
    for name in sorted(names) if paths is None else paths:
        file = shipped.find(name)
        paper, document = read_paper(file)
        for number, table in enumerate(paper.tables):
            if table.id in seen:
                raise UsageError(
                    f"{document.place(('tables', number))}: tables.{number}.id: {table.id} is also the id of "
                    f"a table of {seen[table.id]}; accepted: an id of its own"
                )
            seen[table.id] = file
            found.append(PublishedTable(paper.paper, paper.source, table.plain()))
    return found


def alike(published: Sequence[PublishedTable], rows: pd.DataFrame) -> list[PublishedTable]:
    """The tables of a corpus that ours is called by, or of a checkpoint that was evaluated."""
    corpora = set(rows["corpus"].astype(str).unique())
    models = {plain_name(name) for name in rows["model"].astype(str).unique()} - {""}
    return [table for table in published if _shares(table, corpora, models)]


def _shares(table: PublishedTable, corpora: set[str], models: set[str]) -> bool:
    checkpoints = {plain_name(str(row["checkpoint"])) for row in table.rows if row.get("checkpoint")}
    return any(same_corpus(table.data.get("corpus"), name) for name in corpora) or bool(checkpoints & models)
