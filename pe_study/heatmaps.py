"""Heat maps: rescales by length, retrieval by depth and length."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
import pandas as pd
import seaborn as sns
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap

from pe_study.captions import SHORT, caption, listed, slug
from pe_study.curves import number
from pe_study.drawing import MUTED, PAPER, Canvas, Figure
from pe_study.tables import TRUNCATION

# Low to high in one hue, dark enough at one end for white text; reads in grey.
RAMP = LinearSegmentedColormap.from_list("blues", ("#f3f6fb", "#b9cbe8", "#6f93cf", "#3158a6", "#152f66"))


def rescale_map(curves: pd.DataFrame, metric: str, protocol: str, label: str) -> Figure | None:
    """Rescales (and their factors) down, lengths across; colour and number: the value."""
    own = curves[(curves["protocol"] == protocol) & (curves["label"] == label)]
    own = own[own["rescale"] != TRUNCATION]
    if own["rescale"].nunique() < 2 or own[metric].notna().sum() == 0:
        return None
    table = own.pivot_table(index="rescale", columns="length", values=metric, observed=True, dropna=False)
    table = table.loc[sorted(table.index, key=_kind_and_factor)]

    def draw(canvas: Canvas) -> None:
        _heat(canvas, table, list(table.index), [f"{int(n):,}" for n in table.columns], "length, tokens")

    return Figure(
        name=f"rescale-map-{slug(label)}-{protocol}-{metric}",
        title=f"{label}: rescale by length, {SHORT[metric]} ({protocol})",
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


def retrieval_figure(retrieval: pd.DataFrame) -> Figure | None:
    """Share of correct answers by depth and length, a panel a label and rescale."""
    answered = retrieval[retrieval["status"].fillna("ok") == "ok"].dropna(subset=["correct"])
    if answered.empty:
        return None
    answered = answered.assign(
        correct=answered["correct"].astype(float), depth=answered["depth"].astype(float)
    )
    groups = {
        label if rescale == "none" else f"{label}, {rescale}": part.pivot_table(
            index="depth", columns="length", values="correct", observed=True
        )
        for (label, rescale), part in answered.groupby(["label", "rescale"], observed=True)
    }

    def draw(canvas: Canvas) -> None:
        across = 2 if canvas.narrow else 3
        panels = canvas.axes(math.ceil(len(groups) / across), across)
        for axes, (name, table) in zip(panels, groups.items(), strict=False):
            depths, lengths = (
                [f"{100 * d:.0f} %" for d in table.index],
                [f"{int(n):,}" for n in table.columns],
            )
            _heat_panel(axes, canvas, table, depths, lengths, (0.0, 1.0), lambda value: f"{100 * value:.0f}")
            axes.set_title(name)
        for axes in panels[len(groups) :]:
            axes.set_axis_off()

    floor = retrieval.loc[retrieval["status"] == "floor", "label"]
    tasks = ", ".join(sorted({str(task) for task in answered["task"]}))
    samples = int(answered.groupby(["label", "rescale", "length", "depth"], observed=True).size().min())
    lines = math.ceil(len(groups) / 3)
    return Figure(
        name="retrieval",
        title="Retrieval by depth and length",
        caption=f"Per cent of answers that are right ({tasks}), by "
        f"where in the text the answer stands; at least {samples} samples a cell; trained at length "
        f"{listed(answered['train_length'].dropna())}.{_floor_text(floor)}",
        alt="; ".join(
            f"{name}: {100 * float(np.nanmean(table)):.0f} % over all" for name, table in groups.items()
        ),
        table=answered,
        draw=draw,
        height=0.35 + 0.55 * lines,
        narrow_height=0.3 + 0.5 * math.ceil(len(groups) / 2),
    )


def _floor_text(labels: pd.Series) -> str:
    names = ", ".join(dict.fromkeys(str(label) for label in labels))
    return f" Not shown, under half right within the training length already: {names}." if names else ""


def _heat(
    canvas: Canvas, table: pd.DataFrame, rows: Sequence[str], columns: Sequence[str], what: str
) -> None:
    axes = canvas.axes()[0]
    room = 0.6 * canvas.points * max(map(len, rows)) / 72 + 0.12
    canvas.sheet.subplots_adjust(left=room / canvas.sheet.get_figwidth())
    finite = table.to_numpy(float)[np.isfinite(table.to_numpy(float))]
    low, high = float(finite.min()), float(np.quantile(finite, 0.85))
    _heat_panel(axes, canvas, table, rows, columns, (low, max(high, low + 1e-9)), number)
    axes.set_xlabel(what)


def _heat_panel(
    axes: Axes,
    canvas: Canvas,
    table: pd.DataFrame,
    rows: Sequence[str],
    columns: Sequence[str],
    limits: tuple[float, float],
    write: Callable[[float], str],
) -> None:
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
        axes.text(
            column + 0.5, row + 0.5, text, ha="center", va="center", color=ink, fontsize=canvas.points - 1.5
        )
