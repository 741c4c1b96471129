"""A study trains, is skipped when finished, goes on when stopped, and refuses what does not fit."""

import json
import os
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from tiny import ENCODINGS, make_updater, tiny_recipe
from transformers import AutoModelForCausalLM, AutoTokenizer

from pe_study import runs, snapshots
from pe_study.errors import DataError, Interrupted, NonFiniteLossError, RecipeError, UsageError
from pe_study.planned import read_planned
from pe_study.recipe import load
from pe_study.train import train_study
from pe_study.training import state
from pe_study.training.jobs import resolve_jobs
from pe_study.training.run_files import RunFiles
from pe_study.training.selection import select_runs
from pe_study.training.stopping import StopRequest
from pe_study.training.updates import Update, Updater


def trace(folder: Path) -> list[tuple[Any, ...]]:
    """What must not depend on how often a run was stopped."""
    return [
        tuple(row.get(key) for key in ("step", "tokens", "loss", "lr", "grad_norm", "val_loss"))
        for row in runs.read_metrics(folder)
    ]


def test_a_study_trains_every_encoding_and_seed(tmp_path: Path) -> None:
    recipe = tiny_recipe(tmp_path, "seeds=[0, 1]", encodings=("rope", "alibi"))
    results = train_study(recipe, tmp_path / "runs")
    assert [(result.run_id, result.status) for result in results] == [
        (run_id, "trained") for run_id in ("rope-s0", "rope-s1", "alibi-s0", "alibi-s1")
    ]
    folder = tmp_path / "runs" / "tiny" / "rope-s1"
    assert {path.name for path in folder.iterdir()} == {
        *("recipe.yaml", "provenance.json", "metrics.jsonl", "snapshots", "final", "DONE", ".lock")
    }
    rows = runs.read_metrics(folder)
    assert [row["step"] for row in rows] == list(range(1, 9))
    assert [row["step"] for row in rows if "val_loss" in row] == [4, 8]
    assert rows[-1]["loss"] < rows[0]["loss"]
    assert [path.name for path in sorted((folder / "snapshots").iterdir())] == [
        "step_00000003",
        "step_00000006",
    ]
    assert load(folder / "recipe.yaml").runs() == (recipe.runs()[1],)
    assert read_planned(folder.parent) == tuple(run.run_id for run in recipe.runs())


def test_done_and_provenance_say_what_was_trained(tmp_path: Path) -> None:
    recipe = tiny_recipe(tmp_path, encodings=("learned",))
    train_study(recipe, tmp_path)
    folder = tmp_path / "tiny" / "learned-s0"
    done, provenance = runs.read_json(folder / "DONE"), runs.read_json(folder / "provenance.json")
    final = safetensors.torch.load_file(folder / "final" / "model.safetensors")
    assert done["weights_sha256"] == state.sha256(final)
    assert done["step"] == 8
    assert done["tokens"] == 8 * 128
    assert done["training_hash"] == provenance["training_hash"]
    assert provenance["kernel"] == "sdpa"
    assert provenance["device"] == "cpu"
    assert provenance["parameters"]["position"] == 64 * 32
    assert provenance["parameters"]["total"] == sum(tensor.numel() for tensor in final.values())


@pytest.mark.parametrize("encoding", ["t5", "shaw", "learned"])
def test_final_loads_to_the_same_logits_with_tied_weights(tmp_path: Path, encoding: str) -> None:
    """case 46, and case 25: no computed table in the file."""
    recipe = tiny_recipe(tmp_path, encodings=(encoding,))
    train_study(recipe, tmp_path)
    final = tmp_path / "tiny" / f"{encoding}-s0" / "final"
    model = AutoModelForCausalLM.from_pretrained(final)
    stored = safetensors.torch.load_file(final / "model.safetensors")
    parameters = dict(model.named_parameters())
    assert set(stored) == set(parameters)
    assert all(torch.equal(stored[name], weight) for name, weight in parameters.items())
    assert model.lm_head.weight is model.embedding.weight
    tokenizer = AutoTokenizer.from_pretrained(final)
    assert tokenizer("é")["input_ids"] == [0xC3, 0xA9]


def test_a_finished_run_is_skipped(tmp_path: Path) -> None:
    recipe = tiny_recipe(tmp_path)
    train_study(recipe, tmp_path)
    folder = tmp_path / "tiny" / "rope-s0"
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("*")}
    assert [result.status for result in train_study(recipe, tmp_path)] == ["skipped"]
    assert {path: path.stat().st_mtime_ns for path in folder.rglob("*")} == before


def test_only_picks_runs(tmp_path: Path) -> None:
    recipe = tiny_recipe(tmp_path, "seeds=[0, 1]", encodings=("rope", "alibi"))
    assert [run.run_id for run in select_runs(recipe, {"encoding": "rope"})] == ["rope-s0", "rope-s1"]
    assert [run.run_id for run in select_runs(recipe, {"seed": "1"})] == ["rope-s1", "alibi-s1"]
    assert [run.run_id for run in select_runs(recipe, {"seed": "1", "encoding": "alibi"})] == ["alibi-s1"]
    assert len(select_runs(recipe)) == 4


@pytest.mark.parametrize(
    ("only", "said"),
    [
        ({"encoding": "rop"}, 'did you mean "rope"'),
        ({"seed": "7"}, "available: 0"),
        ({"encodings": "rope"}, 'did you mean "encoding"'),
    ],
)
def test_a_selection_of_nothing_is_refused(tmp_path: Path, only: dict[str, str], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        train_study(tiny_recipe(tmp_path), tmp_path, only)
    assert not (tmp_path / "tiny").exists()


def test_labels_pick_one_of_two_of_a_kind(tmp_path: Path) -> None:
    recipe = tiny_recipe(tmp_path, "encodings=[rope, {name: rope, label: far, base: 1000000}]")
    assert [run.run_id for run in select_runs(recipe, {"encoding": "far"})] == ["far-s0"]
    assert [run.run_id for run in select_runs(recipe, {"encoding": "rope"})] == ["rope-s0", "far-s0"]


def test_a_finished_run_of_another_recipe_is_refused(tmp_path: Path) -> None:
    train_study(tiny_recipe(tmp_path), tmp_path)
    with pytest.raises(UsageError, match=r"trained with another recipe or corpus \(train.lr: 0.003 -> 0.5\)"):
        train_study(tiny_recipe(tmp_path, "train.lr=0.5"), tmp_path)


def test_what_does_not_decide_the_weights_may_change(tmp_path: Path) -> None:
    train_study(tiny_recipe(tmp_path), tmp_path)
    other = tiny_recipe(tmp_path, "train.log_every=3", "eval.lengths=[1x, 2x]", "train.keep_snapshots=9")
    assert [result.status for result in train_study(other, tmp_path)] == ["skipped"]


def test_a_run_directory_that_is_not_ours_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "tiny" / "rope-s0"
    folder.mkdir(parents=True)
    (folder / "notes.txt").write_text("mine")
    with pytest.raises(UsageError, match="not ours"):
        train_study(tiny_recipe(tmp_path), tmp_path)
    assert [path.name for path in folder.iterdir()] == ["notes.txt"]


def stop_after(monkeypatch: pytest.MonkeyPatch, step: int, number: int = signal.SIGTERM) -> None:
    """Send this process a signal while update `step` (from 1) runs."""
    plain = Updater.update

    def update(self: Updater, index: int, stop: StopRequest) -> Update:
        if index + 1 == step:
            os.kill(os.getpid(), number)
        return plain(self, index, stop)

    monkeypatch.setattr(Updater, "update", update)


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_a_stopped_run_goes_on_to_the_same_bits(
    tmp_path: Path, encoding: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    overrides = ("model.dropout=0.1", "train.micro_batch_tokens=48")
    recipe = tiny_recipe(tmp_path, *overrides, encodings=(encoding,))
    whole = train_study(recipe, tmp_path / "whole")[0]
    with monkeypatch.context() as patch:
        stop_after(patch, 5)
        with pytest.raises(Interrupted, match="stopped after step 5"):
            train_study(recipe, tmp_path / "parts")
    folder = tmp_path / "parts" / "tiny" / f"{encoding}-s0"
    assert not (folder / "DONE").exists()
    assert snapshots.newest(folder / "snapshots").step == 5  # type: ignore[union-attr]
    resumed = train_study(recipe, tmp_path / "parts")[0]
    assert trace(folder) == trace(whole.folder)
    assert resumed.facts["weights_sha256"] == whole.facts["weights_sha256"]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR2])
def test_signals_finish_the_step_and_give_the_handlers_back(
    tmp_path: Path, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = signal.getsignal(number)
    stop_after(monkeypatch, 2, number)
    with pytest.raises(Interrupted) as caught:
        train_study(tiny_recipe(tmp_path), tmp_path)
    assert caught.value.exit_code == 75
    assert signal.getsignal(number) is before
    assert [row["step"] for row in runs.read_metrics(tmp_path / "tiny" / "rope-s0")] == [1, 2]


def test_a_second_ctrl_c_stops_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = Updater.update

    def update(self: Updater, index: int, stop: StopRequest) -> Update:
        if index == 1:
            os.kill(os.getpid(), signal.SIGINT)
            os.kill(os.getpid(), signal.SIGINT)
        return plain(self, index, stop)

    monkeypatch.setattr(Updater, "update", update)
    with pytest.raises(KeyboardInterrupt):
        train_study(tiny_recipe(tmp_path), tmp_path)
    assert not (tmp_path / "tiny" / "rope-s0" / "snapshots").exists()


def test_ctrl_c_is_counted_whatever_comes_between() -> None:
    """torchrun answers every Ctrl-C with a SIGTERM to its processes."""
    with StopRequest() as stop, pytest.raises(KeyboardInterrupt):
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGTERM):
            os.kill(os.getpid(), number)
        assert stop.requested
        os.kill(os.getpid(), signal.SIGINT)


class Killed(BaseException):
    """Stands for kill -9: nothing catches it."""


@pytest.mark.parametrize(
    "moment", ["before the first snapshot", "while saving", "before final", "before DONE"]
)
def test_a_killed_run_is_not_taken_for_finished(
    tmp_path: Path, moment: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = tiny_recipe(tmp_path)
    whole = train_study(recipe, tmp_path / "whole")[0]

    def kill(*args: Any, **options: Any) -> None:
        raise Killed

    with monkeypatch.context() as patch:
        if moment == "before the first snapshot":
            patch.setattr(RunFiles, "save", kill)
        elif moment == "while saving":
            patch.setattr(snapshots, "verify", kill)
        elif moment == "before final":
            patch.setattr(RunFiles, "finish", kill)
        else:
            write_json = runs.write_json
            patch.setattr(
                runs, "write_json", lambda path, obj: kill() if path.name == "DONE" else write_json(path, obj)
            )
        with pytest.raises(Killed):
            train_study(recipe, tmp_path / "parts")
    folder = tmp_path / "parts" / "tiny" / "rope-s0"
    assert runs.run_state(folder).status == "partial"
    result = train_study(recipe, tmp_path / "parts")[0]
    assert result.status == "trained"
    assert trace(folder) == trace(whole.folder)
    assert result.facts["weights_sha256"] == whole.facts["weights_sha256"]


def test_weights_that_encodings_share_and_their_batches_are_equal(tmp_path: Path) -> None:
    """case 48, and the claim of the study: identical but for the encoding."""
    seen: dict[str, dict[str, bytes]] = {}
    for encoding in ENCODINGS:
        recipe = tiny_recipe(tmp_path, encodings=(encoding,))
        updater = make_updater(recipe)
        position = {name for name, _ in updater.model.position_parameters()}
        for name, weight in updater.model.named_parameters():
            if name not in position:
                seen.setdefault(name, {})[encoding] = weight.detach().numpy().tobytes()
        ids = updater.batches.batch(3).ids_BT.numpy().tobytes()
        seen.setdefault("batch", {})[encoding] = ids
    for name, values in seen.items():
        assert len(values) == len(ENCODINGS), name
        assert len(set(values.values())) == 1, name


def test_non_finite_loss_leaves_a_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = Updater._backward_part

    def backward(self: Updater, *args: Any) -> torch.Tensor:
        return plain(self, *args) * (float("nan") if self.optimizer.state else 1.0)

    monkeypatch.setattr(Updater, "_backward_part", backward)
    with pytest.raises(NonFiniteLossError, match="step 2"):
        train_study(tiny_recipe(tmp_path), tmp_path)
    folder = tmp_path / "tiny" / "rope-s0"
    assert [row["step"] for row in runs.read_metrics(folder)] == [1]
    assert json.loads((folder / "non_finite.json").read_text())["step"] == 2
    assert not (folder / "DONE").exists()


def test_too_little_text_is_refused_before_training(tmp_path: Path) -> None:
    recipe = tiny_recipe(tmp_path, "train.batch_tokens=1048576")
    with pytest.raises(DataError, match="one batch needs"):
        train_study(recipe, tmp_path)
    assert not list((tmp_path / "tiny").rglob("DONE"))


def test_a_plan_that_no_document_fits_is_refused_before_training(tmp_path: Path) -> None:
    recipe = tiny_recipe(tmp_path, "eval.lengths=[1x, 64x]")
    with pytest.raises(DataError, match="no document is long enough"):
        train_study(recipe, tmp_path)
    assert not (tmp_path / "tiny").exists()


@pytest.mark.parametrize(
    ("corpus", "message"), [("no/such/text.txt", "no such file"), ("short.txt", "no document is long enough")]
)
def test_a_plan_without_its_text_is_refused_before_training(
    tmp_path: Path, corpus: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("short.txt").write_text("a few words", encoding="utf-8")
    with pytest.raises(DataError, match=message):
        train_study(tiny_recipe(tmp_path, f"eval.corpus={corpus}"), tmp_path)
    assert not (tmp_path / "tiny").exists()


@pytest.mark.parametrize("kernel", ["flash", "flex"])
def test_a_kernel_that_cannot_train_here_is_refused_before_any_work(
    tmp_path: Path, kernel: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr("pe_study.train.load_data", lambda *_: pytest.fail("read the text first"))
    with pytest.raises(RecipeError, match=rf"train.kernel: kernel {kernel} .*; these can: eager, sdpa"):
        train_study(tiny_recipe(tmp_path, f"train.kernel={kernel}"), tmp_path)


def test_a_folder_of_runs_that_cannot_be_is_refused_before_any_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pe_study.train.load_data", lambda *_: pytest.fail("read the text first"))
    (tmp_path / "runs").write_text("", encoding="utf-8")
    with pytest.raises(UsageError, match="runs is not a folder"):
        train_study(tiny_recipe(tmp_path), tmp_path / "runs")


def test_a_stop_before_the_first_step(tmp_path: Path) -> None:
    stop = StopRequest()
    stop.requested = "SIGTERM"
    with pytest.raises(Interrupted, match="before its first step"):
        train_study(tiny_recipe(tmp_path), tmp_path, stop=stop)
    assert train_study(tiny_recipe(tmp_path), tmp_path)[0].status == "trained"


@pytest.mark.parametrize(("allowed", "bad"), [(1, 1), (1, 2)])
def test_a_bounded_number_of_bad_steps_may_be_left_out(
    tmp_path: Path, allowed: int, bad: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = Updater.backward
    bad_steps = set(range(3, 3 + bad))

    def backward(self: Updater, index: int) -> Any:
        loss, misfit = plain(self, index)
        return loss * (float("nan") if index + 1 in bad_steps else 1.0), misfit

    monkeypatch.setattr(Updater, "backward", backward)
    recipe = tiny_recipe(tmp_path, f"train.skip_nonfinite={allowed}")
    folder = tmp_path / "tiny" / "rope-s0"
    if bad > allowed:
        with pytest.raises(NonFiniteLossError, match="step 4"):
            train_study(recipe, tmp_path)
        return
    train_study(recipe, tmp_path)
    assert [row["step"] for row in runs.read_metrics(folder) if row["loss"] is None] == [3]
    optimizer = snapshots.newest(folder / "snapshots").tensors("optimizer")  # type: ignore[union-attr]
    assert optimizer["norm.weight.step"] == 5, "six steps, one of them left out"


def test_deterministic_is_held_only_while_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[bool] = []
    plain = Updater.backward

    def backward(self: Updater, index: int) -> Any:
        seen.append(torch.are_deterministic_algorithms_enabled())
        return plain(self, index)

    monkeypatch.setattr(Updater, "backward", backward)
    train_study(tiny_recipe(tmp_path, "train.deterministic=true"), tmp_path)
    assert all(seen)
    assert not torch.are_deterministic_algorithms_enabled()


def test_several_runs_at_once(tmp_path: Path) -> None:
    """One cannot run; the others are trained, to the same bits as one after the other."""
    recipe = tiny_recipe(tmp_path, "seeds=[0, 1]", encodings=("rope", "alibi"))
    alone = train_study(recipe, tmp_path / "alone", {"run": "alibi-s1"})[0]
    taken = tmp_path / "runs" / "tiny" / "rope-s0"
    taken.mkdir(parents=True)
    with runs.locked(taken), pytest.raises(UsageError, match="rope-s0: in use by process"):
        train_study(recipe, tmp_path / "runs", jobs=2)
    done = [state.run_id for state in runs.list_runs(tmp_path / "runs") if state.status == "done"]
    assert done == ["alibi-s0", "alibi-s1", "rope-s1"]
    assert trace(tmp_path / "runs" / "tiny" / "alibi-s1") == trace(alone.folder)


def test_number_of_jobs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = tiny_recipe(tmp_path)
    monkeypatch.setattr("pe_study.training.jobs.num_cores", lambda: 4)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert resolve_jobs("auto", recipe, num_runs=7) == 4
    assert resolve_jobs("auto", recipe, num_runs=3) == 3
    assert resolve_jobs(2, recipe, num_runs=7) == 2
    assert resolve_jobs(2, recipe, num_runs=0) == 1
    large = tiny_recipe(tmp_path, "model.num_layers=12", "model.d_model=768", "model.d_ff=2048")
    assert resolve_jobs("auto", large, num_runs=7) == 1
    with pytest.raises(UsageError, match="accepted: a whole number"):
        resolve_jobs(0, recipe, num_runs=7)
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(UsageError, match="exclude each other"):
        resolve_jobs(2, recipe, num_runs=7)


def test_fp16_without_a_gpu_is_refused(tmp_path: Path) -> None:
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    with pytest.raises(RecipeError, match="fp16 needs a GPU"):
        train_study(tiny_recipe(tmp_path, "train.mixed_precision=fp16"), tmp_path)


def test_bf16_trains_float32_weights(tmp_path: Path) -> None:
    train_study(tiny_recipe(tmp_path, "train.mixed_precision=bf16"), tmp_path)
    stored = safetensors.torch.load_file(tmp_path / "tiny" / "rope-s0" / "final" / "model.safetensors")
    assert {tensor.dtype for tensor in stored.values()} == {torch.float32}


def test_an_absent_tracker_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pe_study.training.run_log.get_available_trackers", list)
    recipe = tiny_recipe(tmp_path, "train.log_with=[tensorboard]")
    with pytest.raises(
        RecipeError, match=r"tensorboard is not installed \(pip install 'pe-study\[trackers\]'\)"
    ):
        train_study(recipe, tmp_path)


def test_a_full_disk_leaves_the_older_snapshot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = tiny_recipe(tmp_path)
    plain = Path.write_bytes

    def write_bytes(path: Path, content: bytes) -> int:
        if "step_00000006" in str(path):
            raise OSError(28, "No space left on device", str(path))
        return plain(path, content)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_bytes", write_bytes)
        with pytest.raises(UsageError, match=r"No space left on device.*\n.*step 3"):
            train_study(recipe, tmp_path)
    folder = tmp_path / "tiny" / "rope-s0"
    assert snapshots.newest(folder / "snapshots").step == 3  # type: ignore[union-attr]
    assert train_study(recipe, tmp_path)[0].status == "trained"


def test_two_processes_on_one_run(tmp_path: Path) -> None:
    recipe = tiny_recipe(tmp_path)
    folder = tmp_path / "tiny" / "rope-s0"
    folder.mkdir(parents=True)
    with runs.locked(folder), pytest.raises(UsageError, match="in use by process"):
        train_study(recipe, tmp_path)
    assert [path.name for path in folder.iterdir()] == [".lock"]


@pytest.mark.parametrize("damage", ["final deleted", "weights deleted", "DONE emptied", "DONE cut short"])
def test_a_finished_run_that_was_damaged_is_trained_again(
    tmp_path: Path, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Never skipped without a word; it goes on from its newest snapshot to the same weights."""
    recipe = tiny_recipe(tmp_path)
    whole = train_study(recipe, tmp_path)[0]
    folder = whole.folder
    if damage == "final deleted":
        shutil.rmtree(folder / "final")
    elif damage == "weights deleted":
        (folder / "final" / "model.safetensors").unlink()
    else:
        content = (folder / "DONE").read_bytes()
        (folder / "DONE").write_bytes(content[:-20] if damage == "DONE cut short" else b"")
    assert runs.run_state(folder).status == "partial"
    again = train_study(recipe, tmp_path)[0]
    assert again.status == "trained"
    assert "trained again from its newest snapshot" in caplog.text
    assert again.facts["weights_sha256"] == whole.facts["weights_sha256"]
    assert runs.run_state(folder).status == "done"


def test_a_finished_run_takes_over_another_plan(tmp_path: Path) -> None:
    """`pe-study eval STUDY` reads the plan in the run's recipe: it has to be that of the recipe seen last."""
    folder = train_study(tiny_recipe(tmp_path), tmp_path)[0].folder
    before = load(folder / "recipe.yaml")
    changed = tiny_recipe(tmp_path, "eval.lengths=[1x, 2x]")
    assert [result.status for result in train_study(changed, tmp_path)] == ["skipped"]
    after = load(folder / "recipe.yaml")
    assert after.eval == changed.eval != before.eval
    assert after.train == before.train


def test_micro_batches_may_change_between_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """What the message about memory asks for has to be possible."""
    whole = train_study(tiny_recipe(tmp_path), tmp_path / "whole")[0]
    with monkeypatch.context() as patch:
        stop_after(patch, 4)
        with pytest.raises(Interrupted):
            train_study(tiny_recipe(tmp_path), tmp_path / "parts")
    resumed = train_study(tiny_recipe(tmp_path, "train.micro_batch_tokens=32"), tmp_path / "parts")[0]
    assert "other micro-batches than before" in caplog.text
    for row, other in zip(trace(resumed.folder), trace(whole.folder), strict=True):
        assert row[2] == pytest.approx(other[2], rel=1e-5)


@pytest.mark.parametrize("reduced", [False, True])
def test_larger_micro_batches_take_effect_unless_memory_forced_smaller_ones(
    tmp_path: Path, reduced: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch, pytest.raises(Interrupted):
        if reduced:
            plain_part = Updater._backward_part

            def part(self: Updater, batch: Any, num_targets: int) -> Any:
                if len(batch.ids_BT) > 2:
                    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB.")
                return plain_part(self, batch, num_targets)

            patch.setattr(Updater, "_backward_part", part)
        stop_after(patch, 4)
        train_study(tiny_recipe(tmp_path, f"train.micro_batch_tokens={64 if reduced else 16}"), tmp_path)
    sizes: list[int] = []
    plain = Updater.micro_batches

    def recording(self: Updater) -> Any:
        batches = plain(self)
        sizes.extend(map(len, batches))
        return batches

    monkeypatch.setattr(Updater, "micro_batches", recording)
    train_study(tiny_recipe(tmp_path, "train.micro_batch_tokens=128"), tmp_path)
    assert set(sizes) == {2 if reduced else 8}


@pytest.mark.parametrize("name", ["model.safetensors", "optimizer.safetensors", "manifest.json"])
@pytest.mark.parametrize("damage", ["one bit", "truncated", "deleted"])
def test_a_run_goes_on_from_the_older_snapshot_where_a_file_is_damaged(
    tmp_path: Path, name: str, damage: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    recipe = tiny_recipe(tmp_path)
    whole = train_study(recipe, tmp_path / "whole")[0]
    with monkeypatch.context() as patch:
        stop_after(patch, 7)
        with pytest.raises(Interrupted):
            train_study(recipe, tmp_path / "parts")
    saved = tmp_path / "parts" / "tiny" / "rope-s0" / "snapshots"
    newest = saved / "step_00000007"
    assert {path.name for path in newest.iterdir()} == {
        "model.safetensors",
        "optimizer.safetensors",
        "manifest.json",
    }, "the test knows every file"
    content = bytearray((newest / name).read_bytes())
    content[len(content) // 2] ^= 1
    if damage == "deleted":
        (newest / name).unlink()
    else:
        (newest / name).write_bytes(content if damage == "one bit" else content[: len(content) // 2])
    resumed = train_study(recipe, tmp_path / "parts")[0]
    assert f"step_00000007/{name}" in caplog.text
    assert trace(resumed.folder) == trace(whole.folder)
    assert resumed.facts["weights_sha256"] == whole.facts["weights_sha256"]
