"""`metrics.jsonl`, the log of a run: an object a line, appended to as it trains. No torch here."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from pe_study.errors import DamagedError
from pe_study.files import naming, parse_json, write_text

METRICS = "metrics.jsonl"
REMEDY = "delete this line to do without it, or start the run over with --resume never"


class Metrics:
    """The append-only `metrics.jsonl` of a run: one strict JSON object a line, flushed as it is written."""

    def __init__(self, folder: Path | str, *, after_step: int = 0) -> None:
        """Open for appending, dropping lines past `after_step` (they will be written again)."""
        self.path = Path(folder) / METRICS
        rows = read_metrics(folder) if after_step else []  # what starts over needs none, whole or not
        kept = [row for row in rows if row["step"] <= after_step]
        write_text(self.path, "".join(_line(row) for row in kept))
        self._file = self.path.open("a", encoding="utf-8")

    def append(self, row: Mapping[str, Any]) -> None:
        with naming(self.path):
            self._file.write(_line(row))
            self._file.flush()

    def close(self) -> None:
        with naming(self.path):
            self._file.close()


def read_metrics(folder: Path | str) -> list[dict[str, Any]]:
    """The lines of a run's `metrics.jsonl`; a last line that a crash cut short is left out. DamagedError
    naming another that cannot be read."""
    path = Path(folder) / METRICS
    if not path.exists():
        return []
    lines = path.read_bytes().split(b"\n")
    return [_parsed(line, f"{path}:{number}") for number, line in enumerate(lines[:-1], start=1)]


def count_lines(folder: Path | str) -> int:
    """How many lines the log has."""
    path = Path(folder) / METRICS
    return path.read_bytes().count(b"\n") if path.exists() else 0


def adopt(source: Path | str, folder: Path | str) -> None:
    """Take over the log of the run in `source`, in place of what `folder` has."""
    write_text(Path(folder) / METRICS, (Path(source) / METRICS).read_text(encoding="utf-8"))


def ranges(steps: Iterable[int]) -> str:
    """Ascending whole numbers as a reader wants them: 1-5, 8."""
    runs: list[list[int]] = []
    for step in steps:
        if runs and step == runs[-1][1] + 1:
            runs[-1][1] = step
        else:
            runs.append([step, step])
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)


def _parsed(line: bytes, place: str) -> dict[str, Any]:
    row = parse_json(line, place, REMEDY)
    if not isinstance(row, dict) or not isinstance(row.get("step"), int):
        raise DamagedError(f"{place}: damaged, no line of a log; {REMEDY}")
    return row


def _line(row: Mapping[str, Any]) -> str:
    return json.dumps(row, allow_nan=False) + "\n"
