"""The page while a study runs: built again whenever a file changes, until every run is done."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import synthetic_studies as synthetic

from pe_study import report

SMALL = {"encodings": ["nope", "rope"], "lengths": (64, 128), "num_documents": 2, "rescales": ("none",)}


@pytest.fixture
def running(tmp_path: Path) -> Path:
    """A study of which rope is at step 200 and not evaluated."""
    rows = synthetic.rows(**SMALL, protocols=("nonoverlapping",))
    folder = synthetic.write_study(tmp_path / "runs", rows)
    evaluated = rows[rows["label"] == "nope"]
    evaluated.to_parquet(folder / "eval" / "length" / "results.parquet")
    (folder / "rope-s0" / "DONE").unlink()
    metrics = folder / "rope-s0" / "metrics.jsonl"
    lines = metrics.read_text(encoding="utf-8").splitlines()[:20]
    metrics.write_text("\n".join([*lines, '{"step": 210, "lo']), encoding="utf-8")  # a line being written
    return folder


def test_a_partial_study_names_what_is_missing(running: Path, tmp_path: Path) -> None:
    page = report.build([running], tmp_path / "out", formats=()).read_text(encoding="utf-8")
    assert "Training not finished: rope-s0 (step 200 of 300)." in page
    assert "Where every run stands" in page
    assert "not finished" in page
    (running / "rope-s0" / "DONE").write_text("{}", encoding="utf-8")
    page = report.build([running], tmp_path / "out", formats=()).read_text(encoding="utf-8")
    assert "Trained but not evaluated: rope-s0." in page
    assert "Where every run stands" not in page


def test_watch_follows_a_study_to_its_end(
    running: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing changed: nothing is built. A line more: built again. All done: the last page, then the end."""
    waits = iter([lambda: None, lambda: more(), lambda: (running / "rope-s0" / "DONE").write_text("{}")])

    def more() -> None:
        metrics = running / "rope-s0" / "metrics.jsonl"
        lines = metrics.read_text(encoding="utf-8").splitlines()[:20]
        metrics.write_text("\n".join([*lines, '{"step": 210, "loss": 1.9}\n']), encoding="utf-8")

    monkeypatch.setattr(report.time, "sleep", lambda seconds: next(waits)())
    seen = list(report.watch([running], tmp_path / "out", interval=7, formats=()))
    assert [line for _, line in seen] == [
        "synthetic: 1 of 2 runs done, rope-s0 at step 200 of 300",
        "synthetic: 1 of 2 runs done, rope-s0 at step 210 of 300",
        "synthetic: 2 of 2 runs done",
    ]
    assert {page for page, _ in seen} == {tmp_path / "out" / "index.html"}
    assert json.loads((tmp_path / "out" / "report.json").read_text(encoding="utf-8"))["studies"]


def test_watch_ends_at_once_when_all_is_done(tmp_path: Path) -> None:
    folder = synthetic.write_study(tmp_path / "runs", synthetic.rows(**SMALL, protocols=("nonoverlapping",)))
    assert len(list(report.watch([folder], tmp_path / "out", formats=()))) == 1
