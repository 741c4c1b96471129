"""Tokenized splits: ids on disk, documents apart, bytes that add up, whatever was there before."""

import numpy as np
import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from pe_study.errors import DataError
from pe_study.sections import DataSpec
from pe_study.text import tokenized
from pe_study.text.corpora import read_corpus
from pe_study.text.sources import Source
from pe_study.text.tokenization import Tokenizer, load_tokenizer
from pe_study.text.tokenized import tokenize, tokenize_documents

TEXTS = ["naïve 東京 <|endoftext|>", " ", "two\n\nlines", "x"]
KEPT = [TEXTS[0], TEXTS[2], TEXTS[3]]


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("PE_STUDY_CACHE", str(tmp_path / "cache"))


def corpus(texts=TEXTS):
    named = [(f"document {number}", text) for number, text in enumerate(texts)]
    return read_corpus(Source("memory", lambda: iter(named)), 0.0)


def tokenizer_of(source, name="byte"):
    return load_tokenizer(DataSpec(tokenizer=name), source)


def spaced_words(size):
    """A vocabulary of whole words that leaves blanks out; `size` ids."""
    vocabulary = {f"w{number}": number for number in range(size - 1)} | {"</s>": size - 1}
    backend = Backend(models.WordLevel(vocabulary, unk_token="w0"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return Tokenizer(PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>"), "words")


@pytest.mark.parametrize("name", ["byte", "bpe:270"])
def test_documents_are_those_of_the_corpus(name):
    source = corpus()
    tokenizer = tokenizer_of(source, name)
    split = tokenize(source, "all", tokenizer)
    assert split.num_documents == 3
    assert split.names == ["document 0", "document 2", "document 3"]
    assert split.hashes.tolist() == source.document_hashes.tolist()
    for text, document in zip(KEPT, split.documents(), strict=True):
        assert tokenizer.hf.decode(document.ids) == text
        assert document.ids.tolist() == tokenizer.encode(text).ids.tolist()
        assert document.token_bytes.sum() == len(text.encode())
    assert split.lengths.tolist() == [len(document) for document in split.documents()]
    assert split.num_bytes == sum(len(text.encode()) for text in KEPT)
    assert split.num_tokens == split.lengths.sum() + 3
    assert (split.corpus_hash, split.tokenizer_hash) == (source.hash, tokenizer.hash)


def test_stream_joins_documents_with_separators_of_no_bytes():
    source = corpus()
    stream = tokenize(source, "all", tokenizer_of(source)).stream()
    expected = []
    for text in KEPT:
        expected += [*text.encode(), 256]
    assert stream.ids.tolist() == expected[:-1], "between documents, not after the last"
    assert stream.token_bytes[stream.ids == 256].tolist() == [0, 0]
    assert stream.token_bytes.sum() == sum(len(text.encode()) for text in KEPT)


def test_found_again_and_rebuilt_when_damaged(monkeypatch):
    source = corpus()
    tokenizer = tokenizer_of(source)
    first = tokenize(source, "all", tokenizer)
    expected = np.array(first.ids)
    with monkeypatch.context() as patch:
        patch.setattr(Tokenizer, "encode_batch", None)
        assert np.array_equal(tokenize(source, "all", tokenizer).ids, expected)
    (first.folder / "ids.bin").write_bytes(np.array(expected[::-1]).tobytes())
    assert np.array_equal(tokenize(source, "all", tokenizer).ids, expected)


def test_another_text_tokenizer_or_split_is_another_folder():
    source, other = corpus(), corpus(["changed", *TEXTS[1:]])
    folders = {
        tokenize(source, "all", tokenizer_of(source)).folder,
        tokenize(source, "train", tokenizer_of(source)).folder,
        tokenize(source, "all", tokenizer_of(source, "bpe:270")).folder,
        tokenize(other, "all", tokenizer_of(other)).folder,
    }
    assert len(folders) == 4


@pytest.mark.parametrize("at_once", [1, 7, 1 << 20])
def test_batches_of_documents_change_nothing(monkeypatch, at_once):
    monkeypatch.setattr(tokenized, "_CHARACTERS_AT_ONCE", at_once)
    source = corpus()
    split = tokenize(source, "all", tokenizer_of(source))
    assert [document.ids.tolist() for document in split.documents()] == [list(text.encode()) for text in KEPT]


def test_long_gaps_and_large_vocabularies_need_wider_columns():
    source = corpus(["w1 w2", "w3" + " " * 300 + "w69998", "w4"])
    split = tokenize(source, "all", spaced_words(70_000))
    assert [document.ids.tolist() for document in split.documents()] == [[1, 2], [3, 69_998], [4]]
    assert (split.ids.dtype, split.token_bytes.dtype) == (np.uint32, np.uint16)
    assert split.document(1).token_bytes.tolist() == [2, 306]
    assert split.document(0).token_bytes.tolist() == [2, 3]
    assert tokenize(corpus(), "all", tokenizer_of(corpus())).ids.dtype == np.uint16


def test_bytes_that_cannot_be_told_are_none(monkeypatch):
    """One document without counts leaves those of the others alone."""
    source = corpus(["w1", "w2"])
    tokenizer = spaced_words(4)
    known = tokenizer.encode("w1")
    lost = type(known)(known.ids, None)
    monkeypatch.setattr(tokenizer, "encode_batch", lambda texts: [known, lost])
    split = tokenize(source, "all", tokenizer)
    assert [document.token_bytes is None for document in split.documents()] == [False, True]
    assert split.stream().token_bytes is None
    assert not split.all_bytes_known


def test_empty_split_is_an_error():
    source = corpus()
    with pytest.raises(DataError, match="this split has no document"):
        tokenize(source, "validation", tokenizer_of(source))


def test_a_plans_corpus(tmp_path):
    (tmp_path / "a.txt").write_text("é", encoding="utf-8")
    split = tokenize_documents(str(tmp_path / "a.txt"), tokenizer_of(corpus()))
    assert [document.ids.tolist() for document in split.documents()] == [[0xC3, 0xA9]]
    assert split.name == "all"
