"""Training snapshots that are whole or not there.

    snapshots/step_00000400/   model.safetensors  optimizer.safetensors  manifest.json

A snapshot is written into a hidden folder beside, every file and the folder flushed to the disk, the
manifest last (size and sha256 of every file, what was trained on what), verified, then renamed; only then
are older ones pruned. Nothing is pickled. No random state is saved because none lives between steps: the
batch, the dropout and the learning rate of a step are functions of (seed, step).
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import re
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
from torch import Tensor

from pe_study.errors import CheckpointError
from pe_study.files import naming, read_json, sync, write_text

MANIFEST = "manifest.json"
_NAME = re.compile(r"step_(\d{8,})")

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Snapshot:
    """A verified snapshot: its folder and what its manifest says."""

    folder: Path
    facts: Mapping[str, Any]

    @property
    def step(self) -> int:
        return self.facts["step"]

    def tensors(self, part: str) -> dict[str, Tensor]:
        """The tensors of one part ("model", "optimizer"), on the CPU."""
        return safetensors.torch.load_file(self.folder / f"{part}.safetensors")


def save(
    root: Path | str, facts: Mapping[str, Any], parts: Mapping[str, Mapping[str, Tensor]], *, keep: int
) -> Snapshot:
    """Write the snapshot of `facts["step"]` under `root`, verify it, then prune all but the newest `keep`.

    `parts` maps a part's name to its CPU tensors. OSError (disk full, no permission) and CheckpointError
    (written bytes read back otherwise) leave every older snapshot as it was.
    """
    root = Path(root)
    root.mkdir(parents=True, exist_ok=True)
    folder = root / f"step_{facts['step']:08d}"
    beside = root / f".{folder.name}.tmp"
    shutil.rmtree(beside, ignore_errors=True)
    try:
        beside.mkdir()
        files = {f"{name}.safetensors": _write(beside, name, tensors) for name, tensors in parts.items()}
        write_text(beside / MANIFEST, _manifest({**facts, "files": files}))
        sync(beside)
        verify(beside)
        if folder.exists():  # of an older attempt at the same step
            shutil.rmtree(folder)
        beside.rename(folder)
        sync(root)
    finally:
        shutil.rmtree(beside, ignore_errors=True)
    prune(root, keep=keep, upto=facts["step"])
    return Snapshot(folder, read_json(folder / MANIFEST))


def _write(folder: Path, name: str, tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """Write one part; returns size and sha256 of the bytes that were meant to be written."""
    content = safetensors.torch.save({key: tensor.contiguous() for key, tensor in tensors.items()})
    path = folder / f"{name}.safetensors"
    with naming(path):
        path.write_bytes(content)
        sync(path)
    return {"size": len(content), "sha256": hashlib.sha256(content).hexdigest()}


def _manifest(facts: Mapping[str, Any]) -> str:
    """The text of a manifest: the facts, then their own sha256, so that no changed byte goes unnoticed."""
    body = json.dumps(facts, indent=1, allow_nan=False)
    digest = hashlib.sha256(body.encode()).hexdigest()
    return json.dumps({**facts, "sha256": digest}, indent=1, allow_nan=False) + "\n"


def verify(folder: Path | str) -> Snapshot:
    """Read every file of a snapshot against its manifest. CheckpointError naming the file that is missing,
    cut short, changed or cannot be read, whatever the reason."""
    folder = Path(folder)
    with _readable(folder / MANIFEST):
        facts = _read_manifest(folder / MANIFEST)
        step, files = facts["step"], dict(facts["files"])
    for name, expected in files.items():
        with _readable(folder / name):
            _verify_file(folder / name, expected)
    named = _NAME.fullmatch(folder.name)
    if named and int(named[1]) != step:
        raise CheckpointError(f"{folder / MANIFEST}: of step {step}, not of the folder it lies in")
    return Snapshot(folder, facts)


def _verify_file(path: Path, expected: Mapping[str, Any]) -> None:
    if not path.is_file():
        raise CheckpointError(f"{path}: missing")
    if path.stat().st_size != expected["size"]:
        raise CheckpointError(f"{path}: {path.stat().st_size} bytes, {expected['size']} were written")
    with path.open("rb") as file:
        if hashlib.file_digest(file, "sha256").hexdigest() != expected["sha256"]:
            raise CheckpointError(f"{path}: its content changed since it was written")


def _read_manifest(path: Path) -> dict[str, Any]:
    text = path.read_text(encoding="utf-8")
    facts = json.loads(text)
    facts.pop("sha256")
    if text != _manifest(facts):
        raise CheckpointError(f"{path}: its content changed since it was written")
    return facts


@contextlib.contextmanager
def _readable(path: Path) -> Iterator[None]:
    """Within the block, whatever a damaged file or disk raises is a CheckpointError naming the file."""
    try:
        yield
    except (OSError, ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
        reason = getattr(error, "strerror", None) or type(error).__name__
        raise CheckpointError(f"{path}: missing or unreadable ({reason})") from None


def newest(root: Path | str) -> Snapshot | None:
    """The newest snapshot that verifies, with a warning of every newer one that does not; else None."""
    for folder in reversed(_folders(root)):
        try:
            return verify(folder)
        except CheckpointError as error:
            logger.warning("damaged snapshot left out: %s", error)
    return None


def adopt(found: Snapshot, root: Path | str) -> Snapshot:
    """Copy a snapshot that lies elsewhere to `root`, in place of those there, which are of another past."""
    root = Path(root)
    root.mkdir(parents=True, exist_ok=True)
    beside = root / f".{found.folder.name}.tmp"
    shutil.rmtree(beside, ignore_errors=True)
    shutil.copytree(found.folder, beside)
    verify(beside)
    for path in (*beside.iterdir(), beside):
        sync(path)
    for folder in _folders(root):
        shutil.rmtree(folder, ignore_errors=True)
    folder = root / f"step_{found.step:08d}"
    beside.rename(folder)
    sync(root)
    return Snapshot(folder, found.facts)


def drop_newer(root: Path | str, step: int) -> list[int]:
    """Remove the snapshots of steps after `step`; returns those steps, ascending."""
    newer = {_step(folder): folder for folder in _folders(root) if _step(folder) > step}
    for folder in newer.values():
        shutil.rmtree(folder, ignore_errors=True)
    return sorted(newer)


def steps(root: Path | str) -> list[int]:
    """The steps that have a snapshot, whole or not, ascending."""
    return [_step(folder) for folder in _folders(root)]


def prune(root: Path | str, *, keep: int, upto: int) -> None:
    """Remove all but the newest `keep` snapshots of steps <= `upto`, and every one of a later step."""
    folders = {_step(folder): folder for folder in _folders(root)}
    kept = sorted(step for step in folders if step <= upto)[-keep:]
    for step, folder in folders.items():
        if step not in kept:
            shutil.rmtree(folder, ignore_errors=True)


def _folders(root: Path | str) -> list[Path]:
    root = Path(root)
    if not root.is_dir():
        return []
    try:
        found = [path for path in root.iterdir() if _NAME.fullmatch(path.name) and path.is_dir()]
    except OSError as error:
        raise CheckpointError(f"{root}: cannot be read ({error.strerror})") from None
    return sorted(found, key=_step)


def _step(folder: Path) -> int:
    return int(folder.name.removeprefix("step_"))
