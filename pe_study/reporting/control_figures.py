"""Lines beside the plain ones: controls at evaluation, and losses of snapshots over training."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
import pandas as pd
from matplotlib.ticker import EngFormatter, MaxNLocator

from pe_study import tables
from pe_study.plots import Panel, cut_of, line, unrescaled
from pe_study.reporting import palette
from pe_study.reporting.captions import SHORT, caption, named, suffixed, titled
from pe_study.reporting.curves import Line, draw_lines, legend, limits_of
from pe_study.reporting.drawing import Canvas, Figure
from pe_study.reporting.palette import Look
from pe_study.rows import NO_CONTROL

Looks = Mapping[str, Look]
OWN = "as it is"
AXES = {"trained_tokens": "tokens trained on", "device_hours": "device-hours"}


def united(controls: pd.DataFrame) -> pd.DataFrame:
    """Rows under controls in which each cell comes from one plan and two strides are two protocols, each
    control for itself."""
    parts = [tables.prepare(rows) for _, rows in controls.groupby("control", observed=True)]
    return pd.concat(parts, ignore_index=True)


def control_curves(plain: pd.DataFrame, controls: pd.DataFrame) -> pd.DataFrame:
    """Curves of united rows under each control, and the plain ones (`control` none) of the same series."""
    parts = [plain.assign(control=NO_CONTROL)]
    for control, rows in controls.groupby("control", observed=True):
        parts.append(tables.length_curves(rows).assign(control=str(control)))
    both = pd.concat(parts, ignore_index=True)
    return unrescaled(both.fillna({"choice": 0}) if "choice" in both else both)


def control_figure(curves: pd.DataFrame, metric: str, protocol: str, study: str = "") -> Figure | None:
    """A panel a label: its loss as it is and under each control, over length.

    `curves` are those of one study; `study` names it where the page has several.
    """
    shown = curves[curves["protocol"] == protocol]
    names = [NO_CONTROL, *sorted(set(shown["control"]) - {NO_CONTROL})]
    labels = list(dict.fromkeys(shown.loc[shown["control"] != NO_CONTROL, "label"].astype(str)))
    shown = shown[shown["label"].isin(labels) & shown[metric].notna()]
    labels = [label for label in labels if (shown["label"] == label).any()]
    if not labels or len(names) < 2:
        return None
    looks = palette.ordered_looks(names)
    panels = {label: _panel(shown[shown["label"] == label], metric, names, looks) for label in labels}
    limits = limits_of([one for panel in panels.values() for one in panel.lines], cut_of(shown, metric))
    lines_down = math.ceil(len(labels) / 3)

    def draw(canvas: Canvas) -> None:
        across = 1 if canvas.narrow else min(3, len(labels))
        titles = canvas.titles(labels, across)
        grid = canvas.axes(math.ceil(len(labels) / across), across, titled=True, titles=titles)
        for place, (axes, title, panel) in enumerate(zip(grid, titles, panels.values(), strict=False)):
            panel.draw(axes, canvas, limits)
            axes.set_title(title, pad=15)
            axes.set_xlabel("length, tokens" if place + across >= len(labels) else "")
            axes.set_ylabel("" if place % across else tables.METRICS[metric])
        for axes in grid[len(labels) :]:
            axes.set_axis_off()
        every = [Line(OWN if n == NO_CONTROL else n, np.zeros(0), np.zeros(0), looks[n]) for n in names]
        legend(every, canvas, 1 if canvas.narrow else 3)

    return Figure(
        name=suffixed(f"controls-{protocol}-{metric}", study),
        title=titled(f"{SHORT[metric].capitalize()} under each control ({protocol})", study),
        caption=f"{caption(shown, protocol)} {_says(names)}",
        alt="; ".join(_alternative(shown[shown["label"] == label], metric, label) for label in labels),
        table=shown,
        draw=draw,
        height=0.8 * lines_down,
        narrow_height=0.75 * len(labels),
    )


def _says(names: Sequence[str]) -> str:
    """What the controls of a figure take away."""
    windows = [name.partition("=")[2] for name in names if name.startswith("attention_window")]
    taken = {
        "far_context replaces the text farther back than the training length": any(
            name.startswith("far_context") for name in names
        ),
        f"attention_window hides all but the last {' or '.join(windows)} keys of each query": bool(windows),
        "shuffle_positions permutes the positions of a window, its text stays": "shuffle_positions" in names,
    }
    said = "; ".join(text for text, here in taken.items() if here)
    return f"{said}. Where a line meets the plain one, the loss did not depend on that."


def _panel(shown: pd.DataFrame, metric: str, names: Sequence[str], looks: Looks) -> Panel:
    parts = {name: shown[shown["control"] == name] for name in names}
    lines = [line(part, metric, name, looks[name]) for name, part in parts.items() if len(part)]
    return Panel.of(shown, metric, lines)


def _alternative(part: pd.DataFrame, metric: str, label: str) -> str:
    last = part[part["length"] == part["length"].max()]
    values = ", ".join(
        f"{name} {value:.3g}" for name, value in zip(last["control"], last[metric], strict=True)
    )
    return f"{label} at {int(part['length'].max()):,}: {values}"


def training_curves(rows: pd.DataFrame) -> pd.DataFrame:
    """Curves of every snapshot: those of `tables.length_curves` with step, trained_tokens, device_hours."""
    parts = []
    for step, part in rows.groupby("step", observed=True):
        curves = tables.length_curves(tables.prepare(part))
        when = part.groupby(["study", "label"], observed=True)[list(AXES)].mean().reset_index()
        parts.append(curves.assign(step=step).merge(when, on=["study", "label"], how="left"))
    return unrescaled(pd.concat(parts, ignore_index=True))


def over_training_figure(curves: pd.DataFrame, metric: str, protocol: str, looks: Looks) -> Figure | None:
    """`metric` at each length against tokens and against device-hours: a column a length, a row an axis."""
    shown = curves[(curves["protocol"] == protocol) & curves[metric].notna()]
    kept = {name: title for name, title in AXES.items() if shown[name].nunique() > 1}
    if shown["step"].nunique() < 2 or not kept:
        return None
    lengths = sorted({int(n) for n in shown["length"]})[:3]
    shown = shown[shown["length"].isin(lengths)]
    cells = [(name, length) for name in kept for length in lengths]
    lines = {cell: _over(shown, metric, *cell, looks) for cell in cells}
    limits = limits_of([one for of_cell in lines.values() for one in of_cell], cut_of(shown, metric))

    def draw(canvas: Canvas) -> None:
        across = 1 if canvas.narrow else len(lengths)
        grid = canvas.axes(math.ceil(len(cells) / across), across)
        for axes, (name, length) in zip(grid, cells, strict=True):
            axes.set_xlim(0, 1.04 * float(shown[name].max()))
            draw_lines(axes, lines[name, length], canvas, limits, label=False)
            axes.set_title(f"length {length:,}")
            axes.set_xlabel(kept[name])
            axes.xaxis.set_major_locator(MaxNLocator(4))
            axes.xaxis.set_major_formatter(EngFormatter(sep=""))  # 500k, 1M
            axes.set_ylabel(tables.METRICS[metric] if length == lengths[0] or canvas.narrow else "")
        legend(max(lines.values(), key=len), canvas)

    return Figure(
        name=f"over-training-{protocol}-{metric}",
        title=f"{SHORT[metric].capitalize()} over training ({protocol})",
        caption=caption(shown, protocol)
        + " A point is a snapshot on the way; device-hours count updates alone.",
        alt=_in_the_end(shown[shown["length"] == lengths[-1]], metric),
        table=shown,
        draw=draw,
        height=0.75 * len(kept),
        narrow_height=0.65 * len(cells),
    )


def _in_the_end(longest: pd.DataFrame, metric: str) -> str:
    return "; ".join(
        f"{name}: {part.sort_values('step')[metric].iloc[-1]:.3g} at length {int(part['length'].iloc[0]):,} "
        "in the end"
        for name, part in longest.groupby(named(longest), sort=False)
    )


def _over(shown: pd.DataFrame, metric: str, name: str, length: int, looks: Looks) -> list[Line]:
    here = shown[shown["length"] == length].sort_values("step")
    here = here.assign(name=named(here))
    studies = list(dict.fromkeys(shown["study"]))
    found = []
    for (title, study, label), part in here.groupby(["name", "study", "label"], observed=True, sort=False):
        values = [part[f"{metric}{end}"].to_numpy(float) for end in ("", "_low", "_high")]
        look = palette.dashed(looks[str(label)], studies.index(study))
        found.append(Line(title, part[name].to_numpy(float), values[0], look, *values[1:]))
    return found
