"""Two processes do what one does: gradients, samples, learning rates; a fault on one stops both."""

from pathlib import Path
from typing import Any

import pytest
import torch
from processes import launch
from safetensors.torch import load_file
from test_train import stop_after, trace
from tiny import ENCODINGS, llama_overrides, make_updater, tiny_recipe, write_llama

from pe_study import runs, snapshots
from pe_study.data import TrainBatches
from pe_study.errors import Interrupted
from pe_study.recipe import load
from pe_study.train import train_study
from pe_study.training.engine import make_accelerator
from pe_study.training.initial import load_data


@pytest.fixture(scope="module")
def exchanged(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the gradients that two processes found together."""
    folder = tmp_path_factory.mktemp("exchanged")
    tiny_recipe(folder)
    assert launch("ranks.py", "gradients", folder) == [0, 0]
    return folder


@pytest.mark.parametrize("checkpointing", ["false", "true"])
@pytest.mark.parametrize("encoding", ENCODINGS)
def test_gradients_are_those_of_one_process(exchanged: Path, encoding: str, checkpointing: str) -> None:
    """cases 14 and 47: uneven micro-batches, a T5 table shared by all layers, every parameter used."""
    recipe = load(exchanged / "tiny.yaml", ("data.packing=isolate", f"encodings=[{encoding}]"))
    updater = make_updater(recipe)
    updater.backward(0)
    for rank in (0, 1):
        found = load_file(exchanged / f"{encoding}-{checkpointing}-{rank}.safetensors")
        for name, weight in updater.model.named_parameters():
            torch.testing.assert_close(found[name], weight.grad, rtol=1e-5, atol=1e-6)


def test_processes_share_the_batch_and_drop_differently(exchanged: Path) -> None:
    """case 48"""
    first, second = (runs.read_json(exchanged / f"share-{rank}.json") for rank in (0, 1))
    assert sorted(first["slots"] + second["slots"]) == list(range(8))
    assert first["dropout"] != second["dropout"]


def samples(folder: Path) -> list[str]:
    """Every sample that any process trained on, by step and slot, without repeats."""
    return sorted({line for path in folder.glob("samples-*.txt") for line in path.read_text().splitlines()})


def test_one_two_one_processes_see_the_same_samples_and_rates(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """cases 13 and 48; SIGTERM to one of two processes stops both."""
    recipe = tiny_recipe(tmp_path)
    whole = train_study(recipe, tmp_path / "whole")[0]
    lines: list[str] = []
    plain = TrainBatches.batch

    def batch(self: TrainBatches, step: int, slots: Any = None) -> Any:
        chunks = self.indices(step, slots)
        lines.extend(f"{step} {slot} {chunk}" for slot, chunk in zip(slots, chunks, strict=True))
        return plain(self, step, slots)

    monkeypatch.setattr(TrainBatches, "batch", batch)
    with monkeypatch.context() as patch:
        stop_after(patch, 3)
        with pytest.raises(Interrupted):
            train_study(recipe, tmp_path / "runs")
    assert launch("ranks.py", "resume", tmp_path) == [75, 75]
    folder = tmp_path / "runs" / "tiny" / "rope-s0"
    assert snapshots.newest(folder / "snapshots").step == 6  # type: ignore[union-attr]
    train_study(recipe, tmp_path / "runs")

    batches = make_updater(recipe).batches
    expected = {f"{step} {slot} {batches.indices(step, [slot])[0]}" for step in range(8) for slot in range(8)}
    assert len(samples(tmp_path)) == 3 * 8, "the two processes made updates 4 to 6"
    assert {*lines, *samples(tmp_path)} == expected
    found, wanted = trace(folder), trace(whole.folder)
    assert [row[:2] + row[3:4] for row in found] == [row[:2] + row[3:4] for row in wanted]  # step, tokens, lr
    for row, other in zip(found, wanted, strict=True):
        assert row[2] == pytest.approx(other[2], rel=1e-5)


@pytest.mark.parametrize("num_processes", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_a_stopped_run_repeats_the_whole_one_bit_for_bit(tmp_path: Path, num_processes: int) -> None:
    """Three or more add in an order, which has to be that of the session before."""
    recipe = tiny_recipe(tmp_path)
    assert launch("ranks.py", "stop_and_go_on", tmp_path, num_processes=num_processes) == [0] * num_processes
    whole, parts = (tmp_path / name / recipe.name / "rope-s0" for name in ("whole", "parts"))
    assert (parts / "snapshots" / "step_00000005").exists()
    assert trace(parts) == trace(whole)
    digests = {runs.read_json(folder / "DONE")["weights_sha256"] for folder in (whole, parts)}
    assert len(digests) == 1


@pytest.mark.parametrize("fault", ["bad_loss", pytest.param("bad_gradient", marks=pytest.mark.slow)])
def test_a_fault_on_one_process_stops_both_before_the_update(tmp_path: Path, fault: str) -> None:
    tiny_recipe(tmp_path, "train.snapshot_every=1")
    recipe = load(tmp_path / "tiny.yaml")
    assert launch("ranks.py", fault, tmp_path) == [5, 5]
    folder = tmp_path / "runs" / recipe.name / "rope-s0"
    report = runs.read_json(folder / "non_finite.json")
    assert report["step"] == 3
    assert report["documents"]
    if fault == "bad_gradient":
        assert report["parameters"] == ["norm.weight"]
    assert [row["step"] for row in runs.read_metrics(folder)] == [1, 2]


def test_out_of_memory_on_one_process_halves_on_both(tmp_path: Path) -> None:
    """In the forward pass, of training and of validation; a Llama has buffers, which no process waits for."""
    recipe = tiny_recipe(tmp_path)
    whole = [train_study(recipe, tmp_path / "whole")[0]]
    write_llama(tmp_path / "llama", whole[0].folder / "final", max_position_embeddings=64)
    whole += train_study(load(tmp_path / "tiny.yaml", llama_overrides(tmp_path)), tmp_path / "whole")
    assert launch("ranks.py", "out_of_memory", tmp_path) == [0, 0]
    for name, one in zip(("tiny", "llama"), whole, strict=True):
        folder = tmp_path / "runs" / name / "rope-s0"
        for row, other in zip(trace(folder), trace(one.folder), strict=True):
            assert row[2] == pytest.approx(other[2], rel=1e-5)
        newest = snapshots.newest(folder / "snapshots")
        assert newest is not None
        assert newest.facts["updater"]["micro_sequences"] == newest.facts["validation_sequences"] == 2


@pytest.mark.slow  # where memory is agreed on is the way that most runs take: tested above
@pytest.mark.parametrize("fault", ["out_of_memory_while_exchanging", "out_of_memory_while_sharded"])
@pytest.mark.slow
def test_out_of_memory_that_cannot_be_agreed_on_ends_both(
    tmp_path: Path, fault: str, capfd: pytest.CaptureFixture[str]
) -> None:
    """Halfway through an exchange there is no way back: one line with the remedy, no hang."""
    tiny_recipe(tmp_path)
    assert launch("ranks.py", fault, tmp_path) == [75, 2]
    said = capfd.readouterr().err
    assert "out of memory on process 1 while gradients were exchanged" in said
    assert "set train.micro_batch_tokens to 32" in said
    assert "process 0 lost another of this run" in said


def test_sharded_models_train_alike(tmp_path: Path) -> None:
    """FSDP2 by the shipped configuration: ours, and a Llama, whose layers have another name."""
    recipe = tiny_recipe(tmp_path)
    load_data(recipe, make_accelerator(recipe)).tokenizer.save(tmp_path / "tokenizer")
    write_llama(tmp_path / "llama", tmp_path / "tokenizer", max_position_embeddings=64)
    assert launch("ranks.py", "sharded", tmp_path) == [0, 0]
    studies = {encoding: ("data.packing=isolate", f"encodings=[{encoding}]") for encoding in ENCODINGS}
    for name, overrides in {**studies, "llama": llama_overrides(tmp_path)}.items():
        updater = make_updater(load(tmp_path / "tiny.yaml", overrides))
        expected = [updater.update(step) for step in range(3)]
        facts = runs.read_json(tmp_path / f"{name}-sharded-0.json")
        for (loss, grad_norm), update in zip(facts, expected, strict=True):
            assert (loss, grad_norm) == pytest.approx((update.loss, update.grad_norm), rel=1e-4)
        first, second = (load_file(tmp_path / f"{name}-sharded-{rank}.safetensors") for rank in (0, 1))
        assert all(torch.equal(first[key], second[key]) for key in first)
        assert set(first) == {key for key, _ in updater.model.named_parameters()}
