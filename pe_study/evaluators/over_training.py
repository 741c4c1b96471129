"""Runs as they were on the way: weights that training kept (`train.keep_at`), measured at L, 2L and 8L.

One protocol, the plan's first, unrescaled. Rows go to a file of their own, `over_training.parquet`, with the
updates made, the tokens seen and the device-hours spent by then; the finished run is its last step.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd

from pe_study import kept, runs
from pe_study.checkpoints import open_checkpoint
from pe_study.errors import PlanError
from pe_study.evaluators import sharing
from pe_study.evaluators.cells import CellStore
from pe_study.evaluators.evaluation import Evaluation
from pe_study.evaluators.subjects import Subject
from pe_study.evaluators.texts import Texts
from pe_study.plan import Plan
from pe_study.rows import OVER_TRAINING, OVER_TRAINING_COLUMNS, make_rows, read_rows, write_rows

LENGTHS = ("1x", "2x", "8x")

logger = logging.getLogger(__name__)


def prepare(subjects: Sequence[Subject], plan: Plan, kernel: str) -> list[tuple[Evaluation, dict[str, Any]]]:
    """Every evaluation with its columns, in the order of training; PlanError where no weights were kept."""
    narrowed = plan.model_copy(
        update={
            "lengths": LENGTHS,
            "protocols": plan.protocols[:1],
            "rescales": ("none",),
            "far_context": ("own",),
            "attention_window": None,
            "shuffle_positions": False,
            "diagnostics": False,
            "truncation": False,
            "tasks": (),
        }
    )
    found: list[tuple[Evaluation, dict[str, Any]]] = []
    texts = Texts()
    for subject in subjects:
        on_the_way = _kept(subject)
        if not on_the_way:
            logger.warning("%s: no weights were kept on the way, left out over training", subject.name)
            continue
        for each, columns in on_the_way:
            found.append((Evaluation.prepare(each, narrowed, kernel, texts), columns))
    if not found:
        names = ", ".join(subject.name for subject in subjects)
        raise PlanError(
            f"over_training: {names}: no weights were kept on the way\n"
            "train with train.keep_at=[0.125, 0.25, 0.5], which keeps those of an eighth, a quarter and half"
        )
    return found


def measure(
    prepared: Sequence[tuple[Evaluation, Mapping[str, Any]]],
    folder: Path,
    store: CellStore,
    on_cell: Callable[[pd.DataFrame], None],
) -> None:
    """Measure what is not finished; write all rows, and keep those of runs that this call did not pick."""
    frames = []
    for evaluation, columns in prepared:
        rows = pd.concat(evaluation.run(store, on_cell), ignore_index=True)
        frames.append(make_rows(rows.assign(**columns), OVER_TRAINING_COLUMNS))
    if not sharing.is_main():
        return
    picked = {evaluation.subject.identity["run"] for evaluation, _ in prepared}
    if (folder / OVER_TRAINING).is_file():
        before = read_rows(folder, OVER_TRAINING)
        frames.append(before[~before["run"].isin(picked)])
    write_rows(pd.concat(frames, ignore_index=True), folder, OVER_TRAINING)


def _kept(subject: Subject) -> list[tuple[Subject, dict[str, Any]]]:
    """The subject at every step that was kept, and finished at last, each with its columns."""
    folder = Path(subject.checkpoint.source)
    steps = kept.found(folder) if subject.recipe is not None else {}
    if not steps:
        return []
    assert subject.recipe is not None
    last = subject.recipe.train.steps
    found = [
        (
            replace(
                subject,
                checkpoint=open_checkpoint(path, dtype=subject.checkpoint.dtype),
                fingerprint=runs.read_json(path / kept.FACTS)["weights_sha256"],
            ),
            step,
        )
        for step, path in steps.items()
    ]
    batch = subject.recipe.train.batch_tokens
    return [
        (
            each,
            {"step": step, "trained_tokens": step * batch, "device_hours": kept.device_hours(folder, step)},
        )
        for each, step in [*found, (subject, last)]
    ]
