"""Packed training batches and evaluation documents.

The batch of a step is a pure function of (seed, step, slot): there is no loader state, and every encoding and
every number of processes sees the same text. Shapes: B sequences of a batch, T input tokens of a sequence.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import numpy as np
import torch

from pe_study.errors import DataError
from pe_study.text.corpora import Corpus, TextDocument, load_corpus, open_corpus
from pe_study.text.evaluation_sets import EvaluationSet, evaluation_documents, overlapping
from pe_study.text.tokenization import Document, Tokenizer, check_vocabulary, load_tokenizer
from pe_study.text.tokenized import TokenizedSplit, tokenize, tokenize_documents

__all__ = [
    "Batch",
    "Chunks",
    "Corpus",
    "Document",
    "EvaluationSet",
    "TextDocument",
    "TokenizedSplit",
    "Tokenizer",
    "TrainBatches",
    "check_vocabulary",
    "evaluation_documents",
    "load_corpus",
    "load_tokenizer",
    "open_corpus",
    "overlapping",
    "tokenize",
    "tokenize_documents",
]

Packing = Literal["concatenate", "isolate", "within-document"]
IGNORED = -100


@dataclass(frozen=True)
class Batch:
    """Sequences with their next tokens.

    `ids_BT` (B, T + 1) int64; `targets_BT` (B, T) int64 is `ids_BT[:, 1:]`, -100 where not scored;
    `segments_BT` (B, T) int64 numbers the documents of a sequence from 0, or is None where attention may
    cross them; `num_bytes` of original text are covered by the scored targets (None where unknown).
    """

    ids_BT: torch.Tensor
    targets_BT: torch.Tensor
    segments_BT: torch.Tensor | None
    num_bytes: int | None


class Chunks:
    """A split cut into chunks of `length` inputs and their next tokens, no target twice.

    `concatenate`: documents follow one another with a separator between; `isolate`: the same chunks, the
    first token of a document no target and attention kept inside documents; `within-document`: each chunk
    lies in one document, what does not fill a chunk is left out. Raises DataError when there is no chunk.
    """

    def __init__(self, split: TokenizedSplit, *, length: int, packing: Packing):
        self.split = split
        self.length = length
        self.packing = packing
        self._starts = _starts_within_documents(split, length) if packing == "within-document" else None
        if self.num_chunks == 0:
            raise DataError(self._too_short())

    @property
    def num_chunks(self) -> int:
        return (self.split.num_tokens - 1) // self.length if self._starts is None else len(self._starts)

    def starts(self, chunks: np.ndarray) -> np.ndarray:
        """Where chunks begin in the split's stream."""
        return chunks * self.length if self._starts is None else self._starts[chunks]

    def gather(self, chunks: np.ndarray) -> Batch:
        """The chunks of the given indices (B,), in that order."""
        places_BT = self.starts(chunks)[:, None] + np.arange(self.length + 1)
        ids_BT = self.split.ids[places_BT].astype(np.int64)
        targets_BT = ids_BT[:, 1:].copy()
        segments_BT = None
        if self.packing == "isolate":
            document_BT = self.documents_at(places_BT)
            targets_BT[document_BT[:, 1:] != document_BT[:, :-1]] = IGNORED
            segments_BT = torch.from_numpy(document_BT[:, :-1] - document_BT[:, :1])
        return Batch(
            torch.from_numpy(ids_BT),
            torch.from_numpy(targets_BT),
            segments_BT,
            self._bytes(places_BT, targets_BT),
        )

    def documents_at(self, places: np.ndarray) -> np.ndarray:
        """The index of the document, its separator included, that holds each place of the stream."""
        return np.searchsorted(self.split.offsets, places, side="right") - 1

    def _bytes(self, places_BT: np.ndarray, targets_BT: np.ndarray) -> int | None:
        if not self.split.all_bytes_known:
            return None
        bytes_BT = self.split.token_bytes[places_BT[:, 1:]]
        return int(bytes_BT[targets_BT != IGNORED].sum(dtype=np.int64))

    def _too_short(self) -> str:
        if self._starts is not None:
            return (
                f"{self.split.label} has no document of {self.length + 1} tokens, as train.length "
                f"{self.length} and within-document packing need: the longest has "
                f"{self.split.lengths.max()}\nlower train.length, or set data.packing to concatenate"
            )
        return (
            f"{self.split.label} has {self.split.num_tokens} tokens, one chunk of train.length {self.length} "
            f"needs {self.length + 1}: lower it, or add text"
        )


class TrainBatches:
    """The batches of a training run: each epoch is a permutation of all chunks, decided by (seed, epoch).

    Raises DataError when the split has fewer chunks than a batch has sequences, unless `partial`: then
    `num_chunks` tells how many slots of step 0 differ.
    """

    def __init__(
        self,
        split: TokenizedSplit,
        *,
        length: int,
        batch_tokens: int,
        seed: int,
        packing: Packing = "concatenate",
        partial: bool = False,
    ):
        self.chunks = Chunks(split, length=length, packing=packing)
        self.seed = seed
        self.sequences_per_batch = batch_tokens // length
        assert self.sequences_per_batch * length == batch_tokens, (
            "recipes hold batch_tokens a multiple of length"
        )
        if self.num_chunks < self.sequences_per_batch and not partial:
            raise DataError(
                f"{split.label} makes {self.num_chunks} chunks of {length} tokens, one batch needs "
                f"{self.sequences_per_batch}: lower train.batch_tokens, or add text"
            )

    @property
    def num_chunks(self) -> int:
        return self.chunks.num_chunks

    def batch(self, step: int, slots: Sequence[int] | None = None) -> Batch:
        """The sequences of a step (from 0): all, or those of some slots in `range(sequences_per_batch)`."""
        return self.chunks.gather(self.indices(step, slots))

    def indices(self, step: int, slots: Sequence[int] | None = None) -> np.ndarray:
        """(B,) the chunks that a step reads."""
        chosen = np.arange(self.sequences_per_batch) if slots is None else np.asarray(slots, dtype=np.int64)
        epochs, places = np.divmod(step * self.sequences_per_batch + chosen, self.num_chunks)
        indices = np.empty_like(places)
        for epoch in np.unique(epochs):
            inside = epochs == epoch
            indices[inside] = _permutation(self.seed, int(epoch), self.num_chunks)[places[inside]]
        return indices

    def documents(self, step: int, slots: Sequence[int] | None = None) -> list[str]:
        """Names of the documents that a step reads, in order of first appearance in the corpus."""
        places = self.chunks.starts(self.indices(step, slots))[:, None] + np.arange(self.chunks.length)
        return [self.chunks.split.names[index] for index in np.unique(self.chunks.documents_at(places))]


@lru_cache(maxsize=4)
def _permutation(seed: int, epoch: int, size: int) -> np.ndarray:
    """A permutation from the raw words of a counter-based generator, whose stream numpy keeps for good."""
    words = np.random.Philox(key=np.array([seed, epoch], dtype=np.uint64)).random_raw(size)
    return np.argsort(words, kind="stable")


def _starts_within_documents(split: TokenizedSplit, length: int) -> np.ndarray:
    per_document = np.maximum(split.lengths - 1, 0) // length
    first = np.repeat(split.offsets[:-1], per_document)
    number = np.arange(len(first)) - np.repeat(np.cumsum(per_document) - per_document, per_document)
    return first + number * length
