"""The house style of every figure: sizes, themes, axes over length, direct labels, cut curves, saving.

A figure is drawn by a function of a `Canvas`; the same function serves each size (one and two paper columns) and
theme. The page inlines the light SVG with its colours turned into CSS variables, so one drawing serves both themes.
"""

from __future__ import annotations

import io
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import matplotlib as mpl
import numpy as np
import pandas as pd
import seaborn as sns
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure as Sheet

# Widths in inches: a paper's two columns and its one column.
SIZES = {"two-column": (6.9, 4.1), "one-column": (3.4, 3.3)}
INK, MUTED, GRID, PAPER = "#1c2024", "#646b73", "#e3e6ea", "#fefefe"
DARK = {INK: "#eceff2", MUTED: "#a3abb4", GRID: "#343a41", PAPER: "#15181c"}
CUT = math.log(3)  # curves are cut where the loss exceeds the worst one at the training length by this (nats)


@dataclass(frozen=True)
class Theme:
    """Roles of colour. `pairs` maps each light colour to its dark one."""

    dark: bool = False

    def __call__(self, colour: str) -> str:
        return DARK[colour] if self.dark else colour


@dataclass
class Canvas:
    """A sheet to draw on, its theme, and whether it is the narrow size."""

    sheet: Sheet
    theme: Theme
    narrow: bool

    def axes(self) -> Axes:
        """One panel that leaves room for axis labels; `reserve` makes room for labels at its right."""
        axes = self.sheet.subplots()
        width, height = self.sheet.get_size_inches()
        self.sheet.subplots_adjust(
            left=0.58 / width, right=1 - 0.12 / width, bottom=0.56 / height, top=1 - 0.26 / height
        )
        return axes

    def reserve(self, texts: Sequence[str]) -> None:
        """Room at the right for the widest of `texts` and its leader."""
        points = 0.62 * mpl.rcParams["font.size"] * max(map(len, texts), default=0) + 26
        self.sheet.subplots_adjust(right=1 - min(points / 72 / self.sheet.get_figwidth(), 0.45))


@dataclass(frozen=True)
class Figure:
    """What a report shows: a drawing, the table behind it, and words for those who do not see it."""

    name: str
    title: str
    caption: str
    alt: str
    table: pd.DataFrame
    draw: Callable[[Canvas], None]
    height: float = 1.0  # relative to the usual height


def render(figure: Figure, size: str, form: str, *, dark: bool = False) -> bytes:
    """The figure as "svg" or "png" bytes; the same input gives the same bytes."""
    theme = Theme(dark)
    width, height = SIZES[size]
    with mpl.rc_context(_style(theme, size)):
        sheet = Sheet(figsize=(width, height * figure.height))
        FigureCanvasAgg(sheet)
        figure.draw(Canvas(sheet, theme, size == "one-column"))
        out = io.BytesIO()
        metadata = {"Date": None} if form == "svg" else {"Software": None}
        sheet.savefig(out, format=form, dpi=200, metadata=metadata)
    return out.getvalue()


def _style(theme: Theme, size: str) -> dict[str, object]:
    points = 8.5 if size == "two-column" else 7.5
    ink, muted, grid, paper = theme(INK), theme(MUTED), theme(GRID), theme(PAPER)
    style = {
        **sns.axes_style("white"),
        "font.family": "sans-serif",
        "font.sans-serif": ["DejaVu Sans"],
        "font.size": points,
        "axes.titlesize": points + 0.5,
        "axes.labelsize": points,
        "axes.titlelocation": "left",
        "axes.titleweight": "bold",
        "xtick.labelsize": points - 0.5,
        "ytick.labelsize": points - 0.5,
        "legend.fontsize": points - 0.5,
        "lines.linewidth": 1.6,
        "lines.markersize": 4.2,
        "axes.edgecolor": muted,
        "axes.labelcolor": ink,
        "text.color": ink,
        "xtick.color": muted,
        "ytick.color": muted,
        "xtick.labelcolor": ink,
        "ytick.labelcolor": ink,
        "xtick.bottom": True,
        "ytick.left": True,
        "xtick.major.size": 3,
        "ytick.major.size": 3,
        "axes.grid": True,
        "axes.grid.axis": "y",
        "grid.color": grid,
        "grid.linewidth": 0.7,
        "axes.facecolor": paper,
        "figure.facecolor": paper,
        "savefig.facecolor": paper,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "legend.frameon": False,
        "svg.fonttype": "none",
        "svg.hashsalt": "pe_study",
        "path.simplify": True,
        "mathtext.default": "regular",
    }
    return style


# --- axes ------------------------------------------------------------------------------------------------


def length_axis(axes: Axes, lengths: Sequence[int], train_lengths: Sequence[int], canvas: Canvas) -> None:
    """A log2 axis of lengths, labelled with the multiple of the training length, and a line at the latter."""
    axes.set_xscale("log", base=2)
    low, high = min(lengths), max([*lengths, *train_lengths])
    axes.set_xlim(low / 1.12, high * 1.12 if high > low else low * 1.6)
    single = train_lengths[0] if len(set(train_lengths)) == 1 else None
    ticks = _spaced([n for n in lengths], 6 if canvas.narrow else 9, keep=single)
    axes.set_xticks(ticks, [_length_text(n, single) for n in ticks])
    axes.set_xticks([n for n in lengths if n not in ticks], minor=True)
    axes.tick_params(axis="x", which="minor", size=2, labelbottom=False)
    axes.set_xlabel("length, tokens" + (" (and times the training length)" if single else ""))
    for train_length in sorted(set(train_lengths)):
        training_line(axes, train_length, canvas)


def training_line(axes: Axes, train_length: int, canvas: Canvas) -> None:
    """A vertical line at the training length, named above the axes."""
    axes.axvline(train_length, color=canvas.theme(MUTED), linewidth=1, linestyle=(0, (2, 2)), zorder=1)
    axes.annotate(
        f"trained at {train_length:,}",
        (train_length, 1),
        xycoords=("data", "axes fraction"),
        xytext=(0, 3),
        textcoords="offset points",
        ha="left" if train_length <= axes.get_xlim()[0] * 1.5 else "center",
        fontsize="small",
        color=canvas.theme(MUTED),
    )


def _length_text(length: int, train_length: int | None) -> str:
    text = f"{length:,}" if length < 10_000 else f"{length / 1024:.4g}k"
    return text if train_length is None else f"{text}\n{length / train_length:.4g}\u00d7"


def _spaced(lengths: Sequence[int], most: int, keep: int | None) -> list[int]:
    """Lengths far enough apart in log2 to label; the training length and the last one always."""
    lengths = sorted(lengths)
    span = math.log2(lengths[-1] / lengths[0]) if lengths[-1] > lengths[0] else 1.0
    gap = span / most
    chosen = [lengths[-1]]
    if keep in lengths and keep != lengths[-1]:
        chosen.append(keep)
    for length in sorted(lengths, key=lambda n: (n & (n - 1) != 0, n)):
        if all(abs(math.log2(length / other)) > gap for other in chosen):
            chosen.append(length)
    return sorted(chosen)


# --- curves ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Line:
    """One curve: its name, x, y and band (nan where there is none), and how it is drawn."""

    name: str
    x: np.ndarray
    y: np.ndarray
    low: np.ndarray
    high: np.ndarray
    light: str
    dark: str
    dash: object
    marker: str
    level: float = math.nan  # the truncation line's height
    start: float = math.nan  # and where it begins


def draw_lines(axes: Axes, lines: Sequence[Line], canvas: Canvas, *, cut: float) -> None:
    """Curves with bands; those above `cut` leave at the top, marked there and labelled with their last value."""
    for line in lines:
        colour = line.dark if canvas.theme.dark else line.light
        size = None if len(line.x) <= 40 else 0
        axes.plot(
            line.x, line.y, color=colour, linestyle=line.dash, marker=line.marker, markersize=size, zorder=3
        )
        axes.fill_between(line.x, line.low, line.high, color=colour, alpha=0.16, linewidth=0, zorder=2)
        if math.isfinite(line.level) and line.x.max() > line.start:
            axes.hlines(
                line.level, line.start, line.x.max(), color=colour, linewidth=0.8, linestyle=":", zorder=1
            )
    _limit(axes, lines, cut)
    top = axes.get_ylim()[1]
    for line in lines:
        colour = line.dark if canvas.theme.dark else line.light
        crossings = _crossings(line, top)
        axes.plot(crossings, [top] * len(crossings), "^", color=colour, clip_on=False, zorder=5, markersize=5)
    _label_ends(axes, lines, canvas)


def _crossings(line: Line, top: float) -> list[float]:
    """Where a curve leaves through the top, interpolated as it is drawn (straight in log x); or where it starts above."""
    above = line.y > top
    found = [float(line.x[0])] if above[:1].any() else []
    for here in np.flatnonzero(above[1:] & ~above[:-1] & ~np.isnan(line.y[:-1])):
        part = (top - line.y[here]) / (line.y[here + 1] - line.y[here])
        found.append(
            float(line.x[here] * (line.x[here + 1] / line.x[here]) ** part)
            if line.x[here] > 0
            else line.x[here]
        )
    return found


def _limit(axes: Axes, lines: Sequence[Line], cut: float) -> None:
    """y from a little below the lowest value to a little above the highest that is not cut."""
    values = np.concatenate([line.y[np.isfinite(line.y)] for line in lines] or [np.array([])])
    shown = values[values <= cut]
    if shown.size == 0:
        axes.set_ylim(0, 1)
        return
    bottom = shown.min()
    top = cut if (values > cut).any() else shown.max()
    room = 0.06 * (top - bottom) if top > bottom else max(abs(top) * 0.05, 0.01)
    axes.set_ylim(bottom - room, top + (0 if (values > cut).any() else room))


def _label_ends(axes: Axes, lines: Sequence[Line], canvas: Canvas) -> None:
    """Names at the right ends, moved apart vertically; a legend below when there are too many."""
    named = [
        (line, *_end(line, axes)) for line in lines if np.isfinite(line.y).any() or np.isinf(line.y).any()
    ]
    if len(named) > (10 if canvas.narrow else 14):
        _legend(axes, lines, canvas)
        return
    size = mpl.rcParams["font.size"]
    height = axes.get_position().height * canvas.sheet.get_figheight() * 72
    gap = 1.25 * size / height
    places = spread([place for _, place, _ in named], gap)
    canvas.reserve([text for *_, text in named])
    for (line, place, text), moved in zip(named, places, strict=True):
        colour = line.dark if canvas.theme.dark else line.light
        axes.annotate(
            text,
            (1, place),
            xycoords="axes fraction",
            xytext=(16, (moved - place) * height),
            textcoords="offset points",
            va="center",
            fontsize=size - 0.5,
            annotation_clip=False,
            arrowprops={"arrowstyle": "-", "color": colour, "linewidth": 1.0, "shrinkA": 1, "shrinkB": 0},
        )


def _end(line: Line, axes: Axes) -> tuple[float, str]:
    """Where a curve leaves the axes (fraction of its height) and its label, with the value when it is cut."""
    last = np.flatnonzero(~np.isnan(line.y))[-1]
    bottom, top = axes.get_ylim()
    value = line.y[last]
    if value > top:
        return 1.0, f"{line.name} \u2191{number(value)}"
    early = "" if last == len(line.y) - 1 else f" (to {int(line.x[last]):,})"
    return (value - bottom) / (top - bottom), line.name + early


def _legend(axes: Axes, lines: Sequence[Line], canvas: Canvas) -> None:
    handles = [
        mpl.lines.Line2D([], [], color=line.dark if canvas.theme.dark else line.light, linestyle=line.dash,
                         marker=line.marker, label=line.name)
        for line in lines
    ]  # fmt: skip
    axes.figure.legend(handles=handles, loc="lower center", ncols=2 if canvas.narrow else 5)


def spread(places: Sequence[float], gap: float) -> list[float]:
    """Move heights apart by at least `gap`, as little as possible, keeping their order."""
    order = np.argsort(places, kind="stable")
    blocks: list[list[float]] = []  # [sum of wanted bottoms, count]
    for rank, index in enumerate(order):
        blocks.append([places[index] - rank * gap, 1])
        while len(blocks) > 1 and blocks[-2][0] / blocks[-2][1] > blocks[-1][0] / blocks[-1][1]:
            total, count = blocks.pop()
            blocks[-1][0] += total
            blocks[-1][1] += count
    moved = np.empty(len(places))
    rank = 0
    for total, count in blocks:
        for _ in range(int(count)):
            moved[order[rank]] = total / count + rank * gap
            rank += 1
    return [float(place) for place in moved]


def number(value: float) -> str:
    """A value for a label: three significant digits, plain up to a million."""
    if math.isinf(value) or value > 1e300:
        return "overflow"
    if value >= 1e6:
        return f"{value:.1e}".replace("e+0", "e").replace("e+", "e")
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


# --- the page's SVG --------------------------------------------------------------------------------------


def themed(svg: bytes, pairs: dict[str, str], prefix: str) -> str:
    """An inline SVG whose colours are CSS variables (`--c1c2024`), scaled to its container; ids are its own."""
    text = svg.decode("utf-8")
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    text = re.sub(r'(\bid="|url\(#|href="#)', rf"\g<1>{prefix}-", text)
    for colour in pairs:
        text = text.replace(colour, f"var(--c{colour[1:]})")
    text = re.sub(r'(<svg[^>]*?) width="[^"]*"', r"\1", text, count=1)
    return re.sub(r'(<svg[^>]*?) height="[^"]*"', r"\1", text, count=1)


def darkened(svg: bytes, pairs: dict[str, str]) -> bytes:
    """The dark version of a light SVG."""
    text = svg.decode("utf-8")
    return re.sub("#[0-9a-f]{6}", lambda found: pairs.get(found[0], found[0]), text).encode("utf-8")
