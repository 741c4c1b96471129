"""The sections of a page: which figures and tables stand where, for each metric and protocol."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import pandas as pd

from pe_study import charts, heatmaps, page_tables, plots, published, tables
from pe_study.comparisons import Comparison, Decomposition
from pe_study.drawing import Figure
from pe_study.findings import yarn_sentence
from pe_study.page_tables import Table
from pe_study.palette import Look
from pe_study.studies import Study
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

    def wants(self, figure: str) -> bool:
        return figure in self.view.figures

    def wants_table(self, table: str) -> bool:
        return table in self.view.tables


def sections(material: Material) -> list[Section]:
    """The sections that have something to show, in reading order."""
    makers: list[Callable[[Material], Section]] = [
        _progress,
        _length,
        _how_far,
        _protocols,
        _position,
        _rescale,
        _retrieval,
        _published,
        _training,
        _lost,
    ]
    made = [make(material) for make in makers]
    return [section for section in made if section.figures or section.tables]


def _combinations(material: Material) -> list[tuple[str, str, bool]]:
    """(metric, protocol, whether it shows first)."""
    first = (material.metric, material.protocol)
    return [(m, p, (m, p) == first) for p in material.protocols for m in material.metrics]


def _length(material: Material) -> Section:
    section = Section("length", "Loss against length")
    for metric, protocol, chosen in _combinations(material):
        if material.wants("length"):
            figure = plots.length_figure(material.curves, metric, protocol, material.looks)
            section.add(figure, metric, protocol, chosen)
        if material.wants_table("main"):
            table = page_tables.main_table(
                material.curves, metric, protocol, material.view.lengths, chosen=chosen
            )
            section.tables.append(table)
    return section


def _how_far(material: Material) -> Section:
    section = Section("how-far", "How far each holds, and what differs")
    if material.wants_table("verdicts") and material.verdicts:
        section.tables.append(page_tables.verdicts_table(material.verdicts))
    if material.wants("differences"):
        section.add(charts.differences_figure(material.comparisons, material.looks, material.curves))
    if material.wants_table("comparisons") and material.comparisons:
        section.tables.append(page_tables.comparisons_table(material.comparisons))
    return section


def _protocols(material: Material) -> Section:
    section = Section("protocols", "The same models under each protocol")
    if material.wants("protocols"):
        for metric in material.metrics:
            figure = plots.protocols_figure(material.curves, metric, material.looks)
            section.add(figure, metric, "", metric == material.metric)
    if material.wants("decomposition") and material.decompositions:
        section.add(charts.decomposition_figure(material.decompositions, material.looks))
        section.tables.append(page_tables.decompositions_table(material.decompositions))
    return section


def _position(material: Material) -> Section:
    section = Section("position", "Where in the window")
    if material.wants("position"):
        positions = tables.position_curves(material.rows)
        for protocol in material.protocols:  # the first whose windows hold more than one bin of contexts
            for metric in material.metrics:
                figure = plots.position_figure(positions, metric, protocol, material.looks)
                section.add(figure, metric, "", metric == material.metric)
            if section.figures:
                break
    return section


def _rescale(material: Material) -> Section:
    section = Section("rescale", "RoPE under each rescale")
    rescaled = material.curves[~material.curves["rescale"].isin(["none", tables.TRUNCATION])]
    if not material.wants("rescale") or rescaled.empty:
        return section
    notes = [
        note
        for study in material.studies
        for ev in study.evaluations
        for note in ev.notes.get("rescales") or []
    ]
    sentence = yarn_sentence(notes)
    section.notes += [sentence] if sentence else []
    for label in dict.fromkeys(rescaled["label"].astype(str)):
        for metric in material.metrics:
            figure = plots.rescale_figure(material.curves, metric, material.protocol, label)
            section.add(figure, metric, "", metric == material.metric)
        section.add(heatmaps.rescale_map(material.curves, material.metric, material.protocol, label))
    return section


def _retrieval(material: Material) -> Section:
    section = Section("retrieval", "Retrieval")
    found = [
        ev.retrieval for study in material.studies for ev in study.evaluations if ev.retrieval is not None
    ]
    if material.wants("retrieval") and found:
        section.add(heatmaps.retrieval_figure(pd.concat(found, ignore_index=True)))
    return section


def _published(material: Material) -> Section:
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
    section.tables.append(page_tables.plain("published", "Printed numbers and ours", frame, note))
    sources = {one.table for one in found}
    for table in tables_of:
        if {table.id, table.data.get("ratio_group")} & sources:
            section.tables.append(page_tables.printed_table(table))
    return section


def _progress(material: Material) -> Section:
    """Where an unfinished study stands."""
    section = Section("progress", "Progress")
    runs = [(study, run) for study in material.studies for run in study.runs]
    if all(run.done for _, run in runs):
        return section
    frame = pd.DataFrame(
        {
            "run": [run.run_id for _, run in runs],
            "study": [study.name for study, _ in runs],
            "state": ["done" if run.done else "not finished" for _, run in runs],
            "step": [run.last_step for _, run in runs],
            "of": [run.train.get("steps") for _, run in runs],
            "last loss, nats": [run.last_loss for _, run in runs],
        }
    )
    section.tables.append(page_tables.plain("progress", "Where every run stands", frame))
    return section


def _training(material: Material) -> Section:
    section = Section("training", "Training and its cost")
    if material.wants("training"):
        section.add(charts.training_figure(tables.training(material.studies), material.looks))
    cost = tables.cost(material.studies)
    if cost is not None and material.wants("cost"):
        section.add(charts.cost_figure(cost, material.looks))
    if cost is not None and material.wants_table("cost"):
        section.tables.append(
            page_tables.plain("cost", "Cost of a run", cost, "Mean over the seeds of a label.")
        )
    return section


def _lost(material: Material) -> Section:
    section = Section("cells", "Cells without a number")
    lost = material.curves[material.curves["status"] != "ok"]
    if material.wants_table("cells") and len(lost):
        columns = ["label", "rescale", "protocol", "length", "status"]
        columns = (["study"] if lost["study"].nunique() > 1 else []) + columns
        section.tables.append(
            page_tables.plain("cells", "Every cell without a number, and why", lost[columns])
        )
    return section
