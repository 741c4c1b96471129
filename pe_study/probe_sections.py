"""The sections that explain a curve: controls, losses over training, where attention goes."""

from __future__ import annotations

import pandas as pd

from pe_study import attention_figures, control_effects, control_figures, palette
from pe_study.page_parts import Material, Section
from pe_study.rows import DIAGNOSTICS, read_rows


def controls(material: Material) -> Section:
    """The length figure again, with a line a control."""
    section = Section("controls", "Controls")
    found = [ev.controls.assign(plan=ev.plan) for ev in material.evaluations if ev.controls is not None]
    if not found or not material.wants("controls"):
        return section
    rows = pd.concat(found, ignore_index=True)
    section.notes += control_effects.sentences(
        control_effects.effects(material.rows, rows, material.protocol)
    )
    curves = control_figures.control_curves(material.curves, rows)
    for study in dict.fromkeys(curves.loc[curves["control"] != "none", "study"].astype(str)):
        for metric, protocol, chosen in material.combinations():
            figure = control_figures.control_figure(curves, metric, protocol, study)
            section.add(figure, metric, protocol, chosen)
    return section


def over_training(material: Material) -> Section:
    """Losses of snapshots against tokens and device-hours."""
    section = Section("over-training", "Over training")
    found = [
        ev.over_training.assign(plan=ev.plan) for ev in material.evaluations if ev.over_training is not None
    ]
    if not found or not material.wants("over_training"):
        return section
    curves = control_figures.training_curves(pd.concat(found, ignore_index=True))
    for metric, protocol, chosen in material.combinations():
        figure = control_figures.over_training_figure(curves, metric, protocol, material.looks)
        section.add(figure, metric, protocol, chosen)
    return section


def attention(material: Material) -> Section:
    """Entropy, largest logit, far mass; mass by distance and head of one run."""
    section = Section("attention", "Where attention goes")
    found = [
        read_rows(ev.folder, DIAGNOSTICS).assign(study=study.name)
        for study in material.studies
        for ev in study.evaluations
        if (ev.folder / DIAGNOSTICS).is_file()
    ]
    if not found or not material.wants("attention"):
        return section
    rows = attention_figures.plain(pd.concat(found, ignore_index=True))
    pairs = zip(rows["label"], rows["encoding"].astype(object).fillna("").astype(str), strict=True)
    looks = {**palette.looks(pairs), **material.looks}
    section.add(attention_figures.position_figure(rows, looks))
    section.add(attention_figures.heads_figure(rows, material.view.attention_run))
    return section
