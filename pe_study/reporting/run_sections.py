"""The sections on the runs themselves: how far they are, what they cost, what they could not measure."""

from __future__ import annotations

import pandas as pd

from pe_study import tables
from pe_study.reporting import bench_figures, charts, page_tables
from pe_study.reporting.bench_files import sentences_of
from pe_study.reporting.page_parts import Material, Section


def progress(material: Material) -> Section:
    """Where an unfinished study stands."""
    section = Section("progress", "Progress")
    runs = [(study, run) for study in material.studies for run in study.runs]
    waiting = [(study.name, name) for study in material.studies for name in study.waiting]
    if all(run.done for _, run in runs) and not waiting:
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
    absent = pd.DataFrame([{"run": name, "study": study, "state": "not started"} for study, name in waiting])
    frame = pd.concat([frame, absent], ignore_index=True) if waiting else frame
    section.tables.append(page_tables.plain("progress", "Where every run stands", frame))
    return section


def training(material: Material) -> Section:
    section = Section("training", "Training and its cost")
    if material.wants("training"):
        section.add(charts.training_figure(tables.training(material.studies), material.looks))
    cost = tables.cost(material.studies)
    if cost is not None and material.wants("cost"):
        for study, part in cost.groupby("study", sort=False):
            suffix = str(study) if cost["study"].nunique() > 1 else ""
            section.add(charts.cost_figure(part, material.looks, suffix))
    if cost is not None and material.wants_table("cost"):
        section.tables.append(
            page_tables.plain(
                "costs", "Cost of a run", _without_one_study(cost), "Mean over the seeds of a label."
            )
        )
    return section


def _without_one_study(frame: pd.DataFrame) -> pd.DataFrame:
    return frame.drop(columns="study") if frame["study"].nunique() == 1 else frame


def bench(material: Material) -> Section:
    """Speed and memory as `pe-study bench` measured them."""
    section = Section("cost", "Cost")
    if material.studies:
        section.notes += sentences_of(material.benches)
    for name, file in material.benches:
        if material.wants("cost"):
            section.add(bench_figures.speed_figure(file, name))
            section.add(bench_figures.ratio_figure(file, name))
        if material.wants_table("cost"):
            section.tables.append(bench_figures.bench_table(file, name))
    return section


def lost(material: Material) -> Section:
    section = Section("cells", "Cells without a number")
    curves = material.curves
    lost = curves[(curves["status"] != "ok") & (curves["protocol"] != tables.LATE)]
    if material.wants_table("cells") and len(lost):
        columns = ["label", "rescale", "protocol", "length", "status"]
        columns = (["study"] if lost["study"].nunique() > 1 else []) + columns
        section.tables.append(
            page_tables.plain("cells", "Every cell without a number, and why", lost[columns])
        )
    return section
