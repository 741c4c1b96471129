"""Runs at once: a process each, a GPU each where there are some, and one that dies takes no other with it."""

import logging
import os
import signal
from multiprocessing.context import SpawnProcess
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import tiny_recipe

from pe_study.errors import Interrupted
from pe_study.metrics import METRICS
from pe_study.training import jobs
from pe_study.training.devices import share_out, visible_gpus
from pe_study.training.jobs import train_at_once
from pe_study.training.stopping import StopRequest, describe_exit, wants_restart


@pytest.mark.parametrize(
    ("gpus", "num_jobs", "expected"),
    [
        (["0", "1"], 2, ["0", "1"]),
        (["0", "1"], 5, ["0", "1", "0", "1", "0"]),
        (["4", "5", "6"], 2, ["4", "5"]),
        (["MIG-a"], 3, ["MIG-a"] * 3),
        ([], 2, [None, None]),
    ],
)
def test_gpus_are_shared_out_in_turn(gpus: list[str], num_jobs: int, expected: list[str | None]) -> None:
    assert share_out(gpus, num_jobs) == expected


def test_gpus_are_those_that_this_process_may_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    assert visible_gpus({}) == ["0", "1", "2"]
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": "4, GPU-8a1f"}) == ["4", "GPU-8a1f"]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": "4"}) == []


def train(recipe: Any, root: Path, only: dict[str, str], *, resume: str, stop: StopRequest) -> list[str]:
    """Stands for `train_study`: says which GPU it sees; the first run is killed at its first start."""
    run_id = only["run"]
    (root / run_id).write_text(os.environ["CUDA_VISIBLE_DEVICES"])
    if run_id == "rope-s0":
        os.kill(os.getpid(), signal.SIGKILL)
    if run_id == "alibi-s0":
        raise Interrupted("alibi-s0: stopped")
    return [run_id]


def test_a_process_that_is_killed_takes_no_other_run_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(jobs, "visible_gpus", lambda: ["6", "GPU-8a1f"])
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "6,GPU-8a1f")
    recipe = tiny_recipe(tmp_path, "seeds=[0, 1]", encodings=("rope", "alibi"))
    with pytest.raises(Interrupted, match=r"rope-s0: its process ended with SIGKILL .*the same command"):
        train_at_once(
            train, recipe, tmp_path, recipe.runs(), jobs=2, resume="auto", progress=False, stop=StopRequest()
        )
    assert "alibi-s0: stopped" in caplog.text, "every run that did not finish is named"
    seen = {run.run_id: (tmp_path / run.run_id).read_text() for run in recipe.runs()}
    assert len(seen) == 4, "all were begun, one of them by a process in the place of the dead one"
    assert set(seen.values()) == {"6", "GPU-8a1f"}
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "6,GPU-8a1f"


def quiet(recipe: Any, root: Path, only: dict[str, str], *, resume: str, stop: StopRequest) -> list[str]:
    """Stands for `train_study`: warns, and is done."""
    logging.getLogger("pe_study.somewhere").warning("of %s", only["run"])
    return [only["run"]]


@pytest.mark.slow
def test_idle_processes_end_by_themselves_and_warn_in_lines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """A killed one would leak its semaphores, which Python complains of when the command ends; a Ctrl-C that
    comes before a process can answer signals ends none, since the parent answers it for all."""
    end, codes = jobs.Worker.end, []
    start, held_back = SpawnProcess.start, []

    def watched(worker: jobs.Worker[str]) -> None:
        process = worker._process
        end(worker)
        codes.append(process and process.exitcode)

    def interrupted(process: SpawnProcess) -> None:
        held_back.append(signal.pthread_sigmask(signal.SIG_BLOCK, []))
        start(process)
        os.kill(process.pid or 0, signal.SIGINT)

    monkeypatch.setattr(jobs.Worker, "end", watched)
    monkeypatch.setattr(SpawnProcess, "start", interrupted)
    recipe = tiny_recipe(tmp_path, encodings=("rope", "alibi"))
    for run_id, line in (("rope-s0", '{"step": 1,'), ("alibi-s0", '{"step": 1}')):
        (tmp_path / "tiny" / run_id).mkdir(parents=True)  # damaged, or odd: the bar does without
        (tmp_path / "tiny" / run_id / METRICS).write_text(f"{line}\n", encoding="utf-8")
    options: dict[str, Any] = {"resume": "auto", "progress": True, "stop": StopRequest()}
    done = train_at_once(quiet, recipe, tmp_path, recipe.runs(), jobs=2, **options)
    assert sorted(done) == ["alibi-s0", "rope-s0"]
    assert all(signals >= {signal.SIGINT, signal.SIGTERM, signal.SIGUSR2} for signals in held_back)
    assert signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, [])
    assert set(codes) <= {0, None} and 0 in codes
    said = capfd.readouterr().err
    assert "pe-study: warning: of rope-s0\n" in said
    assert "1/16" in said, "a step of the log that can be read"


def test_what_wants_to_be_started_again() -> None:
    assert [code for code in (0, 1, 2, 5, 75, -9, -11, -15) if wants_restart(code)] == [75, -9, -15]
    assert describe_exit(5) == "exit code 5"
    assert describe_exit(-11) == "SIGSEGV"
    assert describe_exit(-9).startswith("SIGKILL (out of memory")
