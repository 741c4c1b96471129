"""Differences, training and cost: a study at a time, a row a label with room for its name."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
import pytest
import synthetic_studies as synthetic

from pe_study import report, tables
from pe_study.reporting import charts, comparisons, drawing, palette, studies

SMALL = {"lengths": (64, 128), "num_documents": 3, "rescales": ("none",), "protocols": ("exact-context",)}


def looks(labels: list[str]) -> dict[str, palette.Look]:
    return palette.looks((label, label) for label in labels)


@pytest.mark.parametrize("size", [pytest.param("two-column", marks=pytest.mark.slow), "one-column"])
def test_thirty_rows_have_room_for_thirty_names(size: str) -> None:
    labels = ["nope", *(f"mine-{n}" for n in range(29))]
    rows = synthetic.plain_rows(encodings=labels, **SMALL)
    found = comparisons.compare(rows, "exact-context")
    figure = charts.differences_figure(found, looks(labels), tables.length_curves(rows), len(found))
    assert figure is not None
    share = figure.narrow_height if size == "one-column" and figure.narrow_height else figure.height
    points = 72 * drawing.SIZES[size][1] * share / 29
    assert points > 10  # of text of 7.5 to 8.5
    svg = drawing.render(figure, size, ("svg",))["svg"].decode()
    assert all(f">{label}<" in svg for label in labels[1:])


@pytest.mark.usefixtures("undrawn")
def test_every_study_has_differences_of_its_own(tmp_path: Path) -> None:
    """One figure a study, each with its own values; Holm's correction is over all of them."""
    one = synthetic.rows(encodings=["nope", "rope"], **SMALL)
    other = synthetic.rows(encodings=["nope", "rope"], study="other", level={"rope": 3.0}, **SMALL)
    paths = [synthetic.write_study(tmp_path, frame) for frame in (one, other)]
    text = report.build(paths, tmp_path / "out", formats=()).read_text(encoding="utf-8")
    assert 'id="figure-differences-synthetic"' in text
    assert 'id="figure-differences-other"' in text
    table = tmp_path / "out" / "tables"
    ours, theirs = (pd.read_csv(table / f"differences-{name}.csv") for name in ("synthetic", "other"))
    assert (ours["difference"] > 0).all()  # nope - rope
    assert (theirs["difference"] < 0).all()
    assert "over all 2 pairs and lengths" in text
    assert 'id="figure-cost-other"' in text


def test_losses_of_two_trainings_are_never_averaged(tmp_path: Path) -> None:
    rows = synthetic.rows(encodings=["rope"], **SMALL)
    paths = [
        synthetic.write_study(tmp_path, rows),
        synthetic.write_study(tmp_path, rows.assign(study="other"), steps=100),
    ]
    found = tables.training([studies.read_study(path) for path in paths])
    figure = charts.training_figure(found, looks(["rope"]))
    assert figure is not None
    svg = drawing.render(figure, "two-column", ("svg",))["svg"].decode()
    assert "rope, synthetic" in svg
    assert "rope, other" in svg
    assert figure.caption.startswith("Loss on the training batches")
    assert "one seed" in figure.caption
