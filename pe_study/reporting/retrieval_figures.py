"""Retrieval: right answers by depth and length, against length with Wilson intervals, and gains of copies."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import numpy as np
import pandas as pd

from pe_study.reporting import answers, palette
from pe_study.reporting.answers import FLOOR, SERIES
from pe_study.reporting.captions import slug, trained
from pe_study.reporting.curves import Line, draw_lines, length_axis, limits_of
from pe_study.reporting.drawing import Canvas, Figure
from pe_study.reporting.heatmaps import heat_panel
from pe_study.reporting.page_tables import DASH, Table, plain
from pe_study.reporting.palette import Look

Looks = Mapping[str, Look]
OVER = "samples of these weights, not over seeds"


def names_of(frame: pd.DataFrame) -> pd.Series:
    """What a reader calls the series of each row: label, rescale and, where there are several, study."""
    name = frame["label"].where(frame["rescale"] == "none", frame["label"] + ", " + frame["rescale"])
    return name if frame["study"].nunique() < 2 else name + " (" + frame["study"] + ")"


def depth_figure(rows: pd.DataFrame, task: str) -> Figure | None:
    """Per cent of right answers by depth and length, a panel a series; None where all are at the floor."""
    counts = answers.accuracy(rows[(rows["task"] == task) & (rows["status"] != FLOOR)])
    if counts.empty:
        return None
    counts = counts.assign(name=names_of(counts))
    groups = dict(list(counts.groupby("name", sort=False)))
    percent = {name: _wide(part, 100 * part["accuracy"]) for name, part in groups.items()}
    bounds = {name: _wide(part, _bounds_text(part)) for name, part in groups.items()}
    depths, lengths = (max(table.shape[side] for table in percent.values()) for side in (0, 1))

    def draw(canvas: Canvas) -> None:
        across = min(2 if canvas.narrow else 3, len(groups))
        titles = canvas.titles(list(percent), across)
        panels = canvas.axes(math.ceil(len(groups) / across), across, titles=titles)
        roomy = lengths * across <= (6 if canvas.narrow else 15)
        for axes, title, (name, table) in zip(panels, titles, percent.items(), strict=False):
            rows_text = [f"{100 * depth:.0f} %" for depth in table.index]
            columns = [f"{int(length):,}" for length in table.columns]
            below = bounds[name] if roomy else None
            heat_panel(axes, canvas, table, rows_text, columns, (0.0, 100.0), "{:.0f}".format, below)
            axes.set_title(title)
        for axes in panels[len(groups) :]:
            axes.set_axis_off()

    height = 0.16 + 0.07 * depths
    return Figure(
        name=f"retrieval-{slug(task)}",
        title=f"{task}: right answers by depth and length",
        caption="Per cent of answers that are right, by where in the text the answer stands (0 %: its start) "
        f"and its length in tokens; below: 95 % Wilson interval over {OVER}; {_samples(counts)} a cell; "
        f"{trained(counts['train_length'])}.",
        alt="; ".join(
            f"{name}: {float(np.nanmean(table)):.0f} % over all" for name, table in percent.items()
        ),
        table=counts.drop(columns="name"),
        draw=draw,
        height=height * math.ceil(len(groups) / 3) + 0.12,
        narrow_height=height * math.ceil(len(groups) / 2) + 0.12,
    )


def _wide(part: pd.DataFrame, values: pd.Series) -> pd.DataFrame:
    return part.assign(value=values).pivot_table("value", "depth", "length", aggfunc="first")


def _bounds_text(part: pd.DataFrame) -> pd.Series:
    low, high = (100 * part[end] for end in ("low", "high"))
    return low.map("{:.0f}".format) + "\u2013" + high.map("{:.0f}".format)


def _samples(counts: pd.DataFrame) -> str:
    low, high = int(counts["n"].min()), int(counts["n"].max())
    return f"{low} samples" if low == high else f"{low} to {high} samples"


def length_figure(rows: pd.DataFrame, task: str, looks: Looks) -> Figure | None:
    """Share of right answers over all depths against length, with Wilson bands."""
    counts = answers.accuracy(rows[(rows["task"] == task) & (rows["status"] != FLOOR)], by=("length",))
    if counts["length"].nunique() < 2:
        return None
    lines = _lines(counts, "accuracy", looks)
    return Figure(
        name=f"retrieval-length-{slug(task)}",
        title=f"{task}: right answers against length",
        caption=f"Share of right answers over all depths; band: 95 % Wilson interval over {OVER}; "
        f"{_samples(counts)} a point; {trained(counts['train_length'])}.",
        alt=_alternative(counts, "accuracy"),
        table=counts,
        draw=_drawer(counts, lines, "share of right answers", (-0.03, 1.03)),
    )


def gain_figure(rows: pd.DataFrame, looks: Looks) -> Figure | None:
    """What a first occurrence saves of a copy, nats a token, against length."""
    found = answers.gains(rows)
    if found.empty or found["length"].nunique() < 2:
        return None
    lines = _lines(found, "gain", looks)
    return Figure(
        name="retrieval-copy",
        title="copy: what a first occurrence saves",
        caption="Nats a token by which a passage is easier when it stood far back before; zero: the model "
        f"makes no use of it. Band: 95 % t interval over {OVER}; {_samples(found)} a point; "
        f"{trained(found['train_length'])}.",
        alt=_alternative(found, "gain"),
        table=found,
        draw=_drawer(found, lines, "gain, nats per token", _whole_bands(found, lines)),
    )


def _whole_bands(frame: pd.DataFrame, lines: list[Line]) -> tuple[float, float]:
    """Limits that hold every band, and zero."""
    low, high = limits_of(lines, math.inf)
    low, high = min([0.0, low, *frame["low"].dropna()]), max([high, *frame["high"].dropna()])
    return low, high + 0.04 * (high - low)


def _lines(frame: pd.DataFrame, value: str, looks: Looks) -> list[Line]:
    """A line a series: a label's own look, other dashes for its rescales."""
    found = []
    frame = frame.assign(name=names_of(frame))
    studies = list(dict.fromkeys(frame["study"]))
    keys = ["name", "study", "label", "rescale"]
    for (name, study, label, rescale), part in frame.groupby(keys, sort=False):
        part = part.sort_values("length")
        look = looks[label] if rescale == "none" else palette.rescale_looks([rescale])[rescale]
        look = palette.dashed(look, studies.index(study))
        values = [part[column].to_numpy(float) for column in (value, "low", "high")]
        found.append(Line(name, np.log2(part["length"].to_numpy(float)), values[0], look, *values[1:]))
    return found


def _drawer(
    frame: pd.DataFrame, lines: list[Line], what: str, limits: tuple[float, float]
) -> Callable[[Canvas], None]:
    lengths = sorted({int(n) for n in frame["length"]})
    trained = sorted({int(n) for n in frame["train_length"].dropna() if n > 0})

    def draw(canvas: Canvas) -> None:
        axes = canvas.axes()[0]
        length_axis(axes, lengths, trained, canvas)
        axes.set_ylabel(what)
        draw_lines(axes, lines, canvas, limits)

    return draw


def _alternative(frame: pd.DataFrame, value: str) -> str:
    last = frame[frame["length"] == frame["length"].max()]
    values = ", ".join(f"{name} {v:.2f}" for name, v in zip(names_of(last), last[value], strict=True))
    return f"At length {int(frame['length'].max()):,}: {values}."


def retrieval_table(rows: pd.DataFrame) -> Table:
    """Every series, task and length: share of right answers with its interval, or the status."""
    counts = answers.accuracy(rows, by=("length",))
    counts["answers"] = [
        f"{100 * share:.0f} % [{100 * low:.0f}, {100 * high:.0f}]"
        for share, low, high in zip(counts["accuracy"], counts["low"], counts["high"], strict=True)
    ]
    lost = rows[rows["correct"].isna() & rows["gain"].isna()]
    lost = lost.drop_duplicates([*SERIES, "status", "length"])[[*SERIES, "status", "length"]]
    everything = pd.concat([counts, lost.assign(n=0)], ignore_index=True)
    frame = pd.DataFrame(
        {
            "model": names_of(everything),
            "task": everything["task"],
            "length": everything["length"],
            "right, 95 % interval": everything["answers"].fillna(DASH) if len(counts) else DASH,
            "samples": everything["n"],
            "status": everything["status"],
        }
    )
    note = (
        f"Wilson intervals over {OVER}, all depths together. floor: fewer than half right within the "
        "training length already, so longer lengths say nothing."
    )
    keys = {"right, 95 % interval": everything["accuracy"] if len(counts) else [math.nan] * len(frame)}
    return plain("retrieval", "Right answers by task and length", frame, note, everything, keys)
