"""Whether a finished run still holds what its training wrote. No torch here: reports and lists ask, too."""

from __future__ import annotations

import hashlib
import json
import shlex
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from pe_study import kept, runs
from pe_study.errors import CheckpointError

FILES = "files"  # of DONE: the sha256 of every file of final/
NOT_OURS = ("README.md",)  # the model card, written later
FOREIGN = "decoder."  # before the names of a foreign decoder's weights, in hashes of older runs


def is_intact(folder: Path | str) -> bool:
    """Whether the run in `folder` is finished and its trained model is, byte for byte, what it wrote."""
    return runs.is_whole(folder) and damaged_file(folder) is None


def check(folder: Path | str) -> None:
    """CheckpointError when the run in `folder` is finished and a file of its trained model is another now."""
    name = damaged_file(folder)
    if name is not None:
        raise CheckpointError(
            f"{Path(folder) / runs.FINAL / name}: not what training wrote; {command(folder)} makes it anew"
        )


def check_source(path: Path) -> None:
    """`check` for whatever of a run may be loaded: its folder, its `final/`, or weights kept on its way."""
    if (path / kept.FACTS).is_file():
        facts = runs.read_json(path / kept.FACTS)
        name = _first_other(path, facts.get(FILES, {}))
        if name is not None:
            raise CheckpointError(f"{path / name}: not what training wrote; its run has to be trained again")
    else:
        check(path.parent if path.name == runs.FINAL else path)


def check_written(final: Path, sha256: str) -> None:
    """CheckpointError when weights read back are not those that were written."""
    if not has_weights(final, sha256):
        raise CheckpointError(f"{final}: not what was written, the disk changed it; the same command goes on")


def command(folder: Path | str) -> str:
    """What trains the run in `folder`, from where it stands."""
    folder = Path(folder)
    typed = ["pe-study", "train", str(folder / runs.RECIPE)]
    root = folder.resolve().parent.parent
    if root != Path("runs").resolve():
        typed += ["--runs", str(folder.parent.parent if len(folder.parts) > 2 else root)]
    return f"`{shlex.join(typed)}`"


def damaged_file(folder: Path | str) -> str | None:
    """The name of a file of `final/` that is not what `DONE` says; None where all are, or nothing is said."""
    done, final = runs.read_done(folder) or {}, Path(folder) / runs.FINAL
    if FILES in done:
        return _first_other(final, done[FILES])
    if "weights_sha256" in done and not has_weights(final, done["weights_sha256"]):
        return min(path.name for path in weight_files(final)) if weight_files(final) else "model.safetensors"
    return None


def _first_other(folder: Path, files: Mapping[str, str]) -> str | None:
    return next((name for name, sha256 in files.items() if _sha256(folder / name) != sha256), None)


def file_hashes(final: Path) -> dict[str, str]:
    """The sha256 of every file of a trained model, by name."""
    return {path.name: str(_sha256(path)) for path in sorted(final.iterdir()) if path.name not in NOT_OURS}


def has_weights(folder: Path | str, sha256: str) -> bool:
    """Whether the weights stored in `folder` have the hash that `state.sha256` gave them."""
    files = _stamps(weight_files(folder))
    return bool(files) and any(_tensors_sha256(files, prefix) == sha256 for prefix in ("", FOREIGN))


def weight_files(folder: Path | str) -> list[Path]:
    """The files that hold the weights of a model, by name."""
    folder = Path(folder)
    for pattern in ("model*.safetensors", "*.safetensors", "pytorch_model*.bin"):
        found = sorted(folder.glob(pattern))
        if found:
            return found
    return []


def files_sha256(files: Sequence[Path]) -> str | None:
    """One sha256 over the names and contents of files; None where one cannot be read."""
    hashes = {path.name: _sha256(path) for path in files}
    if not hashes or None in hashes.values():
        return None
    return hashlib.sha256(json.dumps(hashes, sort_keys=True).encode()).hexdigest()


def _sha256(path: Path) -> str | None:
    """sha256 of a file, read once as long as it stays the same; None where it cannot be read."""
    try:
        stamps = _stamps([path])
        return _content_sha256(stamps[0])
    except OSError:
        return None


Stamp = tuple[str, int, int]  # path, size, time of the last change


def _stamps(paths: Sequence[Path]) -> tuple[Stamp, ...]:
    return tuple((str(path), path.stat().st_size, path.stat().st_mtime_ns) for path in paths)


@lru_cache(maxsize=256)
def _content_sha256(stamp: Stamp) -> str:
    with open(stamp[0], "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@lru_cache(maxsize=64)
def _tensors_sha256(files: tuple[Stamp, ...], prefix: str) -> str | None:
    """What `state.sha256` says of the tensors in safetensors files; None where they cannot be read."""
    digest = hashlib.sha256()
    try:
        for name, path, begin, end in sorted(_tensors(files, prefix)):
            digest.update(name.encode())
            with open(path, "rb") as file:
                file.seek(begin)
                digest.update(file.read(end - begin))
    except (OSError, ValueError, TypeError, KeyError, RecursionError):
        return None
    return digest.hexdigest()


def _tensors(files: Sequence[Stamp], prefix: str) -> Iterator[tuple[str, str, int, int]]:
    """(name, path, first byte, end) of each tensor: eight bytes of length, a header of JSON, the data."""
    for path, size, _ in files:
        with open(path, "rb") as file:
            length = int.from_bytes(file.read(8), "little")
            header: Mapping[str, Any] = json.loads(file.read(min(length, size)))
        for name, tensor in header.items():
            if name != "__metadata__":
                begin, end = tensor["data_offsets"]
                yield prefix + name, path, 8 + length + begin, 8 + length + end
