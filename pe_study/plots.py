"""Figures over length: each from a table of `tables`, with its caption, alternative text and CSV."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd
from matplotlib.axes import Axes

from pe_study import tables
from pe_study.reporting import likeness, palette
from pe_study.reporting.captions import (
    SHORT,
    absences,
    alternative,
    caption,
    joined,
    slug,
    suffixed,
    titled,
)
from pe_study.reporting.curves import Line, draw_lines, legend, length_axis, limits_of
from pe_study.reporting.drawing import Canvas, Figure
from pe_study.reporting.palette import CONTROL, Look

CUT = math.log(3)  # curves are cut at the worst loss up to the training length and this much more (nats)
Looks = Mapping[str, Look]
DOTTED = " Dotted: the same targets with the context cut to the training length."
BYTES = " Lengths in bytes of the same text; each model reads them in tokens of its own."
LEVEL = " Dotted: the value at the training length, carried on."


def length_figure(curves: pd.DataFrame, metric: str, protocol: str, looks: Looks) -> Figure | None:
    """`metric` against length for every label, unrescaled, under one protocol; None without a number."""
    shown = unrescaled(curves[curves["protocol"] == protocol])
    if not drawable(shown, metric):
        return None
    truncated = truncated_rows(curves, protocol)
    over = tables.in_bytes(shown)
    if over is None:
        panel = Panel.of(shown, metric, label_lines(shown, metric, looks, truncated))
    else:
        panel = Panel.of(over, metric, label_lines(over, metric, looks), unit="bytes of text")

    def draw(canvas: Canvas) -> None:
        panel.draw(canvas.axes()[0], canvas)

    return Figure(
        name=f"length-{protocol}-{metric}",
        title=f"{SHORT[metric].capitalize()} against length ({protocol})",
        caption=caption(shown, protocol)
        + absences(shown, metric)
        + (_dotted(truncated) if over is None else BYTES)
        + likeness.warning(shown, metric),
        alt=alternative(shown if over is None else over, metric, what="tokens" if over is None else "bytes"),
        table=pd.concat([shown, truncated]),
        draw=draw,
    )


def protocols_figure(curves: pd.DataFrame, metric: str, looks: Looks) -> Figure | None:
    """The same models under each protocol, side by side on one scale; None for a single protocol."""
    ran = [name for name in tables.protocols_of(curves) if name != "prefix"]
    one_of_each = {name.partition("_")[0]: name for name in reversed(ran)}  # not sliding at two strides
    kinds = [name for name in ran if name in one_of_each.values()]
    order, more = kinds[:3], [name for name in ran if name not in kinds[:3]]
    shown = unrescaled(curves[curves["protocol"].isin(order)])
    parts = {name: shown[shown["protocol"] == name] for name in order}
    parts = {name: part for name, part in parts.items() if drawable(part, metric)}
    if len(parts) < 2:
        return None

    drawn = {
        name: Panel.of(part, metric, label_lines(part, metric, looks, truncated_rows(curves, name)))
        for name, part in parts.items()
    }
    everything = [one for panel in drawn.values() for one in panel.lines]
    limits = limits_of(everything, cut_of(shown, metric))

    def draw(canvas: Canvas) -> None:
        across = 1 if canvas.narrow else len(parts)
        panels = canvas.axes(len(parts) // across, across, titled=True)
        for place, (axes, (name, panel)) in enumerate(zip(panels, drawn.items(), strict=True)):
            panel.draw(axes, canvas, limits)
            axes.set_title(name, pad=15)
            if place and not canvas.narrow:
                axes.set_ylabel("")
            axes.set_xlabel("length, tokens" if place == len(panels) - 1 or not canvas.narrow else "")
        legend(max((panel.lines for panel in drawn.values()), key=len), canvas)

    return Figure(
        name=f"protocols-{metric}",
        title=f"{SHORT[metric].capitalize()} under each protocol",
        caption=caption(shown, " | ".join(parts))
        + " One scale; values above the top edge are in the table."
        + (f" Not drawn: {joined(more)}." if more else "")
        + _dotted(curves[curves["rescale"] == tables.TRUNCATION])
        + likeness.warning(shown, metric),
        alt=" ".join(f"{name}: {alternative(part, metric)}" for name, part in parts.items()),
        table=shown,
        draw=draw,
        narrow_height=float(len(parts)),
    )


def rescale_figure(
    curves: pd.DataFrame, metric: str, protocol: str, label: str, study: str = ""
) -> Figure | None:
    """`metric` against length for one label under each rescale, with the unrescaled control beside it.

    `curves` are those of one study; `study` names it where the page has several.
    """
    here = curves[(curves["protocol"] == protocol) & (curves["rescale"] != tables.TRUNCATION)]
    own = here[here["label"] == label]
    if own["rescale"].nunique() < 2 or not drawable(own, metric):
        return None
    control = here[(here["label"] == CONTROL) & (here["rescale"] == "none")]
    control = control if label != CONTROL else control.iloc[:0]
    names = ["none", *sorted(set(own["rescale"].astype(str)) - {"none"})]

    looks = palette.rescale_looks(names)
    lines = [line(own[own["rescale"] == name], metric, name, looks[name]) for name in names]
    if len(control):
        lines.append(line(control, metric, f"{CONTROL} (control)", palette.control_look()))
    panel = Panel.of(pd.concat([own, control]), metric, lines)

    def draw(canvas: Canvas) -> None:
        panel.draw(canvas.axes()[0], canvas)

    return Figure(
        name=suffixed(f"rescale-{slug(label)}-{protocol}-{metric}", study),
        title=titled(f"{label} under each rescale: {SHORT[metric]} ({protocol})", study),
        caption=caption(own, protocol) + absences(own, metric),
        alt=alternative(own, metric, by="rescale"),
        table=pd.concat([own, control]),
        draw=draw,
    )


# --- parts -----------------------------------------------------------------------------------------------


def unrescaled(curves: pd.DataFrame) -> pd.DataFrame:
    return curves[curves["rescale"] == "none"]


def truncated_rows(curves: pd.DataFrame, protocol: str) -> pd.DataFrame:
    return curves[(curves["protocol"] == protocol) & (curves["rescale"] == tables.TRUNCATION)]


def _dotted(truncated: pd.DataFrame) -> str:
    """The words for the dotted lines: the truncation line where one was evaluated, else a level."""
    return LEVEL if truncated.empty else DOTTED


def drawable(shown: pd.DataFrame, metric: str) -> bool:
    """Whether there is anything to draw: a number, or one too large to write."""
    return bool(shown[metric].notna().any() or (metric == "perplexity" and shown["overflow"].any()))


def label_lines(
    shown: pd.DataFrame, metric: str, looks: Looks, truncated: pd.DataFrame | None = None
) -> list[Line]:
    """A line a label, in the order of `looks`; a study's name joins where there are several."""
    studies = list(dict.fromkeys(shown["study"]))
    parts = _parts(shown, metric)
    cuts = None if truncated is None else _parts(truncated, metric)
    found = []
    for label in looks:
        for study in studies:
            part = parts.get((label, study))
            if part is not None and drawable(part, metric):
                name = label if len(studies) == 1 else f"{label}, {study}"
                cut = None if cuts is None else cuts.get((label, study), part.iloc[:0])
                look = palette.dashed(looks[label], studies.index(study))
                found.append(line(part, metric, name, look, cut))
    return found


def _parts(curves: pd.DataFrame, metric: str) -> dict[tuple[str, str], pd.DataFrame]:
    """The curves of each label and study, with the columns that a line needs."""
    columns = [
        "label",
        "study",
        "length",
        "train_length",
        metric,
        f"{metric}_low",
        f"{metric}_high",
        "overflow",
    ]
    return dict(list(curves[columns].groupby(["label", "study"], observed=True, sort=False)))


def line(
    part: pd.DataFrame, metric: str, name: str, look: Look, truncated: pd.DataFrame | None = None
) -> Line:
    """One curve over log2 of length. `truncated` holds the truncation rows; empty means: level from L0 on."""
    part = part.sort_values("length")
    y = part[metric].to_numpy(float)
    if metric == "perplexity":
        y = np.where(part["overflow"], np.inf, y)
    known = part.loc[~np.isnan(y), "length"]
    early = f" (to {int(known.max()):,})" if len(known) and known.max() < part["length"].max() else ""
    return Line(
        name=name + early,
        x=np.log2(part["length"].to_numpy(float)),
        y=y,
        look=look,
        low=part[f"{metric}_low"].to_numpy(float),
        high=part[f"{metric}_high"].to_numpy(float),
        truncated=None if truncated is None else _truncation(part, metric, truncated),
    )


def _truncation(
    part: pd.DataFrame, metric: str, truncated: pd.DataFrame
) -> tuple[np.ndarray, np.ndarray] | None:
    start = part["train_length"].iloc[0]
    at_start = part.loc[part["length"] == start, metric]
    if len(truncated):
        rest = truncated[truncated["length"] > start].sort_values("length")
        x, y = [*rest["length"]], [*rest[metric]]
    else:
        x, y = [part["length"].max()], [*at_start]
    if not len(at_start) or part["length"].max() <= start:
        return None
    return np.log2([start, *x]), np.array([at_start.iloc[0], *y], dtype=float)


@dataclass(frozen=True)
class Panel:
    """Curves over one length axis, ready to draw."""

    lines: Sequence[Line]
    lengths: Sequence[int]
    train_lengths: Sequence[int]
    metric: str
    limits: tuple[float, float]
    unit: str = "tokens"

    @classmethod
    def of(cls, shown: pd.DataFrame, metric: str, lines: Sequence[Line], unit: str = "tokens") -> Panel:
        limits = limits_of(lines, cut_of(shown, metric))
        starts = sorted({n for n in shown["train_length"] if n > 0})
        return cls(lines, sorted(set(shown["length"])), starts, metric, limits, unit)

    def draw(self, axes: Axes, canvas: Canvas, shared: tuple[float, float] | None = None) -> None:
        """Draw and label the curves; with `shared` limits a legend elsewhere names them."""
        length_axis(axes, self.lengths, self.train_lengths, canvas, self.unit)
        axes.set_ylabel(tables.METRICS[self.metric])
        draw_lines(axes, self.lines, canvas, shared or self.limits, label=shared is None)


def cut_of(shown: pd.DataFrame, metric: str) -> float:
    """Where curves are cut: `CUT` nats above the worst value up to the training length."""
    within = shown[shown["length"] <= shown["train_length"]]
    return above(within if within[metric].notna().any() else shown, metric)


def above(shown: pd.DataFrame, metric: str) -> float:
    """`CUT` nats above the worst value of these curves; infinity where there is none."""
    worst = shown[metric].max()
    if not math.isfinite(worst):
        return math.inf
    if metric == "perplexity":
        return float(worst * math.exp(CUT))
    return float(worst + CUT / (math.log(2) if metric == "bits_per_byte" else 1))
