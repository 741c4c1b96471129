"""Documents cut into windows, windows put into batches, losses gathered into float64 sums.

Shapes: B windows of a batch, T inputs of a window, K of them scored, W windows of all documents.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from pe_study.errors import DataError
from pe_study.evaluators import windows


@dataclass(frozen=True)
class DocumentSequence:
    """One document ready to be cut: ids (N+1,) int64 and bytes (N+1,), BOS in front where the policy has one."""

    ids: np.ndarray
    token_bytes: np.ndarray | None
    bos_token_id: int | None

    @property
    def num_targets(self) -> int:
        return max(len(self.ids) - 1, 0)


def read_documents(documents: Sequence[Any], bos_token_id: int | None) -> list[DocumentSequence]:
    """Sequences under the BOS policy. DataError where ids are not whole numbers or bytes do not match them."""
    return [_read_document(index, document, bos_token_id) for index, document in enumerate(documents)]


def _read_document(index: int, document: Any, bos_token_id: int | None) -> DocumentSequence:
    ids = np.asarray(getattr(document, "ids", document))
    token_bytes = getattr(document, "token_bytes", None)
    if ids.ndim != 1 or (len(ids) and ids.dtype.kind not in "iu"):
        raise DataError(
            f"document {index}: expected a flat sequence of token ids, found {ids.dtype} {ids.shape}"
        )
    ids = ids.astype(np.int64)
    if len(ids) and ids.min() < 0:
        raise DataError(f"document {index}: token id {ids.min()} is negative")
    if token_bytes is not None:
        token_bytes = np.asarray(token_bytes, dtype=np.int64)
        if token_bytes.shape != ids.shape:
            raise DataError(f"document {index}: {len(token_bytes)} token_bytes for {len(ids)} ids")
    if bos_token_id is not None and not (len(ids) and ids[0] == bos_token_id):
        ids = np.concatenate([[np.int64(bos_token_id)], ids])
        token_bytes = None if token_bytes is None else np.concatenate([[np.int64(0)], token_bytes])
    return DocumentSequence(ids, token_bytes, bos_token_id)


@dataclass(frozen=True)
class Job:
    """All windows of all documents at one length, as flat arrays (W,)."""

    sequences: list[DocumentSequence]
    spec: windows.Protocol
    length: int
    document: np.ndarray
    start: np.ndarray
    stop: np.ndarray
    first: np.ndarray

    @classmethod
    def build(cls, sequences, spec: windows.Protocol, length: int, *, longest: int) -> Job:
        """DataError where no document has a target."""
        plans = [
            spec.plan(
                sequence.num_targets,
                length,
                longest=longest,
                bos=sequence.bos_token_id is not None,
                entropy=zlib.crc32(sequence.ids.tobytes()),
            )
            for sequence in sequences
        ]
        counts = [len(plan.start) for plan in plans]
        if not sum(counts):
            raise DataError(
                f"none of {len(sequences)} documents has a target under protocol {spec.name} at length {length}"
                + (f" (they need more than {longest} tokens)" if spec.num_targets else "")
            )
        document = np.repeat(np.arange(len(sequences)), counts)
        joined = [np.concatenate([getattr(plan, name) for plan in plans]) for name in windows.Windows._fields]
        return cls(sequences, spec, length, document, *joined)

    @property
    def skipped(self) -> np.ndarray:
        return np.setdiff1d(np.arange(len(self.sequences)), self.document)

    def batches(self, batch_tokens: int) -> Iterator[np.ndarray]:
        """Window indices of one shape each, longest first, at most `batch_tokens` inputs (or one window)."""
        width = self.stop - self.start
        order = np.lexsort((np.arange(len(width)), self.first, -width))
        shapes = np.stack([width, self.first])[:, order]
        edges = np.flatnonzero((np.diff(shapes) != 0).any(axis=0)) + 1
        for group in np.split(order, edges):
            size = max(1, batch_tokens // int(width[group[0]]))
            for offset in range(0, len(group), size):
                yield group[offset : offset + size]

    def inputs(self, indices: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """ids (B, T) and the scored targets (B, K) of windows of one shape."""
        first = int(self.first[indices[0]])
        spans = np.stack(
            [self.sequences[self.document[i]].ids[self.start[i] : self.stop[i] + 1] for i in indices]
        )
        ids = spans[:, :-1].copy()
        bos_token_id = self.sequences[self.document[indices[0]]].bos_token_id
        if bos_token_id is not None:
            ids[:, 0] = bos_token_id
        return ids, spans[:, 1 + first :].copy()

    def target_bytes(self, indices: np.ndarray) -> np.ndarray:
        """Bytes of text of the scored targets (B, K); zero where a document does not know them."""
        first, width = int(self.first[indices[0]]), int((self.stop - self.start)[indices[0]])
        spans = np.zeros((len(indices), width - first), dtype=np.int64)
        for row, i in enumerate(indices):
            token_bytes = self.sequences[self.document[i]].token_bytes
            if token_bytes is not None:
                spans[row] = token_bytes[self.start[i] + 1 + first : self.stop[i] + 1]
        return spans


@dataclass
class Sums:
    """Float64 sums (documents, bins); bin b holds contexts [2^b, 2^(b+1))."""

    nll: np.ndarray
    tokens: np.ndarray
    num_bytes: np.ndarray
    windows: np.ndarray
    window_means: np.ndarray

    @classmethod
    def zeros(cls, num_documents: int, length: int) -> Sums:
        shape = (num_documents, int(length).bit_length())
        whole = lambda: np.zeros(shape, dtype=np.int64)  # noqa: E731
        return cls(np.zeros(shape), whole(), whole(), whole(), np.zeros(shape))

    def add(self, document_B: np.ndarray, nll_BK: np.ndarray, bytes_BK: np.ndarray, first: int) -> None:
        """Adds windows of one shape. A window counts in the bin of its last target."""
        num_scored = nll_BK.shape[1]
        splits, lows = windows.context_bins(first, first + num_scored)
        for column, (low, tokens) in enumerate(zip(lows, np.diff(splits, append=num_scored), strict=True)):
            at = (document_B, int(low).bit_length() - 1)
            span = slice(splits[column], splits[column] + tokens)
            np.add.at(self.nll, at, nll_BK[:, span].sum(axis=1))
            np.add.at(self.num_bytes, at, bytes_BK[:, span].sum(axis=1))
            np.add.at(self.tokens, at, tokens)
        last = (document_B, int(lows[-1]).bit_length() - 1)
        np.add.at(self.windows, last, 1)
        np.add.at(self.window_means, last, nll_BK.mean(axis=1))
