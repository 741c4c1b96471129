"""Training batches: a pure function of (seed, step, slot) over every chunk of the text."""

import hashlib

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pe_study import data
from pe_study.data import Chunks, TrainBatches, load_tokenizer, tokenize
from pe_study.errors import DataError
from pe_study.sections import DataSpec
from pe_study.text.corpora import read_corpus
from pe_study.text.sources import Source

TEXTS = [f"{number:02d}" + "é" * number for number in range(1, 60)]
PACKINGS = ["concatenate", "isolate", "within-document"]
LENGTH = 8


@pytest.fixture(scope="module")
def split(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PE_STUDY_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield split_of(TEXTS)


def split_of(texts):
    named = [(f"document {number}", text) for number, text in enumerate(texts)]
    corpus = read_corpus(Source("memory", lambda: iter(named)), 0.0)
    return tokenize(corpus, "all", load_tokenizer(DataSpec(), corpus))


def batches(split, packing="concatenate", **options):
    options = {"length": LENGTH, "batch_tokens": 4 * LENGTH, "seed": 0} | options
    return TrainBatches(split, packing=packing, **options)


def same(one, other):
    assert torch.equal(one.ids_BT, other.ids_BT)
    assert torch.equal(one.targets_BT, other.targets_BT)
    assert (one.segments_BT is None) == (other.segments_BT is None)
    if one.segments_BT is not None:
        assert torch.equal(one.segments_BT, other.segments_BT)


@pytest.mark.parametrize("packing", PACKINGS)
def test_shapes_and_targets(split, packing):
    batch = batches(split, packing).batch(0)
    assert batch.ids_BT.shape == (4, LENGTH + 1) and batch.ids_BT.dtype == torch.int64
    assert batch.targets_BT.shape == (4, LENGTH) and batch.targets_BT.dtype == torch.int64
    scored = batch.targets_BT != data.IGNORED
    assert torch.equal(batch.targets_BT[scored], batch.ids_BT[:, 1:][scored])
    assert batch.num_bytes == (scored & (batch.ids_BT[:, 1:] != 256)).sum(), "a separator covers no byte"
    assert scored.all() or packing == "isolate"


def test_golden_batches(split):
    """The text of a step never changes: these are the hashes of steps 0 to 99 for seeds 0 and 1."""
    digests = []
    for seed in (0, 1):
        total = hashlib.sha256()
        source = batches(split, seed=seed)
        for step in range(100):
            total.update(source.batch(step).ids_BT.numpy().astype("<i8").tobytes())
        digests.append(total.hexdigest()[:12])
    assert digests == ["1c7137cee58f", "22d2365f7849"]


@pytest.mark.parametrize("packing", PACKINGS)
def test_an_epoch_reads_every_chunk_once_in_its_own_order(split, packing):
    source = batches(split, packing)
    epochs = 3
    steps = epochs * source.num_chunks // source.sequences_per_batch + 1
    order = np.concatenate([source.indices(step) for step in range(steps)])[: epochs * source.num_chunks]
    order = order.reshape(epochs, source.num_chunks)
    assert (np.sort(order) == np.arange(source.num_chunks)).all()
    assert not any(np.array_equal(order[0], order[epoch]) for epoch in (1, 2))
    assert not np.array_equal(order[0], np.arange(source.num_chunks))


@given(
    st.lists(
        st.tuples(st.integers(0, 10**6), st.lists(st.integers(0, 3), min_size=1)), min_size=1, max_size=4
    )
)
def test_a_batch_depends_on_seed_step_and_slot_alone(split, asked):
    """In any order of steps and slots, the same (seed, step, slot) is the same text."""
    source = batches(split, "isolate")
    for step, slots in asked:
        whole, part = batches(split, "isolate").batch(step), source.batch(step, slots)
        assert torch.equal(part.ids_BT, whole.ids_BT[slots])
        assert torch.equal(part.targets_BT, whole.targets_BT[slots])
        assert torch.equal(part.segments_BT, whole.segments_BT[slots])


@pytest.mark.parametrize("num_processes", [1, 2, 4])
def test_processes_share_one_global_batch(split, num_processes):
    """case 48: the ranks' slots are disjoint and together the batch of one process, at every step."""
    source = batches(split)
    for step in (0, 7, 1000):
        shares = [source.batch(step, range(rank, 4, num_processes)) for rank in range(num_processes)]
        rows = [row.tolist() for share in shares for row in share.ids_BT]
        assert sorted(rows) == sorted(source.batch(step).ids_BT.tolist())
        assert sum(share.num_bytes for share in shares) == source.batch(step).num_bytes


def test_seeds_differ(split):
    assert not torch.equal(batches(split, seed=0).batch(0).ids_BT, batches(split, seed=1).batch(0).ids_BT)


def test_concatenated_chunks_are_the_stream(split):
    """Every token but the first is a target exactly once; what does not fill a chunk is the end alone."""
    chunks = Chunks(split, length=LENGTH, packing="concatenate")
    batch = chunks.gather(np.arange(chunks.num_chunks))
    stream = [token for text in TEXTS for token in [*text.encode(), 256]]
    targets = batch.targets_BT.flatten().tolist()
    assert targets == stream[1 : len(targets) + 1]
    assert len(stream) - 1 - len(targets) < LENGTH
    assert batch.ids_BT[:, 0].tolist() == stream[: len(targets) : LENGTH]


def test_chunks_within_documents(split):
    chunks = Chunks(split, length=LENGTH, packing="within-document")
    batch = chunks.gather(np.arange(chunks.num_chunks))
    rows = iter(batch.ids_BT.tolist())
    for text in TEXTS:
        tokens = list(text.encode())
        for start in range(0, len(tokens) - LENGTH, LENGTH):
            assert next(rows) == tokens[start : start + LENGTH + 1]
    assert next(rows, None) is None
    assert not (batch.ids_BT == 256).any()


def test_isolated_documents(split):
    """case 53: a segment is a document and its separator; no target is in another one than its input."""
    isolated = Chunks(split, length=LENGTH, packing="isolate")
    joined = Chunks(split, length=LENGTH, packing="concatenate")
    everything = np.arange(isolated.num_chunks)
    batch = isolated.gather(everything)
    assert torch.equal(batch.ids_BT, joined.gather(everything).ids_BT)
    for ids, targets, segments in zip(batch.ids_BT, batch.targets_BT, batch.segments_BT, strict=True):
        expected, segment = [], 0
        for token in ids[:-1].tolist():
            expected.append(segment)
            segment += token == 256
        assert segments.tolist() == expected
        assert (targets == data.IGNORED).tolist() == (ids[:-1] == 256).tolist()


def test_names_of_the_documents_of_a_batch(split):
    source = batches(split)
    names = source.documents(3)
    text = "\0".join(TEXTS[int(name.split()[1])] for name in names).encode()
    for row in source.batch(3).ids_BT[:, :-1].tolist():
        assert all(bytes(part) in text for part in split_at_separator(row))
    assert set(source.documents(3, [0, 1])) | set(source.documents(3, [2, 3])) == set(names)


def split_at_separator(row):
    parts = [[]]
    for token in row:
        if token == 256:
            parts.append([])
        else:
            parts[-1].append(token)
    return parts


def test_bytes_are_null_where_a_document_has_none(split, monkeypatch):
    monkeypatch.setitem(split.__dict__, "all_bytes_known", False)
    assert batches(split).batch(0).num_bytes is None


def test_too_short(split):
    with pytest.raises(DataError, match=r"no document of 201 tokens, .* has 120\nlower train\.length"):
        Chunks(split, length=200, packing="within-document")
    with pytest.raises(DataError, match=r"has 3717 tokens, one chunk of train.length 4096 needs 4097"):
        Chunks(split, length=4096, packing="concatenate")
    with pytest.raises(DataError, match=r"makes 464 chunks of 8 tokens, one batch needs 512: lower"):
        batches(split, batch_tokens=4096)
    assert batches(split, batch_tokens=4096, partial=True).num_chunks == 464


def test_default_text_feeds_a_run(split):
    """The standard library has documents and tokens enough for the demo's batches."""
    corpus = data.load_corpus(DataSpec())
    library = tokenize(corpus, "train", load_tokenizer(DataSpec(), corpus))
    batch = TrainBatches(library, length=64, batch_tokens=4096, seed=0).batch(0)
    assert batch.ids_BT.shape == (64, 65) and batch.ids_BT.max() <= 256
    assert library.num_tokens > 5_000_000
