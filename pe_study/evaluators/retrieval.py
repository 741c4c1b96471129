"""Retrieval: does a model find what stands far back? Needles scored two ways, and copies by their gain.

A needle is right (`correct`) when greedy generation gives it; `rank` is its place among ten values by
log-likelihood, `target_logprob` its own. A copy has a `gain`: nats a token that a first occurrence saves.
Accuracy under one half within the training length means that the model cannot do the task at all: its rows
get the status `floor`, and say nothing about length.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from pe_study.checkpoints import max_length
from pe_study.errors import DataError, LengthError, PEStudyError
from pe_study.evaluators import cells, sharing
from pe_study.evaluators.evaluation import Evaluation, Models, factors_of
from pe_study.evaluators.haystacks import NUM_COPIED, Haystack, Haystacks, answers
from pe_study.evaluators.reader import Reader
from pe_study.evaluators.scoring import Scorer, is_out_of_memory
from pe_study.evaluators.texts import bos_token_id
from pe_study.files import read_json, write_json
from pe_study.rows import RETRIEVAL, RETRIEVAL_COLUMNS, make_rows, read_rows, write_rows

logger = logging.getLogger(__name__)

Measured = tuple[Mapping[str, Any], pd.DataFrame]
COPY = "copy"
FOLDER = "retrieval"
FLOOR = 0.5
_MORE_TOKENS = 2  # generated beyond the answer's own number: the same text may take more of them
_VERSION = 3  # raised when the numbers would come out differently


@dataclass(frozen=True)
class RetrievalCell:
    """All depths and samples of a task at one length, under one rescale."""

    task: str
    rescale: str
    length: int


def measure(
    evaluations: Sequence[Evaluation], folder: Path, fingerprints: Collection[str] = ()
) -> pd.DataFrame:
    """The retrieval tasks of the evaluations' plan, written to `folder/retrieval.parquet`.

    A finished cell is kept and not measured again; several processes share the others. Cells that were
    measured before in the same way stay in the file: of these models, and of others that `fingerprints` name.
    """
    measured = [pair for evaluation in evaluations for pair in _measure_one(evaluation, folder / FOLDER)]
    if not sharing.is_main():
        return _joined(measured)
    with cells.CellStore(folder).assembling():
        kept = _kept(folder / FOLDER, fingerprints, [key for key, _ in measured])
        frame = _joined(measured + kept)
        write_rows(frame, folder, RETRIEVAL)
    return frame


def _joined(measured: Sequence[Measured]) -> pd.DataFrame:
    frames: dict[tuple[str, str], list[pd.DataFrame]] = {}
    for key, cell in measured:
        frames.setdefault((key["fingerprint"], key["identity"]["run"]), []).append(cell)
    of_models = [_floored(pd.concat(of_one, ignore_index=True)) for of_one in frames.values()]
    return pd.concat(of_models, ignore_index=True)


def _measure_one(evaluation: Evaluation, folder: Path) -> list[Measured]:
    task_runner = _Tasks(evaluation)
    keys = {cell: task_runner.key(cell) for cell in task_runner.cells()}
    homes = {cell: folder / cells.name(key) for cell, key in keys.items()}
    found = {cell: read_rows(home, RETRIEVAL) for cell, home in homes.items() if _is_kept(home)}
    sharing.wait()  # all have looked before one writes
    mine = {}
    for cell in sharing.mine([cell for cell in keys if cell not in found]):
        frame = mine[cell] = task_runner.frame(cell)
        if not set(frame["status"]) & {"oom", "error"}:
            write_rows(frame, homes[cell], RETRIEVAL)
            write_json(homes[cell] / "key.json", keys[cell])
    for part in sharing.gathered(mine):
        found |= part
    return [(keys[cell], found[cell]) for cell in keys]


def _is_kept(home: Path) -> bool:
    return (home / "key.json").is_file()


def _kept(
    folder: Path, fingerprints: Collection[str], measured: Sequence[Mapping[str, Any]]
) -> list[Measured]:
    """Cells of an earlier call, measured as these keys say; none twice, the latest first."""
    models = {*fingerprints, *(key["fingerprint"] for key in measured)}
    tables, places = [_table(key) for key in measured], [_place(key) for key in measured]
    kept: list[Measured] = []
    for path in sorted(
        folder.glob("*/key.json"), key=lambda path: (-path.stat().st_mtime_ns, path.parent.name)
    ):
        key = read_json(path)
        if key["fingerprint"] in models and _table(key) in tables and _place(key) not in places:
            places.append(_place(key))
            kept.append((key, read_rows(path.parent, RETRIEVAL)))
    return kept


def _table(key: Mapping[str, Any]) -> list[Any]:
    """What must agree before two cells may stand in one table."""
    return [
        key[part] for part in ("version", "tokenizer", "text", "kernel", "dtype", "depths", "num_samples")
    ]


def _place(key: Mapping[str, Any]) -> list[Any]:
    """The one place of the table that a cell fills."""
    return [key["fingerprint"], key["identity"]["run"], key["task"], key["rescale"], key["length"]]


def _floored(frame: pd.DataFrame) -> pd.DataFrame:
    """The frame of one model, tasks that it fails within its training length marked `floor`."""
    frame = frame.copy()
    for task in frame["task"].unique():
        answered = (frame["task"] == task) & (frame["status"] == "ok") & frame["correct"].notna()
        within = frame[answered & (frame["length"] <= frame["train_length"].fillna(frame["length"].min()))]
        plain = within[within["rescale"] == "none"]
        right = (plain if len(plain) else within)["correct"]
        if answered.any() and (right.empty or float(right.mean()) < FLOOR):
            frame.loc[answered, "status"] = "floor"
    return frame


class _Tasks:
    """The tasks of one evaluation: prompts from its tokenizer, copies from its text."""

    def __init__(self, evaluation: Evaluation):
        self.evaluation, self.plan = evaluation, evaluation.plan
        self.models = Models(evaluation.subject, evaluation.kernel)
        self.tokenizer = evaluation.subject.tokenizer()
        self.haystacks = Haystacks(
            self.tokenizer,
            longest_length=max(evaluation.lengths),
            bos_token_id=bos_token_id(evaluation.subject, self.plan, self.tokenizer),
        )

    def cells(self) -> Iterator[RetrievalCell]:
        """Cells that share a model follow one another."""
        for rescale in self.evaluation.rescales:
            for length in self.evaluation.lengths:
                yield from (RetrievalCell(task, rescale, length) for task in self.plan.tasks)

    def key(self, cell: RetrievalCell) -> dict[str, Any]:
        """What decides a cell's numbers."""
        subject = self.evaluation.subject
        return {
            "version": _VERSION,
            "fingerprint": subject.fingerprint,
            "tokenizer": self.tokenizer.hash,
            "text": self.evaluation.text.hash,
            "bos": self.haystacks.bos_ids,
            "kernel": self.evaluation.kernel,
            "dtype": self.evaluation.dtype(self.plan.cache),
            "identity": dict(subject.identity),
            "task": cell.task,
            "rescale": cell.rescale,
            "length": cell.length,
            "longest": max(self.evaluation.lengths) if cell.task == COPY else None,
            "depths": list(self.plan.depths),
            "num_samples": self.plan.num_samples,
            **factors_of(cell.rescale),
        }

    def frame(self, cell: RetrievalCell) -> pd.DataFrame:
        """The rows of a cell; one row with a status where it cannot be measured."""
        subject = self.evaluation.subject
        rows = self._guarded(cell)
        shared = {
            **subject.identity,
            "train_length": subject.train_length,
            "dtype": self.evaluation.dtype(self.plan.cache),
            "mask_kind": "causal",
            "task": cell.task,
            "length": cell.length,
            "rescale": cell.rescale,
            "kernel": self.models.kernel if any(row["status"] == "ok" for row in rows) else None,
            "factor": self.evaluation.factor(cell.rescale, cell.length),
        }
        return make_rows([{**shared, **row} for row in rows], RETRIEVAL_COLUMNS)

    def _guarded(self, cell: RetrievalCell) -> list[dict[str, Any]]:
        measure_cell: Callable[[RetrievalCell], list[dict[str, Any]]]
        measure_cell = self._copies if cell.task == COPY else self._needles
        try:
            return measure_cell(cell)
        except DataError as error:  # no prompt of this length
            status, reason = "skipped", str(error)
        except LengthError as error:
            status, reason = "unsupported", str(error)
        except PEStudyError:
            raise
        except Exception as error:
            status = "oom" if is_out_of_memory(error) else "error"
            reason = f"{type(error).__name__}: {error}"
        level = logging.INFO if status == "skipped" else logging.WARNING
        logger.log(level, "%s, %s: %s", self.evaluation.subject.name, cell.task, reason)
        return [{"status": status}]

    def _needles(self, cell: RetrievalCell) -> list[dict[str, Any]]:
        prompts = [
            self.haystacks.build(cell.task, length=cell.length, depth=depth, sample=sample)
            for depth in self.plan.depths
            for sample in range(self.plan.num_samples)
        ]
        longest_answer = max(len(ids) for prompt in prompts for ids in prompt.candidate_ids)
        declared = cell.length + longest_answer + _MORE_TOKENS
        factor = self.evaluation.factor(cell.rescale, declared)
        model = self._model(cell.rescale, declared)
        new_cache = self.evaluation.reading.new_cache
        return [
            score_needle(model, prompt, self.tokenizer, new_cache) | {"factor": factor} for prompt in prompts
        ]

    def _model(self, rescale: str, length: int) -> Any:
        """The model of a declared length, LengthError where it has not so many positions."""
        model = self.models.get(rescale, length)
        limit = max_length(model)
        if limit is not None and length > limit:
            raise LengthError(
                f"{length} tokens, the answer among them: the model has no position past {limit}"
            )
        return model

    def _copies(self, cell: RetrievalCell) -> list[dict[str, Any]]:
        documents = self.evaluation.text.documents.documents
        farthest = cell.length - NUM_COPIED - len(self.haystacks.bos_ids)
        rows = []
        scorer = Scorer(self._model(cell.rescale, cell.length), new_cache=self.evaluation.reading.new_cache)
        distances = {round(farthest + depth * (NUM_COPIED - farthest)): depth for depth in self.plan.depths}
        for distance, depth in distances.items():  # one probe each: in short windows depths share one
            for sample in range(self.plan.num_samples):
                probe = self.haystacks.copy_probe(
                    documents[sample % len(documents)], length=cell.length, distance=distance, sample=sample
                )
                ids_2T = np.stack([probe.with_ids, probe.without_ids])
                scored = NUM_COPIED - 1
                with_nll, without_nll = scorer.nll(ids_2T[:, :-1], ids_2T[:, -scored:]).sum(axis=1)
                gain = float(without_nll - with_nll) / scored
                row = {"depth": depth, "sample": sample, "target_logprob": -float(with_nll), "gain": gain}
                rows.append(row | {"status": "ok"} if math.isfinite(gain) else _not_a_number(depth, sample))
        return rows


def _not_a_number(depth: float, sample: int) -> dict[str, Any]:
    """A row of a model that gave NaN: nothing was answered, and nothing ranks."""
    return {"depth": depth, "sample": sample, "status": "error"}


def score_needle(
    model: Any, prompt: Haystack, tokenizer: Any, new_cache: Callable[[Any], Any] | None = None
) -> dict[str, Any]:
    """Greedy answer, log-likelihood and rank among ten of one prompt; status `error` where a likelihood is
    NaN. `new_cache` builds the cache that the prompt is read through."""
    reader = Reader(model, prompt.prompt_ids, new_cache)
    logprobs = [reader.logprob(ids) for ids in prompt.candidate_ids]
    if any(math.isnan(logprob) for logprob in logprobs):
        return _not_a_number(prompt.depth, prompt.sample)
    generated = reader.greedy(len(prompt.candidate_ids[0]) + _MORE_TOKENS)
    return {
        "depth": prompt.depth,
        "sample": prompt.sample,
        "correct": answers(tokenizer.hf.decode(generated), prompt.answer),
        "target_logprob": logprobs[0],
        "rank": 1 + sum(logprob >= logprobs[0] for logprob in logprobs[1:]),
        "status": "ok",
    }
