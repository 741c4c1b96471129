"""The sections of a page: which figures and tables stand where, for each metric and protocol."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import pandas as pd

from pe_study import plots, tables
from pe_study.reporting import (
    answers,
    charts,
    heatmaps,
    page_tables,
    position_figures,
    probe_sections,
    published_section,
    retrieval_figures,
    run_sections,
    tuned,
)
from pe_study.reporting.comparisons import Comparison, Decomposition
from pe_study.reporting.decomposition_figures import decomposition_figure
from pe_study.reporting.findings import cache_sentence, yarn_sentence
from pe_study.reporting.main_table import main_table
from pe_study.reporting.page_parts import Material, Section, named_once
from pe_study.reporting.studies import Evaluation, Study
from pe_study.reporting.uncompared import unmade

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
        published_section.beside,
        probe_sections.controls,
        probe_sections.attention,
        probe_sections.over_training,
        tuned.rates,
        run_sections.training,
        run_sections.bench,
        run_sections.lost,
    ]
    made = [make(material) for make in makers]
    return named_once([section for section in made if section.figures or section.tables])


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
            lengths = material.view.lengths
            section.tables.append(main_table(material.curves, metric, protocol, lengths, chosen=chosen))
    return section


def _of_each(material: Material, found: Sequence[T]) -> list[tuple[str, str, list[T]]]:
    """(study, what its figures' names carry, its share), a study at a time."""
    studies = list(dict.fromkeys(one.study for one in found))
    return [(name, material.suffix(name), [one for one in found if one.study == name]) for name in studies]


def _how_far(material: Material) -> Section:
    section = Section("how-far", "How far each holds, and what differs")
    if material.wants_table("verdicts") and material.verdicts:
        section.tables.append(page_tables.verdicts_table(material.verdicts))
    if material.wants("differences"):
        for study, suffix, found in _of_each(material, material.comparisons):
            curves = material.curves[material.curves["study"] == study]
            num_tests = len(material.comparisons)
            for protocol in dict.fromkeys(one.protocol for one in found):
                here = [one for one in found if one.protocol == protocol]
                section.add(charts.differences_figure(here, material.looks, curves, num_tests, suffix))
    if material.wants_table("comparisons") and material.comparisons:
        section.tables.append(page_tables.comparisons_table(material.comparisons))
    if material.verdicts:
        section.notes += unmade(material.rows)
    return section


def _protocols(material: Material) -> Section:
    section = Section("protocols", "The same models under each protocol")
    if material.wants("protocols"):
        for metric in material.metrics:
            figure = plots.protocols_figure(material.curves, metric, material.looks)
            section.add(figure, metric, "", metric == material.metric)
    if material.wants("decomposition") and material.decompositions:
        for _, suffix, found in _of_each(material, material.decompositions):
            section.add(decomposition_figure(found, material.looks, suffix))
        section.tables.append(page_tables.decompositions_table(material.decompositions))
    return section


def _position(material: Material) -> Section:
    section = Section("position", "Where in the window")
    if material.wants("position"):
        positions = tables.position_curves(position_figures.within_windows(material.rows))
        for protocol in material.protocols:  # the first whose windows hold more than one bin of contexts
            for metric in material.metrics:
                figure = position_figures.position_figure(positions, metric, protocol, material.looks)
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
    for study, of_study in rescaled.groupby("study", observed=True, sort=False):
        curves = material.curves[material.curves["study"] == study]
        ran = tables.protocols_of(of_study)
        protocol = material.protocol if material.protocol in ran else ran[0]
        suffix = material.suffix(str(study))
        for label in dict.fromkeys(of_study["label"].astype(str)):
            for metric in material.metrics:
                figure = plots.rescale_figure(curves, metric, protocol, label, suffix)
                section.add(figure, metric, "", metric == material.metric)
            section.add(heatmaps.rescale_map(curves, material.metric, protocol, label, suffix))
    return section


def _retrieval(material: Material) -> Section:
    section = Section("retrieval", "Retrieval")
    found = [
        (ev.retrieval, _plan_of(study, ev))
        for study in material.studies
        for ev in study.evaluations
        if ev.retrieval is not None
    ]
    if not material.wants("retrieval") or not found:
        return section
    rows = answers.plain(pd.concat([rows.assign(study=name) for rows, name in found], ignore_index=True))
    looks = material.looks
    section.notes += answers.floor_sentences(rows)
    for task in dict.fromkeys(rows["task"]):
        section.add(retrieval_figures.length_figure(rows, task, looks))
        section.add(retrieval_figures.depth_figure(rows, task))
    section.add(retrieval_figures.gain_figure(rows, looks))
    section.tables.append(retrieval_figures.retrieval_table(rows))
    return section


def _plan_of(study: Study, evaluation: Evaluation) -> str:
    """The study's name, with the plan where several asked for answers: their samples are never pooled."""
    several = sum(one.retrieval is not None for one in study.evaluations) > 1
    return f"{study.name} ({evaluation.plan})" if several else study.name
