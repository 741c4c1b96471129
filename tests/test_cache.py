"""Cached folders: built once, whole or not at all, and built again when damaged."""

import errno
import os
import subprocess
import sys

import pytest

from pe_study.errors import DataError
from pe_study.text.cache import cache_root, cached_folder, digest


@pytest.fixture(autouse=True)
def root(tmp_path, monkeypatch):
    monkeypatch.setenv("PE_STUDY_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


class Build:
    def __init__(self):
        self.count = 0

    def __call__(self, folder):
        self.count += 1
        (folder / "a.bin").write_bytes(b"abc")
        (folder / "b.bin").write_bytes(b"")
        return {"number": 3}


def test_root_is_named_by_the_environment(root, monkeypatch, tmp_path):
    assert cache_root() == root
    monkeypatch.delenv("PE_STUDY_CACHE")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_root() == tmp_path / ".cache" / "pe_study"


def test_built_once(root):
    build = Build()
    first = cached_folder("kind", "key", build)
    assert first == cached_folder("kind", "key", build) == (root / "kind" / "key", {"number": 3})
    assert build.count == 1
    cached_folder("kind", "other", build)
    assert build.count == 2


@pytest.mark.parametrize(
    "damage", ["flipped", "cut", "missing", "no manifest", "bad manifest", "half manifest"]
)
def test_damage_is_found_and_repaired(damage):
    build = Build()
    folder, _ = cached_folder("kind", "key", build)
    match damage:
        case "flipped":
            (folder / "a.bin").write_bytes(b"abd")
        case "cut":
            (folder / "a.bin").write_bytes(b"ab")
        case "missing":
            (folder / "b.bin").unlink()
        case "no manifest":
            (folder / "manifest.json").unlink()
        case "bad manifest":
            (folder / "manifest.json").write_text("[]")
        case "half manifest":
            (folder / "manifest.json").write_text('{"facts": {"num')
    assert cached_folder("kind", "key", build) == (folder, {"number": 3})
    assert build.count == 2
    assert (folder / "a.bin").read_bytes() == b"abc"


def test_failed_build_leaves_nothing(root):
    def fail(folder):
        (folder / "a.bin").write_bytes(b"half")
        raise DataError("no text")

    with pytest.raises(DataError, match="no text"):
        cached_folder("kind", "key", fail)
    assert [path.name for path in (root / "kind").iterdir()] == ["key.lock"]


@pytest.mark.parametrize(("code", "words"), [(errno.ENOSPC, "the disk is full"), (errno.EROFS, "Read-only")])
def test_cache_that_cannot_be_written(root, code, words):
    def fail(folder):
        raise OSError(code, os.strerror(code))

    with pytest.raises(DataError, match=words) as caught:
        cached_folder("kind", "key", fail)
    assert "PE_STUDY_CACHE" in str(caught.value) and str(root / "kind") in str(caught.value)


def test_cache_that_is_a_file(root):
    root.write_text("not a folder")
    with pytest.raises(DataError, match="cannot write the cache"):
        cached_folder("kind", "key", Build())


BUILDER = """
import sys, time
from pe_study.text.cache import cached_folder
def build(folder):
    print("built", flush=True)
    time.sleep(0.3)
    (folder / "a.bin").write_bytes(b"abc" * 1000)
    return {}
folder, _ = cached_folder("kind", "key", build)
assert (folder / "a.bin").read_bytes() == b"abc" * 1000
"""


def test_processes_at_once_build_once(root):
    command = [sys.executable, "-c", BUILDER]
    running = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    printed = [process.communicate()[0] for process in running]
    assert [process.returncode for process in running] == [0, 0, 0]
    assert "".join(printed) == "built\n"
    assert sorted(path.name for path in (root / "kind").iterdir()) == ["key", "key.lock"]


def test_digest_tells_lists_apart():
    lists = [("ab", "c"), ("a", "bc"), ("abc",), ("ab", "c", "")]
    assert len({digest(*parts) for parts in lists}) == len(lists)
