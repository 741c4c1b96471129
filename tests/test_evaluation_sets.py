"""Evaluation documents: long enough for the longest length, the same whatever the order (case 11)."""

import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pe_study.data import Document, evaluation_documents, load_tokenizer, overlapping, tokenize
from pe_study.errors import DataError
from pe_study.sections import DataSpec
from pe_study.text.corpora import read_corpus
from pe_study.text.sources import Source

LENGTHS = (5, 40, 41, 42, 80, 81, 100, 200)


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("PE_STUDY_CACHE", str(tmp_path / "cache"))


def split_of(texts):
    named = [(f"document {text[:3]}", text) for text in texts]
    corpus = read_corpus(Source("memory", lambda: iter(named)), 0.0)
    return tokenize(corpus, "all", load_tokenizer(DataSpec(), corpus))


def texts():
    padded = [f"{number:03d}" + "é" * ((length - 3) // 2) for number, length in enumerate(LENGTHS)]
    return [text + "." * (length - len(text.encode())) for text, length in zip(padded, LENGTHS, strict=True)]


def test_documents_are_long_enough_and_cut():
    found = evaluation_documents(split_of(texts()), longest_length=40, num_documents=24)
    assert sorted(len(document) for document in found.documents) == [41, 41, 41, 81, 81, 161]
    assert (found.kept, found.eligible, found.total) == (6, 6, 8)
    assert found.median_length == np.median([41, 42, 80, 81, 100, 200])
    assert found.total_median_length == np.median(LENGTHS)
    for document in found.documents:
        assert len(document.token_bytes) == len(document)
        assert (len(document) - 1) % 40 == 0


def test_choice_does_not_depend_on_order_or_on_shorter_documents():
    shuffled = texts()
    random.Random(0).shuffle(shuffled)
    first = evaluation_documents(split_of(texts()), longest_length=40, num_documents=3)
    again = evaluation_documents(split_of([*shuffled, "short"]), longest_length=40, num_documents=3)
    assert [document.name for document in first.documents] == [document.name for document in again.documents]
    more = evaluation_documents(split_of(texts()), longest_length=40, num_documents=5)
    assert [each.name for each in more.documents[:3]] == [each.name for each in first.documents]


def test_none_means_all():
    assert evaluation_documents(split_of(texts()), longest_length=40, num_documents=None).kept == 6


@given(
    st.lists(st.integers(1, 50), min_size=1, max_size=12), st.integers(1, 20), st.integers(1, 4), st.randoms()
)
def test_documents_of_ids(lengths, longest_length, num_documents, shuffler):
    """Plain documents, as notebooks pass them, are chosen by their ids."""
    documents = [Document(np.arange(length) + 1000 * number) for number, length in enumerate(lengths)]
    eligible = sum(length > longest_length for length in lengths)
    if not eligible:
        with pytest.raises(DataError, match="no document is long enough"):
            evaluation_documents(documents, longest_length=longest_length, num_documents=num_documents)
        return
    found = evaluation_documents(documents, longest_length=longest_length, num_documents=num_documents)
    assert (found.kept, found.eligible) == (min(eligible, num_documents), eligible)
    shuffler.shuffle(documents)
    again = evaluation_documents(documents, longest_length=longest_length, num_documents=num_documents)
    assert [each.ids.tolist() for each in found.documents] == [each.ids.tolist() for each in again.documents]
    for document in found.documents:
        start = document.ids[0]
        assert document.ids.tolist() == list(range(start, start + len(document)))
        assert len(document) > longest_length and (len(document) - 1) % longest_length == 0
        assert lengths[start // 1000] - len(document) < longest_length


def test_stream_is_the_whole_split():
    split = split_of(texts())
    found = evaluation_documents(split, longest_length=500, num_documents=2, unit="stream")
    (stream,) = found.documents
    assert len(stream) == sum(LENGTHS) + len(LENGTHS) - 1
    assert stream.token_bytes.sum() == sum(LENGTHS)
    assert (found.kept, found.total, found.median_length) == (1, 8, len(stream))


def test_too_short_for_the_longest_length():
    with pytest.raises(DataError, match=r"200 needs 201 tokens, the longest of 8 documents has 200\n"):
        evaluation_documents(split_of(texts()), longest_length=200, num_documents=24)
    with pytest.raises(DataError, match="has 596 tokens, the longest length 596 needs 597"):
        evaluation_documents(split_of(texts()), longest_length=596, num_documents=24, unit="stream")


def test_overlap_is_found_by_text():
    """Training documents among the evaluated ones are named."""
    corpus = read_corpus(Source("memory", lambda: ((text, text) for text in texts()[:5])), 0.3)
    train = {document.text for document in corpus.documents("train")}
    assert 0 < len(train) < 5
    evaluated = split_of([*texts(), "new"])
    assert overlapping(corpus, evaluated) == [f"document {text[:3]}" for text in texts() if text in train]
