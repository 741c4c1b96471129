"""What a run spent is counted over its sessions, and its memory apart from what ran before it."""

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from test_train import stop_after
from tiny import tiny_recipe

from pe_study import kept, runs, snapshots
from pe_study.errors import Interrupted
from pe_study.memory import peak_memory_bytes, reset_peak_memory
from pe_study.train import train_study
from pe_study.training.spent import Spent


def session(monkeypatch: pytest.MonkeyPatch, processes: int, seconds: float) -> Any:
    """What a session on so many processes counts after so many seconds."""
    times = iter([100.0, 100.0 + seconds])
    monkeypatch.setattr("pe_study.training.spent.time", SimpleNamespace(perf_counter=lambda: next(times)))
    return Spent(SimpleNamespace(num_processes=processes, device=torch.device("cpu")))  # type: ignore[arg-type]


def test_sessions_add_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """10 seconds on 4 processes, then 3 on one."""
    first = session(monkeypatch, 4, 10).facts()
    second = session(monkeypatch, 1, 3)
    second.go_on_from({**first, "peak_memory_bytes": 2**60})
    facts = second.facts()
    assert (facts["wall_seconds"], facts["device_seconds"]) == (13.0, 43.0)
    assert facts["peak_memory_bytes"] == 2**60 > first["peak_memory_bytes"] > 0


def test_a_resumed_run_counts_its_earlier_sessions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = tiny_recipe(tmp_path)
    with monkeypatch.context() as patch:
        stop_after(patch, 5)
        patch.setattr(
            "pe_study.training.spent.time", SimpleNamespace(perf_counter=iter(range(0, 10**6, 1000)).__next__)
        )
        with pytest.raises(Interrupted):
            train_study(recipe, tmp_path)
    newest = snapshots.newest(tmp_path / "tiny" / "rope-s0" / "snapshots")
    assert newest is not None
    before = newest.facts["spent"]["wall_seconds"]
    assert before >= 1000
    facts = train_study(recipe, tmp_path)[0].facts
    assert before < facts["wall_seconds"] < before + 500
    assert facts["device_seconds"] == facts["wall_seconds"]


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere the peak is that of the whole process")
def test_peak_memory_is_that_of_the_run_alone() -> None:
    cpu = torch.device("cpu")
    reset_peak_memory(cpu)
    before = peak_memory_bytes(cpu)
    torch.ones(2**28, dtype=torch.uint8)
    assert peak_memory_bytes(cpu) > before + 2**27
    reset_peak_memory(cpu)
    assert peak_memory_bytes(cpu) < before + 2**27


def test_without_proc_the_peak_is_that_of_the_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pe_study.memory.PROCESS", tmp_path / "nowhere")
    reset_peak_memory(torch.device("cpu"))
    assert peak_memory_bytes(torch.device("cpu")) > 2**25


def test_device_hours_count_the_processes_of_each_session(tmp_path: Path) -> None:
    """10 tokens a step: 2 steps at 5 tokens a second on 3 processes, 3 at 10 on one."""
    metrics = runs.Metrics(tmp_path)
    metrics.append({"step": 2, "tokens": 20, "tokens_per_second": 5.0, "num_processes": 3})
    metrics.append({"step": 5, "tokens": 50, "tokens_per_second": 10.0, "num_processes": 1})
    metrics.close()
    runs.write_json(tmp_path / "provenance.json", {"num_processes": 1})
    hours = [kept.device_hours(tmp_path, step) for step in (1, 2, 3, 5)]
    assert hours == pytest.approx([seconds / 3600 for seconds in (6.0, 12.0, 13.0, 15.0)])
