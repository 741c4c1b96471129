"""Finished cells on disk: rows of one (model, rescale, length, protocol), named by what decides them."""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd

from pe_study.files import LOCK, alone, read_json, write_json
from pe_study.rows import read_rows, write_rows

FOLDER = "cells"
FINISHED = {"ok", "skipped"}


class Setting(NamedTuple):
    """What one cell measures, in four parts.

    table: what must agree before rows of two evaluations may stand in one table (text, dtype, kernel,
    version, lengths in tokens or in bytes). protocol: its name. draw: what decides the targets of a sampling
    protocol, None for others. place: the one place of the table that its rows fill.
    """

    table: tuple[Any, ...]
    protocol: str
    draw: tuple[Any, ...] | None
    place: tuple[Any, ...]


class CellStore:
    """Cells under `folder/cells`: a Parquet file of rows each, and beside it what decides their numbers.

    The second is written last, so a cell that has both is whole.
    """

    def __init__(self, folder: Path):
        self.folder = folder / FOLDER

    def read(self, key: Mapping[str, Any]) -> pd.DataFrame | None:
        """The rows of a finished cell, None where there are none yet."""
        if not (self.folder / f"{name(key)}.json").is_file():
            return None
        return read_rows(self.folder, f"{name(key)}.parquet")

    def write(self, key: Mapping[str, Any], frame: pd.DataFrame) -> None:
        """Keeps the rows of a cell if it finished: what failed is tried again next time."""
        if set(frame["status"]) <= FINISHED:
            write_rows(frame, self.folder, f"{name(key)}.parquet")
            write_json(self.folder / f"{name(key)}.json", dict(key))

    def others(
        self, measured: Collection[str], fingerprints: Collection[str], settings: Collection[Setting]
    ) -> list[pd.DataFrame]:
        """Cells that were measured before, of models that are still there, that fit `settings` in one table.

        measured: names of the cells that this evaluation holds itself. No place is filled twice, and a
        protocol that samples its targets has one draw: that of `settings`, else the latest.
        """
        tables = {each.table for each in settings}
        places = {each.place for each in settings}
        draws = {each.protocol: each.draw for each in settings}
        found = []
        for path in sorted(
            self.folder.glob("*.json"), key=lambda path: (-path.stat().st_mtime_ns, path.name)
        ):
            key = read_json(path)
            its = setting(key)
            if path.stem in measured or key["fingerprint"] not in fingerprints or its.table not in tables:
                continue
            if its.place not in places and draws.setdefault(its.protocol, its.draw) == its.draw:
                places.add(its.place)
                found.append(path.stem)
        return [read_rows(self.folder, f"{stem}.parquet") for stem in sorted(found)]

    @contextlib.contextmanager
    def assembling(self) -> Iterator[None]:
        """One process at a time puts a folder's results together; another waits for it."""
        self.folder.mkdir(parents=True, exist_ok=True)
        with alone(self.folder / LOCK):
            yield


def setting(key: Mapping[str, Any]) -> Setting:
    """The setting of the cell that `key` names."""
    protocol = key["protocol"]
    draw = tuple(protocol[part] for part in ("num_targets", "anchors", "seed"))
    return Setting(
        (
            *(str(key[part]) for part in ("text", "dtype", "kernel")),
            int(key["version"]),
            key.get("span_bytes"),
            key.get("bytes_version"),
        ),
        str(protocol["name"]),
        (key["longest"], *draw) if key["longest"] is not None else None,
        (
            key["fingerprint"],
            key["identity"]["run"],
            key["rescale"],
            key["length"],
            protocol["name"],
            protocol["stride"],
            key.get("control"),
        ),
    )


def name(key: Mapping[str, Any]) -> str:
    """The file name of a cell, without its suffix."""
    text = json.dumps(key, sort_keys=True, ensure_ascii=False)
    return hashlib.sha256(text.encode()).hexdigest()[:24]
