"""Context in training chunks and lengths in bytes, against plain counting."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pe_study.data import Chunks, Document, load_tokenizer, tokenize
from pe_study.errors import DataError
from pe_study.sections import DataSpec
from pe_study.text import contexts
from pe_study.text.contexts import context_sizes, tokens_covering
from pe_study.text.corpora import read_corpus
from pe_study.text.sources import Source


def split_of(texts, cache):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PE_STUDY_CACHE", str(cache))
        named = [(str(number), text) for number, text in enumerate(texts)]
        corpus = read_corpus(Source("memory", lambda: iter(named)), 0.0)
        return tokenize(corpus, "all", load_tokenizer(DataSpec(), corpus))


def counted(split, length, packing):
    """The contexts of all targets, one at a time."""
    chunks = Chunks(split, length=length, packing=packing)
    sizes = []
    for row in chunks.gather(np.arange(chunks.num_chunks)).ids_BT.tolist():
        for place in range(1, length + 1):
            before = row[:place]
            size = before[::-1].index(256) if 256 in before else len(before)
            if size > 0 or packing != "isolate":
                sizes.append(size)
    return sizes


@pytest.mark.parametrize("packing", ["concatenate", "isolate", "within-document"])
def test_contexts_are_counted_inside_documents(packing, tmp_path):
    split = split_of(["a" * size for size in (3, 50, 9, 17, 100, 1)], tmp_path)
    found = context_sizes(Chunks(split, length=8, packing=packing))
    sizes = sorted(counted(split, 8, packing))
    expected = [sizes[-(-len(sizes) * share // 100) - 1] for share in (10, 50, 90)]
    assert [found.p10, found.p50, found.p90] == expected


def test_short_documents_are_flagged(tmp_path):
    short = split_of(["ab" + str(number) for number in range(100)], tmp_path)
    assert context_sizes(Chunks(short, length=64, packing="concatenate")).is_short
    long = split_of(["a" * 1000], tmp_path)
    found = context_sizes(Chunks(long, length=64, packing="within-document"))
    assert not found.is_short
    assert found.p50 == 32


@pytest.mark.parametrize(("size", "flagged"), [(40_000, False), (1500, True), (300, True)])
def test_borders_between_long_documents_are_no_flag(size, flagged, tmp_path):
    """At length 512 half of it, 256, is the most: a border in one chunk of 80 takes a token of that."""
    sizes = np.random.default_rng(0).exponential(size, 400_000 // size).astype(int) + 1
    split = split_of(["a" * int(each) for each in sizes], tmp_path)
    found = context_sizes(Chunks(split, length=512, packing="concatenate"))
    assert found.p50 < 256
    assert found.is_short == flagged


def test_a_sample_of_chunks_is_even(tmp_path, monkeypatch):
    split = split_of(["a" * 2001], tmp_path)
    whole = context_sizes(Chunks(split, length=10, packing="within-document"))
    monkeypatch.setattr(contexts, "_MOST_PLACES", 100)
    assert context_sizes(Chunks(split, length=10, packing="within-document")) == whole


@given(st.lists(st.integers(0, 6), min_size=1, max_size=30), st.integers(0, 100))
def test_tokens_cover_the_bytes(sizes, num_bytes):
    document = Document(np.arange(len(sizes)), np.array(sizes), "a.txt")
    if sum(sizes) < num_bytes:
        with pytest.raises(DataError, match=rf"a\.txt: {sum(sizes)} bytes of text, {num_bytes} are needed"):
            tokens_covering(document, num_bytes)
        return
    count = tokens_covering(document, num_bytes)
    assert sum(sizes[:count]) >= num_bytes
    assert count == 1 or sum(sizes[: count - 1]) < num_bytes


def test_unknown_bytes_have_no_lengths():
    with pytest.raises(DataError, match="bytes of its tokens are not known"):
        tokens_covering(Document(np.arange(3)), 1)
