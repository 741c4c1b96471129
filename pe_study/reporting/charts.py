"""Figures over other things than length: training, differences, cost."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import pandas as pd
from matplotlib import rcParams
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from pe_study.reporting.captions import caption, slug
from pe_study.reporting.comparisons import Comparison, comparison_table
from pe_study.reporting.curves import Line, draw_lines, limits_of, number
from pe_study.reporting.cuts import arrow, arrows_text, drawn_interval, reach_of, write
from pe_study.reporting.drawing import GRID, MUTED, PAPER, POINTS, SIZES, Canvas, Figure, row_names
from pe_study.reporting.fitting import fitted
from pe_study.reporting.palette import CONTROL, Look, dashed

Looks = Mapping[str, Look]


def training_figure(training: pd.DataFrame, looks: Looks) -> Figure | None:
    """Training loss by step, mean over the seeds of a label, as a running mean (the CSV has every step)."""
    if training.empty:
        return None
    mean = training.groupby(["study", "label", "step"], as_index=False)["loss"].mean()
    several = mean["study"].nunique() > 1
    studies = list(dict.fromkeys(mean["study"]))
    parts = {
        f"{label}, {study}" if several else label: (dashed(looks[label], studies.index(study)), part)
        for label in looks
        for study, part in mean[mean["label"] == label].groupby("study")
    }

    lines = []
    for name, (look, part) in parts.items():
        smooth = part["loss"].rolling(max(1, len(part) // 40), min_periods=1, center=True).mean()
        plain = Look(look.light, look.dark, look.dash, "")
        lines.append(Line(name, part["step"].to_numpy(float), smooth.to_numpy(), plain))
    last_step = mean["step"].max()
    limits = limits_of(lines, float(mean[mean["step"] >= last_step * 0.1]["loss"].max()) + 0.05)

    def draw(canvas: Canvas) -> None:
        axes = canvas.axes()[0]
        axes.set_xlabel("training step")
        axes.set_ylabel("training loss, nats per token")
        axes.set_xlim(0, last_step)
        draw_lines(axes, lines, canvas, limits)

    seeds = training.groupby(["study", "label"])["seed"].nunique().max()
    last = ", ".join(f"{name} {number(part['loss'].iloc[-1])}" for name, (_, part) in parts.items())
    return Figure(
        name="training",
        title="Training loss",
        caption=f"Loss on the training batches, which are the same for every encoding; "
        f"{'one seed' if seeds == 1 else f'mean of up to {seeds} seeds'}; running mean, its steep start cut.",
        alt=f"Training loss by step. Last logged: {last}.",
        table=training,
        draw=draw,
    )


def differences_figure(
    found: Sequence[Comparison], looks: Looks, curves: pd.DataFrame, num_tests: int, suffix: str = ""
) -> Figure | None:
    """Each encoding of a study against the control (or the first one), at the declared lengths.

    num_tests: what Holm's correction was over. suffix: the study, where there are several.
    """
    against = CONTROL if any(CONTROL in (one.label, one.other) for one in found) else None
    against = against or (found[0].label if found else None)
    chosen = [_from(one, against) for one in found if against in (one.label, one.other)]
    chosen = [one for one in chosen if math.isfinite(one.value)]
    if not chosen:
        return None
    lengths = sorted({one.length for one in chosen})
    labels = [label for label in looks if any(one.label == label for one in chosen)]
    panels = {length: [one for one in chosen if one.length == length] for length in lengths}

    def draw(canvas: Canvas) -> None:
        sheet = canvas.axes(len(lengths) if canvas.narrow else 1, 1 if canvas.narrow else len(lengths))
        canvas.reserve_left(labels)
        named = len(lengths) - 1 if canvas.narrow else len(lengths) // 2
        for place, (axes, (length, here)) in enumerate(zip(sheet, panels.items(), strict=True)):
            named_rows(axes, labels, names=canvas.narrow or place == 0)
            _forest(axes, here, labels, looks, canvas)
            axes.set_title(f"length {length:,}")
            short = fitted(str(against), 1.2, canvas.points, lines=1)
            if place == named:
                canvas.xlabel(axes, f"loss minus that of {short}, nats")

    level = found[0].level
    what = "paired over documents, these runs" if level == "a" else "over seeds"
    protocol = found[0].protocol
    return Figure(
        name=f"differences{suffix and '-' + slug(suffix)}",
        title=f"Difference from {against} ({protocol}{suffix and ', ' + suffix})",
        caption=caption(
            curves[(curves["protocol"] == protocol) & (curves["rescale"] == "none")], protocol, bands=False
        )
        + f" Left of zero is better than {against}. 95 % intervals {what}; filled: differs from {against} "
        f"after Holm's correction over all {num_tests} pairs and lengths, hollow: not shown to differ."
        + "".join(dict.fromkeys(_cut_text(here) for here in panels.values())),
        alt="; ".join(f"{one.label} {one.value:+.3f} nats at {one.length:,}" for one in chosen),
        table=comparison_table(found),
        draw=draw,
        height=of_rows(labels, 0.75),
        narrow_height=of_rows(labels, 0.6, narrow=True) * len(lengths) + 0.3,
    )


@dataclass(frozen=True)
class _Difference:
    """A label's loss minus that of the one that all are held against, with its interval."""

    label: str
    length: int
    value: float
    low: float
    high: float
    differs: bool


def _from(one: Comparison, against: str | None) -> _Difference:
    low, high = one.interval.bounds()
    if one.other == against:
        return _Difference(one.label, one.length, one.interval.estimate, low, high, one.differs)
    return _Difference(one.other, one.length, -one.interval.estimate, -high, -low, one.differs)


def named_rows(axes: Axes, labels: Sequence[str], *, names: bool = True) -> None:
    """A row a label, from the top down; `names` only where no panel to the left has them."""
    axes.set_ylim(len(labels) - 0.5, -0.5)
    width, points = axes.get_figure().get_figwidth(), float(rcParams["font.size"])
    shown = row_names(labels, width, points) if names else [""] * len(labels)
    axes.set_yticks(range(len(labels)), shown)
    axes.tick_params(axis="y", length=0)
    axes.grid(True, axis="x")
    axes.grid(False, axis="y")


def _cut_text(here: Sequence[_Difference]) -> str:
    return arrows_text("value", [(one.value, one.low, one.high) for one in here], _reach(here))


def _reach(here: Sequence[_Difference]) -> float:
    return reach_of([one.value for one in here], [end for one in here for end in (one.low, one.high)])


def _forest(
    axes: Axes, here: Sequence[_Difference], labels: Sequence[str], looks: Looks, canvas: Canvas
) -> None:
    """A row a label: the estimate and its interval. A value far outside the others is cut and written."""
    reach = _reach(here)
    axes.axvline(0, color=MUTED, linewidth=1)
    for one in here:
        row, colour = labels.index(one.label), looks[one.label].light
        if abs(one.value) > reach:
            arrow(axes, math.copysign(reach, one.value), row, colour)
            write(axes, one.value, one.low, one.high, row, canvas.points - 1)
            continue
        drawn_interval(axes, one.low, one.high, row, reach, colour, 1.6)
        face = colour if one.differs else PAPER
        axes.plot(
            [one.value], [row], looks[one.label].marker, color=colour, markerfacecolor=face, markersize=5.5
        )
    ends = [end for one in here for end in (one.value, one.low, one.high) if math.isfinite(end)]
    low, high = max(min([0, *ends]), -reach), min(max([0, *ends]), reach)
    if any(abs(one.value) > reach for one in here):  # room for what is written
        low, high = -reach, reach
    axes.set_xlim(low - 0.06 * (high - low), high + 0.06 * (high - low))
    axes.xaxis.set_major_locator(MaxNLocator(4, steps=[1, 2, 5, 10]))


# --- cost ------------------------------------------------------------------------------------------------


def cost_figure(cost: pd.DataFrame, looks: Looks, suffix: str = "") -> Figure | None:
    """Speed, memory and position parameters of a training run, side by side, a bar a label."""
    wanted = {
        "tokens_per_second": "tokens a second",
        "peak_memory_MiB": "peak memory, MiB",
        "position_parameters": "position parameters",
    }
    kept = {
        column: title for column, title in wanted.items() if column in cost and cost[column].notna().any()
    }
    labels = [label for label in looks if label in set(cost["label"])]
    if not kept or len(labels) < 2:
        return None
    table = cost.groupby("label")[list(kept)].mean().reindex(labels)

    def draw(canvas: Canvas) -> None:
        panels = canvas.axes(len(kept) if canvas.narrow else 1, 1 if canvas.narrow else len(kept))
        canvas.reserve_left(labels)
        for place, (axes, (column, title)) in enumerate(zip(panels, kept.items(), strict=True)):
            bars(axes, table[column], looks, canvas, names=canvas.narrow or place == 0)
            axes.set_title(title)

    return Figure(
        name=f"cost{suffix and '-' + slug(suffix)}",
        title=f"Cost of a training run{suffix and f' ({suffix})'}",
        caption="Median logged speed, peak memory of the process and parameters that the encoding adds; mean "
        "over seeds. Speeds of runs that shared a machine with others are not comparable.",
        alt="; ".join(
            f"{label}: "
            + ", ".join(f"{title} {number(row[c])}" for c, title in kept.items() if row[c] == row[c])
            for label, row in table.iterrows()
        ),
        table=table.reset_index(),
        draw=draw,
        height=of_rows(labels, 0.62),
        narrow_height=of_rows(labels, 0.55, narrow=True) * len(kept),
    )


def of_rows(labels: Sequence[str], least: float, *, narrow: bool = False, lines: int = 1) -> float:
    """The relative height of a panel with a row a label, each of `lines` lines of text, or of its name's."""
    size = "one-column" if narrow else "two-column"
    width, height = SIZES[size]
    broken = [name.count("\n") + 1 for name in row_names(labels, width, POINTS[size])]
    inches = 0.155 * sum(max(lines, number) for number in broken) + 0.9
    return max(least, inches / height)


def bars(axes: Axes, values: pd.Series, looks: Looks, canvas: Canvas, *, names: bool) -> None:
    """A bar a label of `values`, from zero, with its number at the end."""
    named_rows(axes, list(values.index), names=names)
    colours = [looks[label].light for label in values.index]
    axes.barh(range(len(values)), values.fillna(0), height=0.6, color=colours, linewidth=0)
    for row, value in enumerate(values):
        known = value == value
        axes.annotate(
            number(value) if known else "not known",
            (value if known else 0, row),
            xytext=(3, 0),
            textcoords="offset points",
            va="center",
            fontsize=canvas.points - 1,
        )
    axes.set_xlim(0, max(float(values.max()) * 1.32, 1e-9))
    axes.set_xticks([])
    axes.grid(False)
    axes.spines["bottom"].set_visible(False)
    axes.spines["left"].set_color(GRID)
