"""Where an axis around zero is cut for a few values far outside, and how that is marked."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes

LEAST = 0.02  # nats: no axis is shorter
MOST = 3.0  # an axis ends at this many times what four fifths of the values stay below


def reach_of(values: Sequence[float], ends: Sequence[float]) -> float:
    """How far an axis around zero goes for these values and ends of intervals: to the farthest of them, or
    less where a few values lie far outside."""
    sizes = np.abs([value for value in values if math.isfinite(value)])
    every = np.abs([end for end in (*values, *ends) if math.isfinite(end)])
    if not len(sizes):
        return LEAST
    return max(min(MOST * float(np.quantile(sizes, 0.8)), float(every.max())), LEAST)


def arrow(axes: Axes, x: float, row: float, colour: str) -> None:
    """What marks that a bar, value or interval goes on past `x`, the edge."""
    axes.plot([x], [row], ">" if x > 0 else "<", color=colour, markersize=4.5, linewidth=0, clip_on=False)


def drawn_interval(
    axes: Axes, low: float, high: float, row: float, reach: float, colour: str, width: float
) -> None:
    """An interval as far as the axis goes, with an arrow at an end that is cut; nothing without one."""
    if not (math.isfinite(low) and math.isfinite(high)):
        return
    axes.plot(np.clip([low, high], -reach, reach), [row, row], color=colour, linewidth=width)
    for end in (low, high):
        if abs(end) > reach:
            arrow(axes, math.copysign(reach, end), row, colour)


def write(axes: Axes, value: float, low: float, high: float, row: float, points: float) -> None:
    """The number of what is cut, "+1.59 \u00b1 0.19", at zero on the side that is empty."""
    half = (high - low) / 2
    text = f"{value:+.2f}" + (f" \u00b1 {half:.2g}" if math.isfinite(half) else "")
    axes.annotate(
        text.replace("-", "\u2212"),
        (0, row),
        xytext=(math.copysign(3, -value), 0),
        textcoords="offset points",
        ha="right" if value > 0 else "left",
        va="center",
        fontsize=points,
    )


def arrows_text(what: str, drawn: Sequence[tuple[float, float, float]], reach: float) -> str:
    """The sentence of a caption for (value, low, high) of which some are cut at `reach`; "" for none."""
    if any(abs(value) > reach for value, _, _ in drawn):
        return (
            f" An arrow at the edge: the {what} or its interval goes on; a cut {what} has its number "
            "written, and half the width of its 95 % interval."
        )
    if any(abs(end) > reach for _, *ends in drawn for end in ends):
        return " An arrow at the edge: the interval goes on; the table has its ends."
    return ""
