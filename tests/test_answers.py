"""Retrieval on the page: shares with Wilson intervals, floors said plainly, tasks and studies apart."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import synthetic_studies as synthetic
from scipy.stats import binomtest

from pe_study import report, stats
from pe_study.reporting import answers, drawing, palette, retrieval_figures
from pe_study.rows import RETRIEVAL, RETRIEVAL_COLUMNS, make_rows, write_rows


def rows(**changed: object) -> pd.DataFrame:
    """Two labels, tasks, lengths and depths, ten samples each: rope finds 8 of 10, nope all."""
    records = [
        {"study": "s", "run": f"{label}-s0", "model": label, "label": label, "encoding": label, "seed": 0,
         "rescale": "none", "train_length": 64, "task": task, "length": length, "depth": depth,
         "sample": sample, "correct": label == "nope" or sample < 8, "status": "ok"}
        | changed
        for label in ("nope", "rope")
        for task in ("passkey", "uuid")
        for length in (64, 128)
        for depth in (0.0, 0.5)
        for sample in range(10)
    ]  # fmt: skip
    return make_rows(records, RETRIEVAL_COLUMNS)


def test_wilson_bounds_are_the_textbook_ones() -> None:
    right, num = np.array([0, 8, 10, 50]), np.array([5, 10, 10, 100])
    low, high = stats.wilson(right, num)
    for k, n, bottom, top in zip(right, num, low, high, strict=True):
        expected = binomtest(int(k), int(n)).proportion_ci(method="wilson")
        assert (bottom, top) == pytest.approx((expected.low, expected.high), abs=1e-12)
    assert (low[1], high[1]) == pytest.approx((0.4902, 0.9433), abs=1e-4)


def test_shares_count_samples_by_depth_or_over_all() -> None:
    found = answers.accuracy(answers.plain(rows()))
    at = found[(found["label"] == "rope") & (found["task"] == "uuid")]
    assert set(zip(at["n"], at["accuracy"], strict=True)) == {(10, 0.8)}
    over = answers.accuracy(answers.plain(rows()), by=("length",))
    assert set(over["n"]) == {20}
    assert len(over) == 8


def test_tasks_are_never_averaged_together() -> None:
    mixed = answers.plain(rows())
    mixed.loc[mixed["task"] == "uuid", "correct"] = 0.0
    figure = retrieval_figures.depth_figure(mixed, "passkey")
    assert figure is not None
    assert figure.alt == "nope: 100 % over all; rope: 80 % over all"
    svg = drawing.render(figure, "two-column", ("svg",))["svg"].decode()
    assert "49\u201394" in svg
    assert "95 % Wilson interval over samples of these weights, not over seeds" in figure.caption


def test_a_floor_is_said_and_not_drawn() -> None:
    frame = answers.plain(rows())
    frame.loc[frame["label"] == "rope", "status"] = "floor"
    assert "**rope** cannot do passkey at all" in answers.floor_sentences(frame)[0]
    looks = palette.looks([("nope", "nope"), ("rope", "rope")])
    figure = retrieval_figures.length_figure(frame, "passkey", looks)
    assert figure is not None
    assert set(figure.table["label"]) == {"nope"}
    frame["status"] = "floor"
    assert retrieval_figures.depth_figure(frame, "passkey") is None
    assert retrieval_figures.length_figure(frame, "passkey", looks) is None
    shown = retrieval_figures.retrieval_table(frame)
    assert {row[5].text for row in shown.rows} == {"floor"}
    assert "80 % [58, 92]" in {row[3].text for row in shown.rows}


def test_a_length_that_cannot_be_done_stays_in_the_table() -> None:
    lost = rows(correct=None, status="oom").drop_duplicates(["label", "task"])
    shown = retrieval_figures.retrieval_table(answers.plain(pd.concat([rows(), lost.assign(length=4096)])))
    assert [(row[2].text, row[3].text, row[5].text) for row in shown.rows if row[5].text == "oom"] == [
        ("4,096", "\u2013", "oom")
    ] * 4


def test_gains_of_copies_have_intervals() -> None:
    copies = rows(correct=None, task="copy")
    copies["gain"] = np.arange(len(copies)) % 3
    found = answers.gains(answers.plain(copies))
    part = copies[(copies["label"] == "rope") & (copies["length"] == 64)]["gain"].astype(float)
    expected = stats.mean_interval(part)
    one = found[(found["label"] == "rope") & (found["length"] == 64)].iloc[0]
    assert (one["gain"], one["low"], one["high"]) == pytest.approx((expected.estimate, *expected.bounds()))


def test_retrieval_is_a_section_of_the_page(tmp_path: Path) -> None:
    folder = synthetic.write_study(
        tmp_path / "runs",
        synthetic.rows(
            encodings=["nope", "rope"], lengths=(64, 128), num_documents=2, protocols=("nonoverlapping",)
        ),
    )
    frame = rows()
    frame.loc[frame["label"] == "rope", "status"] = "floor"
    copies = rows(correct=None, task="copy", gain=0.5)
    unlabelled = rows(label=None, encoding=None, model="org/Model")
    everything = pd.concat([frame, copies, unlabelled], ignore_index=True)
    write_rows(everything, folder / "eval" / "length", RETRIEVAL)
    page = report.build([folder], tmp_path / "out", formats=()).read_text(encoding="utf-8")
    assert "<strong>rope</strong> cannot do passkey at all" in page
    for name in ("retrieval-passkey", "retrieval-length-uuid", "retrieval-copy"):
        assert f'id="figure-{name}"' in page
    assert "org/Model" in page
