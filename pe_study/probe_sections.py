"""The sections that explain a curve: controls, losses over training, where attention goes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pandas as pd

from pe_study import attention_figures, control_effects, control_figures, palette
from pe_study.page_parts import Material, Section
from pe_study.rows import DIAGNOSTICS, read_rows
from pe_study.studies import Study


def controls(material: Material) -> Section:
    """The length figure again, with a line a control."""
    section = Section("controls", "Controls")
    rows = material.controls
    if rows is None or not material.wants("controls"):
        return section
    section.notes += control_effects.sentences(
        control_effects.effects(material.rows, rows, material.protocol)
    )
    curves = control_figures.control_curves(material.curves, rows)
    for study in dict.fromkeys(curves.loc[curves["control"] != "none", "study"].astype(str)):
        own, suffix = curves[curves["study"] == study], material.suffix(study)
        for metric, protocol, chosen in material.combinations():
            figure = control_figures.control_figure(own, metric, protocol, suffix)
            section.add(figure, metric, protocol, chosen)
    return section


def over_training(material: Material) -> Section:
    """Losses of snapshots against tokens and device-hours."""
    section = Section("over-training", "Over training")
    if material.over_training is None or not material.wants("over_training"):
        return section
    curves = control_figures.training_curves(material.over_training)
    for metric, protocol, chosen in material.combinations():
        figure = control_figures.over_training_figure(curves, metric, protocol, material.looks)
        section.add(figure, metric, protocol, chosen)
    return section


def attention(material: Material) -> Section:
    """Entropy, largest logit, far mass; mass by distance and head of one run."""
    section = Section("attention", "Where attention goes")
    found = [
        read_rows(folder, DIAGNOSTICS).assign(study=name) for name, folder in _measured(material.studies)
    ]
    if not found or not material.wants("attention"):
        return section
    rows = attention_figures.plain(pd.concat(found, ignore_index=True))
    pairs = zip(rows["label"], rows["encoding"].astype(object).fillna("").astype(str), strict=True)
    looks = {**palette.looks(pairs), **material.looks}
    section.add(attention_figures.position_figure(rows, looks))
    names = list(dict.fromkeys(rows["study"]))
    for name in names:
        figure = attention_figures.heads_figure(
            rows[rows["study"] == name], material.view.attention_run, name if len(names) > 1 else ""
        )
        section.add(figure)
    return section


def _measured(studies: Sequence[Study]) -> list[tuple[str, Path]]:
    """(study, folder) of every evaluation that looked at attention; two of one study are told apart."""
    found = [
        (study.name, evaluation)
        for study in studies
        for evaluation in study.evaluations
        if (evaluation.folder / DIAGNOSTICS).is_file()
    ]
    names = [name for name, _ in found]
    return [
        (name if names.count(name) == 1 else f"{name} ({evaluation.plan})", evaluation.folder)
        for name, evaluation in found
    ]


def attention_runs(studies: Sequence[Study]) -> list[str]:
    """The runs whose attention was measured; none measured: all runs, since one may yet be."""
    measured = [read_rows(folder, DIAGNOSTICS)["run"] for _, folder in _measured(studies)]
    names = [str(name) for runs in measured for name in runs.dropna().unique()]
    return list(dict.fromkeys(names or [run.run_id for study in studies for run in study.runs]))
