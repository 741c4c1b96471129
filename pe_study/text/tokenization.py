"""Tokenizers: bytes, byte-level BPE trained on the corpus, or any of Hugging Face's.

Each wraps a Hugging Face tokenizer, so that what is saved beside a model loads with `AutoTokenizer`. Encoding
adds nothing (no BOS, no template), and text that spells a special token stays text.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from pe_study import hub
from pe_study.errors import DataError
from pe_study.text import token_bytes
from pe_study.text.cache import cached_folder, digest
from pe_study.text.corpora import Corpus

if TYPE_CHECKING:
    from pe_study.sections import DataSpec

END_OF_TEXT = "<|endoftext|>"
_LINE_END = re.compile(r"(?<=[!-~])\n(?=[!-~])")  # no token of GPT-2's pattern crosses the end of such a line
_TRAINER = "byte-level BPE, GPT-2 pattern, <|endoftext|> first; 1"  # part of the cache key


@dataclass(frozen=True)
class Document:
    """Token ids (n,) of one document and, where known, the bytes of original text each covers (n,).

    `token_bytes` adds up to the document's UTF-8 bytes; specials cover none. None where it cannot be told.
    """

    ids: np.ndarray
    token_bytes: np.ndarray | None = None
    name: str = ""

    def __len__(self) -> int:
        return len(self.ids)


class Tokenizer:
    """A Hugging Face tokenizer `hf`, named as the recipe names it."""

    def __init__(self, hf: Any, name: str):
        self.hf = hf
        self.name = name

    @cached_property
    def vocab_size(self) -> int:
        """One more than the largest token id, added tokens included."""
        return max(self.hf.get_vocab().values()) + 1

    @property
    def bos_token_id(self) -> int | None:
        return self.hf.bos_token_id

    @property
    def eos_token_id(self) -> int | None:
        return self.hf.eos_token_id

    @property
    def separator_id(self) -> int:
        """The token between documents: end of text, else a separator or BOS. Raises DataError."""
        for token_id in (self.hf.eos_token_id, self.hf.sep_token_id, self.hf.bos_token_id):
            if token_id is not None:
                return token_id
        raise DataError(f'tokenizer "{self.name}" has no token to put between documents (eos, sep or bos)')

    @cached_property
    def prepends_bos(self) -> bool:
        """Whether the tokenizer, left to itself, starts a text with BOS: `bos: auto` for a checkpoint."""
        return self.bos_token_id is not None and self.hf("a")["input_ids"][:1] == [self.bos_token_id]

    @cached_property
    def hash(self) -> str:
        """sha256 (hex) of everything that decides the ids of a text."""
        if self._backend is not None:
            return digest(self._backend.to_str(), str(self.separator_id))
        vocabulary = json.dumps(sorted(self.hf.get_vocab().items()))
        return digest(type(self.hf).__name__, vocabulary, str(self.separator_id))

    def parts(self, text: str, size: int) -> list[str]:
        """The text in parts of about `size` characters that encode to the same ids as the whole.

        Ours can be cut between a line break and a letter; for others, where is not known: the text is whole.
        """
        if len(text) <= size or not (self.name == "byte" or self.name.startswith("bpe:")):
            return [text]
        cuts = [0]
        while cut := _LINE_END.search(text, cuts[-1] + size):
            cuts.append(cut.end())
        return [text[start:end] for start, end in itertools.pairwise([*cuts, len(text)])]

    def encode(self, text: str) -> Document:
        """The ids of a text and the bytes each covers."""
        return self.encode_batch([text])[0]

    def encode_batch(self, texts: Sequence[str]) -> list[Document]:
        """`encode` of several texts, in parallel where the tokenizer can."""
        if self.name == "byte":
            return [_byte_document(text) for text in texts]
        if self._backend is None:
            return [self._encode_slowly(text) for text in texts]
        if self._pieces is None:
            return self._encode_with_offsets(texts)
        encodings = self._backend.encode_batch_fast(texts, add_special_tokens=False)
        return [self._from_pieces(text, each.ids) for text, each in zip(texts, encodings, strict=True)]

    def save(self, folder: Path | str) -> None:
        """Write the files that `AutoTokenizer.from_pretrained(folder)` loads."""
        self.hf.save_pretrained(str(folder))

    @cached_property
    def _backend(self) -> Any:
        """A copy of the fast tokenizer that does not pad, cut or find specials; None if slow."""
        from tokenizers import Tokenizer as Backend

        if not self.hf.is_fast:
            return None
        backend = Backend.from_str(self.hf.backend_tokenizer.to_str())
        backend.no_padding()
        backend.no_truncation()
        backend.encode_special_tokens = True
        return backend

    @cached_property
    def _pieces(self) -> list[bytes] | None:
        return token_bytes.byte_level_pieces(self._backend, self.vocab_size)

    def _from_pieces(self, text: str, ids: list[int]) -> Document:
        assert self._pieces is not None
        covered = token_bytes.from_pieces(text, ids, self._pieces)
        if covered is None:  # a normalizer changed the text
            return self._encode_with_offsets([text])[0]
        return Document(np.array(ids, dtype=np.int64), covered)

    def _encode_with_offsets(self, texts: Sequence[str]) -> list[Document]:
        encodings = self._backend.encode_batch(texts, add_special_tokens=False)
        return [
            Document(np.array(each.ids, dtype=np.int64), token_bytes.from_offsets(text, each.offsets))
            for text, each in zip(texts, encodings, strict=True)
        ]

    def _encode_slowly(self, text: str) -> Document:
        ids = self.hf(text, add_special_tokens=False, split_special_tokens=True, verbose=False)["input_ids"]
        decode = partial(self.hf.decode, clean_up_tokenization_spaces=False)
        return Document(np.array(ids, dtype=np.int64), token_bytes.from_decoding(text, ids, decode))


def load_tokenizer(spec: DataSpec, corpus: Corpus) -> Tokenizer:
    """The tokenizer of a recipe: `byte`, `bpe:N`, or a Hugging Face id or folder. Raises DataError."""
    name = spec.tokenizer
    if name == "byte":
        return Tokenizer(byte_tokenizer(), name)
    if name.startswith("bpe:"):
        return Tokenizer(_trained(corpus, _parse_size(name)), name)
    return Tokenizer(_pretrained(name), name)


def byte_tokenizer() -> Any:
    """256 bytes, each its own id, and `<|endoftext|>` = 256."""
    from tokenizers import Tokenizer as Backend
    from tokenizers import models

    vocabulary = {symbol: byte for byte, symbol in token_bytes.BYTE_SYMBOLS.items()}
    backend = Backend(models.BPE(vocab=vocabulary, merges=[]))
    return _wrap(_byte_level(backend, use_regex=False))


def check_vocabulary(ids: np.ndarray, vocab_size: int, what: str) -> None:
    """Raises DataError when an id is outside a model's vocabulary."""
    if len(ids) and int(ids.max()) >= vocab_size:
        raise DataError(
            f"{what}: token id {int(ids.max())} is outside the model's vocabulary of {vocab_size}\n"
            "the tokenizer belongs to another model: use the one saved with this checkpoint"
        )


def _byte_document(text: str) -> Document:
    data = np.frombuffer(text.encode("utf-8"), dtype=np.uint8)
    return Document(data.astype(np.int64), np.ones(len(data), dtype=np.int64))


def _parse_size(name: str) -> int:
    number = name.removeprefix("bpe:").lower()
    scale = 1024 if number.endswith("k") else 1
    try:
        size = int(number.removesuffix("k")) * scale
    except ValueError:
        size = 0
    if size <= len(token_bytes.BYTE_SYMBOLS):
        raise DataError(
            f'data.tokenizer "{name}": expected bpe:N with N of at least 257, for example bpe:16k'
        )
    return size


def _trained(corpus: Corpus, size: int) -> Any:
    """Byte-level BPE of at most `size` tokens over the training documents, cached by their hash."""
    from tokenizers import Tokenizer as Backend

    def build(folder: Path) -> dict[str, Any]:
        texts = (document.text for document in corpus.documents("train"))
        _train(texts, size).save(str(folder / "tokenizer.json"))
        return {"corpus": corpus.name, "size": size}

    key = digest(_TRAINER, corpus.split_hash("train"), str(size))
    folder, _ = cached_folder("tokenizers", key, build)
    return _wrap(Backend.from_file(str(folder / "tokenizer.json")))


def _train(texts: Iterable[str], size: int) -> Any:
    from tokenizers import Tokenizer as Backend
    from tokenizers import models, trainers

    backend = _byte_level(Backend(models.BPE()), use_regex=True)
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=sorted(token_bytes.BYTE_SYMBOLS.values()),
        show_progress=False,
    )
    backend.train_from_iterator(texts, trainer)
    return backend


def _byte_level(backend: Any, use_regex: bool) -> Any:
    from tokenizers import decoders, pre_tokenizers

    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=use_regex)
    backend.decoder = decoders.ByteLevel()
    return backend


def _wrap(backend: Any) -> Any:
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token=END_OF_TEXT,
        eos_token=END_OF_TEXT,
        clean_up_tokenization_spaces=False,
        model_input_names=["input_ids", "attention_mask"],
    )


def _pretrained(name: str) -> Any:
    from transformers import AutoTokenizer

    try:
        with hub.no_retries():
            return AutoTokenizer.from_pretrained(name, trust_remote_code=False)
    except Exception as error:  # any of the library's own, or of its HTTP client
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0][:300]
        missing = "" if Path(name).exists() else hub.why()
        raise DataError(
            f'data.tokenizer "{name}": {reason}{missing}\n'
            "accepted: byte, bpe:N, or a Hugging Face id or folder"
        ) from error
