"""Measured diagnostics on disk: rows of one (model, rescale, length), named by what decides them.

Each lies in a folder of its own below `diagnostics/`; beside the rows stands what decided them, so that rows
of weights that are gone, or of another text, are never put into a table with others.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import pandas as pd

from pe_study.evaluators import cells
from pe_study.files import read_json, write_json
from pe_study.rows import DIAGNOSTICS, read_rows, write_rows

FOLDER = "diagnostics"
KEY = "key.json"


def place(root: Path, key: Mapping[str, Any]) -> Path:
    """The folder of the rows that `key` decides."""
    return root / FOLDER / cells.name(key)


def read(root: Path, key: Mapping[str, Any], table: Collection[Any]) -> pd.DataFrame | None:
    """The rows of a finished measurement, None where there are none; marked as those of `table`, what must
    agree before rows stand in one file."""
    folder = place(root, key)
    if not (folder / DIAGNOSTICS).is_file():
        return None
    _mark(folder, key, table)
    return read_rows(folder, DIAGNOSTICS)


def write(root: Path, key: Mapping[str, Any], table: Collection[Any], frame: pd.DataFrame) -> None:
    """Keeps rows if all of them could be measured: what failed is tried again next time."""
    if set(frame["status"]) <= {"ok"}:
        folder = place(root, key)
        write_rows(frame, folder, DIAGNOSTICS)
        _mark(folder, key, table)


def others(
    root: Path,
    measured: Collection[Mapping[str, Any]],
    fingerprints: Collection[str],
    tables: Collection[Collection[Any]],
) -> list[pd.DataFrame]:
    """Rows of models that are still there, on the same text, that fill no place of `measured`; the latest of
    two that fill one. What an earlier version kept says not what it is of, and stays out."""
    filled = {_fills(key) for key in measured}
    found = []
    paths = (root / FOLDER).glob(f"*/{KEY}")
    for path in sorted(paths, key=lambda path: (-path.stat().st_mtime_ns, path.parent.name)):
        kept = read_json(path)
        key, fits = kept["key"], list(kept["table"]) in [list(table) for table in tables]
        if fits and key["fingerprint"] in fingerprints and _fills(key) not in filled:
            filled.add(_fills(key))
            found.append(path.parent)
    return [read_rows(folder, DIAGNOSTICS) for folder in sorted(found)]


def _mark(folder: Path, key: Mapping[str, Any], table: Collection[Any]) -> None:
    write_json(folder / KEY, {"key": dict(key), "table": list(table)})


def _fills(key: Mapping[str, Any]) -> tuple[Any, ...]:
    return key["identity"]["run"], key["rescale"], key["length"]
