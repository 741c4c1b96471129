"""Validation that runs out of memory, is asked to stop, or finds no finite loss."""

import json
import math
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from processes import launch
from test_train import trace
from tiny import tiny_recipe
from torch import Tensor

from pe_study import cli, runs, snapshots
from pe_study.errors import Interrupted, NonFiniteLossError, UsageError
from pe_study.model import PEStudyForCausalLM
from pe_study.train import train_study
from pe_study.training.validation import Validator


def limit_memory(monkeypatch: pytest.MonkeyPatch, sequences: int) -> None:
    """Without gradients no more than so many sequences fit."""
    plain = PEStudyForCausalLM.forward

    def forward(self: PEStudyForCausalLM, input_ids: Tensor, **inputs: Any) -> Any:
        if not torch.is_grad_enabled() and len(input_ids) > sequences:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB.")
        return plain(self, input_ids=input_ids, **inputs)

    monkeypatch.setattr(PEStudyForCausalLM, "forward", forward)


def test_out_of_memory_halves_its_micro_batch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    recipe = tiny_recipe(tmp_path)
    whole = train_study(recipe, tmp_path / "whole")[0]
    limit_memory(monkeypatch, sequences=3)
    result = train_study(recipe, tmp_path / "runs")[0]
    assert result.facts["weights_sha256"] == whole.facts["weights_sha256"]
    assert result.facts["val_loss"] == pytest.approx(whole.facts["val_loss"], rel=1e-6)
    assert caplog.text.count("validation: out of memory") == 2, "8 sequences, 4, 2; then it stays"
    newest = snapshots.newest(result.folder / "snapshots")
    assert newest is not None
    assert newest.facts["validation_sequences"] == 2


def test_a_sequence_that_does_not_fit_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    limit_memory(monkeypatch, sequences=0)
    with pytest.raises(UsageError, match="validation: out of memory with one sequence of 16 tokens"):
        train_study(tiny_recipe(tmp_path), tmp_path / "runs")


@pytest.mark.parametrize("more", [["train.eval_every=1"], ["train.steps=1"]])
def test_a_loss_that_is_not_finite_ends_like_one_of_training(
    tmp_path: Path, more: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """Weights explode in the first update, whose own loss and gradients are those before it."""
    path = str(tiny_recipe(tmp_path).path)
    given = ["train", path, "--runs", str(tmp_path)]
    assert cli.main([*given, "train.lr=1e39", "train.warmup_steps=0", *more]) == 5
    assert "step 1: validation loss nan after the update" in capsys.readouterr().err
    folder = tmp_path / "tiny" / "rope-s0"
    report = json.loads((folder / "non_finite.json").read_text())
    assert (report["step"], report["validation_loss"]) == (1, "nan")
    assert not (folder / "DONE").exists()
    assert runs.read_metrics(folder) == []
    assert cli.main(given) == 0
    assert not (folder / "non_finite.json").exists(), "the run ended well"


def stop_in_validation(monkeypatch: pytest.MonkeyPatch, number: int) -> list[int]:
    """A SIGTERM in the second micro-batch of the validation of that number; micro-batches of it that ran."""
    plain, evaluate = Validator._sums, Validator.evaluate
    validations: list[int] = []
    ran: list[int] = []

    def counted(self: Validator, *args: Any) -> Any:
        validations.append(1)
        return evaluate(self, *args)

    def sums(self: Validator, *args: Any) -> Tensor:
        if len(validations) == number:
            ran.append(1)
            if len(ran) == 2:
                os.kill(os.getpid(), signal.SIGTERM)
        return plain(self, *args)

    monkeypatch.setattr(Validator, "evaluate", counted)
    monkeypatch.setattr(Validator, "_sums", sums)
    return ran


@pytest.mark.parametrize(("number", "step"), [(1, 4), (2, 8)])
def test_a_stop_is_answered_within_a_micro_batch(
    tmp_path: Path, number: int, step: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the step that was validated everything is saved, and its validation comes first when it goes on:
    twice stopped, in the same one, the trace and the weights are those of the whole run."""
    recipe = tiny_recipe(tmp_path, "train.keep_snapshots=1")
    whole = train_study(recipe, tmp_path / "whole")[0]
    folder = tmp_path / "parts" / "tiny" / "rope-s0"
    for which in (number, 1):
        with monkeypatch.context() as patch:
            ran = stop_in_validation(patch, which)
            with pytest.raises(Interrupted, match=f"stopped after step {step}"):
                train_study(recipe, tmp_path / "parts")
        assert len(ran) == 2
        newest = snapshots.newest(folder / "snapshots")
        assert newest is not None
        assert newest.step == step
        assert [row["step"] for row in runs.read_metrics(folder)] == list(range(1, step))
    again = train_study(recipe, tmp_path / "parts")[0]
    assert trace(folder) == trace(whole.folder)
    assert again.facts["weights_sha256"] == whole.facts["weights_sha256"]
    assert again.facts["val_loss"] == whole.facts["val_loss"]


def test_a_step_that_proves_to_be_no_good_after_a_stop_leaves_the_snapshots_before_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stop within the validation saves its step; where the loss is then not finite, that is taken back."""
    recipe = tiny_recipe(tmp_path, "train.keep_snapshots=1", "train.snapshot_every=3")
    folder = tmp_path / "tiny" / "rope-s0"
    with monkeypatch.context() as patch, pytest.raises(Interrupted):
        stop_in_validation(patch, 1)
        train_study(recipe, tmp_path)
    assert snapshots.steps(folder / "snapshots") == [3, 4]
    with (
        monkeypatch.context() as patch,
        pytest.raises(NonFiniteLossError, match="nothing of this step was saved"),
    ):
        patch.setattr(Validator, "evaluate", lambda *_: {"val_loss": math.nan})
        train_study(recipe, tmp_path)
    assert snapshots.steps(folder / "snapshots") == [3]
    assert train_study(recipe, tmp_path)[0].status == "trained"
    assert snapshots.steps(folder / "snapshots") == [6]


def test_a_line_that_was_due_is_written_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Killed after the validation that was due, the run makes it again."""

    class Killed(BaseException):
        pass

    def kill(*args: Any) -> None:
        raise Killed

    recipe = tiny_recipe(tmp_path)
    with monkeypatch.context() as patch:
        stop_in_validation(patch, 1)
        with pytest.raises(Interrupted):
            train_study(recipe, tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr("pe_study.training.updates.Updater.update", kill)
        with pytest.raises(Killed):
            train_study(recipe, tmp_path)
    folder = tmp_path / "tiny" / "rope-s0"
    assert [row["step"] for row in runs.read_metrics(folder)] == [1, 2, 3, 4]
    train_study(recipe, tmp_path)
    assert [row["step"] for row in runs.read_metrics(folder)] == list(range(1, 9))


@pytest.mark.slow
def test_processes_agree_on_memory_and_stops(tmp_path: Path) -> None:
    """One of two runs out of memory at more than two sequences, and is asked to stop at step 4."""
    tiny_recipe(tmp_path)
    assert launch("ranks.py", "validation", tmp_path) == [75, 75]
    newest = snapshots.newest(tmp_path / "runs" / "tiny" / "rope-s0" / "snapshots")
    assert newest is not None
    assert (newest.step, newest.facts["due"]["step"]) == (4, 4)
    assert newest.facts["validation_sequences"] == 2
