"""What the sections of a page are made of, and made from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import pandas as pd

from pe_study.reporting.bench_files import BenchFile
from pe_study.reporting.comparisons import Comparison, Decomposition
from pe_study.reporting.drawing import Figure
from pe_study.reporting.page_tables import Table
from pe_study.reporting.palette import Look
from pe_study.reporting.studies import Evaluation, Study
from pe_study.reporting.verdicts import Verdict
from pe_study.reporting.view import View


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


# What the files of a figure add to its name (`report.SUFFIXES` and themes): no other may be called so.
LONGEST_NAME = 200  # bytes, of the 255 that file systems take
_VARIANTS = ("", "-dark", "-one-column", "-one-column-dark")


def named_once(sections: Sequence[Section]) -> list[Section]:
    """Sections whose figures and tables have names of their own, as files and as ids: a second one of a name
    is numbered. Names that differ in case alone are one name, as they are on many disks."""
    taken: set[str] = set()

    def free(name: str) -> str:
        name = name.encode("utf-8")[:LONGEST_NAME].decode("utf-8", "ignore")
        numbered, number = name, 1
        while taken & {f"{numbered}{variant}".casefold() for variant in _VARIANTS}:
            number += 1
            numbered = f"{name}-{number}"
        taken.update(f"{numbered}{variant}".casefold() for variant in _VARIANTS)
        return numbered

    return [
        replace(
            section,
            figures=[
                replace(one, figure=replace(one.figure, name=free(one.figure.name)))
                for one in section.figures
            ],
            tables=[replace(table, name=free(table.name)) for table in section.tables],
        )
        for section in sections
    ]


@dataclass(frozen=True)
class Material:
    """Everything that sections are made of."""

    studies: Sequence[Study]
    benches: Sequence[tuple[str, BenchFile]]
    view: View
    rows: pd.DataFrame
    measured: pd.DataFrame  # the same before plans were united: every plan's own cells
    controls: pd.DataFrame | None  # rows under a control, and of snapshots; their studies as in `rows`
    over_training: pd.DataFrame | None
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

    @property
    def studies_shown(self) -> list[str]:
        """The studies that rows are told apart by; one on several texts is several."""
        return [str(name) for name in dict.fromkeys(self.rows["study"])]

    def suffix(self, study: str) -> str:
        """What the name and title of a figure of one study carry: nothing where there is one alone."""
        return study if max(len(self.studies_shown), len(self.studies)) > 1 else ""

    def combinations(self) -> list[tuple[str, str, bool]]:
        """(metric, protocol, whether it shows first)."""
        first = (self.metric, self.protocol)
        return [(m, p, (m, p) == first) for p in self.protocols for m in self.metrics]

    def wants(self, figure: str) -> bool:
        return figure in self.view.figures

    def wants_table(self, table: str) -> bool:
        return table in self.view.tables
