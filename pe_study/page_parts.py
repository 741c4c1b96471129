"""What the sections of a page are made of, and made from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import pandas as pd

from pe_study.bench_files import BenchFile
from pe_study.comparisons import Comparison, Decomposition
from pe_study.drawing import Figure
from pe_study.page_tables import Table
from pe_study.palette import Look
from pe_study.studies import Evaluation, Study
from pe_study.verdicts import Verdict
from pe_study.view import View


@dataclass(frozen=True)
class Shown:
    """A figure on the page; `metric` and `protocol` are "" where it holds for all; `chosen` shows first."""

    figure: Figure
    metric: str = ""
    protocol: str = ""
    chosen: bool = True


@dataclass
class Section:
    slug: str
    title: str
    notes: list[str] = field(default_factory=list)
    figures: list[Shown] = field(default_factory=list)
    tables: list[Table] = field(default_factory=list)

    def add(self, figure: Figure | None, metric: str = "", protocol: str = "", chosen: bool = True) -> None:
        if figure is not None:
            self.figures.append(Shown(figure, metric, protocol, chosen))


@dataclass(frozen=True)
class Material:
    """Everything that sections are made of."""

    studies: Sequence[Study]
    benches: Sequence[tuple[str, BenchFile]]
    view: View
    rows: pd.DataFrame
    curves: pd.DataFrame
    looks: Mapping[str, Look]
    metrics: Sequence[str]
    metric: str
    protocols: Sequence[str]
    protocol: str
    verdicts: Sequence[Verdict]
    comparisons: Sequence[Comparison]
    decompositions: Sequence[Decomposition]

    @property
    def evaluations(self) -> list[Evaluation]:
        return [evaluation for study in self.studies for evaluation in study.evaluations]

    def combinations(self) -> list[tuple[str, str, bool]]:
        """(metric, protocol, whether it shows first)."""
        first = (self.metric, self.protocol)
        return [(m, p, (m, p) == first) for p in self.protocols for m in self.metrics]

    def wants(self, figure: str) -> bool:
        return figure in self.view.figures

    def wants_table(self, table: str) -> bool:
        return table in self.view.tables
