"""A corpus's documents as token ids on disk, memory-mapped and built once for a corpus and a tokenizer.

The ids of all documents follow one another, each document closed by a separator that covers no bytes: the
`stream` of a split. Document i is `ids[offsets[i] : offsets[i + 1] - 1]`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from pe_study.cache import cached_folder, digest
from pe_study.corpora import Corpus, Split, TextDocument, open_corpus
from pe_study.errors import DataError
from pe_study.files import read_json, write_json
from pe_study.tokenization import Document, Tokenizer

_LAYOUT = "ids, token_bytes, offsets, hashes, has_bytes, names; 2"  # part of the cache key
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
        return read_json(self.folder / "names.json")

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
    names, hashes, lengths, has_bytes = [], [], [], []
    with _Column(folder / "ids.bin") as ids, _Column(folder / "token_bytes.bin") as covered:
        for text, document in _encoded(documents, tokenizer):
            known = document.token_bytes
            ids.extend(np.append(document.ids, separator))
            covered.extend(np.append(np.zeros(len(document)) if known is None else known, 0))
            names.append(text.name)
            hashes.append(text.hash)
            lengths.append(len(document) + 1)
            has_bytes.append(known is not None)
    if not names:
        raise DataError("this split has no document (data.validation_fraction, data.validation_split)")
    np.save(folder / "offsets.npy", np.cumsum([0, *lengths], dtype=np.int64))
    np.save(folder / "hashes.npy", np.array(hashes, dtype=np.uint64))
    np.save(folder / "has_bytes.npy", np.array(has_bytes, dtype=bool))
    write_json(folder / "names.json", names)
    dtypes = {"ids": ids.dtype.name, "token_bytes": covered.dtype.name}
    return {"tokenizer": tokenizer.name, "dtypes": dtypes}


def _encoded(
    documents: Iterable[TextDocument], tokenizer: Tokenizer
) -> Iterator[tuple[TextDocument, Document]]:
    for batch in _batches(documents):
        yield from zip(batch, tokenizer.encode_batch([each.text for each in batch]), strict=True)


def _batches(documents: Iterable[TextDocument]) -> Iterator[list[TextDocument]]:
    """Lists of documents of about a million characters each."""
    batch: list[TextDocument] = []
    size = 0
    for document in documents:
        batch.append(document)
        size += len(document.text)
        if size >= _CHARACTERS_AT_ONCE:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


class _Column:
    """Values written one batch after another, in the narrowest unsigned type that has held them so far."""

    def __init__(self, path: Path):
        self.path = path
        self.dtype = np.dtype(np.uint8)
        self.file = path.open("wb")

    def __enter__(self) -> _Column:
        return self

    def __exit__(self, *error: object) -> None:
        self.file.close()

    def extend(self, values: np.ndarray) -> None:
        if (needed := np.min_scalar_type(int(values.max()))).itemsize > self.dtype.itemsize:
            self._widen(needed)
        values.astype(self.dtype).tofile(self.file)

    def _widen(self, dtype: np.dtype) -> None:
        self.file.close()
        narrow = self.path.rename(self.path.with_suffix(".narrow"))
        self.file = self.path.open("wb")
        with narrow.open("rb") as file:
            while len(values := np.fromfile(file, dtype=self.dtype, count=1 << 22)):
                values.astype(dtype).tofile(self.file)
        narrow.unlink()
        self.dtype = dtype
