"""A corpus's documents as token ids on disk, memory-mapped and built once for a corpus and a tokenizer.

The ids of all documents follow one another, each document closed by a separator that covers no bytes: the
`stream` of a split. Document i is `ids[offsets[i] : offsets[i + 1] - 1]`.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from pe_study.errors import DataError
from pe_study.text.cache import cached_folder, digest
from pe_study.text.corpora import Corpus, Split, TextDocument, open_corpus
from pe_study.text.tokenization import Document, Tokenizer

_LAYOUT = "ids, token_bytes, offsets, hashes, has_bytes, names; 3"  # part of the cache key
_CHARACTERS_AT_ONCE = 1 << 20


@dataclass(frozen=True)
class TokenizedSplit:
    """The documents of a split of a corpus.

    `ids`, `token_bytes` (num_tokens,) are memory maps, separators included; `offsets` (N + 1,) are the first
    tokens of the documents; `hashes` (N,) uint64 are those of their texts.
    """

    name: str
    corpus_name: str
    corpus_hash: str
    tokenizer_hash: str
    ids: np.ndarray
    token_bytes: np.ndarray
    offsets: np.ndarray
    hashes: np.ndarray
    has_bytes: np.ndarray
    folder: Path

    @property
    def label(self) -> str:
        """What an error calls the split."""
        return f'data.corpus "{self.corpus_name}", split {self.name},'

    @property
    def num_documents(self) -> int:
        return len(self.offsets) - 1

    @property
    def num_tokens(self) -> int:
        """Tokens, separators included."""
        return int(self.offsets[-1])

    @cached_property
    def num_bytes(self) -> int:
        """UTF-8 bytes of the documents whose tokens tell."""
        return int(self.token_bytes.sum(dtype=np.int64))

    @cached_property
    def all_bytes_known(self) -> bool:
        return bool(self.has_bytes.all())

    @cached_property
    def names(self) -> list[str]:
        lines = (self.folder / "names.jsonl").read_text(encoding="utf-8").splitlines()
        return [json.loads(line) for line in lines]

    @property
    def lengths(self) -> np.ndarray:
        """(N,) tokens of each document, without its separator."""
        return np.diff(self.offsets) - 1

    def document(self, index: int) -> Document:
        """The ids of a document, its separator left off, with the bytes each covers."""
        return self._slice(
            self.offsets[index], self.offsets[index + 1] - 1, self.names[index], self.has_bytes[index]
        )

    def documents(self) -> Iterator[Document]:
        return (self.document(index) for index in range(self.num_documents))

    def stream(self) -> Document:
        """All documents joined by separators, which cover no bytes."""
        return self._slice(0, self.offsets[-1] - 1, self.corpus_name, self.all_bytes_known)

    def _slice(self, start: int, end: int, name: str, has_bytes: bool) -> Document:
        ids = self.ids[start:end].astype(np.int64)
        return Document(ids, self.token_bytes[start:end].astype(np.int64) if has_bytes else None, name)


def tokenize(corpus: Corpus, split: Split, tokenizer: Tokenizer) -> TokenizedSplit:
    """The documents of a split as ids, from the cache where they are. Raises DataError for an empty split."""
    key = digest(_LAYOUT, corpus.split_hash(split), split, tokenizer.hash)
    folder, facts = cached_folder(
        "tokens", key, lambda folder: _write(folder, corpus.documents(split), tokenizer)
    )
    dtypes = facts["dtypes"]
    return TokenizedSplit(
        name=split,
        corpus_name=corpus.name,
        corpus_hash=corpus.hash,
        tokenizer_hash=tokenizer.hash,
        ids=np.memmap(folder / "ids.bin", dtype=dtypes["ids"], mode="r"),
        token_bytes=np.memmap(folder / "token_bytes.bin", dtype=dtypes["token_bytes"], mode="r"),
        offsets=np.load(folder / "offsets.npy"),
        hashes=np.load(folder / "hashes.npy"),
        has_bytes=np.load(folder / "has_bytes.npy"),
        folder=folder,
    )


def tokenize_documents(source: str, tokenizer: Tokenizer, text_field: str = "text") -> TokenizedSplit:
    """All documents of a plan's corpus (`stdlib`, a file, a folder, a hub id) in a tokenizer's ids."""
    return tokenize(open_corpus(source, text_field), "all", tokenizer)


def _write(folder: Path, documents: Iterable[TextDocument], tokenizer: Tokenizer) -> dict[str, Any]:
    separator = tokenizer.separator_id
    ends, hashes, has_bytes = array("q", [0]), array("Q"), bytearray()
    all_known = True
    with (
        _Column(folder / "ids.bin") as ids,
        _Column(folder / "token_bytes.bin") as covered,
        (folder / "names.jsonl").open("w", encoding="utf-8") as names,
    ):
        for part, encoded in _encoded(documents, tokenizer):
            known = encoded.token_bytes
            ids.extend(encoded.ids)
            covered.extend(np.zeros(len(encoded)) if known is None else known)
            all_known = all_known and known is not None
            if part.is_last:
                ids.extend(np.array([separator]))
                covered.extend(np.array([0]))
                ends.append(ids.size)
                hashes.append(part.document.hash)
                has_bytes.append(all_known)
                names.write(json.dumps(part.document.name) + "\n")
                all_known = True
    if not hashes:
        raise DataError("this split has no document (data.validation_fraction, data.validation_split)")
    np.save(folder / "offsets.npy", np.frombuffer(ends, dtype=np.int64))
    np.save(folder / "hashes.npy", np.frombuffer(hashes, dtype=np.uint64))
    np.save(folder / "has_bytes.npy", np.frombuffer(has_bytes, dtype=bool))
    dtypes = {"ids": ids.dtype.name, "token_bytes": covered.dtype.name}
    return {"tokenizer": tokenizer.name, "dtypes": dtypes}


class _Part(NamedTuple):
    """A document, or a piece of a long one, as it is encoded."""

    document: TextDocument
    text: str
    is_last: bool


def _encoded(documents: Iterable[TextDocument], tokenizer: Tokenizer) -> Iterator[tuple[_Part, Document]]:
    """Every part with its tokens, encoded about a million characters at a time."""
    batch: list[_Part] = []
    size = 0
    for part in _parts(documents, tokenizer):
        batch.append(part)
        size += len(part.text)
        if size >= _CHARACTERS_AT_ONCE:
            yield from zip(batch, tokenizer.encode_batch([each.text for each in batch]), strict=True)
            batch, size = [], 0
    yield from zip(batch, tokenizer.encode_batch([each.text for each in batch]), strict=True)


def _parts(documents: Iterable[TextDocument], tokenizer: Tokenizer) -> Iterator[_Part]:
    for document in documents:
        *first, last = tokenizer.parts(document.text, _CHARACTERS_AT_ONCE // 8)
        yield from (_Part(document, text, False) for text in first)
        yield _Part(document, last, True)


class _Column:
    """Values written one batch after another, in the narrowest unsigned type that has held them so far."""

    def __init__(self, path: Path):
        self.path = path
        self.dtype = np.dtype(np.uint8)
        self.size = 0
        self.file = path.open("wb")

    def __enter__(self) -> _Column:
        return self

    def __exit__(self, *error: object) -> None:
        self.file.close()

    def extend(self, values: np.ndarray) -> None:
        needed = np.min_scalar_type(int(values.max(initial=0)))
        if needed.itemsize > self.dtype.itemsize:
            self._widen(needed)
        values.astype(self.dtype).tofile(self.file)
        self.size += len(values)

    def _widen(self, dtype: np.dtype) -> None:
        self.file.close()
        narrow = self.path.rename(self.path.with_suffix(".narrow"))
        self.file = self.path.open("wb")
        with narrow.open("rb") as file:
            while len(values := np.fromfile(file, dtype=self.dtype, count=1 << 22)):
                values.astype(dtype).tofile(self.file)
        narrow.unlink()
        self.dtype = dtype
