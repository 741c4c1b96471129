"""Figures and table of a bench file: speed and memory by encoding and length, and ratios to a peer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import pandas as pd
from matplotlib.axes import Axes

from pe_study.reporting import palette
from pe_study.reporting.bench_files import PHASES, REFERENCES, BenchFile, ratios
from pe_study.reporting.captions import listed, slug
from pe_study.reporting.charts import bars, named_rows, of_rows
from pe_study.reporting.curves import Line, draw_lines, legend, length_axis, limits_of, number
from pe_study.reporting.drawing import DARK, INK, MUTED, Canvas, Figure
from pe_study.reporting.page_tables import DASH, Table, plain
from pe_study.reporting.palette import Look

MEASURES = {"tokens_per_second": "tokens a second", "peak_memory_MiB": "peak memory, MiB"}
# Peers are drawn in ink, not in the colour of an encoding.
PEERS = {
    "LlamaForCausalLM": Look(INK, DARK[INK], "solid", "P"),
    "x-transformers": Look(MUTED, DARK[MUTED], (0, (4, 2)), "X"),
}
LENGTH_MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")


def looks_of(bench: BenchFile) -> dict[str, Look]:
    """A look for everything measured, in the order in which it is drawn: encodings, then peers."""
    rows = bench.rows
    own = rows[~rows["encoding"].isin(list(PEERS))]
    found = palette.looks(zip(own["name"], own["encoding"], strict=True))
    for peer, look in PEERS.items():
        for name in rows.loc[rows["encoding"] == peer, "name"].unique():
            found[name] = look if name == peer else replace(look, dash=(0, (1, 2)))
    return found


def measures(bench: BenchFile) -> pd.DataFrame:
    """The rows of the file with memory in MiB."""
    rows = bench.rows
    memory = rows["peak_memory_bytes"].astype("float64") / 2**20 if "peak_memory_bytes" in rows else np.nan
    return rows.assign(peak_memory_MiB=memory)


def speed_figure(bench: BenchFile, name: str) -> Figure | None:
    """Tokens a second and peak memory: lines over length, or bars where one length was measured."""
    rows, looks = measures(bench), looks_of(bench)
    panels = [
        (column, phase)
        for column in MEASURES
        for phase in PHASES
        if rows.loc[rows["phase"] == phase, column].notna().any()
    ]
    if not panels:
        return None
    phases = [phase for phase in PHASES if any(phase == of for _, of in panels)]
    lengths = sorted({int(length) for length in rows["length"]})
    memory = "; memory: peak of a process that does this alone" * any("memory" in of for of, _ in panels)

    def draw(canvas: Canvas) -> None:
        across = 1 if canvas.narrow else len(phases)
        axes = canvas.axes(-(-len(panels) // across), across)
        if len(lengths) == 1:
            canvas.reserve_left(list(looks))
        for place, (column, phase) in enumerate(panels):
            here = rows[rows["phase"] == phase]
            first = canvas.narrow or place % across == 0
            if len(lengths) == 1:
                series = here.groupby("name")[column].mean().reindex(list(looks))
                bars(axes[place], series, looks, canvas, names=first)
            else:
                _lines(axes[place], here, column, lengths, looks, canvas)
            axes[place].set_title(f"{MEASURES[column]}, {PHASES[phase]}")
        if len(lengths) > 1:
            names = [Line(name, np.zeros(0), np.zeros(0), look) for name, look in looks.items()]
            legend(names, canvas, 2 if canvas.narrow else 4)

    return Figure(
        name=f"bench-{slug(name)}",
        title=f"Speed and memory ({name})",
        caption=f"{_where(bench)} Median over turns{memory}. {_sizes(rows)}",
        alt="; ".join(_alternative(rows, phase) for phase in phases),
        table=rows,
        draw=draw,
        height=(0.72 if len(lengths) == 1 else 0.8) * -(-len(panels) // len(phases)),
        narrow_height=0.62 * len(panels),
    )


def _lines(
    axes: Axes,
    here: pd.DataFrame,
    column: str,
    lengths: Sequence[int],
    looks: Mapping[str, Look],
    canvas: Canvas,
) -> None:
    lines = []
    for name, look in looks.items():
        part = here[here["name"] == name].sort_values("length")
        if part[column].notna().any():
            lines.append(
                Line(name, np.log2(part["length"].to_numpy(float)), part[column].to_numpy(float), look)
            )
    length_axis(axes, lengths, [], canvas)
    draw_lines(axes, lines, canvas, (0, limits_of(lines, np.inf)[1]), label=False)


def _alternative(rows: pd.DataFrame, phase: str) -> str:
    here = rows[rows["phase"] == phase]
    last = here[here["length"] == here["length"].max()]
    values = ", ".join(
        f"{name} {number(speed)}" for name, speed in zip(last["name"], last["tokens_per_second"], strict=True)
    )
    return f"Tokens a second, {PHASES[phase]} at length {int(last['length'].iloc[0]):,}: {values}"


def _where(bench: BenchFile) -> str:
    return f"{bench.place}, {', '.join(sorted(set(bench.rows['dtype'])))}."


def _sizes(rows: pd.DataFrame) -> str:
    """ "Decoder: 8 layers, width 512, 8 heads; 4,096 tokens a step."."""
    known = {
        "num_layers": "layers {}",
        "d_model": "width {}",
        "num_heads": "heads {}",
        "num_tokens": "tokens a step {}",
    }
    said = [text.format(listed(rows[key].dropna())) for key, text in known.items() if key in rows]
    return f"Decoder: {', '.join(said)}." if said else ""


def ratio_figure(bench: BenchFile, name: str) -> Figure | None:
    """Speed over that of the reference: median and spread over turns, a row a name, a mark a length."""
    reference = bench.reference
    if reference is None:
        return None
    to = f"to_{reference}"
    rows = bench.rows[(bench.rows["name"] != reference) & bench.rows[to].notna()]
    if rows.empty:
        return None
    looks = {key: look for key, look in looks_of(bench).items() if key in set(rows["name"])}
    phases = [phase for phase in PHASES if (rows["phase"] == phase).any()]
    lengths = sorted({int(length) for length in rows["length"]})

    def draw(canvas: Canvas) -> None:
        panels = canvas.axes(len(phases) if canvas.narrow else 1, 1 if canvas.narrow else len(phases))
        canvas.reserve_left(list(looks))
        for place, (axes, phase) in enumerate(zip(panels, phases, strict=True)):
            named_rows(axes, list(looks), names=canvas.narrow or place == 0)
            here = rows[rows["phase"] == phase]
            _spreads(axes, here, to, lengths, looks)
            axes.set_title(PHASES[phase])
            if canvas.narrow or len(phases) == 1 or not place:
                canvas.xlabel(axes, f"speed, times that of {reference}")
        if len(lengths) > 1:
            _length_legend(canvas, lengths)

    return Figure(
        name=f"bench-ratio-{slug(name)}",
        title=f"Speed beside {reference} ({name})",
        caption=f"{_where(bench)} Right of 1 is faster than {reference}, which took turns in the same run."
        f" Dot: median over turns, bar: lowest to highest; length {listed(lengths)}.",
        alt="; ".join(
            f"{PHASES[phase]} at {length:,}: "
            + ", ".join(f"{one.name} {one.text}" for one in ratios(_at(rows, phase, length), to))
            for phase in phases
            for length in lengths
        ),
        table=rows,
        draw=draw,
        height=of_rows(list(looks), 0.5, lines=2),
        narrow_height=of_rows(list(looks), 0.5, narrow=True, lines=2) * len(phases),
    )


def _at(rows: pd.DataFrame, phase: str, length: int) -> pd.DataFrame:
    return rows[(rows["phase"] == phase) & (rows["length"] == length)]


def _spreads(
    axes: Axes, here: pd.DataFrame, to: str, lengths: Sequence[int], looks: Mapping[str, Look]
) -> None:
    order = list(looks)
    axes.axvline(1, color=MUTED, linewidth=1)
    step = 0.7 / len(lengths)
    for place, length in enumerate(lengths):
        for one in ratios(here[here["length"] == length], to):
            row, colour = (
                order.index(one.name) + (place - (len(lengths) - 1) / 2) * step,
                looks[one.name].light,
            )
            axes.plot([one.low, one.high], [row, row], color=colour, linewidth=1.4)
            axes.plot(
                [one.median], [row], LENGTH_MARKERS[place % len(LENGTH_MARKERS)], color=colour, markersize=4.5
            )


def _length_legend(canvas: Canvas, lengths: Sequence[int]) -> None:
    lines = [
        Line(f"length {length:,}", np.zeros(0), np.zeros(0), Look(MUTED, MUTED, "", LENGTH_MARKERS[n % 8]))
        for n, length in enumerate(lengths)
    ]
    legend(lines, canvas)


def bench_table(bench: BenchFile, name: str) -> Table:
    """Every workload: speed, ratios with their spread, share of the matmul ceiling, memory, parameters."""
    rows = measures(bench)
    frame = pd.DataFrame(
        {"model": rows["name"], "phase": rows["phase"].map(PHASES), "length": rows["length"]}
    )
    frame["tokens a second"] = rows["tokens_per_second"]
    keys: dict[str, list[float]] = {}
    for reference in REFERENCES:
        to = f"to_{reference}"
        if to in rows:
            found = ratios(rows, to)
            frame[f"to {reference}"] = [DASH if one.median != one.median else one.text for one in found]
            keys[f"to {reference}"] = [one.median for one in found]
    for column, title, factor in (
        ("matmul_share", "% of matmul", 100),
        ("peak_memory_MiB", "peak memory, MiB", 1),
        ("num_parameters", "parameters", 1),
    ):
        if column in rows and rows[column].notna().any():
            frame[title] = rows[column].astype("float64") * factor
    frame["kernel"] = rows["kernel"]
    note = (
        f"{_where(bench)} Ratios are medians of turns (lowest\u2013highest), above 1 is faster; % of matmul: "
        "arithmetic a second over what a matrix multiplication reaches on this machine."
    )
    return plain(f"bench-{slug(name)}-table", f"Speed and memory ({name})", frame, note, rows, keys)
