"""Bars and intervals of differences: as long as their numbers, or marked, written and said."""

from __future__ import annotations

import pandas as pd
import pytest
import synthetic_studies as synthetic
from matplotlib.figure import Figure as Sheet

from pe_study import tables
from pe_study.reporting import charts, comparisons, cuts, drawing, palette
from pe_study.reporting.decomposition_figures import decomposition_figure

LABELS = ["nope", "rope", "alibi", "t5"]
BOTH = ("nonoverlapping", "exact-context")


def study(**options: object) -> pd.DataFrame:
    made = {
        "encodings": LABELS,
        "lengths": (64, 128, 256),
        "num_documents": 6,
        "rescales": ("none",),
        "protocols": BOTH,
    }
    return synthetic.plain_rows(**{**made, **options})


def decomposed(rows: pd.DataFrame) -> drawing.Figure:
    labels = list(dict.fromkeys(rows["label"].astype(str)))
    figure = decomposition_figure(comparisons.decompose(rows), palette.looks((one, one) for one in labels))
    assert figure is not None
    return figure


def drawn(figure: drawing.Figure, *, narrow: bool = False) -> Sheet:
    sheet = Sheet(figsize=(3.4, 3.3) if narrow else (6.9, 4.0))
    figure.draw(drawing.Canvas(sheet, narrow))
    return sheet


def widths(sheet: Sheet) -> list[float]:
    return [bar.get_width() for bar in sheet.axes[0].patches]


def test_bars_are_as_long_as_their_numbers() -> None:
    """Early tokens and context cancel: a small sum is no reason to cut its parts."""
    rows = study()
    found = {one.label: one for one in comparisons.decompose(rows) if one.length == 256}
    parts = sorted(part.estimate for one in found.values() for part in (one.early, one.context))
    total = max(abs(one.total.estimate) for one in found.values())
    assert max(map(abs, parts)) > 1.3 * total
    figure = decomposed(rows)
    assert sorted(widths(drawn(figure))) == pytest.approx(parts)
    assert "arrow" not in figure.caption


@pytest.mark.parametrize("narrow", [False, True])
def test_a_bar_that_is_cut_is_marked_written_and_said(narrow: bool) -> None:
    rows = study(encodings=[*LABELS, "sinusoidal", "shaw", "learned"], damage={"learned": 9.0})
    figure = decomposed(rows)
    (learned,) = [one for one in comparisons.decompose(rows) if (one.label, one.length) == ("learned", 256)]
    sheet = drawn(figure, narrow=narrow)
    low, high = learned.context.bounds()
    texts = [text.get_text() for text in sheet.axes[0].texts]
    assert f"{learned.context.estimate:+.2f} \u00b1 {(high - low) / 2:.2g}" in texts
    assert f"\u2212{-learned.early.estimate:.2f} \u00b1" in " ".join(texts)
    assert {line.get_marker() for line in sheet.axes[0].lines} >= {"<", ">"}
    assert max(widths(sheet)) < learned.context.estimate
    assert "An arrow at the edge: the bar or its interval goes on" in figure.caption


def test_every_bar_of_thirty_has_its_interval() -> None:
    names = [*LABELS, *(f"mine-{n}" for n in range(26))]
    rows = study(encodings=names, lengths=(64, 128), num_documents=3, seeds=(0, 1))
    sheet = drawn(decomposed(rows))
    intervals = [line for line in sheet.axes[0].lines if len(set(line.get_ydata())) == 1]
    written = len(sheet.axes[0].texts)
    assert len([one for one in intervals if len(one.get_xdata()) == 2]) + written == 60
    assert written <= 12


def test_intervals_past_the_edge_are_marked() -> None:
    sheet = Sheet()
    axes = sheet.subplots()
    cuts.drawn_interval(axes, -9.0, 0.5, 0, 1.0, "#000000", 1)
    assert [list(line.get_xdata()) for line in axes.lines] == [[-1.0, 0.5], [-1.0]]
    assert axes.lines[1].get_marker() == "<"
    assert "interval goes on" in cuts.arrows_text("bar", [(0.1, -9.0, 0.5)], 1.0)
    assert cuts.arrows_text("bar", [(0.1, -0.9, 0.5)], 1.0) == ""


@pytest.mark.parametrize(
    ("values", "ends", "reach"),
    [
        ([-0.91, 1.59, 0.1, 0.1], [1.7], 1.7),  # nothing far outside: to the end of the longest interval
        ([0.1] * 9 + [5.0], [], 0.3),
        ([0.1] * 9 + [float("nan")], [float("nan")], 0.1),
        ([0.0, 0.0], [], 0.02),
        ([], [], 0.02),
    ],
)
def test_where_an_axis_ends(values: list[float], ends: list[float], reach: float) -> None:
    assert cuts.reach_of(values, ends) == pytest.approx(reach)


def test_the_longest_length_that_all_labels_have() -> None:
    rows = study()
    cut = rows[~((rows["label"] == "rope") & (rows["length"] == 256))]
    figure = decomposed(cut)
    assert figure.title == "Where the change at 128 comes from"
    assert len(widths(drawn(figure))) == 2 * len(LABELS)
    assert "At 256, which not all have: in the table." in figure.caption


def test_who_is_missing_is_named_where_no_length_is_shared() -> None:
    rows = study()
    rope = rows["label"] == "rope"
    apart = rows[~(rope & (rows["length"] == 256)) & (rope | (rows["length"] != 128))]
    figure = decomposed(apart)
    assert figure.title == "Where the change at 256 comes from"
    assert "Not measured at 256: rope." in figure.caption


def test_a_difference_that_is_cut_is_written_with_its_interval() -> None:
    rows = study(encodings=[*LABELS, "sinusoidal", "shaw", "learned"], damage={"learned": 9.0})
    found = comparisons.compare(rows, "exact-context")
    looks = palette.looks((one, one) for one in dict.fromkeys(rows["label"].astype(str)))
    figure = charts.differences_figure(found, looks, tables.length_curves(rows), len(found))
    assert figure is not None
    texts = [text.get_text() for text in drawn(figure).axes[0].texts]
    assert len(texts) == 1
    assert texts[0].startswith("+")
    assert " \u00b1 " in texts[0]
    assert figure.caption.count("An arrow at the edge: the value or its interval goes on") == 1
