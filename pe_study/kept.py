"""Weights that a run keeps on its way (`train.keep_at`), and what they had cost. No torch here.

kept/step_00000030/   what `final/` holds, of that step, and kept.json
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

from pe_study import runs

FOLDER, FACTS = "kept", "kept.json"


def steps_of(shares: Sequence[float], steps: int) -> tuple[int, ...]:
    """The updates after which weights are kept: shares of all, to the nearest update, never the last one."""
    chosen = {max(round(share * steps), 1) for share in shares}
    return tuple(sorted(step for step in chosen if step < steps))


def folder_of(run: Path, step: int) -> Path:
    """Where the weights of a step lie."""
    return run / FOLDER / f"step_{step:08d}"


def found(run: Path) -> dict[int, Path]:
    """The steps whose weights a run kept whole, ascending, and where they lie."""
    facts = sorted((run / FOLDER).glob(f"step_*/{FACTS}"))
    return {int(path.parent.name.removeprefix("step_")): path.parent for path in facts}


def adopt(source: Path, run: Path, step: int) -> None:
    """Take over what the run in `source` kept up to a step, in place of what `run` has."""
    shutil.rmtree(run / FOLDER, ignore_errors=True)
    for at, folder in found(source).items():
        if at <= step:
            beside = run / FOLDER / f".{folder.name}.tmp"
            shutil.copytree(folder, beside)
            beside.rename(folder_of(run, at))


def device_hours(run: Path, step: int) -> float | None:
    """Hours of updates up to `step`, times the number of processes; None where the log does not reach it.

    From the speeds in `metrics.jsonl`, which count updates alone, and the number of processes there was then;
    between two lines a step takes their mean.
    """
    seconds, before = 0.0, 0
    last = runs.read_json(run / runs.PROVENANCE)["num_processes"]  # of runs whose lines do not say it
    for row in runs.read_metrics(run):
        through = min(row["step"], step)
        processes = row.get("num_processes", last)
        seconds += processes * row["tokens"] / row["step"] * (through - before) / row["tokens_per_second"]
        before = row["step"]
        if before >= step:
            return seconds / 3600
    return None
