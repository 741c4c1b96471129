"""Which documents an evaluation reads: the same at every length, chosen by what they say (design: units)."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from pe_study.errors import DataError
from pe_study.text.corpora import Corpus
from pe_study.text.tokenization import Document
from pe_study.text.tokenized import TokenizedSplit

Unit = Literal["document", "stream"]


@dataclass(frozen=True)
class EvaluationSet:
    """Documents to evaluate: `kept` of the `eligible` (long enough) of `total`; medians in tokens, uncut."""

    documents: tuple[Document, ...]
    unit: Unit
    kept: int
    eligible: int
    total: int
    median_length: float
    total_median_length: float


def evaluation_documents(
    source: TokenizedSplit | Sequence[Document],
    *,
    longest_length: int,
    num_documents: int | None,
    unit: Unit = "document",
) -> EvaluationSet:
    """At most `num_documents` (None: all) of at least `longest_length + 1` tokens, or the split as a stream.

    A document is cut to a multiple of `longest_length`, and one more. The choice depends on the texts alone,
    not on their order or number. Raises DataError when nothing is long enough.
    """
    if unit == "stream":
        return _stream(source, longest_length)
    lengths = (
        source.lengths if isinstance(source, TokenizedSplit) else np.array([len(each) for each in source])
    )
    eligible = np.flatnonzero(lengths > longest_length).tolist()
    if not eligible:
        raise DataError(
            f"no document is long enough: the longest length {longest_length} needs {longest_length + 1} "
            f"tokens, the longest of {len(lengths)} documents has {max(lengths, default=0)}\n"
            "leave out the longest lengths, take a corpus of longer documents, or evaluate unit: stream"
        )
    chosen = sorted(eligible, key=lambda index: _rank(source, index))[:num_documents]
    documents = tuple(_cut(_document(source, index), longest_length) for index in chosen)
    return EvaluationSet(
        documents,
        unit,
        kept=len(documents),
        eligible=len(eligible),
        total=len(lengths),
        median_length=float(np.median(lengths[chosen])),
        total_median_length=float(np.median(lengths)),
    )


def overlapping(training: Corpus, evaluated: TokenizedSplit) -> list[str]:
    """Names of evaluated documents whose text is also a training document."""
    hashes = training.document_hashes[~training.is_validation]
    return [evaluated.names[index] for index in np.flatnonzero(np.isin(evaluated.hashes, hashes))]


def _rank(source: TokenizedSplit | Sequence[Document], index: int) -> tuple[int, str]:
    if isinstance(source, TokenizedSplit):
        return int(source.hashes[index]), source.names[index]
    ids = np.asarray(source[index].ids, dtype="<i8")
    return int.from_bytes(hashlib.sha256(ids.tobytes()).digest()[:8], "big"), source[index].name


def _document(source: TokenizedSplit | Sequence[Document], index: int) -> Document:
    return source.document(index) if isinstance(source, TokenizedSplit) else source[index]


def _cut(document: Document, longest_length: int) -> Document:
    end = (len(document) - 1) // longest_length * longest_length + 1
    covered = None if document.token_bytes is None else document.token_bytes[:end]
    return replace(document, ids=document.ids[:end], token_bytes=covered)


def _stream(source: TokenizedSplit | Sequence[Document], longest_length: int) -> EvaluationSet:
    assert isinstance(source, TokenizedSplit), "a stream needs the separators of a tokenized split"
    stream = source.stream()
    if len(stream) <= longest_length:
        raise DataError(
            f"{source.label} has {len(stream)} tokens, the longest length {longest_length} needs "
            f"{longest_length + 1}: leave out the longest lengths, or take a larger corpus"
        )
    return EvaluationSet(
        (stream,), "stream", 1, 1, source.num_documents, float(len(stream)), float(np.median(source.lengths))
    )
