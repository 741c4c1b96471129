"""Curves over a length axis: bands, the training-length line, cuts with their values, labels at the ends."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.transforms import ScaledTranslation

from pe_study.reporting.drawing import MUTED, PAPER, Canvas
from pe_study.reporting.fitting import fitted, inches_of
from pe_study.reporting.palette import Look
from pe_study.stats import Array

LEADER = 14  # points from the axes to a label
LEAST = 0.02  # of a value: the least height of a panel, four times what counts as a rise
MOST_LABELS = {True: 10, False: 14}  # narrow or not; more than these get a legend


@dataclass(frozen=True)
class Line:
    """One curve in axis units (log2 of a length), its band (nan: none) and its truncation line (or None)."""

    name: str
    x: Array
    y: Array
    look: Look
    low: Array | None = None
    high: Array | None = None
    truncated: tuple[Array, Array] | None = None


# --- axes ------------------------------------------------------------------------------------------------


def length_axis(
    axes: Axes, lengths: Sequence[int], train_lengths: Sequence[int], canvas: Canvas, unit: str = "tokens"
) -> None:
    """A log2 axis of lengths, with multiples of the training length, and a line at the latter."""
    low, high = math.log2(min(lengths)), math.log2(max([*lengths, *train_lengths]))
    room = max(0.03 * (high - low), 0.1)
    axes.set_xlim(low - room, high + room)
    single = train_lengths[0] if len(set(train_lengths)) == 1 else None
    ticks = spaced(lengths, 5 if canvas.narrow else 9, keep=single)
    axes.set_xticks([math.log2(n) for n in ticks], [_length_text(n, single) for n in ticks])
    rest = [math.log2(n) for n in lengths if n not in ticks]
    axes.set_xticks(rest, [""] * len(rest), minor=True)
    axes.tick_params(axis="x", which="minor", size=2, bottom=True)
    axes.set_xlabel(f"length, {unit}" + (" (and times the training length)" if single else ""))
    for train_length in sorted(set(train_lengths)):
        training_line(axes, train_length, canvas)


def training_line(axes: Axes, train_length: int, canvas: Canvas) -> None:
    """A vertical line at the training length, named above the axes."""
    here = math.log2(train_length)
    left, right = axes.get_xlim()
    place = (here - left) / (right - left)
    if not 0 <= place <= 1:
        return
    axes.axvline(here, color=MUTED, linewidth=1, linestyle=(0, (2, 2)), zorder=1)
    side = "left" if place < 0.15 else "right" if place > 0.85 else "center"
    axes.text(
        place,
        1 + 4 / canvas.height_of(axes),
        f"trained at {train_length:,}",
        transform=axes.transAxes,
        ha=side,
        fontsize=canvas.points - 1,
        color=MUTED,
    )


def _length_text(length: int, train_length: int | None) -> str:
    text = f"{length:,}" if length < 10_000 else f"{length / 1024:.4g}k"
    return text if train_length is None else f"{text}\n{length / train_length:.4g}\u00d7"


def spaced(lengths: Sequence[int], most: int, keep: int | None) -> list[int]:
    """Lengths far enough apart in log2 to label; the last one and `keep` always, powers of two first."""
    lengths = sorted(set(lengths))
    gap = 0.999 * math.log2(lengths[-1] / lengths[0]) / most
    chosen = [lengths[-1]]
    if keep in lengths and math.log2(lengths[-1] / keep) > gap:
        chosen.append(keep)
    for length in sorted(lengths, key=lambda n: (n & (n - 1) != 0, n)):
        if all(abs(math.log2(length / other)) > gap for other in chosen):
            chosen.append(length)
    return sorted(set(chosen))


# --- curves ----------------------------------------------------------------------------------------------


def draw_lines(
    axes: Axes, lines: Sequence[Line], canvas: Canvas, limits: tuple[float, float], *, label: bool = True
) -> None:
    """Curves with bands; one above the limits leaves at the top, marked, labelled with its last value."""
    axes.set_ylim(limits)
    top = limits[1]
    for line in lines:
        colour = line.look.light
        dots = {"marker": line.look.marker, "markeredgecolor": PAPER, "markeredgewidth": 0.4}
        style = {"linestyle": line.look.dash, **(dots if len(line.x) <= 40 else {})}
        axes.plot(line.x, np.minimum(line.y, 1e300), color=colour, zorder=3, **style)
        if line.low is not None and np.isfinite(line.low).any():
            axes.fill_between(line.x, line.low, line.high, color=colour, alpha=0.16, linewidth=0, zorder=2)
        if line.truncated is not None:
            axes.plot(*line.truncated, color=colour, linewidth=0.8, linestyle=":", zorder=1)
        left = crossings(line, top)
        axes.plot(left, [top] * len(left), "^", color=colour, clip_on=False, zorder=5, markersize=5)
    if label:
        label_ends(axes, lines, canvas)


def crossings(line: Line, top: float) -> list[float]:
    """Where a curve leaves through the top as it is drawn, or where it starts above it."""
    above = line.y > top
    found = [float(line.x[0])] if above[:1].any() else []
    for here in np.flatnonzero(above[1:] & (line.y[:-1] <= top)):
        rise = min(line.y[here + 1], 1e300) - line.y[here]
        part = (top - line.y[here]) / rise
        found.append(float(line.x[here] + part * (line.x[here + 1] - line.x[here])))
    return found


def limits_of(lines: Sequence[Line], cut: float) -> tuple[float, float]:
    """From a little below the lowest value to `cut`, or to a little above the highest where none is cut.

    At least `LEAST` of the value high, so that noise is not drawn as if it were a rise.
    """
    values = np.concatenate([line.y[~np.isnan(line.y)] for line in lines] or [np.zeros(0)])
    shown = values[values <= cut]
    if shown.size == 0:
        return 0.0, 1.0
    cuts = bool((values > cut).any())
    bottom, top = float(shown.min()), cut if cuts else float(shown.max())
    room = max(0.06 * (top - bottom), (LEAST * abs(top) - (top - bottom)) / 2) or 0.01
    return bottom - room, top + (0 if cuts else room)


def label_ends(axes: Axes, lines: Sequence[Line], canvas: Canvas) -> None:
    """Names at the right ends, moved apart vertically; a legend below when there are too many."""
    named = [(line, *_end(line, axes)) for line in lines if not np.isnan(line.y).all()]
    texts = [text for *_, text in named]
    if len(named) > MOST_LABELS[canvas.narrow] or not canvas.has_room(texts):
        legend([replace(line, name=text) for line, _, text in named], canvas)
        return
    canvas.reserve(texts)
    height = canvas.height_of(axes)
    places = spread([place for _, place, _ in named], 1.22 * canvas.points / height)
    aside = axes.transAxes + ScaledTranslation(LEADER / 72, 0, canvas.sheet.dpi_scale_trans)
    for (line, place, text), moved in zip(named, places, strict=True):
        colour = line.look.light
        axes.text(1, moved, text, transform=aside, va="center", fontsize=canvas.points - 0.5)
        ends = [1.0, 1 + (LEADER - 2) / 72 / (axes.get_position().width * canvas.sheet.get_figwidth())]
        axes.plot(ends, [place, moved], color=colour, lw=1, transform=axes.transAxes, clip_on=False)


def _end(line: Line, axes: Axes) -> tuple[float, str]:
    """Where a curve leaves the axes (a fraction of their height), and its label, with its value if cut."""
    last = line.y[~np.isnan(line.y)][-1]
    bottom, top = axes.get_ylim()
    if last > top:
        return 1.0, f"{line.name} \u2191{number(float(last))}"
    return (last - bottom) / (top - bottom), line.name


def legend(lines: Sequence[Line], canvas: Canvas, columns: int | None = None) -> None:
    """A legend below the panels, in at most so many columns as hold its names, and room for it."""
    width, height = canvas.sheet.get_size_inches()
    handle = 4.5 * canvas.points / 72
    names = [fitted(line.name, width - handle - 0.2, canvas.points) for line in lines]
    fit = int((width - 0.1) / (inches_of(names, canvas.points) + handle))
    columns = max(1, min(columns or (2 if canvas.narrow else 5), fit))
    handles = [
        Line2D([], [], color=line.look.light, linestyle=line.look.dash, marker=line.look.marker)
        for line in lines
    ]
    canvas.sheet.legend(handles, names, loc="lower center", ncols=columns, handlelength=2.6)
    rows = math.ceil(len(lines) / columns)
    breaks = [name.count("\n") for name in names]
    broken = sum(breaks) if columns == 1 else max(breaks, default=0) * rows
    inches = canvas.points * (1.6 * rows + 1.2 * broken) / 72 + 0.08
    canvas.sheet.set_size_inches(width, height + inches)
    share = height / (height + inches)
    now = canvas.sheet.subplotpars
    canvas.sheet.subplots_adjust(bottom=1 - share * (1 - now.bottom), top=1 - share * (1 - now.top))


def spread(places: Sequence[float], gap: float) -> list[float]:
    """Move heights apart by at least `gap`, as little as possible, keeping their order."""
    order = np.argsort(places, kind="stable")
    blocks: list[list[float]] = []  # [sum of the wanted bottoms, how many labels]
    for rank, index in enumerate(order):
        blocks.append([places[index] - rank * gap, 1])
        while len(blocks) > 1 and blocks[-2][0] / blocks[-2][1] > blocks[-1][0] / blocks[-1][1]:
            total, count = blocks.pop()
            blocks[-1][0] += total
            blocks[-1][1] += count
    bottoms = [total / count for total, count in blocks for _ in range(int(count))]
    moved = np.empty(len(places))
    moved[order] = np.array(bottoms) + gap * np.arange(len(places))
    return [float(place) for place in moved]


def number(value: float) -> str:
    """A value for a label: three significant digits, plain up to a million."""
    if math.isinf(value) or value > 1e300:
        return "overflow"
    if value >= 1e6:
        return f"{value:.1e}".replace("e+0", "e").replace("e+", "e")
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
