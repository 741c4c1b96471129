"""Loss by position: every point lies within its window and rests on more than its last targets."""

from __future__ import annotations

import numpy as np
import pytest
import synthetic_studies as synthetic

from pe_study import plots, tables
from pe_study.reporting import palette
from pe_study.reporting.position_figures import position_figure, within_windows

ONE = {"encodings": ["rope"], "rescales": ("none",), "num_documents": 4, "lengths": (64, 128, 256)}


def test_the_last_target_of_a_window_joins_the_bin_before_its_own() -> None:
    rows = synthetic.plain_rows(protocols=("nonoverlapping",), **ONE)
    rows.loc[rows["position_lo"] == rows["length"], "position_hi"] *= 2  # as wide as evaluations write it
    last = rows[(rows["length"] == 256) & (rows["position_lo"] >= 128)]
    assert last["position_lo"].nunique() == 2
    made = within_windows(rows)
    assert (made["position_lo"] < made["length"]).all()
    assert (made["position_hi"] <= made["length"] + 1).all()
    found = tables.position_curves(made)
    end = found[(found["length"] == 256) & (found["position_lo"] == 128)]
    assert end["num_tokens"].tolist() == [last["num_tokens"].sum()]
    assert end["nll"].iloc[0] == pytest.approx(last["nll_sum"].sum() / last["num_tokens"].sum())
    assert end["position_hi"].tolist() == [257]
    assert made["nll_sum"].sum() == rows["nll_sum"].sum()


def test_no_point_lies_outside_the_window() -> None:
    rows = within_windows(synthetic.plain_rows(protocols=("nonoverlapping",), **ONE))
    figure = position_figure(
        tables.position_curves(rows), "nll", "nonoverlapping", palette.looks([("rope", "rope")])
    )
    assert figure is not None
    middle = np.sqrt(figure.table["position_lo"] * (figure.table["position_hi"] - 1))
    assert middle.max() == pytest.approx((128 * 256) ** 0.5)
    assert "one a window, are in the last" in figure.caption


def test_contexts_of_whole_windows_alone_stay() -> None:
    rows = synthetic.plain_rows(protocols=("exact-context", "nonoverlapping"), **ONE)
    made = within_windows(rows)
    exact = made[made["protocol"] == "exact-context"]
    assert exact["position_lo"].tolist() == rows[rows["protocol"] == "exact-context"]["position_lo"].tolist()


def test_protocols_that_are_not_drawn_are_named() -> None:
    order = ("nonoverlapping", "sliding", "exact-context", "fixed-target")
    rows = synthetic.plain_rows(protocols=order, **ONE)
    curves = tables.length_curves(rows)
    figure = plots.protocols_figure(curves, "nll", palette.looks([("rope", "rope")]))
    assert figure is not None
    assert "Not drawn: fixed-target." in figure.caption
