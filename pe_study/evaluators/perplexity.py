"""Perplexity by named protocols: float64 sums a document and position bin, never a mean of means.

The five protocols are planned in `windows`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pandas as pd
from transformers import PreTrainedModel

from pe_study.checkpoints import follows_running_length, max_length, vocabulary_size
from pe_study.errors import CheckpointError, LengthError, PEStudyError, PlanError, UsageError
from pe_study.evaluators import sharing, windows
from pe_study.evaluators.jobs import Job, Sums, read_documents
from pe_study.evaluators.reading import BATCH_TOKENS, Reading
from pe_study.evaluators.scoring import Scorer, evaluation_mode, is_out_of_memory
from pe_study.loading.frozen import frozen
from pe_study.rows import make_rows

logger = logging.getLogger(__name__)

Measured = tuple[list[dict[str, Any]], str | None]
AGGREGATIONS = ("token", "yarn")


def evaluate_perplexity(
    documents: Sequence[Any],
    *,
    lengths: Sequence[int],
    protocol: str,
    model: Callable[..., Any] | None = None,
    load: Callable[[int], Callable[..., Any]] | None = None,
    stride: int | None = None,
    num_targets: int | None = None,
    anchors: int | None = None,
    bos_token_id: int | None = None,
    batch_tokens: int = BATCH_TOKENS,
    aggregation: str = "token",
    seed: int = 0,
    progress: Callable[[int], None] | None = None,
) -> pd.DataFrame:
    """Rows of NLL sums for each length, document and position bin, in the order of `lengths`.

    documents: sequences of token ids, or `Document(ids, token_bytes)`, read as they are.
    model: its call on ids (B, T) returns `.logits` (B, T, V).
    load: from a length to such a model, instead of `model`.
    bos_token_id: the BOS policy, None = off; a document's own first BOS is not doubled.
    batch_tokens: inputs a forward pass, at least one window.
    aggregation: what `summarise` reports, `token` (weighted by tokens) or `yarn` (mean of window means).
    progress: called with the number of tokens read, after each batch.

    A length that the model cannot do, or that fails, is a row with its `status`, and
    `frame.attrs["errors"]` says why. Raises UsageError for options that make no sense, DataError where no
    document has a target, CheckpointError where ids and model do not fit.
    """
    if (model is None) == (load is None):
        raise UsageError("evaluate_perplexity takes exactly one of model= and load=")
    if aggregation not in AGGREGATIONS:
        raise UsageError(f'unknown aggregation "{aggregation}" (available: {", ".join(AGGREGATIONS)})')
    if batch_tokens < 1:
        raise UsageError(f"batch_tokens is {batch_tokens!r}; expected at least 1")
    if bos_token_id is not None and (isinstance(bos_token_id, bool) or bos_token_id < 0):
        raise UsageError(f"bos_token_id is {bos_token_id!r}; expected the id of a token, or None for no BOS")
    lengths = list(lengths)
    if not lengths:
        raise UsageError("lengths is empty; expected at least one length in tokens")
    chosen = windows.protocol(protocol, stride=stride, num_targets=num_targets, anchors=anchors, seed=seed)
    for length in lengths:
        windows.check_length(chosen, length)
    sequences = read_documents(documents, bos_token_id)
    reading = Reading(batch_tokens, progress=progress)
    jobs = [Job.build(sequences, chosen, int(length), longest=max(lengths)) for length in lengths]
    if load is not None:
        measured = [measure(job, load, reading) for job in jobs]
    elif isinstance(model, PreTrainedModel) and not follows_running_length(model):
        measured = measure_together(jobs, lambda length: model, reading)
    else:
        measured = [measure(job, lambda length: model, reading) for job in jobs]
    frame = make_rows([row for rows, _ in measured for row in rows])
    errors = {job.length: reason for job, (_, reason) in zip(jobs, measured, strict=True) if reason}
    frame.attrs.update(aggregation=aggregation, errors=errors)
    return frame


def measure(
    job: Job,
    load: Callable[[int], Any],
    reading: Reading,
) -> Measured:
    """The rows of one length, and what went wrong if something did."""

    def read() -> Measured:
        model = load(job.length)
        limit = max_length(model)
        if limit is not None and job.length > limit:
            return [status_row(job, "unsupported")], f"the model has no position past {limit}"
        [sums] = _read(job, [job.length], model, reading)
        return _rows(job, sums, model)

    return guarded(job, read)


def guarded(job: Job, read: Callable[[], Measured]) -> Measured:
    """What `read` measures, or a row with a status: one length must not take the others with it."""
    try:
        return read()
    except LengthError as error:
        return [status_row(job, "unsupported")], str(error)
    except PEStudyError:
        raise
    except Exception as error:
        status = "oom" if is_out_of_memory(error) else "error"
        reason = f"{type(error).__name__}: {error}"
        logger.warning("length %d, %s: %s (%s)", job.length, job.protocol.name, status, reason)
        return [status_row(job, status)], reason


def measure_together(
    jobs: Sequence[Job],
    load: Callable[[int], Any],
    reading: Reading,
) -> list[Measured]:
    """`measure` for each job; prefixes are read once, at the longest length, and cut.

    For models that give a token the same loss whatever follows and whatever length was declared. A pass that
    fails is no answer for the shorter ones: then each length is read for itself.
    """
    if jobs[0].protocol.name == "prefix" and len(jobs) > 1:
        longest = max(jobs, key=lambda job: job.length)
        try:
            model = load(longest.length)
            limit = max_length(model)
            if limit is None or longest.length <= limit:
                all_sums = _read(longest, [job.length for job in jobs], model, reading)
                found = [_rows(job, sums, model) for job, sums in zip(jobs, all_sums, strict=True)]
                # A NaN far out reaches back through masked keys: shorter prefixes are read for themselves.
                return [
                    measure(job, load, reading) if reason and job is not longest else (rows, reason)
                    for job, (rows, reason) in zip(jobs, found, strict=True)
                ]
        except (CheckpointError, PlanError) as error:
            if not isinstance(error, LengthError):
                raise
        except Exception as error:
            logger.info("one pass for all prefixes failed (%s): one for each length", error)
    return [measure(job, load, reading) for job in jobs]


def _check_vocabulary(job: Job, model: Any) -> None:
    size = vocabulary_size(model)
    highest = max(int(sequence.ids.max()) for sequence in job.sequences if len(sequence.ids))
    if size is not None and highest >= size:
        raise CheckpointError(
            f"token id {highest} is not in the model's vocabulary of {size}: tokenizer and model do not fit"
        )


def losses(
    job: Job, model: Any, reading: Reading, *, shared: bool = False
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """(window indices (B,), NLL (B, K)) of every window, or of this process's share of them, batch by batch.

    CheckpointError for ids that the model does not know.
    """
    _check_vocabulary(job, model)
    batches = job.batches(reading.batch_tokens)
    with evaluation_mode(model), frozen(model, job.length):
        scorer = Scorer(model, new_cache=reading.new_cache)
        for indices in sharing.mine(batches) if shared else batches:
            ids_BT, targets_BK = job.inputs(indices)
            yield indices, scorer.nll(ids_BT, targets_BK)
            if reading.progress is not None:
                reading.progress(ids_BT.size)


def _read(job: Job, cuts: Sequence[int], model: Any, reading: Reading) -> list[Sums]:
    """Sums over the first `cut` scored targets of every window, for each cut; over all processes."""
    all_sums = [Sums.zeros(len(job.sequences), cut) for cut in cuts]

    def add_all() -> None:
        for indices, nll_BK in losses(job, model, reading, shared=True):
            first, target_bytes = int(job.first[indices[0]]), job.target_bytes(indices)
            for sums, cut in zip(all_sums, cuts, strict=True):
                sums.add(job.document[indices], nll_BK[:, :cut], target_bytes[:, :cut], first)

    sharing.added([array for sums in all_sums for array in sums.arrays], add_all)
    return all_sums


def _rows(job: Job, sums: Sums, model: Any) -> Measured:
    untrained = model.untrained_rows(job.length) if hasattr(model, "untrained_rows") else None
    return sums_rows(job, sums, untrained)


def sums_rows(job: Job, sums: Sums, untrained_rows: int | None) -> Measured:
    """A row a document and bin, and a row for each skipped document."""
    shared = {**_shared(job), "untrained_rows": untrained_rows}
    rows = []
    for document, bin_ in zip(*np.nonzero(sums.tokens), strict=True):
        nll = float(sums.nll[document, bin_])
        known = job.sequences[document].token_bytes is not None
        rows.append(
            {
                **shared,
                "document": document,
                "position_lo": 1 << bin_,
                "position_hi": 2 << bin_,
                "nll_sum": None if np.isnan(nll) else nll,
                "num_tokens": sums.tokens[document, bin_],
                "num_bytes": sums.num_bytes[document, bin_] if known else None,
                "num_windows": sums.windows[document, bin_],
                "window_mean_sum": sums.window_means[document, bin_],
                "num_skipped": 0,
                "status": "error" if np.isnan(nll) else "ok",
            }
        )
    skipped = {**status_row(job, "skipped"), "num_skipped": 1}
    rows += [{**skipped, "document": document} for document in job.skipped]
    failed = any(row["status"] == "error" for row in rows)
    return rows, "the model returned NaN" if failed else None


def _shared(job: Job) -> dict[str, Any]:
    return {
        "protocol": job.protocol.name,
        "stride": job.protocol.stride,
        "length": job.length,
        "bos": job.sequences[0].bos_token_id is not None,
    }


def status_row(job: Job, status: str) -> dict[str, Any]:
    """A row for what was not measured: nothing summed, its status says why."""
    counts: dict[str, float] = {"num_tokens": 0, "num_windows": 0, "num_skipped": 0}
    if status == "skipped":
        counts |= {"nll_sum": 0.0, "window_mean_sum": 0.0, "num_bytes": 0}
    return {**_shared(job), **counts, "status": status}
