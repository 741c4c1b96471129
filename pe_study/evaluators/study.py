"""Runs a plan over a study, a run or a checkpoint, and writes what came out.

A finished cell is kept on disk and not measured again; `results.parquet` and `results.json` hold all cells
that were measured on the same text, also those of runs and lengths that this call did not pick.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pandas as pd

from pe_study import rope_scaling, runs
from pe_study.errors import RescaleError
from pe_study.evaluators import cells, retrieval, sharing, summary
from pe_study.evaluators.cells import CellStore
from pe_study.evaluators.evaluation import Evaluation
from pe_study.evaluators.live import LiveTable
from pe_study.evaluators.subjects import Subject, default_plan, find_study, find_subjects, fingerprints, slug
from pe_study.evaluators.texts import Texts
from pe_study.plan import Plan
from pe_study.rows import RESULTS, RETRIEVAL, write_rows

__all__ = ["default_plan", "evaluate"]

logger = logging.getLogger(__name__)

SUMMARY = "results.json"
OURS = (RESULTS, SUMMARY, cells.FOLDER, RETRIEVAL)  # what marks a folder as one of results


def evaluate(
    target: str,
    plan: Plan,
    *,
    runs_root: Path,
    output: Path | None = None,
    only: Mapping[str, str] | None = None,
    dry_run: bool = False,
    kernel: str = "auto",
    **checkpoint_options: Any,
) -> Any:
    """Measure `target` by `plan`; returns the folder of its results, or with `dry_run` the cells.

    target: a study or run directory, a Hugging Face id or folder, a .gguf file. only: picks runs of a study.
    checkpoint_options: dtype, revision, gguf_file, trust_remote_code of `load_causal_lm`.
    """
    sharing.start()
    target, runs_root, texts = str(target), Path(runs_root), Texts()
    subjects = find_subjects(target, runs_root, dict(only or {}), checkpoint_options)
    folder = Path(output) if output is not None else default_folder(target, runs_root, plan)
    runs.check_output(folder, ours=OURS)
    check_rescales(plan, subjects)
    evaluations = [Evaluation.prepare(subject, plan, kernel, texts) for subject in subjects]
    if dry_run:
        return [cell for evaluation in evaluations for cell in evaluation.describe()]
    runs.claim_folder(folder, ours=OURS)
    store = CellStore(folder)
    with LiveTable(plan.aggregation) as table:
        frames = [frame for evaluation in evaluations for frame in evaluation.run(store, table.add)]
    if sharing.is_main():
        with store.assembling():
            before = _measured_before(store, target, runs_root, evaluations)
            write_results(folder, evaluations, frames + before)
            if plan.tasks:
                retrieval.measure(evaluations, folder, fingerprints(find_study(target, runs_root)))
    sharing.wait()
    return folder


def check_rescales(plan: Plan, subjects: Sequence[Subject]) -> None:
    """RescaleError where a plan rescales and nothing else, and no subject has positions to rescale."""
    if "none" not in plan.rescales and all(subject.checkpoint.rotary is None for subject in subjects):
        said = ", ".join(f"{subject.name} ({subject.identity['encoding']})" for subject in subjects)
        found = ", ".join(plan.rescales)
        raise RescaleError(f"rescales: found {found}; accepted: none (no rotary positions: {said})")


def default_folder(target: str, runs_root: Path, plan: Plan) -> Path:
    """Beside a study, `runs/<study>/eval/<plan>`; for a checkpoint, `runs/eval/<slug>`."""
    study = find_study(target, runs_root)
    if study is None:
        return runs_root / "eval" / slug(target)
    if (study / runs.RECIPE).is_file():
        study = study.resolve().parent
    return study / "eval" / plan.name


def _measured_before(
    store: CellStore, target: str, runs_root: Path, evaluations: Sequence[Evaluation]
) -> list[pd.DataFrame]:
    """Rows of runs, rescales and lengths that this call did not pick: same text, same weights."""
    current = {evaluation.subject.fingerprint for evaluation in evaluations}
    current |= fingerprints(find_study(target, runs_root))
    keys = [evaluation.key(cell) for evaluation in evaluations for cell in evaluation.cells()]
    return store.others({cells.name(key) for key in keys}, current, {cells.setting(key) for key in keys})


def write_results(folder: Path, evaluations: Sequence[Evaluation], frames: Sequence[pd.DataFrame]) -> None:
    """`results.parquet` and `results.json` of everything measured."""
    frame = pd.concat(frames, ignore_index=True)
    write_rows(frame, folder)
    first = evaluations[0]
    named = frame.dropna(subset=["kernel"]).groupby("label", sort=False)["kernel"].first()
    notes = {
        "documents": _document_notes(first),
        "rescales": _rescale_notes(evaluations, folder),
        "kernels": {str(label): str(kernel) for label, kernel in named.items()},
        "nothing_slid": _nothing_slid(frame),
    }
    config = {
        "model": "pe_study",
        "model_args": [dict(evaluation.subject.identity) for evaluation in evaluations],
        "plan": first.plan.model_dump(mode="json"),
        "command": runs.command_line(),
    }
    runs.write_json(folder / SUMMARY, summary.results(frame, config, notes))


def _document_notes(evaluation: Evaluation) -> dict[str, Any]:
    documents = evaluation.text.documents
    return {
        "unit": documents.unit,
        "kept": documents.kept,
        "eligible": documents.eligible,
        "total": documents.total,
        "median_length": documents.median_length,
        "total_median_length": documents.total_median_length,
    }


def _rescale_notes(evaluations: Iterable[Evaluation], folder: Path) -> list[dict[str, Any]]:
    """For each label, rescale and length: factors, and how many frequency pairs are left alone.

    Notes of runs that this call did not pick are kept.
    """
    before = runs.read_json(folder / SUMMARY)["notes"]["rescales"] if (folder / SUMMARY).is_file() else []
    now = [
        rescale_note(evaluation.subject, rescale, length)
        for evaluation in evaluations
        if evaluation.subject.checkpoint.rotary is not None
        for rescale in evaluation.rescales
        for length in evaluation.lengths
    ]
    return list({(note["label"], note["rescale"], note["length"]): note for note in before + now}.values())


def rescale_note(subject: Subject, rescale: str, length: int) -> dict[str, Any]:
    """What a rescale does to the frequencies of a subject at a length."""
    rotary = subject.checkpoint.rotary
    assert rotary is not None
    original = rotary.original_length
    geometry: dict[str, Any] = asdict(rotary)
    _, attention_factor = rope_scaling.frequencies(rescale, **geometry, length=length)
    return {
        "label": subject.identity["label"],
        "rescale": rescale,
        "length": length,
        "train_length": subject.train_length,
        "factor": rope_scaling.parse(rescale).resolved_factor(original, length),
        "attention_factor": attention_factor,
        **rope_scaling.pair_counts(rescale, **geometry, length=length),
    }


def _nothing_slid(frame: pd.DataFrame) -> list[int]:
    """Lengths at which sliding never moved: each document fitted into its first window."""
    sliding = frame[(frame["protocol"] == "sliding") & (frame["status"] == "ok")]
    counts = sliding.groupby(["run", "rescale", "length", "document"])["num_windows"].sum()
    most = counts.groupby("length").max()
    return [int(length) for length in most.index[most == 1]]
