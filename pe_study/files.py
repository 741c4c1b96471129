"""Files that are replaced whole: written beside, flushed to the disk, renamed."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pe_study.errors import DamagedError

LOCK = ".lock"


@contextlib.contextmanager
def replacing(path: Path | str) -> Iterator[Path]:
    """A temporary path beside `path`; renamed to it, synced, when the block succeeds and removed when not."""
    path = Path(path)
    beside = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with naming(path):
            yield beside
            sync(beside)
            os.replace(beside, path)
            sync(path.parent)
    finally:
        beside.unlink(missing_ok=True)


@contextlib.contextmanager
def naming(path: Path | str) -> Iterator[None]:
    """Within the block, an OSError that names no file, as that of a full disk, names `path`."""
    try:
        yield
    except OSError as error:
        if error.errno is not None and error.filename is None:
            error.filename = str(path)
        raise


@contextlib.contextmanager
def alone(lock: Path) -> Iterator[None]:
    """One process at a time in the block of one lock file; another waits for it. The kernel frees it when
    the process ends, however it ends."""
    with open(lock, "a", encoding="utf-8") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def sync(path: Path) -> None:
    """Flush a file's bytes, or a folder's names, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_text(path: Path | str, text: str) -> None:
    """Write UTF-8 text so that a reader sees the old file or the new one, never a part."""
    with replacing(path) as beside:
        beside.write_text(text, encoding="utf-8")


def write_json(path: Path | str, value: Any) -> None:
    """Write strict JSON (no NaN, no Infinity: ValueError) atomically."""
    write_text(path, json.dumps(value, indent=1, allow_nan=False, ensure_ascii=False) + "\n")


def read_json(path: Path | str) -> Any:
    """Read a JSON file. DamagedError naming it where it holds something else."""
    text = Path(path).read_bytes()
    return parse_json(text, str(path))


def parse_json(text: str | bytes, place: str, remedy: str = "delete it to make it anew") -> Any:
    """The value of a JSON text. DamagedError naming its place and the remedy where it is none."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise DamagedError(f"{place}: damaged, not JSON ({error}); {remedy}") from None
