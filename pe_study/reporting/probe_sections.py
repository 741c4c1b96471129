"""The sections that explain a curve: controls, losses over training, where attention goes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import pandas as pd

from pe_study import tables
from pe_study.reporting import attention_figures, control_effects, control_figures, palette
from pe_study.reporting.page_parts import Material, Section
from pe_study.reporting.studies import Study
from pe_study.rows import DIAGNOSTICS, read_rows


def controls(material: Material) -> Section:
    """The length figure again, with a line a control; each control shows, whatever protocol is chosen."""
    section = Section("controls", "Controls")
    if material.controls is None or not material.wants("controls"):
        return section
    rows = control_figures.united(material.controls)
    ran = _ran(rows)
    first = _first(material, ran)
    for protocol, names in first.items():
        changed = rows[rows["control"].isin(names)]
        found = control_effects.effects(material.rows, changed, protocol, material.measured)
        section.notes += control_effects.sentences(found, "" if protocol == material.protocol else protocol)
    curves = control_figures.control_curves(material.curves, rows)
    for study in dict.fromkeys(curves.loc[curves["control"] != "none", "study"].astype(str)):
        own, suffix = curves[curves["study"] == study], material.suffix(study)
        for metric, protocol, at, chosen in _places(material, list(ran), list(first)):
            figure = control_figures.control_figure(own, metric, protocol, suffix)
            section.add(figure, metric, at, chosen)
    return section


def over_training(material: Material) -> Section:
    """Losses of snapshots against tokens and device-hours, under the protocol that was run."""
    section = Section("over-training", "Over training")
    rows = material.over_training
    if rows is None or not material.wants("over_training"):
        return section
    ran = tables.protocols_of(rows)
    shown = [material.protocol if material.protocol in ran else ran[0]]
    curves = control_figures.training_curves(rows)
    for metric, protocol, at, chosen in _places(material, ran, shown):
        figure = control_figures.over_training_figure(curves, metric, protocol, material.looks)
        section.add(figure, metric, at, chosen)
    return section


def _ran(rows: pd.DataFrame) -> dict[str, set[str]]:
    """The controls that ran under each protocol."""
    return {
        protocol: set(rows.loc[rows["protocol"] == protocol, "control"].astype(str))
        for protocol in tables.protocols_of(rows)
    }


def _first(material: Material, ran: Mapping[str, set[str]]) -> dict[str, set[str]]:
    """The chosen protocol with the controls that ran under it, then others with those that ran there alone:
    together every control once."""
    left, found = set().union(*ran.values()), {}
    for protocol in sorted(ran, key=lambda name: name != material.protocol):
        here = ran[protocol] & left
        if here:
            found[protocol] = here
            left -= here
    return found


def _places(
    material: Material, ran: Sequence[str], first: Sequence[str]
) -> Iterator[tuple[str, str, str, bool]]:
    """(metric, protocol, the protocol that a figure shows under, whether it shows first).

    `ran`: the protocols of a section, which may be fewer than the page has; `first`: those of them that show
    whatever is chosen ("") where another would leave nothing.
    """
    everywhere = set(material.protocols) <= set(ran)
    for protocol in ran:
        stays = protocol in first and not (everywhere and protocol == material.protocol)
        for metric in material.metrics:
            yield metric, protocol, "" if stays else protocol, metric == material.metric and protocol in first


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
