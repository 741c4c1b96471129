"""Heat maps: a colour and a number a cell; rescales by length."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
import pandas as pd
import seaborn as sns
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap

from pe_study.reporting.captions import SHORT, caption, slug, suffixed, titled
from pe_study.reporting.curves import number
from pe_study.reporting.drawing import MUTED, PAPER, Canvas, Figure
from pe_study.tables import TRUNCATION

# Low to high in one hue, dark enough at one end for white text; reads in grey.
RAMP = LinearSegmentedColormap.from_list("blues", ("#f3f6fb", "#b9cbe8", "#6f93cf", "#3158a6", "#152f66"))


def rescale_map(
    curves: pd.DataFrame, metric: str, protocol: str, label: str, study: str = ""
) -> Figure | None:
    """Rescales (and their factors) down, lengths across; colour and number: the value.

    `curves` are those of one study; `study` names it where the page has several.
    """
    own = curves[(curves["protocol"] == protocol) & (curves["label"] == label)]
    own = own[own["rescale"] != TRUNCATION]
    if own["rescale"].nunique() < 2 or own[metric].notna().sum() == 0:
        return None
    table = own.assign(rescale=own["rescale"].astype(str)).pivot(
        index="rescale", columns="length", values=metric
    )  # refuses two values of one cell: nothing here is a mean
    table = table.loc[sorted(table.index, key=_kind_and_factor)]

    def draw(canvas: Canvas) -> None:
        _heat(canvas, table, list(table.index), [f"{int(n):,}" for n in table.columns], "length, tokens")

    return Figure(
        name=suffixed(f"rescale-map-{slug(label)}-{protocol}-{metric}", study),
        title=titled(f"{label}: rescale by length, {SHORT[metric]} ({protocol})", study),
        caption=caption(own, protocol, bands=False)
        + " auto is the length over the training length, never below 1.",
        alt="; ".join(
            f"{name}: {', '.join(number(v) for v in row if v == v)}" for name, row in table.iterrows()
        ),
        table=own,
        draw=draw,
        height=0.45 + 0.09 * len(table),
    )


def _kind_and_factor(rescale: str) -> tuple[bool, str, float]:
    kind, _, rest = str(rescale).partition(":")
    factor = rest.split(":")[0]
    return kind != "none", kind, float(factor) if factor.replace(".", "", 1).isdigit() else math.inf


def _heat(
    canvas: Canvas, table: pd.DataFrame, rows: Sequence[str], columns: Sequence[str], what: str
) -> None:
    axes = canvas.axes()[0]
    room = 0.6 * canvas.points * max(map(len, rows)) / 72 + 0.12
    canvas.sheet.subplots_adjust(left=room / canvas.sheet.get_figwidth())
    finite = table.to_numpy(float)[np.isfinite(table.to_numpy(float))]
    low, high = float(finite.min()), float(np.quantile(finite, 0.85))
    heat_panel(axes, canvas, table, rows, columns, (low, max(high, low + 1e-9)), _fixed)
    axes.set_xlabel(what)


def _fixed(value: float) -> str:
    """Two decimals throughout, so that cells line up; shorter where a number is long."""
    return f"{value:.2f}" if value < 100 else number(value)


def heat_panel(
    axes: Axes,
    canvas: Canvas,
    table: pd.DataFrame,
    rows: Sequence[str],
    columns: Sequence[str],
    limits: tuple[float, float],
    write: Callable[[float], str],
    below: pd.DataFrame | None = None,
) -> None:
    """A coloured cell a value, written in it; `below`: smaller text under it."""
    values = table.to_numpy(float)
    sns.heatmap(
        values, ax=axes, cmap=RAMP, vmin=limits[0], vmax=limits[1], cbar=False,
        linewidths=1, linecolor=PAPER, xticklabels=columns, yticklabels=rows,
    )  # fmt: skip
    axes.tick_params(length=0)
    axes.tick_params(axis="y", rotation=0)
    axes.tick_params(axis="x", rotation=0 if len(columns) * max(map(len, columns)) < 45 else 45)
    axes.set(xlabel="", ylabel="")
    if values.shape[1] > (9 if canvas.narrow else 16):
        return
    for (row, column), value in np.ndenumerate(values):
        text = "\u2013" if math.isnan(value) else write(value)
        share = (min(value, limits[1]) - limits[0]) / (limits[1] - limits[0])
        ink = "#ffffff" if (share > 0.5) else "#101418"
        ink = MUTED if math.isnan(value) else ink
        under = "" if below is None else str(below.iloc[row, column])
        place = {"x": column + 0.5, "ha": "center", "va": "center", "color": ink}
        axes.text(y=row + (0.36 if under else 0.5), s=text, fontsize=canvas.points - 1.5, **place)
        if under:
            axes.text(y=row + 0.74, s=under, fontsize=canvas.points - 3, **place)
