"""Snapshots are whole or not there."""

import errno
import io
import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from pe_study import snapshots
from pe_study.errors import CheckpointError

FILES = ("model.safetensors", "optimizer.safetensors", "manifest.json")


def save(root: Path, step: int, keep: int = 2) -> snapshots.Snapshot:
    parts = {
        "model": {"weight": torch.arange(6.0).reshape(2, 3) * step},
        "optimizer": {"weight.exp_avg": torch.ones(2, 3), "weight.step": torch.tensor(float(step))},
    }
    return snapshots.save(root, {"step": step, "tokens": 8 * step, "training": {"lr": 0.1}}, parts, keep=keep)


def steps(root: Path) -> list[str]:
    return sorted(path.name for path in root.iterdir())


def test_round_trip_is_exact(tmp_path: Path) -> None:
    save(tmp_path, 3)
    found = snapshots.newest(tmp_path)
    assert found is not None
    assert found.step == 3
    assert found.facts["training"] == {"lr": 0.1}
    assert torch.equal(found.tensors("model")["weight"], torch.arange(6.0).reshape(2, 3) * 3)
    assert found.tensors("optimizer")["weight.step"] == 3


def test_manifest_names_every_other_file(tmp_path: Path) -> None:
    folder = save(tmp_path, 1).folder
    manifest = json.loads((folder / "manifest.json").read_text())
    assert sorted(manifest["files"]) == sorted(name for name in FILES if name != "manifest.json")
    assert sorted(path.name for path in folder.iterdir()) == sorted(FILES)


def test_the_newest_are_kept(tmp_path: Path) -> None:
    for step in (1, 5, 10, 100_000_000):
        save(tmp_path, step)
    assert steps(tmp_path) == ["step_00000010", "step_100000000"]
    assert snapshots.newest(tmp_path).step == 100_000_000  # type: ignore[union-attr]


def test_no_snapshot_is_none(tmp_path: Path) -> None:
    assert snapshots.newest(tmp_path / "none") is None


def flip(path: Path, bit: int) -> None:
    content = bytearray(path.read_bytes())
    content[bit // 8 % len(content)] ^= 1 << bit % 8
    path.write_bytes(content)


@pytest.mark.parametrize("name", FILES)
def test_one_flipped_bit_is_noticed_wherever_it_is(tmp_path: Path, name: str) -> None:
    folder = save(tmp_path, 1).folder
    whole = (folder / name).read_bytes()
    bits = range(len(whole) * 8) if name == "manifest.json" else range(0, len(whole) * 8, 37)
    for bit in bits:
        flip(folder / name, bit)
        with pytest.raises(CheckpointError, match=name):
            snapshots.verify(folder)
        (folder / name).write_bytes(whole)
    snapshots.verify(folder)


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("damage", ["flipped", "truncated", "emptied", "deleted", "a folder", "a loop"])
def test_a_damaged_snapshot_gives_way_to_the_older_one(
    tmp_path: Path, name: str, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    save(tmp_path, 1)
    path = save(tmp_path, 2).folder / name
    if damage == "flipped":
        flip(path, 801)
    elif damage == "truncated":
        path.write_bytes(path.read_bytes()[:-1])
    elif damage == "emptied":
        path.write_bytes(b"")
    else:
        path.unlink()
        if damage == "a folder":
            path.mkdir()
        elif damage == "a loop":
            path.symlink_to(name)
    found = snapshots.newest(tmp_path)
    assert found is not None
    assert found.step == 1
    assert name in caplog.text


@pytest.mark.parametrize(
    "text", [b"[]", b"7", b"null", b'{"sha256": 1}', b"[" * 100_000, b"\xff\xfe\x00", b'{"a": \xff}']
)
def test_a_manifest_of_another_kind_gives_way_to_the_older_snapshot(
    tmp_path: Path, text: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    save(tmp_path, 1)
    (save(tmp_path, 2).folder / "manifest.json").write_bytes(text)
    assert snapshots.newest(tmp_path).step == 1  # type: ignore[union-attr]
    assert "step_00000002/manifest.json" in caplog.text


@pytest.mark.parametrize("number", [errno.EIO, errno.EACCES, errno.ESTALE])
@pytest.mark.parametrize("name", FILES)
def test_a_file_that_cannot_be_read_gives_way_to_the_older_snapshot(
    tmp_path: Path,
    number: int,
    name: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    save(tmp_path, 1)
    bad = save(tmp_path, 2).folder / name
    plain = io.open

    def opened(file: Any, *args: Any, **options: Any) -> Any:
        if str(file) == str(bad):
            raise OSError(number, os.strerror(number), str(file))
        return plain(file, *args, **options)

    monkeypatch.setattr(io, "open", opened)
    assert snapshots.newest(tmp_path).step == 1  # type: ignore[union-attr]
    assert f"{bad}: missing or unreadable ({os.strerror(number)})" in caplog.text


def test_a_snapshot_under_the_name_of_another_step_is_left_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    shutil.copytree(save(tmp_path, 4).folder, tmp_path / "step_00000099")
    assert snapshots.newest(tmp_path).step == 4  # type: ignore[union-attr]
    assert "step_00000099/manifest.json: of step 4" in caplog.text


def test_a_snapshot_from_elsewhere_replaces_those_of_another_past(tmp_path: Path) -> None:
    found = save(tmp_path / "old", 4)
    for step in (2, 3, 8):
        save(tmp_path / "new", step)
    adopted = snapshots.adopt(found, tmp_path / "new")
    assert steps(tmp_path / "new") == ["step_00000004"]
    assert snapshots.verify(adopted.folder).facts == snapshots.verify(found.folder).facts


class FullDisk:
    """Path.write_bytes and friends on a disk with room for `room` bytes."""

    def __init__(self, room: int) -> None:
        self.room = room
        self.plain = Path.write_bytes

    def write_bytes(self, path: Path, content: bytes) -> int:
        written = self.plain(path, content[: self.room])
        self.room -= written
        if written < len(content):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        return written


@pytest.mark.parametrize("room", [0, 100, 300, 500, 1500])
def test_a_full_disk_costs_no_older_snapshot(
    tmp_path: Path, room: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path, 1, keep=1)
    disk = FullDisk(room)
    monkeypatch.setattr(Path, "write_bytes", lambda path, content: disk.write_bytes(path, content))
    monkeypatch.setattr(
        Path, "write_text", lambda path, text, encoding="": disk.write_bytes(path, text.encode())
    )
    try:
        save(tmp_path, 2, keep=1)
        expected = 2
    except OSError as error:
        assert error.errno == errno.ENOSPC
        expected = 1
    monkeypatch.undo()
    assert (room >= 1500) == (expected == 2)
    assert snapshots.newest(tmp_path).step == expected  # type: ignore[union-attr]
    assert steps(tmp_path) == [f"step_{expected:08d}"]


def test_bytes_that_the_disk_changed_are_noticed_before_older_ones_go(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path, 1, keep=1)
    plain = Path.write_bytes
    monkeypatch.setattr(Path, "write_bytes", lambda path, content: plain(path, content[:-1] + b"!"))
    with pytest.raises(CheckpointError, match="changed since"):
        save(tmp_path, 2, keep=1)
    monkeypatch.undo()
    assert steps(tmp_path) == ["step_00000001"]


def test_what_a_killed_save_left_behind_is_no_snapshot(tmp_path: Path) -> None:
    folder = save(tmp_path, 1).folder
    shutil.copytree(folder, tmp_path / ".step_00000002.tmp")
    (tmp_path / ".step_00000002.tmp" / "manifest.json").unlink()
    assert snapshots.newest(tmp_path).step == 1  # type: ignore[union-attr]
    save(tmp_path, 2)
    assert steps(tmp_path) == ["step_00000001", "step_00000002"]


def test_a_step_saved_again_replaces_its_snapshot(tmp_path: Path) -> None:
    save(tmp_path, 4)
    flip(save(tmp_path, 8).folder / "model.safetensors", 9)
    assert save(tmp_path, 8).step == 8
    assert snapshots.newest(tmp_path).step == 8  # type: ignore[union-attr]


def test_snapshots_of_later_steps_are_another_past(tmp_path: Path) -> None:
    """Training that went back to an older snapshot must not find the newer ones again."""
    for step in (4, 8):
        save(tmp_path, step)
    save(tmp_path, 6)
    assert steps(tmp_path) == ["step_00000004", "step_00000006"]


def test_nothing_is_pickled(tmp_path: Path) -> None:
    folder = save(tmp_path, 1).folder
    for path in folder.iterdir():
        content: Any = path.read_bytes()
        assert content[:1] == b"{" or content[8:9] == b"{", "JSON, or safetensors' length and JSON header"
