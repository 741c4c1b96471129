"""How far a study is: which runs are done, under way or not started, and whether it is evaluated."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from pe_study.reporting.studies import SUMMARY, Evaluation, Study
from pe_study.runs import DONE, RECIPE


def progress(studies: Sequence[Study]) -> str:
    """ "demo: 3 of 7 runs done, rope-s0 at step 120 of 300, not started: t5-s0", a clause a study."""
    return "; ".join(map(_progress, studies))


def _progress(study: Study) -> str:
    running = [run for run in study.runs if not run.done]
    said = [f", {run.run_id} at step {run.last_step:,} of {run.train.get('steps', '?')}" for run in running]
    if study.waiting:
        said.append(f", not started: {', '.join(study.waiting)}")
    if not running and not study.due and not is_finished(study):
        said.append(", not evaluated yet")
    total = len(study.runs) + len(study.waiting)
    return f"{study.name}: {len(study.runs) - len(running)} of {total} runs done{''.join(said)}"


def waiting(studies: Sequence[Study]) -> list[str]:
    """What a page says of runs that have not begun."""
    return [
        f"{study.name}: {len(study.waiting)} of {len(study.runs) + len(study.waiting)} runs have not "
        f"started: {', '.join(study.waiting)}."
        for study in studies
        if study.waiting
    ]


def is_finished(study: Study) -> bool:
    """Whether every run that was picked is done and an evaluation holds them all, made since the last was.

    One run alone is finished when it is done: its results lie with its study. A checkpoint has no runs.
    """
    if study.due or not all(run.done for run in study.runs):
        return False
    if (study.path / RECIPE).is_file() or not study.runs:
        return True
    last = max(_when(run.finished.get("finished"), study.path / run.run_id / DONE) for run in study.runs)
    runs = {(run.label, run.seed) for run in study.runs}
    return any(
        bool(one.summary)
        and _when(one.summary.get("date"), one.folder / SUMMARY) >= last
        and runs <= _held(one)
        for one in study.evaluations
    )


def _held(evaluation: Evaluation) -> set[tuple[str, int]]:
    """(label, seed) of every run that an evaluation holds results of."""
    frames = [evaluation.rows] if evaluation.retrieval is None else [evaluation.rows, evaluation.retrieval]
    pairs = [
        pair for frame in frames for pair in frame[["label", "seed"]].dropna().drop_duplicates().to_numpy()
    ]
    return {(str(label), int(seed)) for label, seed in pairs}


def _when(written: Any, file: Path) -> int:
    """When something was finished, in whole seconds: as it says itself, else by the time of its file."""
    try:
        return int(datetime.fromisoformat(str(written)).timestamp())
    except ValueError:
        return int(file.stat().st_mtime)
