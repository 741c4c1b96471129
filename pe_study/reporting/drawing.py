"""The house style of every figure: sizes, themes, saving, and the SVG that a page inlines.

A figure is drawn in light colours by a function of a `Canvas`, which serves one and two paper columns.
The dark version is the same drawing recoloured; the page inlines an SVG whose colours are CSS variables.
"""

from __future__ import annotations

import io
import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import matplotlib as mpl
import pandas as pd
import seaborn as sns
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.collections import QuadMesh
from matplotlib.colors import to_hex, to_rgba, to_rgba_array
from matplotlib.figure import Figure as Sheet
from matplotlib.text import Text

from pe_study.reporting import fonts
from pe_study.reporting.fitting import fitted, inches_of

# Width and height in inches: a paper's two columns and its one column.
SIZES = {"two-column": (6.9, 4.0), "one-column": (3.4, 3.3)}
POINTS = {"two-column": 8.5, "one-column": 7.5}  # of text
INK, MUTED, GRID, PAPER = "#1c2024", "#646b73", "#e3e6ea", "#fefefe"
DARK = {INK: "#eceff2", MUTED: "#a3abb4", GRID: "#343a41", PAPER: "#15181c"}


MOST_RIGHT, MOST_LEFT = 0.42, 0.42  # of the width of a sheet: for labels at the ends, for names of rows
LEADER = 24 / 72  # inches from the axes to a label, and past it


def row_names(names: Sequence[str], width: float, points: float) -> list[str]:
    """Names of rows on a sheet `width` inches wide, in lines that leave room for the rows."""
    return [fitted(name, MOST_LEFT * width, points) for name in names]


@dataclass
class Canvas:
    """A sheet to draw on, in light colours, and whether it is the narrow size."""

    sheet: Sheet
    narrow: bool

    def axes(
        self, rows: int = 1, columns: int = 1, *, titled: bool = False, titles: Sequence[str] = ()
    ) -> list[Axes]:
        """Panels in reading order, with room for axis labels, and for titles above their training lines.

        titles: those of `titles` (below), where they are names; their lines get more room.
        """
        width, height = self.sheet.get_size_inches()
        more = 1.2 * self.points * max((title.count("\n") for title in titles), default=0) / 72
        panels = self.sheet.subplots(rows, columns, squeeze=False)
        top, bottom = 0.42 if titled else 0.26, 0.56
        hspace = 0.9 / (height / rows)
        panel = (height - top - bottom) / (rows + (rows - 1) * hspace)
        height += more * rows
        self.sheet.set_size_inches(width, height)
        self.sheet.subplots_adjust(
            left=0.58 / width,
            right=1 - 0.12 / width,
            bottom=bottom / height,
            top=1 - (top + more) / height,
            wspace=0.55 / (width / columns),
            hspace=hspace + more / panel,
        )
        return list(panels.flat)

    def titles(self, names: Sequence[str], columns: int) -> list[str]:
        """Names as titles of panels that stand `columns` in a row: in lines that fit."""
        inches = (self.sheet.get_figwidth() - 0.7) / columns - 0.35
        return [fitted(name, inches, self.points) for name in names]

    def xlabel(self, axes: Axes, text: str) -> None:
        """What a panel's axis is, in two lines where it would leave the sheet."""
        box, width = axes.get_position(), self.sheet.get_figwidth()
        middle = (box.x0 + box.x1) / 2
        inches = 2 * min(middle, 1 - middle) * width
        axes.set_xlabel(fitted(text, inches, self.points, lines=2))

    def has_room(self, texts: Sequence[str]) -> bool:
        """Whether `texts` may stand at the right without taking the room of what they name."""
        return inches_of(texts, self.points) + LEADER <= MOST_RIGHT * self.sheet.get_figwidth()

    def reserve(self, texts: Sequence[str]) -> None:
        """Room at the right for the widest of `texts` and its leader."""
        inches = inches_of(texts, self.points) + LEADER
        self.sheet.subplots_adjust(right=1 - inches / self.sheet.get_figwidth())

    def reserve_left(self, texts: Sequence[str]) -> None:
        """Room at the left for the names of rows, as `row_names` breaks them."""
        width = self.sheet.get_figwidth()
        inches = inches_of(row_names(texts, width, self.points), self.points) + 0.1
        self.sheet.subplots_adjust(left=inches / width, wspace=0.12)

    @property
    def points(self) -> float:
        """The size of plain text."""
        return float(mpl.rcParams["font.size"])

    def height_of(self, axes: Axes) -> float:
        """The height of a panel in points."""
        return float(axes.get_position().height * self.sheet.get_figheight() * 72)


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
    narrow_height: float | None = None  # the same for one column, where panels are stacked; None = height


def render(
    figure: Figure, size: str, forms: Sequence[str], colours: Mapping[str, str] | None = None
) -> dict[str, bytes]:
    """The figure in each of `forms` ("svg", "png"); with `colours` (light to dark) also "svg-dark", ….

    The same input gives the same bytes.
    """
    narrow = size == "one-column"
    width, height = SIZES[size]
    share = figure.narrow_height if narrow and figure.narrow_height else figure.height
    with mpl.rc_context(_style(size)), warnings.catch_warnings():
        # What no font here has: an SVG shows it all the same, a PNG as boxes, which the report says itself.
        warnings.filterwarnings("ignore", message="Glyph .* missing from font")
        sheet = Sheet(figsize=(width, height * share))
        FigureCanvasAgg(sheet)
        figure.draw(Canvas(sheet, narrow))
        _choose_fonts(sheet)
        made = {form: _save(sheet, form) for form in forms}
        if colours is not None and "svg" in made:
            made["svg-dark"] = _in_colours(made["svg"].decode("utf-8"), colours).encode("utf-8")
        if colours is not None and "png" in made:
            recolour(sheet, colours)
            made["png-dark"] = _save(sheet, "png")
    return made


def _choose_fonts(sheet: Sheet) -> None:
    """Write what the house font lacks in an installed one."""
    for artist in sheet.findobj(Text):
        chosen = fonts.families(artist.get_text()) if isinstance(artist, Text) else []
        if len(chosen) > 1:
            artist.set_fontfamily(chosen)


def _in_colours(svg: str, colours: Mapping[str, str]) -> str:
    """An SVG with its colours replaced by those of a mapping; others stay."""
    return re.sub("#[0-9a-f]{6}", lambda hit: colours.get(hit[0], hit[0]), svg)


def _save(sheet: Sheet, form: str) -> bytes:
    out = io.BytesIO()
    png = {"metadata": {"Software": None}, "dpi": 200, "pil_kwargs": {"compress_level": 3}}
    options: dict[str, Any] = {"metadata": {"Date": None}} if form == "svg" else png
    sheet.savefig(out, format=form, facecolor=sheet.get_facecolor(), **options)
    return out.getvalue()


def recolour(sheet: Sheet, colours: Mapping[str, str]) -> None:
    """Turn what was drawn in light colours into its dark version; other colours stay."""
    for artist in sheet.findobj():
        for name in ("color", "facecolor", "edgecolor", "markerfacecolor", "markeredgecolor"):
            get, put = getattr(artist, f"get_{name}", None), getattr(artist, f"set_{name}", None)
            if get is None or put is None or isinstance(artist, QuadMesh):
                continue
            found = to_rgba_array(get())
            dark = [colours.get(to_hex(colour)) for colour in found]
            if len(dark) == 1 and dark[0]:
                put(to_rgba(dark[0], float(found[0, 3])))


def _style(size: str) -> dict[str, object]:
    points = POINTS[size]
    family = {"font.family": "sans-serif", "font.sans-serif": [fonts.HOUSE], "font.size": points}
    sizes = dict.fromkeys(
        ("xtick.labelsize", "ytick.labelsize", "legend.fontsize", "axes.titlesize"), points - 0.5
    )
    inks = dict.fromkeys(("axes.labelcolor", "text.color", "xtick.labelcolor", "ytick.labelcolor"), INK)
    quiet = dict.fromkeys(("axes.edgecolor", "xtick.color", "ytick.color"), MUTED)
    papers = dict.fromkeys(("axes.facecolor", "figure.facecolor", "savefig.facecolor"), PAPER)
    return {
        **sns.axes_style("white"),
        **family,
        **sizes,
        **inks,
        **quiet,
        **papers,
        "axes.labelsize": points,
        "axes.titlelocation": "left",
        "lines.linewidth": 1.6,
        "lines.markersize": 4.2,
        "xtick.bottom": True,
        "ytick.left": True,
        "xtick.major.size": 3,
        "ytick.major.size": 3,
        "axes.grid": True,
        "axes.grid.axis": "y",
        "grid.color": GRID,
        "grid.linewidth": 0.7,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "legend.frameon": False,
        "svg.fonttype": "none",
        "svg.hashsalt": "pe_study",
        "text.parse_math": False,
        "axes.unicode_minus": True,
        "axes.formatter.useoffset": False,  # an axis never says "+8.002" in a corner
    }


def themed(svg: bytes, colours: Mapping[str, str], prefix: str) -> str:
    """An inline SVG: colours as CSS variables (`--c1c2024`), ids of its own, scaled to its container."""
    text = svg.decode("utf-8")
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>|<!--.*?-->", "", text, flags=re.DOTALL)
    text = re.sub(r'(\bid="|url\(#|href="#)', rf"\g<1>{prefix}-", text)
    text = _in_colours(text, {colour: f"var(--c{colour[1:]})" for colour in colours})
    return re.sub(r' (?:width|height)="[\d.]+pt"', "", text, count=2)
