"""The figures of a report: each from a table of `tables`, with its caption, alternative text and CSV."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
import pandas as pd

from pe_study import palette, tables
from pe_study.drawing import CUT, Canvas, Figure, Line, draw_lines, length_axis, number, training_line
from pe_study.palette import Look

SHORT = {"perplexity": "perplexity", "bits_per_byte": "bits per byte", "nll": "loss"}


def length_figure(
    curves: pd.DataFrame, metric: str, protocol: str, looks: Mapping[str, Look]
) -> Figure | None:
    """`metric` against length for every label, unrescaled, under one protocol; None without a number to show."""
    shown = curves[(curves["protocol"] == protocol) & (curves["rescale"] == "none")]
    if not _drawable(shown, metric):
        return None

    def draw(canvas: Canvas) -> None:
        axes = canvas.axes()
        lines = [_line(part, metric, name, looks[label]) for name, label, part in _parts(shown, looks)]
        _length_panel(axes, lines, shown, metric, canvas)

    return Figure(
        name=f"length-{protocol}-{metric}",
        title=f"{SHORT[metric].capitalize()} against length ({protocol})",
        caption=_caption(shown, protocol)
        + _absences(shown, metric)
        + " Dotted: the same targets with the context "
        "cut to the training length.",
        alt=_alt(shown, metric),
        table=shown,
        draw=draw,
    )


def rescale_figure(curves: pd.DataFrame, metric: str, protocol: str, label: str) -> Figure | None:
    """`metric` against length for one label under each rescale, with the unrescaled control beside it."""
    own = curves[(curves["protocol"] == protocol) & (curves["label"] == label)]
    if own["rescale"].nunique() < 2 or not _drawable(own, metric):
        return None
    control = curves[
        (curves["protocol"] == protocol)
        & (curves["label"] == palette.CONTROL)
        & (curves["rescale"] == "none")
    ]
    shown = pd.concat([own, control[control["study"].isin(own["study"])]])
    names = ["none", *sorted(set(own["rescale"]) - {"none"})]

    def draw(canvas: Canvas) -> None:
        axes = canvas.axes()
        looks = palette.rescale_looks(names)
        lines = [_line(own[own["rescale"] == name], metric, name, looks[name]) for name in names]
        if len(control):
            look = palette.looks([(palette.CONTROL, palette.CONTROL)])[palette.CONTROL]
            lines.append(_line(control, metric, f"{palette.CONTROL} (control)", look, truncation=False))
        _length_panel(axes, lines, shown, metric, canvas)

    return Figure(
        name=f"rescale-{label}-{protocol}-{metric}",
        title=f"{label} under each rescale: {SHORT[metric]} ({protocol})",
        caption=_caption(own, protocol) + _absences(own, metric),
        alt=_alt(own.assign(label=own["rescale"]), metric),
        table=shown,
        draw=draw,
    )


def position_figure(
    positions: pd.DataFrame, metric: str, protocol: str, looks: Mapping[str, Look]
) -> Figure | None:
    """`metric` by size of context within windows of the longest length that any label could do."""
    shown = positions[(positions["protocol"] == protocol) & (positions["rescale"] == "none")]
    shown = shown[np.isfinite(shown["nll"])]
    if shown.empty:
        return None
    length = int(shown["length"].max())
    shown = shown[shown["length"] == length].sort_values("position_lo")
    if shown["position_lo"].nunique() < 2:
        return None

    def draw(canvas: Canvas) -> None:
        axes = canvas.axes()
        lines = []
        for name, label, part in _parts(shown, looks):
            centre = np.sqrt(part["position_lo"] * (part["position_hi"] - 1))
            lines.append(_line(part.assign(length=centre), metric, name, looks[label], truncation=False))
        axes.set_xscale("log", base=2)
        edges = sorted(set(shown["position_lo"]))
        axes.set_xlim(edges[0] / 1.12, shown["position_hi"].max() * 1.02)
        ticks = edges[:: 2 if canvas.narrow and len(edges) > 7 else 1]
        axes.set_xticks(ticks, [f"{tick:,}" for tick in ticks])
        axes.set_xlabel("tokens of context before the target")
        axes.set_ylabel(tables.METRICS[metric])
        for train_length in sorted(set(shown["train_length"])):
            training_line(axes, int(train_length), canvas)
        draw_lines(axes, lines, canvas, cut=_cut(shown, metric, positions=True))

    return Figure(
        name=f"position-{protocol}-{metric}",
        title=f"{SHORT[metric].capitalize()} by position in windows of {length:,} tokens ({protocol})",
        caption=_caption(shown, protocol) + " Each point is a bin of context sizes, at its geometric middle.",
        alt=_alt(shown.assign(length=shown["position_lo"]), metric, what="tokens of context"),
        table=shown,
        draw=draw,
    )


def training_figure(training: pd.DataFrame, looks: Mapping[str, Look]) -> Figure | None:
    """Training loss by step of every label, mean over seeds, smoothed for the eye (the CSV is not)."""
    if training.empty:
        return None
    mean = training.groupby(["label", "step"], as_index=False)[["loss"]].mean()

    def draw(canvas: Canvas) -> None:
        axes = canvas.axes()
        lines = []
        for label in looks:
            part = mean[mean["label"] == label]
            if len(part):
                smooth = part["loss"].rolling(max(1, len(part) // 40), min_periods=1).mean().to_numpy()
                nothing = np.full(len(part), math.nan)
                look = looks[label]
                lines.append(
                    Line(
                        label,
                        part["step"].to_numpy(float),
                        smooth,
                        nothing,
                        nothing,
                        look.light,
                        look.dark,
                        look.dash,
                        "",
                    )
                )
        axes.set_xlabel("step")
        axes.set_ylabel("training loss, nats per token")
        axes.set_xlim(0, mean["step"].max())
        last = mean[mean["step"] >= mean["step"].max() * 0.1]["loss"]
        draw_lines(axes, lines, canvas, cut=float(last.max()))

    seeds = training.groupby("label")["seed"].nunique()
    return Figure(
        name="training",
        title="Training loss",
        caption=f"Loss on the training batches; every encoding sees the same batches. {_seeds(seeds)}. "
        "Running mean of the logged steps; the first tenth is cut where it is higher than the rest.",
        alt="Training loss by step. Last value: "
        + ", ".join(f"{label} {number(part['loss'].iloc[-1])}" for label, part in mean.groupby("label")),
        table=training,
        draw=draw,
    )


# --- parts -----------------------------------------------------------------------------------------------


def _drawable(shown: pd.DataFrame, metric: str) -> bool:
    return bool(shown[metric].notna().any() or shown["overflow"].any())


def _parts(shown: pd.DataFrame, looks: Mapping[str, Look]) -> list[tuple[str, str, pd.DataFrame]]:
    """(name, label, rows) of each label in the order of `looks`; a study's name joins where there are several."""
    studies = list(dict.fromkeys(shown["study"]))
    found = []
    for label in looks:
        for study in studies:
            part = shown[(shown["label"] == label) & (shown["study"] == study)]
            if len(part):
                found.append((label if len(studies) == 1 else f"{label}, {study}", label, part))
    return found


def _line(part: pd.DataFrame, metric: str, name: str, look: Look, *, truncation: bool = True) -> Line:
    part = part.sort_values("length")
    y = part[metric].to_numpy(float)
    if metric == "perplexity":
        y = np.where(part["overflow"], np.inf, y)
    start = float(part["train_length"].iloc[0])
    at_start = part.loc[part["length"] == start, metric]
    level = float(at_start.iloc[0]) if truncation and len(at_start) else math.nan
    return Line(
        name, part["length"].to_numpy(float), y,
        part[f"{metric}_low"].to_numpy(float), part[f"{metric}_high"].to_numpy(float),
        look.light, look.dark, look.dash, look.marker, level, start,
    )  # fmt: skip


def _length_panel(axes, lines: list[Line], shown: pd.DataFrame, metric: str, canvas: Canvas) -> None:
    length_axis(axes, sorted(set(shown["length"])), sorted(set(shown["train_length"])), canvas)
    axes.set_ylabel(tables.METRICS[metric])
    draw_lines(axes, lines, canvas, cut=_cut(shown, metric))


def _cut(shown: pd.DataFrame, metric: str, *, positions: bool = False) -> float:
    """Where curves are cut: the worst value up to the training length and `CUT` nats more, in this metric."""
    within = shown if positions else shown[shown["length"] <= shown["train_length"]]
    if positions:
        within = shown[(shown["position_hi"] <= shown["train_length"]) & (shown["position_lo"] >= 2)]
    worst = (within if within[metric].notna().any() else shown)[metric].max()
    if not math.isfinite(worst):
        return math.inf
    return float(
        {"perplexity": worst * math.exp(CUT), "bits_per_byte": worst + CUT / math.log(2)}.get(
            metric, worst + CUT
        )
    )


def _caption(shown: pd.DataFrame, protocol: str) -> str:
    corpora = ", ".join(sorted(set(shown["corpus"].astype(str)))) or "unknown corpus"
    documents = shown["num_documents"].max()
    trained = ", ".join(f"{n:,}" for n in sorted(set(shown["train_length"])))
    counted = f"{int(documents)} documents" if documents == documents else "documents not counted"
    seeds = shown.groupby("label", observed=True)["num_seeds"].max()
    stride = sorted({int(s) for s in shown["stride"] if s == s})
    named = (
        f"{protocol}, stride {', '.join(map(str, stride))}" if protocol == "sliding" and stride else protocol
    )
    return f"Protocol {named}; corpus {corpora}, {counted}; trained at length {trained}; {_seeds(seeds)}."


def _seeds(seeds: pd.Series) -> str:
    """ "1 seed: no bands", or the number of seeds and what the bands are."""
    low, high = int(seeds.min()), int(seeds.max())
    if high <= 1:
        return "n = 1 seed each, so no bands"
    counted = f"n = {high} seeds" if low == high else f"n = {low} to {high} seeds"
    return f"{counted}; line: mean, band: 95 % t interval over seeds (this corpus's documents held fixed)"


def _absences(shown: pd.DataFrame, metric: str) -> str:
    """What the figure cannot show: cells with a status instead of a number, and perplexities past float64."""
    lost = shown[shown["status"] != "ok"]
    said = [
        f" {label}: {status} at {', '.join(f'{int(n):,}' for n in sorted(set(part['length'])))}."
        for (label, status), part in lost.groupby(["label", "status"], observed=True)
    ]
    if metric == "perplexity" and shown["overflow"].any():
        said.append(
            " Perplexities too large for a 64-bit number are marked at the top edge; their loss is in the table."
        )
    return "".join(said)


def _alt(shown: pd.DataFrame, metric: str, what: str = "tokens") -> str:
    """The figure in a sentence a label: first and last value."""
    said = []
    for label, part in shown.groupby("label", observed=True, sort=False):
        part = part[part[metric].notna()].sort_values("length")
        if len(part):
            first, last = part.iloc[0], part.iloc[-1]
            said.append(
                f"{label} {number(first[metric])} at {int(first['length']):,} and "
                f"{number(last[metric])} at {int(last['length']):,} {what}"
            )
    return f"{SHORT[metric].capitalize()}: " + "; ".join(said) + "."
