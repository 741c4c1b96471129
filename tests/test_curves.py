"""Axes, cuts and labels of the figures."""

from __future__ import annotations

import itertools
import math
import re

import numpy as np
import pandas as pd
import pytest
import synthetic_studies as synthetic

from pe_study import plots, tables
from pe_study.reporting import curves, drawing, palette
from pe_study.reporting.curves import Line

LOOK = palette.control_look()


def line(*y: float) -> Line:
    return Line("one", np.arange(float(len(y))), np.array(y), LOOK)


def test_labels_move_apart_and_keep_their_order() -> None:
    places = [0.5, 0.51, 0.52, 0.9, 0.1]
    moved = curves.spread(places, 0.1)
    assert list(np.argsort(moved)) == list(np.argsort(places))
    assert min(b - a for a, b in itertools.pairwise(sorted(moved))) >= 0.1 - 1e-9
    assert (moved[3], moved[4]) == pytest.approx((0.9, 0.1))
    assert np.mean(moved[:3]) == pytest.approx(0.51)


def test_a_curve_leaves_where_it_crosses_the_top() -> None:
    assert curves.crossings(line(1, 2, 4), 3) == pytest.approx([1.5])
    assert curves.crossings(line(5, 2, 4), 3) == pytest.approx([0, 1.5])
    assert curves.crossings(line(1, math.inf), 3) == pytest.approx([0], abs=1e-6)
    assert curves.crossings(line(1, math.nan, 4), 3) == []


def test_limits_end_at_the_cut_only_when_something_is_cut() -> None:
    assert curves.limits_of([line(1, 2)], 10)[1] < 2.2
    assert curves.limits_of([line(1, 2, 40)], 10)[1] == 10
    assert curves.limits_of([line(math.nan)], 10) == (0, 1)
    low, high = curves.limits_of([line(2, 2)], 10)
    assert low < 2 < high
    assert curves.limits_of([line(0, 0)], 10) == pytest.approx((-0.01, 0.01))


def test_a_flat_curve_is_drawn_flat() -> None:
    """A change of a ten thousandth of the loss is no slope, and no axis counts from an offset."""
    low, high = curves.limits_of([line(8.0026, 8.0027)], 10)
    assert high - low == pytest.approx(0.02 * 8.0027)
    rows = rows_of()
    rows["nll_sum"] = rows["num_tokens"] * (2.0 + 1e-6 * rows["length"])
    svg = length_svg(rows, "nll")
    assert re.search(r">2\.0+<", svg)
    assert ">+2" not in svg


def test_numbers_are_short() -> None:
    numbers = [2.4567, 123.4, 45_678, 1.2e9, math.inf]
    assert [curves.number(value) for value in numbers] == ["2.46", "123", "45,678", "1.2e9", "overflow"]


def test_ticks_keep_the_training_and_the_last_length() -> None:
    lengths = [64, 80, 96, 128, 192, 256, 384, 512, 1000, 1024]
    chosen = curves.spaced(lengths, 5, keep=64)
    assert {64, 1024} <= set(chosen)
    assert 1000 not in chosen
    assert curves.spaced([64], 5, keep=64) == [64]


def length_svg(rows, metric: str = "perplexity") -> str:
    found = tables.length_curves(rows)
    looks = palette.looks(zip(found["label"].astype(str), found["encoding"].astype(str), strict=True))
    figure = plots.length_figure(found, metric, "nonoverlapping", looks)
    assert figure is not None
    return drawing.render(figure, "two-column", ("svg",))["svg"].decode()


def rows_of(**options: object):
    settings = {
        "encodings": ["nope", "rope"],
        "lengths": (64, 128, 1024),
        "rescales": ("none",),
        "num_documents": 3,
    }
    return synthetic.plain_rows(protocols=("nonoverlapping",), **{**settings, **options})


def test_a_cut_curve_is_labelled_with_its_value() -> None:
    """case 34: a clipped point is marked; an overflowing one says so."""
    rows = rows_of(damage={"rope": 1.5})
    value = tables.length_curves(rows).query("label == 'rope' and length == 1024")["perplexity"].iloc[0]
    assert f"rope ↑{curves.number(value)}" in length_svg(rows)
    at = (rows["label"] == "rope") & (rows["length"] == 1024)
    rows.loc[at, "nll_sum"] = rows.loc[at, "num_tokens"] * 710.0
    assert "rope ↑overflow" in length_svg(rows)


def test_a_figure_names_axes_training_length_and_curves() -> None:
    svg = length_svg(rows_of())
    for text in ("trained at 64", "perplexity per token", "length, tokens", "nope", "rope", "1,024", "16×"):
        assert text in svg


def test_an_early_end_is_named() -> None:
    rows = synthetic.with_status(rows_of(), "oom", label="rope", length=1024)
    assert "rope (to 128)" in length_svg(rows)


def test_the_same_rows_draw_the_same_bytes() -> None:
    rows = rows_of()
    assert length_svg(rows) == length_svg(rows)


def test_many_series_get_a_legend() -> None:
    svg = length_svg(rows_of(encodings=[f"mine-{n}" for n in range(30)]))
    assert "mine-29" in svg
    assert 'id="legend_1"' in svg


def test_protocols_stand_side_by_side_once_each() -> None:
    """Sliding at two strides does not push exact-context out of the figure."""
    rows = synthetic.plain_rows(
        encodings=["nope", "rope"], lengths=(64, 128), rescales=("none",), num_documents=3,
        protocols=("nonoverlapping", "sliding", "exact-context"),
    )  # fmt: skip
    finer = rows[rows["protocol"] == "sliding"].assign(stride=16.0)
    found = tables.length_curves(
        tables.prepare(pd.concat([rows, finer.assign(plan="length")], ignore_index=True))
    )
    looks = palette.looks([("nope", "nope"), ("rope", "rope")])
    figure = plots.protocols_figure(found, "nll", looks)
    assert figure is not None
    svg = drawing.render(figure, "two-column", ("svg",))["svg"].decode()
    assert [name in svg for name in ("nonoverlapping", "sliding_16", "exact-context")] == [True] * 3
    assert "sliding_32" not in svg
