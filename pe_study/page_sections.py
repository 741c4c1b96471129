"""The sections of a page: which figures and tables stand where, for each metric and protocol."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import pandas as pd

from pe_study import (
    answers,
    charts,
    heatmaps,
    page_tables,
    plots,
    probe_sections,
    published,
    retrieval_figures,
    run_sections,
    tables,
)
from pe_study.comparisons import Comparison, Decomposition
from pe_study.findings import cache_sentence, yarn_sentence
from pe_study.page_parts import Material, Section

T = TypeVar("T", Comparison, Decomposition)


def sections(material: Material) -> list[Section]:
    """The sections that have something to show, in reading order."""
    makers: list[Callable[[Material], Section]] = [
        run_sections.progress,
        _length,
        _how_far,
        _protocols,
        _position,
        _rescale,
        _retrieval,
        _published,
        probe_sections.controls,
        probe_sections.attention,
        probe_sections.over_training,
        run_sections.training,
        run_sections.bench,
        run_sections.lost,
    ]
    made = [make(material) for make in makers]
    return [section for section in made if section.figures or section.tables]


def _length(material: Material) -> Section:
    section = Section("length", "Loss against length")
    costs = [cost for ev in material.evaluations for cost in ev.notes.get("cache_costs") or []]
    sentence = cache_sentence(costs)
    section.notes += [sentence] if sentence else []
    for metric, protocol, chosen in material.combinations():
        if material.wants("length"):
            figure = plots.length_figure(material.curves, metric, protocol, material.looks)
            section.add(figure, metric, protocol, chosen)
        if material.wants_table("main"):
            table = page_tables.main_table(
                material.curves, metric, protocol, material.view.lengths, chosen=chosen
            )
            section.tables.append(table)
    return section


def _of_each(found: Sequence[T]) -> list[tuple[str, str, list[T]]]:
    """(study, what to add to its figures' names, its share), a study at a time."""
    studies = list(dict.fromkeys(one.study for one in found))
    return [
        (name, name if len(studies) > 1 else "", [one for one in found if one.study == name])
        for name in studies
    ]


def _how_far(material: Material) -> Section:
    section = Section("how-far", "How far each holds, and what differs")
    if material.wants_table("verdicts") and material.verdicts:
        section.tables.append(page_tables.verdicts_table(material.verdicts))
    if material.wants("differences"):
        for study, suffix, found in _of_each(material.comparisons):
            curves = material.curves[material.curves["study"] == study]
            num_tests = len(material.comparisons)
            section.add(charts.differences_figure(found, material.looks, curves, num_tests, suffix))
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
        for _, suffix, found in _of_each(material.decompositions):
            section.add(charts.decomposition_figure(found, material.looks, suffix))
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
    section = Section("rescale", "Under each rescale")
    rescaled = material.curves[~material.curves["rescale"].isin(["none", tables.TRUNCATION])]
    if not material.wants("rescale") or rescaled.empty:
        return section
    notes = [note for ev in material.evaluations for note in ev.notes.get("rescales") or []]
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
    found = [ev.retrieval for ev in material.evaluations if ev.retrieval is not None]
    if not material.wants("retrieval") or not found:
        return section
    rows = answers.plain(pd.concat(found, ignore_index=True))
    looks = material.looks
    section.notes += answers.floor_sentences(rows)
    for task in dict.fromkeys(rows["task"]):
        section.add(retrieval_figures.length_figure(rows, task, looks))
        section.add(retrieval_figures.depth_figure(rows, task))
    section.add(retrieval_figures.gain_figure(rows, looks))
    section.tables.append(retrieval_figures.retrieval_table(rows))
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
