"""Where attention goes: entropy, largest logit and far mass by position; mass by distance of one run's heads.

Rows are those of diagnostics.parquet (`rows.DIAGNOSTICS_COLUMNS`), measured at one length a cell.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
import pandas as pd

from pe_study.reporting import palette
from pe_study.reporting.captions import listed, named, slug, suffixed, titled, trained
from pe_study.reporting.curves import Line, draw_lines, legend, limits_of, training_line
from pe_study.reporting.drawing import Canvas, Figure
from pe_study.reporting.heatmaps import heat_panel
from pe_study.reporting.palette import Look
from pe_study.rows import NO_CONTROL

Looks = Mapping[str, Look]
MEASURES = {
    "entropy_ratio": "entropy over ln(n)",
    "max_logit": "largest logit",
    "mass_beyond": "mass beyond the training length",
}
_NUMBERS = ("length", "train_length", "layer", "head", "position_lo", "position_hi", "num_queries", "mass")


def plain(rows: pd.DataFrame) -> pd.DataFrame:
    """Measured rows without a control, in numpy types; a label, rescale and study always."""
    frame = rows.assign(
        label=rows["label"].astype(object).fillna(rows["model"].astype(object)).astype(str),
        rescale=rows["rescale"].astype(object).fillna("none").astype(str),
        **{
            name: rows[name].astype("float64")
            for name in (*_NUMBERS, *MEASURES, "distance_lo", "distance_hi")
        },
        **{name: rows[name].astype(object).fillna("").astype(str) for name in ("study", "run", "corpus")},
    )
    kept = (frame["status"].fillna("ok") == "ok") & (frame["control"].fillna(NO_CONTROL) == NO_CONTROL)
    return frame[kept.to_numpy(bool)]


def by_position(rows: pd.DataFrame) -> pd.DataFrame:
    """Unrescaled, at the longest length of a study: each measure by label and position, over layers, heads
    and seeds.

    Means (of entropy and mass, weighted by queries) and the largest of the largest logits; nan where no query
    has an entropy ratio, since it sees one key, or a far key.
    """
    own = rows[(rows["rescale"] == "none") & rows["distance_lo"].isna()]
    own = own[own["length"] == own.groupby("study")["length"].transform("max")]
    keys = ["study", "label", "corpus", "train_length", "length", "position_lo", "position_hi"]
    weight = own["num_queries"].where(own["num_queries"] > 0, 1)
    work = own.assign(
        weight=weight,
        several=weight.where(own["entropy_ratio"].notna()),
        entropy_ratio=own["entropy_ratio"] * weight,
        mass_beyond=own["mass_beyond"] * weight,
        far=weight.where(own["mass_beyond"].notna()),
    )
    found = work.groupby(keys, dropna=False, sort=False).agg(
        entropy_ratio=("entropy_ratio", lambda ratio: ratio.sum(min_count=1)),
        max_logit=("max_logit", "max"),
        mass_beyond=("mass_beyond", lambda mass: mass.sum(min_count=1)),
        several=("several", "sum"),
        far=("far", "sum"),
        num_heads=("head", "size"),
    )
    return (
        found.assign(
            entropy_ratio=found["entropy_ratio"] / found["several"],
            mass_beyond=found["mass_beyond"] / found["far"],
        )
        .drop(columns=["several", "far"])
        .reset_index()
    )


def most_in_sight(rows: pd.DataFrame) -> pd.Series:
    """The most keys that a query of each bin sees: a bin may reach past the window, no query does."""
    return (rows["position_hi"] - 1).clip(upper=rows["length"])


def position_figure(rows: pd.DataFrame, looks: Looks) -> Figure | None:
    """The three measures by position, a line a label."""
    found = by_position(rows)
    if found["position_lo"].nunique() < 2:
        return None
    found = found.sort_values("position_lo")
    several = found["study"].nunique() > 1
    shown = {name: title for name, title in MEASURES.items() if found[name].notna().any()}
    lines = {name: _lines(found, name, looks, several) for name in shown}
    starts = sorted({int(n) for n in found["train_length"].dropna() if n > 0})

    def draw(canvas: Canvas) -> None:
        across = 1 if canvas.narrow else len(shown)
        panels = canvas.axes(len(shown) // across, across, titled=True)
        for axes, (name, title) in zip(panels, shown.items(), strict=True):
            edges = sorted(set(found["position_lo"].clip(lower=1)))
            axes.set_xlim(math.log2(edges[0]) - 0.3, math.log2(most_in_sight(found).max()) + 0.1)
            ticks = edges[:: math.ceil(len(edges) / 5)]
            axes.set_xticks([math.log2(tick) for tick in ticks], [f"{int(tick):,}" for tick in ticks])
            axes.set_xlabel("keys in sight")
            for start in starts:
                training_line(axes, start, canvas)
            draw_lines(axes, lines[name], canvas, limits_of(lines[name], math.inf), label=False)
            axes.set_title(title, pad=15)
        legend(next(iter(lines.values())), canvas)

    return Figure(
        name="attention-position",
        title=f"Attention by position in windows of {listed(found['length'])} tokens",
        caption="Entropy of the attention weights over that of uniform ones, largest logit, and mass on keys "
        "farther back than the training length; means over layers, heads and seeds (the logit: the largest); "
        f"corpus {', '.join(sorted(set(found['corpus'])))}; "
        f"{trained(starts)}.",
        alt="; ".join(_alternative(found, name, title) for name, title in shown.items()),
        table=found,
        draw=draw,
        height=0.72,
        narrow_height=0.62 * len(shown),
    )


def _lines(found: pd.DataFrame, name: str, looks: Looks, several: bool) -> list[Line]:
    lines = []
    studies = list(dict.fromkeys(found["study"]))
    for (study, label), part in found.groupby(["study", "label"], sort=False):
        middle = np.sqrt(part["position_lo"].clip(lower=1) * most_in_sight(part).clip(lower=1))
        title = f"{label}, {study}" if several else str(label)
        look = palette.dashed(looks[label], studies.index(study))
        lines.append(Line(title, np.log2(middle.to_numpy(float)), part[name].to_numpy(float), look))
    return lines


def _alternative(found: pd.DataFrame, name: str, title: str) -> str:
    last = found.drop_duplicates(["study", "label"], keep="last")
    return f"{title} at the end: " + ", ".join(
        f"{label} {value:.3g}" for label, value in zip(named(last), last[name], strict=True)
    )


def heads_figure(rows: pd.DataFrame, run: str | None = None, study: str = "") -> Figure | None:
    """Mass by distance, a row a layer and head, at the end of the windows of a run (`run`, or the first).

    `rows` are those of one study; `study` names it where the page has several.
    """
    placed = rows[rows["distance_lo"].notna() & (rows["rescale"] == "none")]
    chosen = run if run in set(placed["run"]) else next(iter(placed["run"]), None)
    own = placed[placed["run"] == chosen]
    own = own[own["length"] == own["length"].max()]
    # The bin that begins with the last query of a window holds that one alone: one query a document.
    fuller = own[own["position_lo"] < own["length"]]
    own = own if fuller.empty else fuller
    own = own[own["position_lo"] == own["position_lo"].max()]
    if own.empty:
        return None
    own = own.assign(
        head_name=[f"layer {int(a)}, head {int(b)}" for a, b in zip(own["layer"], own["head"], strict=True)]
    ).sort_values(["layer", "head", "distance_lo"])
    table = own.pivot(index="head_name", columns="distance_lo", values="mass")
    table = table.loc[list(dict.fromkeys(own["head_name"]))]
    ends = own.groupby("distance_lo")["distance_hi"].max()
    columns = [_span(int(low), int(ends[low]) - 1) for low in table.columns]
    first, most = own.iloc[0], most_in_sight(own).iloc[0]

    def draw(canvas: Canvas) -> None:
        axes = canvas.axes()[0]
        canvas.reserve_left(list(table.index))
        high = max(float(np.nanmax(table.to_numpy(float))), 1e-9)
        heat_panel(axes, canvas, 100 * table, list(table.index), columns, (0.0, 100 * high), "{:.0f}".format)
        axes.set_xlabel("distance to the key, tokens")

    return Figure(
        name=suffixed(f"attention-heads-{slug(str(chosen))}", study),
        title=titled(f"{chosen}: attention mass by distance and head", study),
        caption=f"Per cent of the attention of each head on keys at a distance, for queries with "
        f"{_span(int(first['position_lo']), int(most), ' to ')} keys in sight, in windows of "
        f"{int(first['length']):,} tokens; {trained(own['train_length'])}; "
        f"corpus {first['corpus']}.",
        alt="; ".join(
            f"{name}: most at {columns[int(np.nanargmax(row))]}"
            for name, row in zip(table.index, table.to_numpy(float), strict=True)
        ),
        table=own.drop(columns="head_name"),
        draw=draw,
        height=0.3 + 0.07 * len(table),
    )


def _span(low: int, high: int, to: str = "\u2013") -> str:
    return f"{low:,}" if low >= high else f"{low:,}{to}{high:,}"
