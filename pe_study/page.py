"""The content of a report page, as plain data that the templates lay out: sections, figures, tables, provenance."""

from __future__ import annotations

import math
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pandas as pd

from pe_study import palette, plots, tables, verdicts
from pe_study.drawing import Figure, number
from pe_study.findings import findings, warnings, yarn_sentence
from pe_study.studies import Study
from pe_study.view import View

METRIC_NAMES = {"perplexity": "perplexity", "bits_per_byte": "bits per byte", "nll": "loss (nats)"}


@dataclass(frozen=True)
class Cell:
    """One cell of a page's table: its text, what it sorts by, and "n", "best", "status" or nothing."""

    text: str
    key: float | None = None
    kind: str = ""


@dataclass(frozen=True)
class Column:
    text: str
    numeric: bool = False


@dataclass(frozen=True)
class Table:
    """A table of the page and the data of its CSV."""

    name: str
    title: str
    columns: list[Column]
    rows: list[list[Cell]]
    data: pd.DataFrame
    note: str = ""
    metric: str = ""
    protocol: str = ""
    chosen: bool = True

    @property
    def href(self) -> str:
        return f"tables/{self.name}.csv"


@dataclass(frozen=True)
class Shown:
    """A figure on the page, for one metric and protocol ("" = for all of them)."""

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


@dataclass(frozen=True)
class Page:
    """Everything a template needs, and the machine-readable summary beside it."""

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
    looks: Mapping[str, palette.Look]


def compose(studies: Sequence[Study], view: View, command: str) -> Page:
    """Compute the page of one or several studies."""
    rows = one_plan(pd.concat([study.rows for study in studies], ignore_index=True))
    curves = tables.length_curves(rows)
    runs = [(run.label, run.encoding) for study in studies for run in study.runs]
    looks = palette.looks(
        [*zip(curves["label"].astype(str), curves["encoding"].astype(str), strict=True), *runs]
    )
    metrics = _metrics(curves)
    metric = view.metric if view.metric in metrics else "nll"
    protocols = [str(name) for name in dict.fromkeys(curves["protocol"])]
    judged_by = verdicts.protocol_for(rows)
    protocol = view.protocol if view.protocol in protocols else judged_by or next(iter(protocols), "")
    found = verdicts.verdicts(rows, judged_by) if judged_by else []
    sections = _sections(studies, view, rows, curves, looks, metrics, metric, protocols, protocol, found)
    return Page(
        title=view.title or " and ".join(study.name for study in studies),
        facts=_facts(studies, rows),
        findings=findings(found, curves),
        warnings=warnings(studies, rows, curves),
        sections=[section for section in sections if section.figures or section.tables],
        metrics=metrics,
        metric=metric,
        protocols=protocols,
        protocol=protocol,
        commands=_commands(studies, command),
        provenance=[block for study in studies for block in _provenance(study)],
        looks=looks,
    )


def one_plan(rows: pd.DataFrame) -> pd.DataFrame:
    """The rows of each series from one plan: the one with most lengths, so that no target counts twice."""
    if rows.empty or rows["plan"].nunique() < 2:
        return rows
    spans = (
        rows.groupby([*tables.SERIES, "plan"], dropna=False, observed=True)["length"].nunique().reset_index()
    )
    spans = spans.sort_values(["length", "plan"], ascending=[False, True])
    chosen = spans.drop_duplicates(tables.SERIES)[[*tables.SERIES, "plan"]]
    return rows.merge(chosen, on=[*tables.SERIES, "plan"], how="inner")


def _metrics(curves: pd.DataFrame) -> list[str]:
    finite = curves[np.isfinite(curves["nll"])]
    known = finite["bits_per_byte"].notna().all() and len(finite)
    return [name for name in tables.METRICS if name != "bits_per_byte" or known]


# --- sections ----------------------------------------------------------------------------------------------


def _sections(
    studies, view, rows, curves, looks, metrics, metric, protocols, protocol, found
) -> list[Section]:  # type: ignore[no-untyped-def]
    positions = tables.position_curves(rows) if "position" in view.figures else curves.iloc[:0]
    length = Section("length", "Loss against length")
    position = Section("position", "Where in the window")
    rescale = Section("rescale", "RoPE under each rescale", notes=_rescale_notes(studies))
    rescaled = [str(name) for name in dict.fromkeys(curves.loc[curves["rescale"] != "none", "label"])]
    for p in protocols:
        for m in metrics:
            chosen = (m, p, m == metric and p == protocol)
            if "length" in view.figures:
                _add(length, plots.length_figure(curves, m, p, looks), *chosen)
            if "position" in view.figures:
                _add(position, plots.position_figure(positions, m, p, looks), *chosen)
            if "rescale" in view.figures:
                for label in rescaled:
                    _add(rescale, plots.rescale_figure(curves, m, p, label), *chosen)
            if "main" in view.tables:
                length.tables.append(main(curves, m, p, view.lengths, chosen[2]))
    training = Section("training", "Training")
    if "training" in view.figures:
        _add(training, plots.training_figure(tables.training(studies), looks), "", "", True)
    if "cost" in view.tables and (cost := tables.cost(studies)) is not None:
        training.tables.append(plain("cost", "Cost of a run", cost, "Mean over the seeds of each label."))
    how_far = Section("verdicts", "How far each holds")
    if "verdicts" in view.tables and found:
        how_far.tables.append(_verdict_table(found))
    statuses = Section("cells", "Cells without a number")
    if "cells" in view.tables and len(lost := curves[curves["status"] != "ok"]):
        columns = ["study", "label", "rescale", "protocol", "length", "status"]
        statuses.tables.append(plain("cells", "Every cell without a number, and why", lost[columns]))
    return [length, how_far, position, rescale, training, statuses]


def _add(section: Section, figure: Figure | None, metric: str, protocol: str, chosen: bool) -> None:
    if figure is not None:
        section.figures.append(Shown(figure, metric, protocol, chosen))


def _rescale_notes(studies: Sequence[Study]) -> list[str]:
    notes = [note for study in studies for ev in study.evaluations for note in ev.notes.get("rescales") or []]
    sentence = yarn_sentence(notes)
    return [sentence] if sentence else []


# --- tables ------------------------------------------------------------------------------------------------


def main(
    curves: pd.DataFrame, metric: str, protocol: str, lengths: Sequence[int] | None, chosen: bool
) -> Table:
    """Labels and rescales down, lengths across; the best of a column is marked."""
    shown = curves[curves["protocol"] == protocol]
    have = sorted({int(n) for n in shown["length"]})
    columns = [n for n in have if n in (lengths or have)][:: max(1, math.ceil(len(have) / 10))]
    frame = tables.main_table(shown, metric, columns)
    several = frame.index.get_level_values("study").nunique() > 1
    best = {n: _best(frame[n]) for n in frame.columns}
    rows = []
    for (study, label, rescale), values in frame.iterrows():  # type: ignore[misc]
        name = str(label) if rescale == "none" else f"{label}, {rescale}"
        cells = [Cell(f"{name} ({study})" if several else name)]
        cells += [_value(values[n], best[n], metric) for n in frame.columns]
        rows.append(cells)
    return Table(
        name=f"main-{protocol}-{metric}",
        title=f"{METRIC_NAMES[metric].capitalize()} by length ({protocol})",
        columns=[Column("encoding"), *(Column(f"{n:,}", numeric=True) for n in frame.columns)],
        rows=rows,
        data=shown[[name for name in shown.columns if name not in ("corpus_hash", "tokenizer_hash")]],
        note=f"{tables.METRICS[metric]}; lower is better; best of each length marked. {_seed_note(shown)}",
        metric=metric,
        protocol=protocol,
        chosen=chosen,
    )


def _seed_note(shown: pd.DataFrame) -> str:
    most = int(shown["num_seeds"].max()) if len(shown) else 0
    return (
        "One seed."
        if most <= 1
        else f"Mean over up to {most} seeds (of the loss, then exponentiated for perplexity)."
    )


def _best(column: pd.Series) -> float:
    numbers = [value for value in column if isinstance(value, float) and math.isfinite(value)]
    return min(numbers, default=math.nan)


def _value(value: Any, best: float, metric: str) -> Cell:
    if not isinstance(value, float):
        return Cell("\u2013" if value is None else str(value), kind="status")
    if math.isnan(value):
        return Cell("not run", kind="status")
    text = (
        number(value)
        if metric == "perplexity" and value >= 1000
        else f"{value:.{2 if metric == 'perplexity' else 3}f}"
    )
    return Cell(text, value, "best" if value == best else "n")


def plain(name: str, title: str, frame: pd.DataFrame, note: str = "") -> Table:
    """A frame as a table: numbers right, missing values as a dash."""
    numeric = [pd.api.types.is_numeric_dtype(frame[column]) for column in frame.columns]
    rows = [
        [_plain_cell(value, is_number) for value, is_number in zip(row, numeric, strict=True)]
        for row in frame.itertuples(index=False)
    ]
    columns = [Column(str(c).replace("_", " "), n) for c, n in zip(frame.columns, numeric, strict=True)]
    return Table(name, title, columns, rows, frame, note)


def _plain_cell(value: Any, is_number: bool) -> Cell:
    if value is None or value is pd.NA or (isinstance(value, float) and math.isnan(value)):
        return Cell("\u2013", kind="n" if is_number else "")
    if not is_number:
        return Cell(str(value))
    text = f"{int(value):,}" if float(value).is_integer() else f"{value:,.4g}"
    return Cell(text, float(value), "n")


def _verdict_table(found: Sequence[verdicts.Verdict]) -> Table:
    frame = verdicts.verdict_table(list(found))
    first = found[0]
    level = "weights and new documents (one seed)" if first.num_seeds == 1 else "new seeds and new documents"
    keep = [c for c in frame.columns if c not in ("protocol", "train_length", "num_documents", "study")]
    if frame["study"].nunique() > 1:
        keep = ["study", *keep]
    return plain(
        "verdicts",
        f"How far each holds ({first.protocol})",
        frame[["label", *(c for c in keep if c != "label")]],
        f"Survives: every length up to it has an upper simultaneous 95 % bound of the loss's rise below the margin, 0.5 % or "
        f"2 % of the loss at the training length. Fails by: the first length with a lower bound above it. Gains to: the "
        f"last length L with a lower bound of loss(L/2) - loss(L) above zero. Bounds are over {level}. Loss in nats.",
    )


# --- facts and provenance ------------------------------------------------------------------------------------


def _facts(studies: Sequence[Study], rows: pd.DataFrame) -> list[tuple[str, str]]:
    facts = [("encodings", str(rows["label"].nunique()))] if len(rows) else []
    if len(rows):
        facts += [
            ("training length", _join(rows["train_length"])),
            ("lengths", f"{rows['length'].min():,} to {rows['length'].max():,}"),
            ("seeds", str(rows.groupby(["study", "label"], observed=True)["seed"].nunique().max())),
            ("corpus", ", ".join(sorted(set(rows["corpus"].astype(str))))),
            ("documents", _documents(studies, rows)),
        ]
    steps = {run.train.get("steps") for study in studies for run in study.runs} - {None}
    return facts + ([("training steps", ", ".join(f"{n:,}" for n in sorted(steps)))] if steps else [])


def _documents(studies: Sequence[Study], rows: pd.DataFrame) -> str:
    used = rows.groupby("study", observed=True)["document"].nunique().max()
    notes = [ev.notes.get("documents") for study in studies for ev in study.evaluations]
    totals = {note["total"] for note in notes if isinstance(note, Mapping) and note.get("total")}
    return f"{used:,}" + (f" of {max(totals):,}" if len(totals) == 1 else "")


def _join(values: pd.Series) -> str:
    return ", ".join(f"{n:,}" for n in sorted(set(values)))


def _commands(studies: Sequence[Study], command: str) -> list[str]:
    lines = []
    for study in studies:
        if study.runs:
            lines.append(
                f"pe-study train {shlex.quote(str(study.path / 'RUN' / 'recipe.yaml'))}  # each RUN of {study.name}"
            )
        for evaluation in study.evaluations:
            typed = (evaluation.summary.get("config") or {}).get("command")
            lines.append(
                str(typed)
                if typed
                else f"pe-study eval {shlex.quote(str(study.path))}  # plan {evaluation.plan}"
            )
    return [*lines, command]


def _provenance(study: Study) -> list[tuple[str, list[tuple[str, str]]]]:
    return [(f"{study.name}: {run.run_id}", flat(run.provenance)) for run in study.runs if run.provenance]


def flat(mapping: Mapping[str, Any], prefix: str = "") -> list[tuple[str, str]]:
    """Nested facts as dotted names and text, in order; empty ones left out."""
    found: list[tuple[str, str]] = []
    for name, value in mapping.items():
        if isinstance(value, Mapping):
            found += flat(value, f"{prefix}{name}.")
        elif value not in (None, "", []):
            found.append((f"{prefix}{name}", str(value)))
    return found
