"""Figures over other things than length: differences, decompositions, training, cost."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from pe_study.captions import caption
from pe_study.comparisons import Comparison, Decomposition, comparison_table, decomposition_table
from pe_study.curves import Line, draw_lines, limits_of, number
from pe_study.drawing import GRID, INK, MUTED, PAPER, Canvas, Figure
from pe_study.palette import CONTROL, Look

Looks = Mapping[str, Look]


def training_figure(training: pd.DataFrame, looks: Looks) -> Figure | None:
    """Training loss by step, mean over the seeds of a label, as a running mean (the CSV has every step)."""
    if training.empty:
        return None
    mean = training.groupby(["label", "step"], as_index=False)["loss"].mean()
    parts = {label: part for label in looks if len(part := mean[mean["label"] == label])}

    lines = []
    for label, part in parts.items():
        smooth = part["loss"].rolling(max(1, len(part) // 40), min_periods=1, center=True).mean()
        look = Look(looks[label].light, looks[label].dark, looks[label].dash, "")
        lines.append(Line(label, part["step"].to_numpy(float), smooth.to_numpy(), look))
    last_step = mean["step"].max()
    limits = limits_of(lines, float(mean[mean["step"] >= last_step * 0.1]["loss"].max()) + 0.05)

    def draw(canvas: Canvas) -> None:
        axes = canvas.axes()[0]
        axes.set_xlabel("training step")
        axes.set_ylabel("training loss, nats per token")
        axes.set_xlim(0, last_step)
        draw_lines(axes, lines, canvas, limits)

    seeds = training.groupby("label")["seed"].nunique().max()
    last = ", ".join(f"{label} {number(part['loss'].iloc[-1])}" for label, part in parts.items())
    return Figure(
        name="training",
        title="Training loss",
        caption=f"Loss on the training batches, which are the same for every encoding; "
        f"{'one seed' if seeds == 1 else f'mean of up to {seeds} seeds'}; running mean, its steep start cut.",
        alt=f"Training loss by step. Last logged: {last}.",
        table=training,
        draw=draw,
    )


def differences_figure(found: Sequence[Comparison], looks: Looks, curves: pd.DataFrame) -> Figure | None:
    """Each encoding against the control (or the first one) at the declared lengths, with intervals."""
    against = CONTROL if any(CONTROL in (one.label, one.other) for one in found) else None
    against = against or (found[0].label if found else None)
    chosen = [_from(one, against) for one in found if against in (one.label, one.other)]
    chosen = [one for one in chosen if math.isfinite(one[2])]
    if not chosen:
        return None
    lengths = sorted({one[1] for one in chosen})
    labels = [label for label in looks if any(one[0] == label for one in chosen)]

    def draw(canvas: Canvas) -> None:
        panels = canvas.axes(len(lengths) if canvas.narrow else 1, 1 if canvas.narrow else len(lengths))
        room = 0.62 * canvas.points * max(map(len, labels)) / 72 + 0.1
        canvas.sheet.subplots_adjust(left=room / canvas.sheet.get_figwidth(), wspace=0.12)
        for place, (axes, length) in enumerate(zip(panels, lengths, strict=True)):
            here = [one for one in chosen if one[1] == length]
            _forest(axes, here, labels, looks, canvas, names=canvas.narrow or place == 0)
            axes.set_title(f"length {length:,}")
            axes.set_xlabel(f"loss minus that of {against}, nats" if place == len(lengths) // 2 else "")

    level = found[0].level
    what = "paired over documents, these runs" if level == "a" else "over seeds"
    protocol = found[0].protocol
    return Figure(
        name="differences",
        title=f"Difference from {against} ({protocol})",
        caption=caption(
            curves[(curves["protocol"] == protocol) & (curves["rescale"] == "none")], protocol, bands=False
        )
        + f" Left of zero is better than {against}. 95 % intervals {what}; filled: differs from {against} "
        f"after Holm's correction over all {len(found)} pairs and lengths, hollow: not shown to differ.",
        alt="; ".join(f"{label} {value:+.3f} nats at {n:,}" for label, n, value, *_ in chosen),
        table=comparison_table(found),
        draw=draw,
        height=0.75,
        narrow_height=0.6 * len(lengths) + 0.3,
    )


def _from(one: Comparison, against: str | None) -> tuple[str, int, float, float, float, bool]:
    """(label, length, difference from `against`, low, high, differs)."""
    low, high = one.interval.bounds()
    if one.other == against:
        return one.label, one.length, one.interval.estimate, low, high, one.differs
    return one.other, one.length, -one.interval.estimate, -high, -low, one.differs


def _forest(
    axes: Axes, here: Sequence[tuple], labels: Sequence[str], looks: Looks, canvas: Canvas, *, names: bool
) -> None:
    """A row a label: the estimate and its interval. A value far outside the others is cut and written."""
    values = np.array([one[2] for one in here])
    reach = max(4 * float(np.median(np.abs(values))), 0.02)
    axes.axvline(0, color=MUTED, linewidth=1)
    for label, _, value, low, high, differs in here:
        row, colour = labels.index(label), looks[label].light
        if abs(value) > reach:
            edge = math.copysign(reach, value)
            axes.plot([edge], [row], ">" if value > 0 else "<", color=colour, clip_on=False)
            side = "right" if value > 0 else "left"
            axes.text(edge * 0.92, row, f"{value:+.2f}", ha=side, va="center", fontsize=canvas.points - 1)
            continue
        axes.plot([max(low, -reach), min(high, reach)], [row, row], color=colour, linewidth=1.6)
        face = colour if differs else PAPER
        axes.plot([value], [row], looks[label].marker, color=colour, markerfacecolor=face, markersize=5.5)
    shown = [end for one in here if abs(one[2]) <= reach for end in one[2:5] if math.isfinite(end)]
    cut = [math.copysign(reach, one[2]) for one in here if abs(one[2]) > reach]
    low, high = min([0, *shown, *cut]), max([0, *shown, *cut])
    axes.set_xlim(max(low, -reach) - 0.06 * (high - low), min(high, reach) + 0.06 * (high - low))
    axes.set_ylim(len(labels) - 0.5, -0.5)
    axes.set_yticks(range(len(labels)), labels if names else [""] * len(labels))
    axes.tick_params(axis="y", length=0)
    axes.grid(True, axis="x")
    axes.grid(False, axis="y")
    axes.xaxis.set_major_locator(MaxNLocator(4, steps=[1, 2, 5, 10]))


def decomposition_figure(found: Sequence[Decomposition], looks: Looks) -> Figure | None:
    """For each encoding at the longest shared length: the change of N split into early tokens and context."""
    if not found:
        return None
    length = max(one.length for one in found)
    here = [one for one in found if one.length == length]
    labels = [label for label in looks if any(one.label == label for one in here)]
    rows = {one.label: one for one in here}

    def draw(canvas: Canvas) -> None:
        axes = canvas.axes()[0]
        room = 0.62 * canvas.points * max(map(len, labels)) / 72 + 0.1
        canvas.sheet.subplots_adjust(left=room / canvas.sheet.get_figwidth())
        reach = 2.5 * float(np.median([abs(rows[label].total.estimate) for label in labels])) + 0.02
        for place, label in enumerate(labels):
            one, colour = rows[label], looks[label].light
            for offset, interval, alpha in ((-0.2, one.early, 0.35), (0.2, one.context, 1.0)):
                low, high = interval.bounds()
                value = float(np.clip(interval.estimate, -reach, reach))
                axes.barh(place + offset, value, height=0.34, color=colour, alpha=alpha, linewidth=0)
                if abs(interval.estimate) <= reach:
                    axes.plot(np.clip([low, high], -reach, reach), [place + offset] * 2, color=INK, lw=1)
                else:
                    side = "right" if value > 0 else "left"
                    ink = INK if alpha < 1 else PAPER
                    axes.text(
                        value * 0.98,
                        place + offset,
                        f"{interval.estimate:+.2f}",
                        ha=side,
                        va="center",
                        color=ink,
                    )
        axes.axvline(0, color=MUTED, linewidth=1)
        axes.set_xlim(-reach * 1.05, reach * 1.05)
        axes.set_ylim(len(labels) - 0.5, -0.5)
        axes.set_yticks(range(len(labels)), labels)
        axes.tick_params(axis="y", length=0)
        axes.grid(True, axis="x")
        axes.grid(False, axis="y")
        axes.set_xlabel("change of loss from the training length, nats")

    first = here[0]
    same = "one index range" if first.same_range else "whole documents for N, the last part of them for X"
    return Figure(
        name="decomposition",
        title=f"Where the change at {length:,} comes from",
        caption=f"Change of the nonoverlapping loss from the training length {first.train_length:,}, in two "
        "parts. Pale, above: early tokens of a window (nonoverlapping minus exact-context; longer windows "
        "have fewer of them). Full, below: what more context does to a target (exact-context). Black: 95 % "
        f"intervals ({'documents, these runs' if first.num_seeds == 1 else 'seeds and documents'}); {same}.",
        alt="; ".join(
            f"{label}: early tokens {rows[label].early.estimate:+.3f}, "
            f"context {rows[label].context.estimate:+.3f} nats"
            for label in labels
        ),
        table=decomposition_table(found),
        draw=draw,
    )


# --- cost ------------------------------------------------------------------------------------------------


def cost_figure(cost: pd.DataFrame, looks: Looks) -> Figure | None:
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
        room = 0.62 * canvas.points * max(map(len, labels)) / 72 + 0.1
        canvas.sheet.subplots_adjust(left=room / canvas.sheet.get_figwidth(), wspace=0.12)
        for place, (axes, (column, title)) in enumerate(zip(panels, kept.items(), strict=True)):
            colours = [looks[label].light for label in labels]
            axes.barh(range(len(labels)), table[column].fillna(0), height=0.6, color=colours, linewidth=0)
            for row, value in enumerate(table[column]):
                text = f" {number(value)}" if value == value else " not known"
                axes.text(value if value == value else 0, row, text, va="center", fontsize=canvas.points - 1)
            axes.set_xlim(0, max(float(table[column].max()) * 1.32, 1e-9))
            axes.set_ylim(len(labels) - 0.4, -0.6)
            shown = canvas.narrow or place == 0
            axes.set_yticks(range(len(labels)), labels if shown else [""] * len(labels))
            axes.set_xticks([])
            axes.tick_params(axis="y", length=0)
            axes.grid(False)
            axes.spines["bottom"].set_visible(False)
            axes.spines["left"].set_color(GRID)
            axes.set_title(title)

    return Figure(
        name="cost",
        title="Cost of a training run",
        caption="Median logged speed, peak memory of the process and parameters that the encoding adds; mean "
        "over seeds. Speeds of runs that shared a machine with others are not comparable.",
        alt="; ".join(
            f"{label}: "
            + ", ".join(f"{title} {number(row[c])}" for c, title in kept.items() if row[c] == row[c])
            for label, row in table.iterrows()
        ),
        table=table.reset_index(),
        draw=draw,
        height=0.62,
        narrow_height=0.55 * len(kept),
    )
