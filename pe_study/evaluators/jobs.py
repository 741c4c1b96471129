"""Documents cut into windows, windows put into batches, losses gathered into float64 sums.

Shapes: B windows of a batch, T inputs of a window, K of them scored, W windows of all documents.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from pe_study.errors import DataError
from pe_study.evaluators import windows


@dataclass(frozen=True)
class DocumentSequence:
    """One document ready to be cut: ids and bytes (N+1,), BOS in front where the policy has one."""

    ids: np.ndarray
    token_bytes: np.ndarray | None
    bos_token_id: int | None

    def plan(self, protocol: windows.Protocol, length: int, longest: int) -> windows.Windows:
        num_targets = max(len(self.ids) - 1, 0)
        entropy = zlib.crc32(self.ids.tobytes())
        bos = self.bos_token_id is not None
        return protocol.plan(windows.Cut(num_targets, length, longest, bos, entropy))

    def cut(self, num_targets: int) -> DocumentSequence:
        """Its first `num_targets` targets."""
        covered = None if self.token_bytes is None else self.token_bytes[: num_targets + 1]
        return replace(self, ids=self.ids[: num_targets + 1], token_bytes=covered)


def read_documents(documents: Sequence[Any], bos_token_id: int | None) -> list[DocumentSequence]:
    """Sequences under the BOS policy. DataError where ids are no whole numbers or bytes do not match."""
    return [_read_document(index, document, bos_token_id) for index, document in enumerate(documents)]


def _read_document(index: int, document: Any, bos_token_id: int | None) -> DocumentSequence:
    ids = np.asarray(getattr(document, "ids", document))
    token_bytes = getattr(document, "token_bytes", None)
    if ids.ndim != 1 or (len(ids) and ids.dtype.kind not in "iu"):
        raise DataError(f"document {index}: expected a sequence of token ids, found {ids.dtype} {ids.shape}")
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
    protocol: windows.Protocol
    length: int
    document: np.ndarray
    start: np.ndarray
    stop: np.ndarray
    first: np.ndarray

    @classmethod
    def build(
        cls, sequences: list[DocumentSequence], protocol: windows.Protocol, length: int, *, longest: int
    ) -> Job:
        """DataError where no document has a target."""
        plans = [sequence.plan(protocol, length, longest) for sequence in sequences]
        counts = [len(plan.start) for plan in plans]
        if not sum(counts):
            need = f"; it needs more than {longest} tokens" if protocol.past_longest else ""
            raise DataError(
                f"none of {len(sequences)} documents has a target ({protocol.name} at length {length}{need})"
            )
        document = np.repeat(np.arange(len(sequences)), counts)
        joined = [np.concatenate(arrays) for arrays in zip(*plans, strict=True)]
        return cls(sequences, protocol, length, document, *joined)

    @property
    def skipped(self) -> np.ndarray:
        """Documents without a target."""
        return np.setdiff1d(np.arange(len(self.sequences)), self.document)

    def batches(self, batch_tokens: int) -> Iterator[np.ndarray]:
        """Window indices of one shape each, longest first, at most `batch_tokens` inputs (or one window)."""
        width = self.stop - self.start
        order = np.lexsort((self.first, -width))
        shapes = np.stack([width, self.first])[:, order]
        edges = np.flatnonzero((np.diff(shapes) != 0).any(axis=0)) + 1
        for group in np.split(order, edges):
            size = max(1, batch_tokens // int(width[group[0]]))
            for offset in range(0, len(group), size):
                yield group[offset : offset + size]

    def inputs(self, indices: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """ids (B, T) and the scored targets (B, K) of windows of one shape."""
        first = int(self.first[indices[0]])
        spans = np.stack([self._sequence(i).ids[self.start[i] : self.stop[i] + 1] for i in indices])
        ids = spans[:, :-1].copy()
        bos_token_id = self._sequence(indices[0]).bos_token_id
        if bos_token_id is not None:
            ids[:, 0] = bos_token_id
        return ids, spans[:, 1 + first :].copy()

    def target_bytes(self, indices: np.ndarray) -> np.ndarray:
        """Bytes of text of the scored targets (B, K); zero where a document does not know them."""
        first, width = int(self.first[indices[0]]), int((self.stop - self.start)[indices[0]])
        spans = np.zeros((len(indices), width - first), dtype=np.int64)
        for row, i in enumerate(indices):
            token_bytes = self._sequence(i).token_bytes
            if token_bytes is not None:
                spans[row] = token_bytes[self.start[i] + 1 + first : self.stop[i] + 1]
        return spans

    def _sequence(self, index: int) -> DocumentSequence:
        return self.sequences[self.document[index]]


@dataclass
class Sums:
    """Sums (documents, bins); bin b holds the contexts [2^b, 2^(b+1)). Losses are float64, counts int64."""

    nll: np.ndarray
    window_means: np.ndarray
    tokens: np.ndarray
    num_bytes: np.ndarray
    windows: np.ndarray

    @property
    def arrays(self) -> list[np.ndarray]:
        return [self.nll, self.window_means, self.tokens, self.num_bytes, self.windows]

    @classmethod
    def zeros(cls, num_documents: int, length: int) -> Sums:
        shape = (num_documents, length.bit_length())
        return cls(
            *(np.zeros(shape) for _ in range(2)),
            *(np.zeros(shape, dtype=np.int64) for _ in range(3)),
        )

    def add(self, document_B: np.ndarray, nll_BK: np.ndarray, bytes_BK: np.ndarray, first: int) -> None:
        """Adds windows of one shape. A window counts in the bin of its last target."""
        num_scored = nll_BK.shape[1]
        splits, bins = windows.context_bins(first, first + num_scored)
        for bin_, start, stop in zip(bins, splits, [*splits[1:], num_scored], strict=True):
            np.add.at(self.nll[:, bin_], document_B, nll_BK[:, start:stop].sum(axis=1))
            np.add.at(self.num_bytes[:, bin_], document_B, bytes_BK[:, start:stop].sum(axis=1))
            np.add.at(self.tokens[:, bin_], document_B, stop - start)
        np.add.at(self.windows[:, bins[-1]], document_B, 1)
        np.add.at(self.window_means[:, bins[-1]], document_B, nll_BK.mean(axis=1))
