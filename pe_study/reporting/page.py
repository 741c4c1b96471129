"""The content of a report page, as plain data that the templates lay out."""

from __future__ import annotations

import math
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from pe_study import tables
from pe_study.reporting import (
    answers,
    bench_figures,
    choices,
    comparisons,
    judging,
    likeness,
    palette,
    probe_sections,
    progress,
    rates,
)
from pe_study.reporting.bench_files import sentences_of
from pe_study.reporting.captions import listed
from pe_study.reporting.cautions import cautions
from pe_study.reporting.findings import findings
from pe_study.reporting.page_parts import Material, Section
from pe_study.reporting.page_sections import sections
from pe_study.reporting.page_tables import DASH
from pe_study.reporting.palette import Look
from pe_study.reporting.studies import Evaluation, Study
from pe_study.reporting.targets import Targets
from pe_study.reporting.view import View


@dataclass(frozen=True)
class Page:
    """Everything that a template needs."""

    title: str
    facts: list[tuple[str, str]]
    findings: list[str]
    warnings: list[str]
    sections: list[Section]
    metrics: list[str]
    metric: str
    protocols: list[str]
    protocol: str
    commands: list[str]
    provenance: list[tuple[str, list[tuple[str, str]]]]
    looks: Mapping[str, Look]


def compose(targets: Targets, view: View, command: str) -> Page:
    """Compute the page of one or several studies and bench files; `command` is what makes it again."""
    studies = targets.studies
    raw = _rows(studies)
    measured, controls = _told_apart(likeness.apart(raw).assign(origin=raw["study"]), studies, raw)
    rows, left_out = tables.united(measured)
    curves = tables.length_curves(rows)
    judged_by = judging.protocol_for(rows)
    metrics = _metrics(curves)
    protocols = tables.protocols_of(rows)
    view.check(
        {
            "protocol": protocols,
            "lengths": _lengths(curves),
            "attention_run": probe_sections.attention_runs(studies),
        }
    )
    compared = comparisons.compare(rows)
    material = Material(
        studies=studies,
        benches=targets.benches,
        view=view,
        rows=rows,
        measured=measured,
        controls=controls,
        over_training=_others(studies, "over_training", raw),
        curves=curves,
        looks=_looks(studies, curves),
        metrics=metrics,
        metric=view.metric if view.metric in metrics else "nll",
        protocols=protocols,
        protocol=view.protocol if view.protocol in protocols else judged_by or next(iter(protocols), ""),
        verdicts=judging.judge(rows),
        comparisons=rates.marked(compared, studies, rows),
        decompositions=comparisons.decompose(rows),
    )
    return Page(
        title=view.title or " and ".join(targets.names),
        facts=_facts(studies, rows),
        findings=_findings(material),
        warnings=[*cautions(studies, rows, curves), *left_out, *progress.waiting(studies)],
        sections=sections(material),
        metrics=metrics,
        metric=material.metric,
        protocols=protocols,
        protocol=material.protocol,
        commands=_commands(studies, command),
        provenance=[block for study in studies for block in _provenance(study)],
        looks={**material.looks, **_bench_looks(targets)},
    )


def _bench_looks(targets: Targets) -> dict[str, Look]:
    return {
        name: look for _, bench in targets.benches for name, look in bench_figures.looks_of(bench).items()
    }


def _rows(studies: Sequence[Study]) -> pd.DataFrame:
    frames = [study.rows for study in studies]
    return pd.concat(frames, ignore_index=True) if frames else Study("", Path()).rows


def _others(studies: Sequence[Study], kind: str, raw: pd.DataFrame) -> pd.DataFrame | None:
    """Rows beside the plain ones (`controls`, `over_training`), under the same names of studies."""
    frames = [
        frame.assign(plan=evaluation.plan)
        for evaluation in _evaluations(studies)
        if (frame := getattr(evaluation, kind)) is not None
    ]
    return likeness.apart(pd.concat(frames, ignore_index=True), beside=raw) if frames else None


def _told_apart(
    plain: pd.DataFrame, studies: Sequence[Study], raw: pd.DataFrame
) -> tuple[pd.DataFrame, pd.DataFrame | None]:
    """Plain rows and those under controls, in which equal numbers mean documents known to be the same."""
    controls = _others(studies, "controls", raw)
    found = choices.told_apart(plain, *([] if controls is None else [controls]))
    return found[0], found[1] if len(found) > 1 else None


def _findings(material: Material) -> list[str]:
    """What the rows say; where bench files alone were given, what those say."""
    if material.studies:
        said = findings(material.verdicts, material.curves)
        return [*said, *rates.sentences(material.comparisons, material.studies, material.rows)]
    return sentences_of(material.benches)


def _looks(studies: Sequence[Study], curves: pd.DataFrame) -> dict[str, Look]:
    """One look a label, wherever it occurs."""
    frames = [
        curves,
        *(answers.plain(ev.retrieval) for ev in _evaluations(studies) if ev.retrieval is not None),
    ]
    pairs = [
        (str(label), str(encoding))
        for frame in frames
        for label, encoding in frame[["label", "encoding"]].drop_duplicates().to_numpy()
    ]
    return palette.looks([*pairs, *((run.label, run.encoding) for study in studies for run in study.runs)])


def _evaluations(studies: Sequence[Study]) -> list[Evaluation]:
    return [evaluation for study in studies for evaluation in study.evaluations]


def _lengths(curves: pd.DataFrame) -> list[int]:
    """What the columns of a main table may be: lengths in tokens, or in bytes of text where that is known."""
    found = {int(n) for n in curves["length"]} | {int(n) for n in curves["length_bytes"].dropna()}
    return sorted(found)


def _metrics(curves: pd.DataFrame) -> list[str]:
    """What a reader chooses from; one where nothing is drawn in either."""
    if curves.empty:
        return ["nll"]
    finite = curves[np.isfinite(curves["nll"])]
    bytes_known = len(finite) > 0 and bool(finite["bits_per_byte"].notna().all())
    return [name for name in tables.METRICS if name != "bits_per_byte" or bytes_known]


# --- facts and provenance --------------------------------------------------------------------------------


def _facts(studies: Sequence[Study], rows: pd.DataFrame) -> list[tuple[str, str]]:
    facts = []
    if len(rows):
        facts = [
            ("encodings", str(rows["label"].nunique())),
            (
                "training length",
                listed(rows.loc[rows["train_length"] > 0, "train_length"].unique()) or "not known",
            ),
            ("lengths", f"{rows['length'].min():,} to {rows['length'].max():,}"),
            ("seeds", str(rows.groupby(["study", "label"], observed=True)["seed"].nunique().max())),
            ("corpus", ", ".join(sorted({str(name) for name in rows["corpus"]}))),
            ("documents", _documents(studies, rows)),
        ]
    steps = {int(run.train["steps"]) for study in studies for run in study.runs if run.train.get("steps")}
    return facts + ([("training steps", listed(steps))] if steps else [])


def _documents(studies: Sequence[Study], rows: pd.DataFrame) -> str:
    scored = rows.loc[rows["num_tokens"] > 0]
    used = scored.groupby(["study", "choice"], observed=True)["document"].nunique().max()
    notes = [ev.notes.get("documents") for ev in _evaluations(studies)]
    totals = {note["total"] for note in notes if isinstance(note, Mapping) and note.get("total")}
    return ("none" if math.isnan(used) else f"{used:,}") + (
        f" of {max(totals):,}" if len(totals) == 1 else ""
    )


def _commands(studies: Sequence[Study], command: str) -> list[str]:
    lines: list[str] = []
    for study in studies:
        lines += dict.fromkeys(
            str(run.provenance["command"]) for run in study.runs if run.provenance.get("command")
        )
        for evaluation in study.evaluations:
            typed = (evaluation.summary.get("config") or {}).get("command")
            lines.append(str(typed or f"pe-study eval {shlex.quote(str(study.path))}"))
    return [*dict.fromkeys(lines), command]


def _provenance(study: Study) -> list[tuple[str, list[tuple[str, str]]]]:
    """What every run of a study has in common, and what differs between them."""
    facts = {run.run_id: dict(flat(run.provenance)) for run in study.runs if run.provenance}
    if not facts:
        return []
    names = dict.fromkeys(name for entries in facts.values() for name in entries)
    values = {name: {run: entries.get(name, DASH) for run, entries in facts.items()} for name in names}
    shared = [(name, next(iter(of.values()))) for name, of in values.items() if len(set(of.values())) == 1]
    differ = [
        (name, "; ".join(f"{run} {value}" for run, value in of.items()))
        for name, of in values.items()
        if len(set(of.values())) > 1
    ]
    blocks = [(f"{study.name}: what all {len(facts)} runs share", shared)]
    return blocks + ([(f"{study.name}: what differs between runs", differ)] if differ else [])


def flat(mapping: Mapping[str, Any], prefix: str = "") -> list[tuple[str, str]]:
    """Nested facts as dotted names and text, in order; empty ones left out."""
    found: list[tuple[str, str]] = []
    for name, value in mapping.items():
        if isinstance(value, Mapping):
            found += flat(value, f"{prefix}{name}.")
        elif value not in (None, "", []):
            found.append((f"{prefix}{name}", str(value)))
    return found
