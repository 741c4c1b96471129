"""Going on by name, going back, the log that belongs to it, and what may change between two sessions."""

import errno
import os
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from test_train import stop_after, trace
from tiny import tiny_recipe

from pe_study import runs, snapshots
from pe_study.errors import CheckpointError, DataError, Interrupted, UsageError
from pe_study.recipe import Recipe
from pe_study.train import RunResult, train_study
from pe_study.training.run_files import RunFiles


@pytest.fixture(scope="module")
def origin(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, RunResult]:
    """A folder whose `parts` holds a run stopped after step 7, with snapshots 6 and 7; and the whole run."""
    folder = tmp_path_factory.mktemp("origin")
    recipe = tiny_recipe(folder)
    whole = train_study(recipe, folder / "whole")[0]
    with pytest.MonkeyPatch.context() as patch, pytest.raises(Interrupted):
        stop_after(patch, 7)
        train_study(recipe, folder / "parts")
    return folder, whole


@pytest.fixture
def root(origin: tuple[Path, RunResult], tmp_path: Path) -> Path:
    shutil.copytree(origin[0] / "parts", tmp_path / "runs")
    return tmp_path / "runs"


@pytest.fixture
def recipe(origin: tuple[Path, RunResult]) -> Recipe:
    return tiny_recipe(origin[0])


def folder_of(root: Path) -> Path:
    return root / "tiny" / "rope-s0"


def snapshot(root: Path, step: int) -> Path:
    return folder_of(root) / "snapshots" / f"step_{step:08d}"


def logged(root: Path) -> list[int]:
    return [row["step"] for row in runs.read_metrics(folder_of(root))]


class Killed(BaseException):
    """Stands for kill -9."""


def test_going_back_leaves_no_hole_in_the_log(
    origin: tuple[Path, RunResult],
    root: Path,
    recipe: Recipe,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Newer snapshots of the same run go; after a kill, the newest would go on from a cut log."""

    def kill(*args: Any, **options: Any) -> None:
        raise Killed

    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(RunFiles, "finish", kill)
        train_study(recipe, root, resume=str(snapshot(root, 6)))
    assert snapshots.steps(folder_of(root) / "snapshots") == [6]
    assert "goes back to step 6; newer snapshots (7) are removed and made again" in caplog.text
    resumed = train_study(recipe, root)[0]
    assert trace(resumed.folder) == trace(origin[1].folder)
    assert resumed.facts["weights_sha256"] == origin[1].facts["weights_sha256"]


def test_a_snapshot_resumed_elsewhere_brings_its_log(
    origin: tuple[Path, RunResult],
    root: Path,
    recipe: Recipe,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    resumed = train_study(recipe, tmp_path / "other", resume=str(snapshot(root, 6)))[0]
    assert trace(resumed.folder) == trace(origin[1].folder)
    assert resumed.facts["weights_sha256"] == origin[1].facts["weights_sha256"]
    assert snapshots.steps(resumed.folder / "snapshots") == [6]
    assert snapshots.steps(folder_of(root) / "snapshots") == [6, 7], "the other run keeps what it has"
    assert "lacks lines" not in caplog.text


def test_a_snapshot_without_its_run_is_resumed_with_a_warning(
    root: Path, recipe: Recipe, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    shutil.copytree(snapshot(root, 6), tmp_path / "alone" / "snapshots" / "step_00000006")
    train_study(recipe, tmp_path / "other", resume=str(tmp_path / "alone" / "snapshots" / "step_00000006"))
    assert logged(tmp_path / "other") == [7, 8]
    assert "metrics.jsonl lacks lines from before the snapshot of step 6 (steps 1-6)" in caplog.text


def test_a_backup_of_a_snapshot_leaves_the_log_of_its_run(
    origin: tuple[Path, RunResult],
    root: Path,
    recipe: Recipe,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Where the snapshot lies alone, nothing is known of its past but what is here."""
    backup = tmp_path / "safe" / "step_00000006"
    shutil.copytree(snapshot(root, 6), backup)
    resumed = train_study(recipe, root, resume=str(backup))[0]
    assert trace(resumed.folder) == trace(origin[1].folder)
    assert "lacks lines" not in caplog.text


@pytest.mark.parametrize("lost", ["the file", "a line"])
def test_a_log_that_lacks_steps_is_warned_of(
    root: Path, recipe: Recipe, lost: str, caplog: pytest.LogCaptureFixture
) -> None:
    path = folder_of(root) / "metrics.jsonl"
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    path.write_text("".join(lines[:2] + lines[3:]) if lost == "a line" else "", encoding="utf-8")
    assert train_study(recipe, root)[0].status == "trained"
    steps = "3" if lost == "a line" else "1-7"
    assert f"lacks lines from before the snapshot of step 7 (steps {steps})" in caplog.text


@pytest.mark.parametrize("remedy", ["delete the line", "start over"])
def test_a_damaged_line_stops_a_resume_and_both_remedies_work(
    origin: tuple[Path, RunResult],
    root: Path,
    recipe: Recipe,
    remedy: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    path = folder_of(root) / "metrics.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join([*lines[:2], b'{"step": 3, \xff}\n', *lines[3:]]))
    with pytest.raises(DataError, match=r"metrics.jsonl:3: damaged.*delete this line.*--resume never"):
        train_study(recipe, root)
    if remedy == "start over":
        assert trace(train_study(recipe, root, resume="never")[0].folder) == trace(origin[1].folder)
    else:
        path.write_bytes(b"".join(lines[:2] + lines[3:]))
        train_study(recipe, root)
        assert logged(root) == [1, 2, 4, 5, 6, 7, 8]
        assert "(steps 3)" in caplog.text


@pytest.mark.parametrize(
    ("resume", "said"),
    [
        ("atuo", 'found "atuo", no such folder; did you mean "auto"?'),
        ("Never", 'did you mean "never"?'),
        ("{run}", r"a run, not a snapshot; .*available: auto, never, .*step_00000006, .*step_00000007"),
        ("{run}/snapshots", r"no snapshot; .*step_00000007"),
        ("{run}/snapshots/stp_00000006", r'no such folder; did you mean "\S*/step_0000000[67]"'),
        ("{run}/final", r"no such folder; .*step_00000007"),
    ],
)
def test_what_resume_cannot_be_is_said_before_any_work(
    root: Path, recipe: Recipe, resume: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pe_study.train.load_data", lambda *_: pytest.fail("read the text first"))
    typed = resume.format(run=folder_of(root))
    with pytest.raises(UsageError, match=rf"^--resume: found \"{re.escape(typed)}\"") as refused:
        train_study(recipe, root, resume=typed)
    assert re.search(said, str(refused.value))
    assert snapshots.steps(folder_of(root) / "snapshots") == [6, 7]


def test_a_damaged_snapshot_that_was_named_is_refused(root: Path, recipe: Recipe) -> None:
    (snapshot(root, 6) / "model.safetensors").unlink()
    with pytest.raises(
        CheckpointError, match=r"^--resume: .*step_00000006/model.safetensors: missing; accepted"
    ):
        train_study(recipe, root, resume=str(snapshot(root, 6)))
    assert snapshots.steps(folder_of(root) / "snapshots") == [6, 7]


@pytest.mark.parametrize(
    "change",
    [
        "train.gradient_checkpointing=true",
        "train.skip_nonfinite=3",
        "train.log_every=3",
        "train.eval_every=null",
        "train.snapshot_every=1",
    ],
)
def test_what_changes_no_number_may_change_between_sessions(
    origin: tuple[Path, RunResult],
    root: Path,
    change: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """What messages offer as remedies has to be possible, and gives the same bits; also at the end."""
    changed = tiny_recipe(origin[0], change)
    resumed = train_study(changed, root)[0]
    assert resumed.facts["weights_sha256"] == origin[1].facts["weights_sha256"]
    assert "rounding" not in caplog.text
    assert "lacks lines" not in caplog.text
    assert train_study(tiny_recipe(origin[0]), root)[0].status == "skipped"


@pytest.mark.parametrize(
    ("change", "name"),
    [("train.kernel=eager", "kernel"), ("train.deterministic=true", "deterministic kernels")],
)
def test_how_numbers_are_computed_may_change_with_a_warning(
    origin: tuple[Path, RunResult], root: Path, change: str, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    resumed = train_study(tiny_recipe(origin[0], change), root)[0]
    assert f"other {name} than before: losses equal to rounding" in caplog.text
    assert runs.read_metrics(resumed.folder)[-1]["loss"] == pytest.approx(
        runs.read_metrics(origin[1].folder)[-1]["loss"], rel=1e-5
    )
    with pytest.raises(UsageError, match=change.partition("=")[0]):
        train_study(tiny_recipe(origin[0]), root)


def test_gradient_checkpointing_draws_the_same_dropout(tmp_path: Path) -> None:
    """It may change within a run, since it changes no bit."""
    options = ("model.dropout=0.3", "train.steps=3", "train.warmup_steps=1")
    hashes = [
        train_study(
            tiny_recipe(tmp_path, *options, f"train.gradient_checkpointing={value}"), tmp_path / value
        )[0].facts["weights_sha256"]
        for value in ("false", "true")
    ]
    assert hashes[0] == hashes[1]


@pytest.mark.parametrize("name", ["metrics.jsonl", "provenance.json", "model.safetensors", "DONE"])
def test_a_full_disk_names_the_file(
    root: Path, recipe: Recipe, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The system names none when a write fails, only when an open does."""
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    plain_text, plain_bytes = Path.write_text, Path.write_bytes

    def write_text(path: Path, *args: Any, **options: Any) -> int:
        if name in path.name:
            raise full
        return plain_text(path, *args, **options)

    def write_bytes(path: Path, content: bytes) -> int:
        if name in path.name:
            raise full
        return plain_bytes(path, content)

    monkeypatch.setattr(Path, "write_text", write_text)
    monkeypatch.setattr(Path, "write_bytes", write_bytes)
    shutil.rmtree(folder_of(root) / "snapshots" / "step_00000007")
    shutil.rmtree(folder_of(root) / "snapshots" / "step_00000006")
    with pytest.raises((UsageError, OSError), match=rf"{re.escape(name)}.*") as failed:
        train_study(recipe, root)
    assert os.strerror(errno.ENOSPC) in str(failed.value)
