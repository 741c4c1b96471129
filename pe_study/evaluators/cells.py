"""Finished cells on disk: rows of one (model, rescale, length, protocol), named by what decides them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pandas as pd

from pe_study.rows import read_rows, write_rows

FOLDER = "cells"
FINISHED = {"ok", "skipped"}


class CellStore:
    """Cells under `folder/cells`, one Parquet file each, named by a hash of what decides their numbers."""

    def __init__(self, folder: Path):
        self.folder = folder / FOLDER

    def read(self, key: Mapping[str, Any]) -> pd.DataFrame | None:
        """The rows of a finished cell, None where there are none yet."""
        name = self._name(key)
        return read_rows(self.folder, name) if (self.folder / name).is_file() else None

    def write(self, key: Mapping[str, Any], frame: pd.DataFrame) -> None:
        """Keeps the rows of a cell if it finished: what failed is tried again next time."""
        if set(frame["status"]) <= FINISHED:
            write_rows(frame, self.folder, self._name(key))

    def _name(self, key: Mapping[str, Any]) -> str:
        text = json.dumps(key, sort_keys=True, ensure_ascii=False)
        return hashlib.sha256(text.encode()).hexdigest()[:24] + ".parquet"
