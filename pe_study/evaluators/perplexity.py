"""Perplexity by named protocols: float64 sums a document and position bin, never a mean of means.

The five protocols are planned in `windows`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pandas as pd

from pe_study.checkpoints import max_length, vocabulary_size
from pe_study.errors import CheckpointError, LengthError, PEStudyError, UsageError
from pe_study.evaluators import windows
from pe_study.evaluators.jobs import Job, Sums, read_documents
from pe_study.evaluators.scoring import Scorer, evaluation_mode, is_out_of_memory
from pe_study.rows import make_rows

logger = logging.getLogger(__name__)

BATCH_TOKENS = 16384
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
    lengths = list(lengths)
    if not lengths:
        raise UsageError("lengths is empty; expected at least one length in tokens")
    chosen = windows.protocol(protocol, stride=stride, num_targets=num_targets, anchors=anchors, seed=seed)
    for length in lengths:
        windows.check_length(chosen, length)
    sequences = read_documents(documents, bos_token_id)
    make = (lambda length: model) if load is None else load
    rows: list[dict[str, Any]] = []
    errors: dict[int, str] = {}
    for length in lengths:
        job = Job.build(sequences, chosen, int(length), longest=max(lengths))
        found, error = measure(job, make, batch_tokens, progress)
        rows += found
        if error:
            errors[int(length)] = error
    frame = make_rows(rows)
    frame.attrs.update(aggregation=aggregation, errors=errors)
    return frame


def measure(
    job: Job,
    load: Callable[[int], Any],
    batch_tokens: int = BATCH_TOKENS,
    progress: Callable[[int], None] | None = None,
) -> tuple[list[dict[str, Any]], str | None]:
    """The rows of one length, and what went wrong if something did."""
    try:
        model = load(job.length)
        limit = max_length(model)
        if limit is not None and job.length > limit:
            return [_status_row(job, "unsupported")], f"the model has no position past {limit}"
        _check_vocabulary(job, model)
        with evaluation_mode(model):
            sums = _read(job, Scorer(model), batch_tokens, progress)
        untrained = model.untrained_rows(job.length) if hasattr(model, "untrained_rows") else None
        return _rows(job, sums, untrained)
    except LengthError as error:
        return [_status_row(job, "unsupported")], str(error)
    except PEStudyError:
        raise
    except Exception as error:  # one length must not take the others with it
        status = "oom" if is_out_of_memory(error) else "error"
        reason = f"{type(error).__name__}: {error}"
        logger.warning("length %d, %s: %s (%s)", job.length, job.protocol.name, status, reason)
        return [_status_row(job, status)], reason


def _check_vocabulary(job: Job, model: Any) -> None:
    size = vocabulary_size(model)
    highest = max(int(sequence.ids.max()) for sequence in job.sequences if len(sequence.ids))
    if size is not None and highest >= size:
        raise CheckpointError(
            f"token id {highest} is not in the model's vocabulary of {size}: tokenizer and model do not fit"
        )


def _read(job: Job, scorer: Scorer, batch_tokens: int, progress: Callable[[int], None] | None) -> Sums:
    sums = Sums.zeros(len(job.sequences), job.length)
    for indices in job.batches(batch_tokens):
        ids_BT, targets_BK = job.inputs(indices)
        nll_BK = scorer.nll(ids_BT, targets_BK)
        first = ids_BT.shape[1] - targets_BK.shape[1]
        sums.add(job.document[indices], nll_BK, job.target_bytes(indices), first)
        if progress is not None:
            progress(ids_BT.size)
    return sums


def _rows(job: Job, sums: Sums, untrained_rows: int | None) -> tuple[list[dict[str, Any]], str | None]:
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
    skipped = {**_status_row(job, "skipped"), "num_skipped": 1}
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


def _status_row(job: Job, status: str) -> dict[str, Any]:
    """A row for what was not measured: nothing summed, its status says why."""
    counts: dict[str, float] = {"num_tokens": 0, "num_windows": 0, "num_skipped": 0}
    if status == "skipped":
        counts |= {"nll_sum": 0.0, "window_mean_sum": 0.0, "num_bytes": 0}
    return {**_shared(job), **counts, "status": status}
