"""Runs a plan over a study, a run or a checkpoint, and writes what came out.

A finished cell is kept on disk and not measured again; `results.parquet` and `results.json` hold all cells
that were measured on the same text, also those of runs and lengths that this call did not pick.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from pe_study import rope_scaling, runs
from pe_study.errors import DataError
from pe_study.evaluators import cells, diagnostics, over_training, retrieval, sharing, summary
from pe_study.evaluators.byte_lengths import ByteEvaluation
from pe_study.evaluators.cache_cost import cache_costs
from pe_study.evaluators.cells import CellStore
from pe_study.evaluators.evaluation import Evaluation, Models
from pe_study.evaluators.live import LiveTable
from pe_study.evaluators.rescale_checks import check_rescales
from pe_study.evaluators.subjects import Subject, default_plan, find_study, find_subjects, fingerprints, slug
from pe_study.evaluators.texts import Texts
from pe_study.plan import Plan
from pe_study.rows import DIAGNOSTICS, NO_CONTROL, RESULTS, RETRIEVAL, read_rows, write_rows

__all__ = ["default_plan", "evaluate"]

logger = logging.getLogger(__name__)

SUMMARY = "results.json"
OURS = (RESULTS, SUMMARY, cells.FOLDER, RETRIEVAL, DIAGNOSTICS)  # what marks a folder as one of results


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
    evaluations: Sequence[Evaluation]
    if plan.in_bytes:
        evaluations = [ByteEvaluation.prepare_bytes(subject, plan, kernel) for subject in subjects]
    else:
        evaluations = [Evaluation.prepare(subject, plan, kernel, texts) for subject in subjects]
        cut = [line for subject in subjects for line in plan.cut_strides(subject.train_length)]
        for line in dict.fromkeys(cut):
            logger.warning("%s", line)
    on_the_way = over_training.prepare(subjects, plan, kernel) if plan.over_training else []
    if dry_run:
        return [cell for evaluation in evaluations for cell in evaluation.describe()]
    runs.claim_folder(folder, ours=OURS)
    store = CellStore(folder)
    with LiveTable(plan.aggregation) as table:
        frames = [frame for evaluation in evaluations for frame in evaluation.run(store, table.add)]
        if on_the_way:
            over_training.measure(on_the_way, folder, store, table.add)
    if sharing.is_main():
        with store.assembling():
            current = _current(target, runs_root, evaluations)
            before = _measured_before(store, current, evaluations)
            _say_what_leaves(folder, frames + before)
            write_results(folder, evaluations, frames + before, cache_costs(evaluations, store))
            diagnostics.measure(evaluations, folder, current, _models_of if plan.diagnostics else None)
    if plan.tasks:
        retrieval.measure(evaluations, folder, fingerprints(find_study(target, runs_root)))
    sharing.wait()
    return folder


def default_folder(target: str, runs_root: Path, plan: Plan) -> Path:
    """Beside a study, `runs/<study>/eval/<plan>`; for a checkpoint, `runs/eval/<slug>`."""
    study = find_study(target, runs_root)
    if study is None:
        return runs_root / "eval" / slug(target)
    if (study / runs.RECIPE).is_file():
        study = study.resolve().parent
    return study / "eval" / plan.name


def _models_of(evaluation: Evaluation) -> Models:
    return Models(evaluation.subject, evaluation.kernel)


def _current(target: str, runs_root: Path, evaluations: Sequence[Evaluation]) -> set[str]:
    """Fingerprints of the models that are there: those of this call and all finished runs of the study."""
    return {each.subject.fingerprint for each in evaluations} | fingerprints(find_study(target, runs_root))


def _measured_before(
    store: CellStore, current: set[str], evaluations: Sequence[Evaluation]
) -> list[pd.DataFrame]:
    """Rows of runs, rescales and lengths that this call did not pick: same text, same weights."""
    keys = [evaluation.key(cell) for evaluation in evaluations for cell in evaluation.cells()]
    return store.others({cells.name(key) for key in keys}, current, {cells.setting(key) for key in keys})


def _say_what_leaves(folder: Path, frames: Sequence[pd.DataFrame]) -> None:
    """Warn of runs and protocols that the results held and will hold no longer: of other documents, say."""
    with contextlib.suppress(DataError):
        held = [read_rows(folder)] if (folder / RESULTS).is_file() else []
        if gone := sorted(_places(held) - _places(frames)):
            logger.warning(
                "%s: %s (%s) lay there, of other documents, dtype, kernel or weights, and make room; cells "
                "are kept, so that their own command shows them; --output FOLDER keeps both",
                folder / RESULTS,
                ", ".join(dict.fromkeys(run for run, _ in gone)),
                ", ".join(dict.fromkeys(protocol for _, protocol in gone)),
            )


def _places(frames: Sequence[pd.DataFrame]) -> set[tuple[str, str]]:
    """(run, protocol) of all rows."""
    columns = ["run", "protocol"]
    return {
        (str(run), str(name)) for frame in frames for run, name in frame[columns].drop_duplicates().to_numpy()
    }


def write_results(
    folder: Path,
    evaluations: Sequence[Evaluation],
    frames: Sequence[pd.DataFrame],
    costs: Sequence[Mapping[str, Any]] = (),
) -> None:
    """`results.parquet` and `results.json` of everything measured; `costs` are those of an 8-bit cache."""
    frame = pd.concat(frames, ignore_index=True)
    write_rows(frame, folder)
    first = evaluations[0]
    named = frame.dropna(subset=["kernel"]).groupby("label", sort=False)["kernel"].first()
    notes = {
        "documents": _document_notes(first),
        "rescales": _rescale_notes(evaluations, folder),
        "kernels": {str(label): str(kernel) for label, kernel in named.items()},
        "nothing_slid": _nothing_slid(frame),
        "cache_costs": list(costs),
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
        "overlap": None if evaluation.text.overlap is None else list(evaluation.text.overlap),
        "may_be_seen": evaluation.text.warning,
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
    """What the frequencies of a subject are under a rescale at a length, with `own_scaling` where those are
    scaled by the checkpoint itself and the rescale leaves them so."""
    checkpoint = subject.checkpoint
    rotary, kept = checkpoint.rotary, checkpoint.kept_scaling(rescale, length)
    assert rotary is not None
    factor: float | None = rope_scaling.parse(rescale).resolved_factor(rotary.original_length, length)
    if kept is not None:
        factor = kept[1]
    found = checkpoint.frequencies(rescale, length)
    return {
        "label": subject.identity["label"],
        "rescale": rescale,
        "length": length,
        "train_length": subject.train_length,
        "own_scaling": None if kept is None else kept[0],
        "factor": factor,
        "attention_factor": None if found is None else found[1],
        **(rope_scaling.count_pairs(found[0], rotary.base, factor or 1.0) if found is not None else {}),
    }


def _nothing_slid(frame: pd.DataFrame) -> list[int]:
    """Lengths at which sliding never moved: each document fitted into its first window."""
    plain = frame[frame["control"] == NO_CONTROL]
    sliding = plain[(plain["protocol"] == "sliding") & (plain["status"] == "ok")]
    counts = sliding.groupby(["run", "rescale", "length", "document"])["num_windows"].sum()
    most = counts.groupby("length").max()
    return [int(length) for length in most.index[most == 1]]
