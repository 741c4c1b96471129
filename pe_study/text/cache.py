"""Folders built once and found again: written beside, checked whole, renamed.

A cached folder holds `manifest.json` with the size and sha256 of every other file. A folder that does not
match its manifest is built again. Two processes that want the same folder build it once.
"""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from filelock import FileLock

from pe_study.errors import DataError
from pe_study.files import read_json, sync, write_json

_BLOCK = 1 << 22


def cache_root() -> Path:
    """`PE_STUDY_CACHE`, else `~/.cache/pe_study`."""
    chosen = os.environ.get("PE_STUDY_CACHE")
    return Path(chosen) if chosen else Path.home() / ".cache" / "pe_study"


def digest(*parts: str) -> str:
    """sha256 (hex) of strings, each with its length, so that no two lists share a digest."""
    total = hashlib.sha256()
    for part in parts:
        data = part.encode("utf-8")
        total.update(len(data).to_bytes(8, "little") + data)
    return total.hexdigest()


def cached_folder(
    kind: str, key: str, build: Callable[[Path], dict[str, Any]]
) -> tuple[Path, dict[str, Any]]:
    """The folder `<root>/<kind>/<key>` and its facts, built on first use.

    `build` fills an empty folder and returns facts (JSON) that the manifest keeps. Raises DataError where
    the cache cannot be written.
    """
    home = cache_root() / kind
    folder = home / key
    facts = _facts(folder)
    if facts is not None:
        return folder, facts
    try:
        home.mkdir(parents=True, exist_ok=True)
        with FileLock(home / f"{key}.lock"):
            facts = _facts(folder)
            if facts is None:
                facts = _build(folder, build)
    except OSError as error:
        raise _unwritable(home, error) from error
    return folder, facts


def _facts(folder: Path) -> dict[str, Any] | None:
    """The facts of a complete, undamaged folder; None otherwise."""
    try:
        manifest = read_json(folder / "manifest.json")
        files = manifest["files"]
        whole = all(_sha256(folder / name) == sha256 for name, sha256 in files.items())
        return manifest["facts"] if whole else None
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def _build(folder: Path, build: Callable[[Path], dict[str, Any]]) -> dict[str, Any]:
    beside = Path(tempfile.mkdtemp(prefix=f".{folder.name[:16]}-", dir=folder.parent))
    try:
        facts = build(beside)
        files = {path.name: _sha256(path) for path in sorted(beside.iterdir())}
        for name in files:
            sync(beside / name)
        write_json(beside / "manifest.json", {"facts": facts, "files": files})
        shutil.rmtree(folder, ignore_errors=True)  # a damaged one; an open memory map keeps its pages
        os.replace(beside, folder)
        sync(folder.parent)
        return facts
    finally:
        shutil.rmtree(beside, ignore_errors=True)


def _sha256(path: Path) -> str:
    total = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(_BLOCK):
            total.update(block)
    return total.hexdigest()


def _unwritable(home: Path, error: OSError) -> DataError:
    full = " (the disk is full)" if error.errno == errno.ENOSPC else ""
    return DataError(
        f"cannot write the cache {home}{full}: {error.strerror or error}\n"
        "free some space, or set PE_STUDY_CACHE to a folder that can be written"
    )
