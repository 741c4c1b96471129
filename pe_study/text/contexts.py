"""How much context: what training chunks hold of one document, and how many tokens cover some bytes."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from pe_study.data import Chunks
from pe_study.errors import DataError
from pe_study.short_contexts import is_short
from pe_study.text.tokenization import Document

_MOST_PLACES = 1 << 22


@dataclass(frozen=True)
class ContextSizes:
    """Percentiles, over training targets, of the inputs before a target that are of its own document.

    `is_short` where the median is under half the training length by more than 5 %: a model "trained at" that
    length has mostly seen less. The most that packing allows is the length itself, half of it at the median;
    each border between documents takes from that.
    """

    length: int
    p10: int
    p50: int
    p90: int

    @property
    def is_short(self) -> bool:
        return is_short(self.p50, self.length)


def context_sizes(chunks: Chunks) -> ContextSizes:
    """Measured on all chunks, or on an even sample of about four million targets."""
    step = -(-chunks.num_chunks * chunks.length // _MOST_PLACES)
    starts_B1 = chunks.starts(np.arange(0, chunks.num_chunks, step))[:, None]
    targets_BT = starts_B1 + np.arange(1, chunks.length + 1)
    document_starts_BT = chunks.split.offsets[chunks.documents_at(targets_BT)]
    sizes_BT = targets_BT - np.maximum(document_starts_BT, starts_B1)
    scored = sizes_BT > 0 if chunks.packing == "isolate" else np.ones_like(sizes_BT, dtype=bool)
    p10, p50, p90 = np.percentile(sizes_BT[scored], [10, 50, 90], method="inverted_cdf").tolist()
    return ContextSizes(chunks.length, p10, p50, p90)


def tokens_covering(document: Document, num_bytes: int) -> int:
    """The least number of tokens from the start of a document that cover `num_bytes` of its text.

    Lengths in bytes: the same text for every tokenizer. Raises DataError where the bytes are not known, or
    the document has fewer.
    """
    if document.token_bytes is None:
        raise DataError(
            f"{document.name}: the bytes of its tokens are not known, so no length in bytes fits it"
        )
    covered = np.cumsum(document.token_bytes)
    if not len(covered) or covered[-1] < num_bytes:
        raise DataError(f"{document.name}: {covered[-1:].sum()} bytes of text, {num_bytes} are needed")
    return int(np.searchsorted(covered, num_bytes)) + 1
