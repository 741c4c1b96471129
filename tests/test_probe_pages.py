"""Sections of controls and snapshots on a page that shows another protocol, or several texts."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
import pytest
import synthetic_studies as synthetic

from pe_study import report, rows

SMALL = {"encodings": ["nope"], "lengths": (64, 256), "num_documents": 3, "rescales": ("none",)}


def page_of(folder: Path, study: Path, figure: str, protocol: str) -> Path:
    """The report of a study that holds one kind of figure, seen under a protocol."""
    view = folder / "view.yaml"
    view.write_text(f"figures: [{figure}]\ntables: []\nprotocol: {protocol}\nmetric: nll\n", encoding="utf-8")
    return report.build([study], folder / f"page-{protocol}", view=view, formats=())


def section_of(page: Path, title: str) -> str:
    text = (page.parent / "report.md").read_text(encoding="utf-8")
    return text.partition(f"## {title}")[2].partition("\n## ")[0]


def shown_under(page: Path, figure: str) -> str:
    """The protocol that a figure of the page is hidden without; "" for none."""
    html = page.read_text(encoding="utf-8")
    attributes = html.partition(f'id="figure-{figure}"')[2].partition(">")[0]
    return attributes.partition('data-protocol="')[2].partition('"')[0]


@pytest.fixture(scope="module")
def controlled(tmp_path_factory) -> Path:
    """Far context is replaced under exact-context alone; windows run under both protocols."""
    made = synthetic.rows(**SMALL, protocols=("nonoverlapping", "exact-context"))
    far = made[(made["protocol"] == "exact-context") & (made["length"] > 64)]
    parts = [made.assign(control="none"), far.assign(control="far_context=shuffled")]
    parts.append(made.assign(control="attention_window=32"))
    study = synthetic.write_study(tmp_path_factory.mktemp("runs"), made)
    rows.write_rows(pd.concat(parts, ignore_index=True), study / "eval" / "length")
    return study


def test_controls_show_under_the_protocol_that_ran(controlled, tmp_path) -> None:
    page = page_of(tmp_path, controlled, "controls", "nonoverlapping")
    said = section_of(page, "Controls")
    assert said.count("changes the loss") == 2
    assert "**far_context=shuffled** under exact-context at 256 changes the loss" in said
    assert "**attention_window=32** at 256 changes the loss" in said
    assert said.count(".* Protocol ") == 2
    assert shown_under(page, "controls-nonoverlapping-nll") == "nonoverlapping"
    assert shown_under(page, "controls-exact-context-nll") == ""


def test_a_control_at_two_strides_is_told_against_the_plain_rows_of_its_stride(tmp_path) -> None:
    made = synthetic.rows(**SMALL, protocols=("sliding",))
    parts = [
        made.assign(stride=stride, control=control, nll_sum=made["nll_sum"] + harm * made["num_tokens"])
        for stride in (16, 32)
        for control, harm in (("none", 0.0), ("attention_window=32", stride / 16))
    ]
    study = synthetic.write_study(tmp_path / "runs", made)
    rows.write_rows(pd.concat(parts, ignore_index=True), study / "eval" / "length")
    said = section_of(page_of(tmp_path, study, "controls", "sliding_16"), "Controls")
    told = [line for line in said.split("\n") if "changes the loss" in line]
    assert len(told) == 1 and "**attention_window=32** at 256" in told[0] and "nope +1.000" in told[0]


def test_controls_that_ran_under_the_chosen_protocol_are_told_once(controlled, tmp_path) -> None:
    page = page_of(tmp_path, controlled, "controls", "exact-context")
    said = section_of(page, "Controls")
    assert said.count("changes the loss") == 2
    assert "under exact-context" not in said and "under nonoverlapping" not in said
    assert said.count(".* Protocol ") == 1
    assert shown_under(page, "controls-nonoverlapping-nll") == "nonoverlapping"


def test_a_second_text_leaves_the_controls_of_the_first(tmp_path) -> None:
    """Plain rows of two texts are two studies on the page; so are those under controls."""
    made = synthetic.rows(**SMALL, protocols=("nonoverlapping",))
    changed = made[made["length"] > 64].assign(control="far_context=shuffled")
    study = synthetic.write_study(tmp_path / "runs", made)
    first = pd.concat([made.assign(control="none"), changed], ignore_index=True)
    second = made.assign(corpus="other", corpus_hash="1" * 64)
    for name, frame in {"length": first, "other": second}.items():
        rows.write_rows(frame, study / "eval" / name)
    page = page_of(tmp_path, study, "controls", "nonoverlapping")
    assert "**far_context=shuffled** at 256 changes the loss" in section_of(page, "Controls")
    [drawn] = (page.parent / "tables").glob("controls-nonoverlapping-nll*.csv")
    found = pd.read_csv(drawn)
    assert set(found["control"]) == {"none", "far_context=shuffled"}
    assert found["study"].nunique() == 1


@pytest.mark.parametrize("ran", ["nonoverlapping", "exact-context"])
def test_snapshots_show_under_the_protocol_that_ran(ran, tmp_path) -> None:
    """Theirs is the plan's first, the page shows one: a heading without a figure says nothing."""
    made = synthetic.rows(**SMALL, protocols=("nonoverlapping", "exact-context"))
    study = synthetic.write_study(tmp_path / "runs", made)
    steps = [made.assign(step=n, trained_tokens=n * 4096, device_hours=n / 1000) for n in (100, 300)]
    frame = pd.concat(steps, ignore_index=True)
    rows.write_rows(frame[frame["protocol"] == ran], study / "eval" / "length", rows.OVER_TRAINING)
    page = page_of(tmp_path, study, "over_training", "exact-context")
    said = section_of(page, "Over training")
    assert said.count(".* Protocol ") == 1
    assert f"over training ({ran})" in said
    assert shown_under(page, f"over-training-{ran}-nll") == ""
