"""Reads what `pe-study bench --output DIR` wrote, for reports. No torch here.

Ratios compare with a reference that took turns in the same run; above 1 is faster than the reference.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from pe_study.errors import DataError

BENCH = "bench.json"
NEEDED = ("encoding", "phase", "length", "kernel", "dtype", "device", "tokens_per_second")
PHASES = {"train": "training", "eval": "evaluation"}
REFERENCES = ("LlamaForCausalLM", "x-transformers", "rope")  # the first that took part is drawn against


@dataclass(frozen=True)
class BenchFile:
    """The rows of one bench file, a workload each, and the machine that they were measured on.

    `rows` has the columns of the file, `name` (what a reader calls the workload) and, for each reference R
    that took part, `to_R`, `to_R_low` and `to_R_high`: its median ratio and the spread over turns.
    """

    machine: Mapping[str, Any]
    rows: pd.DataFrame

    @property
    def reference(self) -> str | None:
        return next((name for name in REFERENCES if f"to_{name}" in self.rows), None)

    @property
    def on_cuda(self) -> bool:
        return bool((self.rows["device"] == "cuda").any())

    @property
    def place(self) -> str:
        """ "x86_64, 2 threads, torch 2.13.0+cpu"."""
        threads = f"{self.machine['threads']} threads, " if self.machine.get("threads") else ""
        return f"{self.machine.get('device', 'unknown device')}, {threads}torch {self.machine.get('torch')}"


def bench_at(path: Path) -> Path | None:
    """The bench file that `path` is or holds; None where it is something else."""
    if path.is_dir():
        return path / BENCH if (path / BENCH).is_file() else None
    return path if path.name == BENCH or (path.suffix == ".json" and path.name != "results.json") else None


def read_bench(path: Path) -> BenchFile:
    """DataError naming the file where it cannot be read or is no bench file."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise DataError(f"{path}: cannot be read ({str(error).splitlines()[0]})") from None
    given = content.get("rows") if isinstance(content, Mapping) else None
    rows = pd.DataFrame([_flat(row) for row in _records(given)])
    absent = [name for name in NEEDED if name not in rows]
    if absent:
        raise DataError(
            f"{path}: not a bench file (no {', '.join(absent)}); pe-study bench --output DIR writes one"
        )
    return BenchFile(content.get("machine") or {}, rows.assign(name=_names(rows)))


def _records(given: Any) -> Sequence[Mapping[str, Any]]:
    """The rows, or none where they are something else."""
    return given if isinstance(given, list) and all(isinstance(row, Mapping) for row in given) else []


def _flat(row: Mapping[str, Any]) -> dict[str, Any]:
    """A row whose ratios are columns."""
    plain = {key: value for key, value in row.items() if not isinstance(value, Mapping)}
    for key, spread in row.items():
        if key.startswith("ratio_to_") and isinstance(spread, Mapping):
            to = "to_" + key.removeprefix("ratio_to_")
            plain |= {
                to: spread.get("median"),
                f"{to}_low": spread.get("low"),
                f"{to}_high": spread.get("high"),
            }
    return plain


def _names(rows: pd.DataFrame) -> Sequence[str]:
    """The encoding or peer, with its kernel where it was measured under several, and whether compiled."""
    several = rows.groupby("encoding")["kernel"].transform("nunique") > 1
    compiled = rows["compiled"].eq(True) if "compiled" in rows else pd.Series(False, index=rows.index)
    return list(
        rows["encoding"]
        + (", " + rows["kernel"]).where(several, "")
        + pd.Series(", compiled", index=rows.index).where(compiled, "")
    )


def sentences(bench: BenchFile) -> list[str]:
    """What was measured where, and how the encodings' speed stands to the reference, phase by phase."""
    rows = bench.rows
    said = [
        f"Measured on {bench.place}, {', '.join(sorted(set(rows['dtype'])))}"
        + ("." if bench.on_cuda else "; CUDA is unmeasured: no bench file of a CUDA device was given.")
    ]
    for phase, words in PHASES.items():
        here = rows[rows["phase"] == phase]
        if bench.reference is None or here.empty:
            continue
        to = f"to_{bench.reference}"
        last = here[(here["length"] == here["length"].max()) & (here["name"] != bench.reference)]
        last = last[last[to].notna()].sort_values(to, ascending=False)
        values = ", ".join(f"{ratio.name} {ratio.text}" for ratio in ratios(last, to))
        if values:
            said.append(
                f"Speed of {words} at length {int(here['length'].max()):,} over that of {bench.reference} "
                f"(median of turns, lowest to highest): {values}."
            )
    return said


def sentences_of(benches: Sequence[tuple[str, BenchFile]]) -> list[str]:
    """The sentences of several bench files, each under the name of its file where there are others."""
    return [
        f"{name}: {sentence}" if len(benches) > 1 else sentence
        for name, bench in benches
        for sentence in sentences(bench)
    ]


@dataclass(frozen=True)
class Ratio:
    """How much faster than a reference: the median over turns, the lowest and the highest."""

    name: str
    median: float
    low: float
    high: float

    @property
    def text(self) -> str:
        """ "1.08 (1.05\u20131.18)"."""
        return f"{self.median:.2f} ({self.low:.2f}\u2013{self.high:.2f})"


def ratios(rows: pd.DataFrame, to: str) -> list[Ratio]:
    """The ratios of column `to`, a row each."""
    return [Ratio(*values) for values in rows[["name", to, f"{to}_low", f"{to}_high"]].to_numpy().tolist()]
