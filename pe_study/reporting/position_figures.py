"""Loss by how much context a target had, in windows of one length."""

from __future__ import annotations

import math

import numpy as np
import pandas as pd

from pe_study import tables
from pe_study.plots import Looks, above, label_lines, unrescaled
from pe_study.reporting import likeness
from pe_study.reporting.captions import SHORT, alternative, caption, listed
from pe_study.reporting.curves import draw_lines, limits_of, training_line
from pe_study.reporting.drawing import Canvas, Figure


def within_windows(rows: pd.DataFrame) -> pd.DataFrame:
    """Rows whose bins of contexts end with their window: the last target, which alone sees all of it, joins
    the bin before its own; a bin of the whole context alone stays."""
    keys = ["protocol", "length"]
    named = rows[[*keys, "position_lo", "position_hi"]].astype({"protocol": object})
    last = named["position_lo"] >= named["length"]
    before = named[~last].groupby(keys)["position_lo"].max().rename("before")
    ends = named.groupby(keys)["position_hi"].max().rename("end")
    found = named.join(before, on=keys).join(ends, on=keys)
    starts = named["position_lo"].where(~last | found["before"].isna(), found["before"]).astype("int64")
    stops = named["position_hi"].where(starts != found["before"], found["end"])
    return rows.assign(position_lo=starts, position_hi=stops.clip(upper=named["length"] + 1))


def position_figure(positions: pd.DataFrame, metric: str, protocol: str, looks: Looks) -> Figure | None:
    """`metric` by size of context, in windows of the longest length of each study that has numbers."""
    shown = unrescaled(positions[positions["protocol"] == protocol])
    shown = shown[np.isfinite(shown["nll"])]
    longest = shown.groupby("study", observed=True)["length"].transform("max")
    shown = shown[shown["length"] == longest].sort_values("position_lo")
    if shown["position_lo"].nunique() < 2:
        return None
    middle = np.sqrt(shown["position_lo"] * (shown["position_hi"] - 1))

    early = shown[(shown["position_hi"] <= shown["train_length"]) & (shown["position_lo"] >= 2)]
    lines = label_lines(shown.assign(length=middle), metric, looks)
    limits = limits_of(lines, above(early if len(early) else shown, metric))
    edges, end = sorted(set(shown["position_lo"])), int(shown["position_hi"].max())
    train_lengths = sorted({n for n in shown["train_length"] if n > 0})

    def draw(canvas: Canvas) -> None:
        axes = canvas.axes()[0]
        axes.set_xlim(math.log2(edges[0]) - 0.3, math.log2(end) + 0.1)
        ticks = edges[:: math.ceil(len(edges) / (7 if canvas.narrow else 12))]
        axes.set_xticks([math.log2(tick) for tick in ticks], [f"{tick:,}" for tick in ticks])
        axes.set_xlabel("tokens of context before the target")
        axes.set_ylabel(tables.METRICS[metric])
        for train_length in train_lengths:
            training_line(axes, int(train_length), canvas)
        draw_lines(axes, lines, canvas, limits)

    windows = f"windows of {listed(shown['length'])} tokens"
    return Figure(
        name=f"position-{protocol}-{metric}",
        title=f"{SHORT[metric].capitalize()} by position in {windows} ({protocol})",
        caption=caption(shown, protocol)
        + " A point is a bin of context sizes, at its geometric middle; the targets with a whole window "
        "before them, one a window, are in the last." + likeness.warning(shown, metric),
        alt=alternative(shown.assign(length=shown["position_lo"]), metric, what="tokens of context"),
        table=shown,
        draw=draw,
    )
