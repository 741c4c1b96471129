"""Names of any length and script: in lines that fit, in a legend, in a font that has them, or said."""

from __future__ import annotations

import logging
from pathlib import Path

import matplotlib as mpl
import pandas as pd
import pytest
import synthetic_studies as synthetic
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure as Sheet
from matplotlib.text import Text

from pe_study import plots, report, tables
from pe_study.reporting import charts, comparisons, control_figures, drawing, fitting, fonts, palette

LONG = "HuggingFaceTB/SmolLM2-135M-of-a-name-that-is-longer-than-any-label"
CJK = "位置编码" * 6
SMALL = {
    "lengths": (64, 128, 256),
    "num_documents": 3,
    "rescales": ("none",),
    "protocols": ("exact-context",),
}
LOOKS = palette.looks([("nope", "nope"), (LONG, "rope"), (CJK, "alibi")])


def rows() -> pd.DataFrame:
    plain = synthetic.plain_rows(encodings=["nope", "rope", "alibi"], **SMALL)
    names = {"rope": LONG, "alibi": CJK, "nope": "nope"}
    return plain.assign(label=plain["label"].astype(str).map(names))


def figures() -> dict[str, drawing.Figure]:
    frame = rows()
    curves = tables.length_curves(frame)
    two = pd.concat([curves, curves.assign(study="a-second-study-of-a-long-name-too")], ignore_index=True)
    controlled = pd.concat([curves.assign(control="none"), curves.assign(control="far_context=shuffled")])
    found = comparisons.compare(frame, "exact-context")
    made = {
        "length": plots.length_figure(two, "nll", "exact-context", LOOKS),
        "differences": charts.differences_figure(found, LOOKS, curves, len(found)),
        "controls": control_figures.control_figure(controlled, "nll", "exact-context"),
    }
    return {name: figure for name, figure in made.items() if figure is not None}


@pytest.mark.filterwarnings("ignore:Glyph .* missing from font")
@pytest.mark.parametrize("size", ["two-column", "one-column"])
@pytest.mark.parametrize("name", ["length", "differences", "controls"])
def test_no_text_leaves_the_sheet_and_no_panel_vanishes(name: str, size: str) -> None:
    figure = figures()[name]
    narrow = size == "one-column"
    share = figure.narrow_height if narrow and figure.narrow_height else figure.height
    width, height = drawing.SIZES[size]
    with mpl.rc_context(drawing._style(size)):
        sheet = Sheet(figsize=(width, height * share))
        FigureCanvasAgg(sheet)
        figure.draw(drawing.Canvas(sheet, narrow))
        sheet.canvas.draw()
        whole = sheet.bbox
        ticks = {
            id(text) for axes in sheet.axes for text in axes.get_xticklabels()
        }  # drawn within limits only
        for text in sheet.findobj(lambda artist: isinstance(artist, Text) and artist.get_text().strip()):
            if id(text) in ticks:
                continue
            box = text.get_window_extent()
            assert box.x0 >= whole.x0 - 1, text.get_text()
            assert box.x1 <= whole.x1 + 1, text.get_text()
            assert box.y1 <= whole.y1 + 1, text.get_text()
        for axes in sheet.axes:
            assert axes.get_position().width * len({a.get_position().x0 for a in sheet.axes}) > 0.45


def test_a_legend_has_whole_names_where_labels_do_not_fit() -> None:
    svg = drawing.render(figures()["length"], "two-column", ("svg",))["svg"].decode()
    assert "a-second-study-of-a-long-name-too" in svg.replace("\n", "")
    assert "\u2026" not in svg


def test_names_break_where_words_end_and_lose_their_middle_last() -> None:
    assert fitting.fitted("rope", 1, 8) == "rope"
    assert fitting.fitted("one two-three four", 0.7, 8).split("\n") == ["one two-", "three four"]
    short = fitting.fitted("x" * 50 + "yz", 0.7, 8, lines=1)
    assert short.startswith("xxx")
    assert short.endswith("yz")
    assert fitting.width_of(short) <= 0.7 * 72 / (fitting.CHARACTER * 8)
    assert fitting.width_of("位置") > fitting.width_of("ab")


def test_a_script_without_a_font_is_said_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The machine's fonts are those of matplotlib alone: DejaVu has no Chinese."""
    frame = synthetic.rows(encodings=["nope", "rope"], **SMALL).replace({"label": {"rope": "位置"}})
    folder = synthetic.write_study(tmp_path / "runs", frame)
    with pytest.MonkeyPatch.context() as patched, caplog.at_level(logging.WARNING, "pe_study"):
        patched.setattr(fonts, "_others", lambda: ())
        report.build([folder], tmp_path / "svg", formats=("svg",))
        assert caplog.messages == []
        report.build([folder], tmp_path / "png", formats=("png",))
    assert caplog.messages == [
        "no installed font has 位置: PNGs show boxes there, SVGs and the page are right; "
        "install one that does, such as Noto Sans CJK"
    ]


def test_a_font_that_has_the_script_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    glyphs = {
        fonts.HOUSE: frozenset(map(ord, "rope")),
        "Good": frozenset(map(ord, "位置")),
        "Bad": frozenset(),
    }
    monkeypatch.setattr(fonts, "_glyphs", lambda family: glyphs[family])
    monkeypatch.setattr(fonts, "_others", lambda: ("Bad", "Good"))
    assert fonts.families("rope") == [fonts.HOUSE]
    assert fonts.families("rope 位置") == [fonts.HOUSE, "Good"]
    assert fonts.unwritable("位置編") == "編"
    sheet = Sheet()
    text = sheet.text(0, 0, "位置")
    drawing._choose_fonts(sheet)
    assert text.get_fontfamily() == [fonts.HOUSE, "Good"]


def test_names_that_are_long_as_files_are_cut(tmp_path: Path) -> None:
    frame = synthetic.rows(encodings=["rope"], **{**SMALL, "rescales": ("none", "yarn:auto")})
    frame = frame.assign(study="位" * 33, label="置" * 60, run="置" * 33)
    other = frame.assign(study="研" * 33)
    paths = [synthetic.write_study(tmp_path, one) for one in (frame, other)]
    page = report.build(paths, tmp_path / "out", formats=("svg",))
    names = [path.name for path in (page.parent / "figures").glob("rescale-map-*.svg")]
    assert len(names) == len(set(names)) == 4 * 2  # two studies, light and dark, two sizes
