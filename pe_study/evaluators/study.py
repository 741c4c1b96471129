"""Runs a plan over a study, a run or a checkpoint: a cell for each (run, rescale, length, protocol).

A finished cell is kept on disk and not measured again; `results.parquet` and `results.json` hold all of them.
"""

from __future__ import annotations

import hashlib
import logging
import shlex
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, cast

import pandas as pd

from pe_study import checkpoints, data, rope_scaling, runs
from pe_study.errors import RescaleError
from pe_study.evaluation_sets import Unit
from pe_study.evaluators import cells, summary, windows
from pe_study.evaluators.cells import CellStore
from pe_study.evaluators.jobs import DocumentSequence, Job, read_documents
from pe_study.evaluators.perplexity import measure
from pe_study.evaluators.subjects import Subject, default_plan, find_study, find_subjects, slug
from pe_study.plan import Plan, ProtocolSpec
from pe_study.rows import RESULTS, RETRIEVAL, make_rows, write_rows

__all__ = ["default_plan", "evaluate"]

logger = logging.getLogger(__name__)

SUMMARY = "results.json"
CELL_VERSION = 1  # raised when a cell's numbers would come out differently


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
    runs_root = Path(runs_root)
    subjects = find_subjects(str(target), runs_root, dict(only or {}), checkpoint_options)
    evaluations = [Evaluation.prepare(subject, plan, kernel) for subject in subjects]
    if dry_run:
        return [cell.describe() for evaluation in evaluations for cell in evaluation.cells()]
    folder = Path(output) if output is not None else default_folder(str(target), runs_root, plan)
    runs.claim_folder(folder, ours=(RESULTS, SUMMARY, cells.FOLDER, RETRIEVAL))
    store = CellStore(folder)
    frames = [frame for evaluation in evaluations for frame in evaluation.run(store)]
    write_results(folder, plan, evaluations, pd.concat(frames, ignore_index=True))
    return folder


def default_folder(target: str, runs_root: Path, plan: Plan) -> Path:
    """Beside a study, `runs/<study>/eval/<plan>`; for a checkpoint, `runs/eval/<slug>`."""
    study = find_study(target, runs_root)
    if study is None:
        return runs_root / "eval" / slug(target)
    if (study / runs.RECIPE).is_file():
        study = study.resolve().parent
    return study / "eval" / plan.name


@dataclass(frozen=True)
class Cell:
    """One measurement: a subject under a rescale at a length, by a protocol."""

    subject: Subject
    rescale: str
    length: int
    protocol: windows.Protocol

    def describe(self) -> dict[str, Any]:
        return {
            "run": self.subject.name,
            "rescale": self.rescale,
            "length": self.length,
            "protocol": self.protocol.name,
            "stride": self.protocol.stride,
        }


@dataclass(frozen=True)
class Evaluation:
    """One subject under a plan, with its documents, chosen once for the longest length."""

    subject: Subject
    plan: Plan
    kernel: str
    documents: data.EvaluationSet
    sequences: list[DocumentSequence]
    identity: Mapping[str, Any]

    @classmethod
    def prepare(cls, subject: Subject, plan: Plan, kernel: str) -> Evaluation:
        """Everything that can be refused is refused here, before anything is measured."""
        plan = plan.resolve(subject.train_length)
        if subject.checkpoint.rotary is None:
            _check_unscaled(subject, plan)
        tokenizer = subject.tokenizer()
        split = subject.split(plan, tokenizer)
        documents = data.evaluation_documents(
            split,
            longest_length=max(plan.resolve_lengths(None)),
            num_documents=plan.num_documents or split.num_documents,
            unit=cast(Unit, plan.unit),
        )
        sequences = read_documents(documents.documents, subject.bos_token_id(plan, tokenizer))
        identity = {
            **subject.identity,
            "corpus": split.corpus_name,
            "corpus_hash": split.corpus_hash,
            "tokenizer_hash": split.tokenizer_hash,
            "unit": plan.unit,
            "train_length": subject.train_length,
            "dtype": subject.checkpoint.dtype,
            "mask_kind": "causal",
        }
        return cls(subject, plan, kernel, documents, sequences, identity)

    @property
    def lengths(self) -> tuple[int, ...]:
        return self.plan.resolve_lengths(None)

    @property
    def rescales(self) -> tuple[str, ...]:
        """The plan's rescales where the model has RoPE, else `none`."""
        return self.plan.rescales if self.subject.checkpoint.rotary is not None else ("none",)

    def cells(self) -> Iterator[Cell]:
        """Cells that share a model follow one another."""
        for rescale in self.rescales:
            for length in self.lengths:
                for spec in self.plan.protocols:
                    yield Cell(self.subject, rescale, length, _protocol(spec))

    def run(self, store: CellStore) -> list[pd.DataFrame]:
        """The rows of every cell, measured where the store does not hold it."""
        models = Models(self.subject, self.kernel)
        return [self._rows(cell, models, store) for cell in self.cells()]

    def _rows(self, cell: Cell, models: Models, store: CellStore) -> pd.DataFrame:
        key = self._key(cell)
        kept = store.read(key)
        if kept is not None:
            return kept
        job = Job.build(self.sequences, cell.protocol, cell.length, longest=max(self.lengths))
        rows, reason = measure(job, lambda _: models.get(cell.rescale, cell.length), self.plan.batch_tokens)
        if reason is not None:
            logger.warning("%s, %s, length %d: %s", self.subject.name, cell.rescale, cell.length, reason)
        shared = {
            **self.identity,
            "rescale": cell.rescale,
            "factor": self._factor(cell),
            "kernel": models.kernel,
        }
        frame = make_rows([{**shared, **row} for row in rows])
        store.write(key, frame)
        return frame

    def _factor(self, cell: Cell) -> float | None:
        rotary = self.subject.checkpoint.rotary
        if rotary is None:
            return None
        return rope_scaling.parse(cell.rescale).resolved_factor(rotary.original_length, cell.length)

    def _key(self, cell: Cell) -> dict[str, Any]:
        """What decides a cell's numbers."""
        return {
            "version": CELL_VERSION,
            "fingerprint": self.subject.fingerprint,
            "kernel": self.kernel,
            "identity": dict(self.identity),
            "rescale": cell.rescale,
            "length": cell.length,
            "longest": max(self.lengths),
            "protocol": asdict(cell.protocol),
            "documents": documents_hash(self.sequences),
        }

    def rescale_notes(self) -> list[dict[str, Any]]:
        """For each rescale and length: factors, and how many frequency pairs are left alone."""
        rotary = self.subject.checkpoint.rotary
        if rotary is None:
            return []
        return [
            _rescale_note(self.subject, rotary, rescale, length)
            for rescale in self.rescales
            for length in self.lengths
        ]


def _protocol(spec: ProtocolSpec) -> windows.Protocol:
    assert not isinstance(spec.stride, str), "the plan is resolved"
    return windows.protocol(spec.name, stride=spec.stride, num_targets=spec.num_targets, anchors=spec.anchors)


class Models:
    """Builds the model of a (rescale, length) and keeps the last one: cells that share it are neighbours."""

    def __init__(self, subject: Subject, kernel: str):
        self.subject, self.asked = subject, kernel
        self.kernel: str | None = None
        self._model: Any = None
        self._of: tuple[str, int] | None = None

    def get(self, rescale: str, length: int) -> Any:
        if self._of != (rescale, length):
            self._model = self._of = None
            self._model = self.subject.checkpoint.load(rescale, length, self.asked)
            self._of = (rescale, length)
            self.kernel = checkpoints.resolved_kernel(self._model)
        return self._model


def documents_hash(sequences: list[DocumentSequence]) -> str:
    """sha256 of every id that is read, and of the BOS policy."""
    digest = hashlib.sha256(str(sequences[0].bos_token_id).encode())
    for sequence in sequences:
        digest.update(len(sequence.ids).to_bytes(8, "little") + sequence.ids.tobytes())
    return digest.hexdigest()


def _check_unscaled(subject: Subject, plan: Plan) -> None:
    """A rescale asked of a checkpoint without RoPE is an error; a study's other runs just run `none`."""
    if subject.recipe is None and set(plan.rescales) != {"none"} and "none" not in plan.rescales:
        raise RescaleError(
            f"{subject.name}: {subject.identity['encoding']} has no rotary positions; accepted: none"
        )


def _rescale_note(subject: Subject, rotary: Any, rescale: str, length: int) -> dict[str, Any]:
    geometry = {
        "rotary_dim": rotary.rotary_dim,
        "base": rotary.base,
        "original_length": rotary.original_length,
    }
    _, attention_factor = rope_scaling.frequencies(rescale, **geometry, length=length)
    return {
        "label": subject.identity["label"],
        "rescale": rescale,
        "length": length,
        "train_length": subject.train_length,
        "factor": rope_scaling.parse(rescale).resolved_factor(rotary.original_length, length),
        "attention_factor": attention_factor,
        **rope_scaling.pair_counts(rescale, **geometry, length=length),
    }


def write_results(folder: Path, plan: Plan, evaluations: list[Evaluation], frame: pd.DataFrame) -> None:
    """`results.parquet` and `results.json` of everything measured."""
    write_rows(frame, folder)
    first = evaluations[0]
    notes = {
        "documents": _document_notes(first),
        "rescales": _distinct(note for evaluation in evaluations for note in evaluation.rescale_notes()),
        "kernels": dict(frame.dropna(subset=["kernel"]).groupby("label", sort=False)["kernel"].first()),
        "nothing_slid": _nothing_slid(frame),
    }
    config = {
        "model": "pe_study",
        "model_args": [dict(evaluation.subject.identity) for evaluation in evaluations],
        "plan": first.plan.model_dump(mode="json"),
        "command": shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]]),
    }
    runs.write_json(folder / SUMMARY, summary.results(frame, config, notes))


def _document_notes(evaluation: Evaluation) -> dict[str, Any]:
    documents = evaluation.documents
    return {
        "unit": documents.unit,
        "kept": documents.kept,
        "eligible": documents.eligible,
        "total": documents.total,
        "median_length": documents.median_length,
        "total_median_length": documents.total_median_length,
    }


def _nothing_slid(frame: pd.DataFrame) -> list[int]:
    """Lengths at which sliding never moved: each document fitted into its first window."""
    sliding = frame[(frame["protocol"] == "sliding") & (frame["status"] == "ok")]
    counts = sliding.groupby(["run", "rescale", "length", "document"])["num_windows"].sum()
    most = counts.groupby("length").max()
    return [int(length) for length in most.index[most == 1]]


def _distinct(notes: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Notes without the copies that several seeds of one encoding make."""
    return list({tuple(sorted(note.items())): note for note in notes}.values())
