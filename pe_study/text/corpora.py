"""Corpora: named sources of text, split into training and validation documents by what the documents say.

The split of a document depends on its text alone, so the order of files, the machine and new files beside it
never move it, and two copies of a document fall on the same side.
"""

from __future__ import annotations

import hashlib
import re
from array import array
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import numpy as np

from pe_study.errors import DataError
from pe_study.text.cache import digest
from pe_study.text.corpus_names import open_source
from pe_study.text.sources import Source, Texts

if TYPE_CHECKING:
    from pe_study.sections import DataSpec

Split = Literal["train", "validation", "all"]
_HUB_PARTS = re.compile(r"(?P<id>[^:]+)(:(?P<config>[\w.-]+))??(:(?P<split>\w+(\[.*\])?))?")


@dataclass(frozen=True)
class TextDocument:
    """A document: its text, where it came from, and 64 bits of the sha256 of its UTF-8 bytes."""

    name: str
    text: str
    hash: int


@dataclass(frozen=True)
class Corpus:
    """Documents of one or two sources. `hash` covers every text in order; `document_hashes` (N,) uint64."""

    name: str
    hash: str
    document_hashes: np.ndarray
    is_validation: np.ndarray
    num_empty: int
    texts: Callable[[], Texts]

    def documents(self, split: Split) -> Iterator[TextDocument]:
        """The documents of a split in the corpus's order, read one at a time. Empty ones are left out."""
        known = zip(self.document_hashes.tolist(), self.is_validation.tolist(), strict=True)
        for name, text in self.texts():
            if not text.strip():
                continue
            document_hash, validation = next(known, (None, False))
            if _hash(text) != document_hash:
                raise DataError(f'data.corpus "{self.name}": {name} changed while it was read: start again')
            if split == "all" or (split == "validation") == validation:
                yield TextDocument(name, text, document_hash)

    def split_hash(self, split: Split) -> str:
        """sha256 (hex) of which documents a split holds, in order."""
        mask = (
            np.ones_like(self.is_validation)
            if split == "all"
            else self.is_validation == (split == "validation")
        )
        return digest(self.hash, mask.tobytes().hex())


def load_corpus(spec: DataSpec) -> Corpus:
    """The corpus of a recipe, its documents split by hash, or by the data set's own validation split.

    Raises DataError naming `data.corpus` and what would be accepted.
    """

    def source(split: str) -> Source:
        return open_source(
            spec.corpus, text_field=spec.text_field, config=spec.config, split=split, revision=spec.revision
        )

    if spec.validation_split is None:
        return read_corpus(source(spec.split), spec.validation_fraction)
    if spec.validation_split == spec.split:
        raise DataError(f'data.validation_split "{spec.split}" is the training split: name another, or none')
    training, held_out = source(spec.split), source(spec.validation_split)
    return _join(read_corpus(training, 0.0), read_corpus(held_out, 0.0))


def open_corpus(name: str, text_field: str = "text") -> Corpus:
    """All documents of a plan's corpus: `stdlib`, a file, a folder, or a hub id.

    A hub id may name its split and configuration: `ID`, `ID:SPLIT`, `ID:CONFIG:SPLIT`.
    Raises DataError naming what was found and what would be accepted.
    """
    parts = _HUB_PARTS.fullmatch(name)
    if parts and parts["split"] and not Path(name).expanduser().exists():
        source = open_source(parts["id"], text_field=text_field, config=parts["config"], split=parts["split"])
    else:
        source = open_source(name, text_field=text_field)
    return read_corpus(source, 0.0)


def read_corpus(source: Source, validation_fraction: float) -> Corpus:
    """One pass over a source: the hash of each document, and the split. Raises DataError when it is empty."""
    corpus = _index(source.name, source.texts)
    if validation_fraction > 0 and len(corpus.document_hashes) == 1:
        return _cut_in_two(source, validation_fraction)
    is_validation = _held_out(corpus.document_hashes, validation_fraction, source.name)
    return replace(corpus, is_validation=is_validation)


def _index(name: str, texts: Callable[[], Texts]) -> Corpus:
    total = hashlib.sha256()
    hashes = array("Q")
    num_seen = 0
    for _, text in texts():
        num_seen += 1
        if not text.strip():
            continue
        document_hash = _hash(text)
        total.update(document_hash.to_bytes(8, "big"))
        hashes.append(document_hash)
    if not hashes:
        found = f"no text in {num_seen} documents" if num_seen > 1 else "no text"
        raise DataError(f'data.corpus "{name}": {found}')
    document_hashes = np.frombuffer(hashes, dtype=np.uint64)
    none = np.zeros(len(hashes), dtype=bool)
    return Corpus(name, total.hexdigest(), document_hashes, none, num_seen - len(hashes), texts)


def _hash(text: str) -> int:
    """The first 64 bits of the sha256 of the text in UTF-8."""
    return int.from_bytes(hashlib.sha256(text.encode("utf-8")).digest()[:8], "big")


def _held_out(hashes: np.ndarray, fraction: float, name: str) -> np.ndarray:
    """(N,) bool: documents whose hash falls in the first `fraction` of all hashes; never none, never all."""
    if fraction == 0:
        return np.zeros(len(hashes), dtype=bool)
    if hashes.min() == hashes.max():
        raise DataError(f'data.corpus "{name}": all {len(hashes)} documents are the same text')
    threshold = np.uint64(min(int(fraction * 2.0**64), 2**64 - 1))
    return (hashes < np.clip(threshold, hashes.min() + np.uint64(1), hashes.max())).astype(bool)


def _cut_in_two(source: Source, fraction: float) -> Corpus:
    """A corpus of one document: its end, from a line break on where there is one, is held out."""

    def texts() -> Texts:
        for name, text in source.texts():
            if text.strip():
                cut = max(1, round(len(text) * (1 - fraction)))
                cut = text.rfind("\n", 1, cut) + 1 or cut
                yield f"{name}#1", text[:cut]
                yield f"{name}#2", text[cut:]

    corpus = _index(source.name, texts)
    if len(corpus.document_hashes) < 2:
        raise DataError(f'data.corpus "{source.name}": one document, too short to hold a part of it out')
    return replace(corpus, is_validation=np.array([False, True]))


def _join(train: Corpus, validation: Corpus) -> Corpus:
    """One corpus of a training and a validation source."""

    def texts() -> Texts:
        yield from train.texts()
        yield from validation.texts()

    return Corpus(
        train.name,
        digest(train.hash, validation.hash),
        np.concatenate([train.document_hashes, validation.document_hashes]),
        np.repeat([False, True], [len(train.document_hashes), len(validation.document_hashes)]),
        train.num_empty + validation.num_empty,
        texts,
    )
