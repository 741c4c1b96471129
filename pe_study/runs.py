"""Run directories: where things lie, what ran, how far it got. No torch here: reports read runs too.

    runs/<study>/<label>-s<seed>/   recipe.yaml  provenance.json  metrics.jsonl  snapshots/  final/  DONE

`DONE` is written last, so a folder that holds it whole is a finished run and any other is not. Files that are
replaced are written beside and renamed; `metrics.jsonl` is appended to, one object a line.
"""

from __future__ import annotations

import contextlib
import fcntl
import importlib.metadata
import json
import os
import platform
import shlex
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pe_study.errors import UsageError
from pe_study.files import LOCK, naming, read_json, write_json
from pe_study.metrics import METRICS, Metrics, read_metrics
from pe_study.rows import RETRIEVAL_COLUMNS, ROW_COLUMNS, make_rows, read_rows, write_rows

if TYPE_CHECKING:
    from pe_study.recipe import Recipe, RunSpec

DONE, FINAL, SNAPSHOTS = "DONE", "final", "snapshots"
PROVENANCE, RECIPE = "provenance.json", "recipe.yaml"

__all__ = [
    "DONE",
    "FINAL",
    "METRICS",
    "PROVENANCE",
    "RECIPE",
    "RETRIEVAL_COLUMNS",
    "ROW_COLUMNS",
    "SNAPSHOTS",
    "Metrics",
    "RunState",
    "check_output",
    "claim_folder",
    "command_line",
    "is_done",
    "is_whole",
    "list_runs",
    "locked",
    "make_rows",
    "provenance",
    "read_done",
    "read_json",
    "read_metrics",
    "read_rows",
    "run_dir",
    "run_state",
    "study_dir",
    "write_json",
    "write_rows",
]

PACKAGES = ("pe_study", "torch", "transformers", "accelerate", "tokenizers", "datasets", "numpy", "pandas")


def study_dir(runs_root: Path | str, recipe: Recipe) -> Path:
    """Where the runs of a recipe lie."""
    return Path(runs_root) / recipe.name


def run_dir(runs_root: Path | str, recipe: Recipe, run: RunSpec) -> Path:
    """Where one run of a recipe lies: `runs/<recipe name>/<label>-s<seed>`."""
    return study_dir(runs_root, recipe) / run.run_id


def read_done(folder: Path | str) -> dict[str, Any] | None:
    """What `DONE` says; None where it is absent, empty or damaged, for then the run is not finished."""
    try:
        facts = json.loads((Path(folder) / DONE).read_bytes())
    except (OSError, ValueError):
        return None
    return facts if isinstance(facts, dict) else None


def is_done(folder: Path | str) -> bool:
    """Whether the run in `folder` was finished; its weights may have been deleted since."""
    return read_done(folder) is not None


def is_whole(folder: Path | str) -> bool:
    """Whether the run in `folder` is finished and its trained model there."""
    final = Path(folder) / FINAL
    return is_done(folder) and (final / "config.json").is_file() and any(final.glob("model*.safetensors"))


def claim_folder(folder: Path | str, *, ours: Sequence[str]) -> Path:
    """Create `folder` for our output, or take it over when it is empty or holds one of the files `ours`.

    UsageError when it is a file, cannot be written, or holds something else, which is left untouched.
    """
    folder = check_output(folder, ours=ours)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"{folder}: cannot be used for output ({error.strerror})") from None
    return folder


def check_output(folder: Path | str, *, ours: Sequence[str]) -> Path:
    """UsageError where `claim_folder` would refuse; for before long work, since it creates nothing."""
    folder = Path(folder)
    nearest = next(path for path in (folder, *folder.parents) if os.path.lexists(path))
    if not nearest.is_dir():
        raise UsageError(f"{folder}: cannot be used for output ({nearest} is not a folder)")
    try:
        found = sorted(path.name for path in folder.iterdir()) if nearest == folder else []
    except OSError as error:
        raise UsageError(f"{folder}: cannot be used for output ({error.strerror})") from None
    names = [name for name in found if not name.startswith(".")]
    if names and not set(names) & set(ours):
        raise UsageError(
            f"{folder}: not empty and not ours (found {', '.join(names[:3])}; expected {' or '.join(ours)}); "
            "choose another output folder"
        )
    if not os.access(nearest, os.W_OK):
        raise UsageError(f"{folder}: no permission to write")
    return folder


@contextlib.contextmanager
def locked(folder: Path | str) -> Iterator[None]:
    """Hold the lock of a run directory; the kernel frees it when the process ends, however it ends.

    UsageError naming the holder when another process has it.
    """
    with open(Path(folder) / LOCK, "a+", encoding="utf-8") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            holder = file.read().strip() or "another process"
            raise UsageError(
                f"{folder}: in use by {holder}; wait for it, or pick other runs with --only"
            ) from None
        with naming(file.name):
            file.truncate(0)
            file.write(f"process {os.getpid()} on {socket.gethostname()}")
            file.flush()
        yield


# --- what ran --------------------------------------------------------------------------------------------


def provenance(**facts: Any) -> dict[str, Any]:
    """What a reader needs to redo or doubt a number: versions, git commit, machine, command, time, and
    `facts` (device, kernel, hashes, …)."""
    return {
        **facts,
        "command": command_line(),
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "versions": versions(),
        **git_commit(),
        "platform": platform.platform(),
    }


def command_line() -> str:
    """What was typed, as it can be typed again."""
    program = Path(sys.argv[0]).name
    start = ["python", "-m", "pe_study"] if program == "__main__.py" else [program]
    return shlex.join([*start, *sys.argv[1:]])


def versions() -> dict[str, str | None]:
    """Versions of Python and of the packages whose numbers we report; None for one that is not installed."""
    found: dict[str, str | None] = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = None
    return found


def git_commit() -> dict[str, Any]:
    """`git_commit` and `git_dirty` of the checkout this package runs from; both None outside of one."""
    here = Path(__file__).resolve()
    if _git(here.parent, "ls-files", "--error-unmatch", here.name) is None:
        return {"git_commit": None, "git_dirty": None}
    changes = _git(here.parent, "status", "--porcelain", "--untracked-files=no", ".")
    return {"git_commit": _git(here.parent, "rev-parse", "HEAD"), "git_dirty": bool(changes)}


def _git(folder: Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(["git", "-C", folder, *arguments], capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


# --- how far it got --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class RunState:
    """One run directory as found on disk; `status` is done, running or partial, `step` of `steps` logged."""

    study: str
    run_id: str
    folder: Path
    status: str
    step: int
    steps: int
    loss: float | None


def list_runs(runs_root: Path | str) -> list[RunState]:
    """Every run directory under `runs_root`, by name; a study's own folder works as well."""
    root = Path(runs_root)
    folders = [path.parent for pattern in ("*", "*/*") for path in root.glob(f"{pattern}/{PROVENANCE}")]
    return [run_state(folder) for folder in sorted(folders) if (folder / RECIPE).is_file()]


def run_state(folder: Path | str) -> RunState:
    """How far the run in `folder` got, from its files alone."""
    folder = Path(folder)
    rows = read_metrics(folder)
    status = "done" if is_whole(folder) else "running" if _is_locked(folder) else "partial"
    return RunState(
        study=folder.resolve().parent.name,
        run_id=folder.resolve().name,
        folder=folder,
        status=status,
        step=rows[-1]["step"] if rows else 0,
        steps=read_json(folder / PROVENANCE)["steps"],
        loss=rows[-1]["loss"] if rows else None,
    )


def _is_locked(folder: Path) -> bool:
    if not (folder / LOCK).exists():
        return False
    with open(folder / LOCK, encoding="utf-8") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False
