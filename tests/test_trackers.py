"""Trackers get what `metrics.jsonl` gets, through Accelerate and without a network."""

import importlib
from pathlib import Path
from typing import Any

import pytest
from tiny import tiny_recipe

from pe_study import runs
from pe_study.train import train_study

pytestmark = pytest.mark.filterwarnings("default")  # of the trackers and what they bring


def installed(name: str) -> Any:
    return pytest.importorskip(name, reason=f"{name} is not installed (pip install 'pe-study[trackers]')")


def train(folder: Path, name: str) -> list[dict[str, Any]]:
    """Train with a tracker; returns the lines of metrics.jsonl."""
    result = train_study(tiny_recipe(folder, f"train.log_with=[{name}]"), folder / "runs")[0]
    return runs.read_metrics(result.folder)


def test_tensorboard(tmp_path: Path) -> None:
    installed("tensorboard")
    accumulator = importlib.import_module("tensorboard.backend.event_processing.event_accumulator")
    rows = train(tmp_path, "tensorboard")
    (events,) = (tmp_path / "runs" / "tiny" / "rope-s0" / "tiny").glob("events.*")
    read = accumulator.EventAccumulator(str(events))
    read.Reload()
    for key in ("loss", "lr", "val_loss"):
        expected = [(row["step"], row[key]) for row in rows if row.get(key) is not None]
        found = [(event.step, event.value) for event in read.Scalars(key)]
        assert [step for step, _ in found] == [step for step, _ in expected]
        assert [value for _, value in found] == pytest.approx([value for _, value in expected], rel=1e-6)


def test_wandb_stays_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    installed("wandb")
    monkeypatch.delenv("WANDB_MODE", raising=False)
    monkeypatch.setenv("WANDB_SILENT", "true")
    train(tmp_path, "wandb")
    folder = tmp_path / "runs" / "tiny" / "rope-s0" / "wandb"
    assert [path.name.partition("-")[0] for path in folder.iterdir() if path.is_dir()].count("offline") == 1
    assert list(folder.glob("offline-run-*/*.wandb"))


def test_trackio(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    installed("trackio")
    train(tmp_path, "trackio")
    assert list((tmp_path / "trackio").glob("tiny*"))
    assert capsys.readouterr().out == ""
