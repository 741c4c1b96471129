"""Perplexity on models whose answer is known, and on tiny checkpoints against cross entropy by hand."""

from __future__ import annotations

import json
import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from pe_study.errors import CheckpointError, DataError, UsageError
from pe_study.evaluators.perplexity import evaluate_perplexity
from pe_study.evaluators.summary import summarise
from pe_study.rows import ROW_COLUMNS

PROTOCOLS = [
    ("nonoverlapping", {}),
    ("sliding", {"stride": 3}),
    ("prefix", {}),
    ("exact-context", {"num_targets": 7}),
    ("fixed-target", {"num_targets": 4, "anchors": 2}),
]


def uniform(vocab_size, dtype=torch.float32):
    return lambda ids: SimpleNamespace(logits=torch.zeros(*ids.shape, vocab_size, dtype=dtype))


def lookup(logits_VV):
    """A bigram model: the row of the input token."""
    return lambda ids: SimpleNamespace(logits=logits_VV[ids])


TWO_AND_FOUR = [np.zeros(1001, dtype=int), np.ones(11, dtype=int)]


def two_and_four_nats():
    """After 0 it gives 0 an NLL of 2, after 1 it gives 1 an NLL of 4."""
    two, four = math.exp(-2), math.exp(-4)
    return lookup(torch.tensor([[two, 0, 1 - two], [0, four, 1 - four], [1, 0, 0]]).log())


def random_documents(*lengths, vocab_size=50):
    generator = np.random.default_rng(0)
    return [generator.integers(0, vocab_size, length) for length in lengths]


@pytest.fixture(scope="module")
def llama():
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=50,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
    )
    return LlamaForCausalLM(config).eval()


def perplexity(frame):
    return math.exp(frame["nll_sum"].sum() / frame["num_tokens"].sum())


def manual_nll(model, ids):
    with torch.inference_mode():
        logits = model(torch.as_tensor(ids)[None]).logits[0, :-1].double()
    return F.cross_entropy(logits, torch.as_tensor(ids)[1:], reduction="none").numpy()


def window_oracle(model, ids, length, stride, bos=None):
    """The NLL of every target by the usual strided script, one window at a time: (index, nll)."""
    found, begin, done = {}, 0, 1 if bos is None else 0
    while done < len(ids):
        if bos is None:
            window = ids[begin : begin + length + 1]
            first_target = begin + 1
        else:
            window = np.concatenate([[bos], ids[begin : begin + length]])
            first_target = begin
        for offset, nll in enumerate(manual_nll(model, window)):
            if first_target + offset >= done:
                found[first_target + offset] = nll
        done, begin = first_target + len(window) - 1, begin + stride
    return found


@pytest.mark.parametrize(("protocol", "options"), PROTOCOLS)
@pytest.mark.parametrize("bos", [None, 3])
@pytest.mark.parametrize("batch_tokens", [1, 40, 100_000])
def test_uniform_model_has_perplexity_v(protocol, options, bos, batch_tokens):
    """Cases 07, 36: V exactly, whatever the protocol, document mix and batch."""
    documents = random_documents(130, 1, 64, 33, 0, vocab_size=8)
    frame = evaluate_perplexity(
        documents,
        lengths=[5, 16, 32],
        protocol=protocol,
        model=uniform(8),
        bos_token_id=bos,
        batch_tokens=batch_tokens,
        **options,
    )
    for _, rows in frame.groupby("length"):
        assert perplexity(rows) == pytest.approx(8, rel=1e-9)


def test_tokens_weigh_equally_not_windows_or_documents():
    """Case 05: 1000 tokens at NLL 2 and 10 at NLL 4 give exp(2040 / 1010)."""
    probabilities = torch.tensor(
        [[math.exp(-2), 0, 1 - math.exp(-2)], [0, math.exp(-4), 1 - math.exp(-4)], [1, 1, 1]]
    )
    documents = [np.zeros(1001, dtype=int), np.ones(11, dtype=int)]
    frame = evaluate_perplexity(
        documents, lengths=[64], protocol="nonoverlapping", model=lookup(probabilities.log())
    )
    assert frame["num_tokens"].sum() == 1010
    assert summarise(frame)["perplexity"] == pytest.approx(7.5368, abs=1e-4)


def test_yarn_aggregation_is_the_mean_of_window_means():
    """Case 05's other reading, for comparison with papers: 20 windows at 2 and one at 4 count alike."""
    probabilities = torch.tensor(
        [[math.exp(-2), 0, 1 - math.exp(-2)], [0, math.exp(-4), 1 - math.exp(-4)], [1, 1, 1]]
    )
    frame = evaluate_perplexity(
        [np.zeros(1001, dtype=int), np.ones(11, dtype=int)],
        lengths=[100],
        protocol="nonoverlapping",
        model=lookup(probabilities.log()),
        aggregation="yarn",
    )
    assert summarise(frame)["num_windows"] == 11
    assert summarise(frame)["nll"] == pytest.approx((10 * 2 + 4) / 11, rel=1e-6)
    assert summarise(frame, "token")["nll"] == pytest.approx(2040 / 1010, rel=1e-6)


@pytest.mark.parametrize("bos", [None, 1])
@pytest.mark.parametrize(("length", "stride"), [(16, 16), (16, 5), (9, 2)])
def test_windows_equal_cross_entropy_by_hand(llama, length, stride, bos):
    """Cases 09, 10: t predicts t + 1; with BOS on each window starts with one, every token is a target."""
    documents = random_documents(50, 31)
    frame = evaluate_perplexity(
        documents, lengths=[length], protocol="sliding", stride=stride, model=llama, bos_token_id=bos
    )
    for index, ids in enumerate(documents):
        rows = frame[frame["document"] == index]
        expected = window_oracle(llama, ids, length, stride, bos)
        assert rows["num_tokens"].sum() == len(ids) - (bos is None)
        assert rows["nll_sum"].sum() == pytest.approx(sum(expected.values()), rel=1e-6)


def test_exact_context_and_fixed_target_equal_single_windows(llama):
    """Case 11: the same targets at every length, each with exactly the inputs before it."""
    [ids] = random_documents(60)
    frame = evaluate_perplexity(
        [ids], lengths=[8, 32], protocol="exact-context", num_targets=100, model=llama
    )
    for length in (8, 32):
        expected = [manual_nll(llama, ids[e - length : e + 1])[-1] for e in range(32, 60)]
        rows = frame[frame["length"] == length]
        assert rows["num_tokens"].sum() == 28
        assert rows["nll_sum"].sum() == pytest.approx(sum(expected), rel=1e-6)
    frame = evaluate_perplexity([ids], lengths=[8, 32], protocol="fixed-target", num_targets=6, model=llama)
    for length in (8, 32):
        expected = manual_nll(llama, ids[59 - length : 60])[-6:]
        assert frame[frame["length"] == length]["nll_sum"].sum() == pytest.approx(expected.sum(), rel=1e-6)


@pytest.mark.parametrize(("protocol", "options"), PROTOCOLS)
def test_batch_and_company_change_no_number(llama, protocol, options):
    """Case 07: a document's sums are its own, whatever is read beside it."""
    documents = random_documents(3, 50, 40, 41, 90)
    together = evaluate_perplexity(documents, lengths=[8, 24], protocol=protocol, model=llama, **options)
    sums = together.groupby(["length", "document"])["nll_sum"].sum()
    for index, document in enumerate(documents):
        if sums.get((24, index), 0) == 0:
            continue
        alone = evaluate_perplexity(
            [document], lengths=[8, 24], protocol=protocol, model=llama, batch_tokens=1, **options
        )
        for length, nll in alone.groupby("length")["nll_sum"].sum().items():
            assert sums[length, index] == pytest.approx(nll, rel=1e-6)


def test_no_id_is_padding(llama):
    """Case 38: an end-of-text inside a document and id 0 are targets like any other."""
    llama.config.pad_token_id = llama.config.eos_token_id = 7
    frame = evaluate_perplexity(
        [[5, 7, 11, 7], [1, 2, 0, 3]], lengths=[8], protocol="nonoverlapping", model=llama
    )
    assert frame.groupby("document")["num_tokens"].sum().tolist() == [3, 3]
    expected = manual_nll(llama, np.array([5, 7, 11, 7])).sum()
    assert frame[frame["document"] == 0]["nll_sum"].sum() == pytest.approx(expected, rel=1e-6)


def test_a_document_s_own_bos_is_not_doubled():
    """Case 09: ids[0] is BOS and ids[1] is not; BOS is never a target."""
    seen = []

    def model(ids):
        seen.append(ids.clone())
        return SimpleNamespace(logits=torch.zeros(*ids.shape, 8))

    frame = evaluate_perplexity(
        [[2, 4, 5, 6, 7], [4, 5, 6, 7]], lengths=[3], protocol="nonoverlapping", model=model, bos_token_id=2
    )
    assert frame.groupby("document")["num_tokens"].sum().tolist() == [4, 4]
    for ids in seen:
        assert (ids[:, 0] == 2).all()
        assert (ids[:, 1:] != 2).all()


def test_empty_documents_are_skipped_and_counted():
    """Case 35: "" and one token add nothing; all empty is an error."""
    frame = evaluate_perplexity(
        [[], [1], [1, 2, 3]], lengths=[4], protocol="nonoverlapping", model=uniform(8)
    )
    assert frame["num_skipped"].sum() == 2
    assert frame["num_tokens"].sum() == 2
    assert perplexity(frame) == pytest.approx(8)
    assert frame.loc[frame["status"] == "skipped", "nll_sum"].tolist() == [0, 0]
    with pytest.raises(DataError, match="none of 2 documents has a target"):
        evaluate_perplexity([[], [1]], lengths=[4], protocol="nonoverlapping", model=uniform(8))
    with pytest.raises(DataError, match="needs more than 4 tokens"):
        evaluate_perplexity([[1, 2]], lengths=[4], protocol="exact-context", model=uniform(8))


def test_overflowing_perplexity_keeps_its_nll():
    """Case 34: NLL 710 is past what exp can hold; the JSON stays strict."""
    logits = torch.full((2, 2), 0.0)
    logits[0, 1] = 710.0
    frame = evaluate_perplexity([[0, 0, 0]], lengths=[2], protocol="nonoverlapping", model=lookup(logits))
    cell = summarise(frame)
    assert cell["nll"] == pytest.approx(710.0)
    assert cell["perplexity"] is None
    assert cell["overflow"]
    json.dumps(cell, allow_nan=False)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_half_precision_logits_do_not_overflow(dtype):
    """Case 58: zero logits over 32000 symbols are ln 32000 = 10.373491 in any type."""
    frame = evaluate_perplexity(
        [[1, 2, 3]], lengths=[2], protocol="nonoverlapping", model=uniform(32000, dtype)
    )
    assert frame["nll_sum"].sum() / 2 == pytest.approx(10.373491, abs=1e-6)


def test_bytes_are_those_of_the_targets():
    """Case 37: bits a byte = NLL / (ln 2 x bytes of the scored targets), "é" counting two."""
    document = SimpleNamespace(ids=np.array([1, 2, 3, 0]), token_bytes=np.array([1, 2, 1, 0]))
    frame = evaluate_perplexity([document], lengths=[8], protocol="nonoverlapping", model=uniform(4))
    assert frame["num_bytes"].sum() == 3
    assert summarise(frame)["bits_per_byte"] == pytest.approx(3 * 2 / 3)
    with_bos = evaluate_perplexity(
        [document], lengths=[8], protocol="nonoverlapping", model=uniform(4), bos_token_id=0
    )
    assert with_bos["num_bytes"].sum() == 4
    unknown = evaluate_perplexity([[1, 2, 3]], lengths=[8], protocol="nonoverlapping", model=uniform(4))
    assert unknown["num_bytes"].isna().all()
    assert summarise(unknown)["bits_per_byte"] is None


def test_position_bins_add_up():
    frame = evaluate_perplexity(
        random_documents(200, vocab_size=8), lengths=[50], protocol="sliding", stride=20, model=uniform(8)
    )
    assert frame["position_lo"].tolist() == [1, 2, 4, 8, 16, 32]
    assert frame["position_hi"].tolist() == [2, 4, 8, 16, 32, 64]
    assert frame["num_tokens"].tolist() == [1, 2, 4, 8, 24, 160]
    assert frame["num_windows"].sum() == 9
    assert list(frame.columns) == list(ROW_COLUMNS)


def test_a_length_without_positions_is_a_row():
    """Case 33: unsupported before any kernel runs; the other lengths finish."""
    model = GPT2LMHeadModel(GPT2Config(vocab_size=50, n_positions=32, n_embd=16, n_layer=1, n_head=2))
    frame = evaluate_perplexity(
        random_documents(100), lengths=[16, 33, 32], protocol="nonoverlapping", model=model
    )
    status = frame.groupby("length")["status"].unique().map(list).to_dict()
    assert status == {16: ["ok"], 32: ["ok"], 33: ["unsupported"]}
    row = frame[frame["length"] == 33].iloc[0]
    assert row["num_tokens"] == 0
    assert row.isna()["nll_sum"]
    assert "past 32" in frame.attrs["errors"][33]


def failing(error):
    def model(ids):
        if ids.shape[1] > 8:
            raise error
        return SimpleNamespace(logits=torch.zeros(*ids.shape, 50))

    return model


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (torch.OutOfMemoryError("CUDA out of memory"), "oom"),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 1 bytes"), "oom"),
        (RuntimeError("shapes do not match"), "error"),
    ],
)
def test_a_length_that_fails_is_a_row_and_the_others_finish(error, status):
    frame = evaluate_perplexity(
        random_documents(40), lengths=[8, 16], protocol="nonoverlapping", model=failing(error)
    )
    assert set(frame[frame["length"] == 8]["status"]) == {"ok"}
    assert frame[frame["length"] == 16]["status"].tolist() == [status]
    assert str(error) in frame.attrs["errors"][16]


def test_nan_far_out_takes_no_shorter_prefix_with_it(monkeypatch):
    """One pass for all prefixes: masked values that are NaN reach back, so each length is read for itself."""
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=50, **sizes)).eval()
    plain = model.forward

    def forward(input_ids, **options):
        output = plain(input_ids, **options)
        output.logits *= math.nan if input_ids.shape[1] > 12 else 1.0
        return output

    documents = [np.arange(40) % 50]
    alone = evaluate_perplexity(documents, lengths=[10], protocol="prefix", model=model)
    monkeypatch.setattr(model, "forward", forward)
    frame = evaluate_perplexity(documents, lengths=[10, 20], protocol="prefix", model=model)
    assert set(frame[frame["length"] == 20]["status"]) == {"error"}
    short = frame[frame["length"] == 10]
    assert short["nll_sum"].sum() == pytest.approx(alone["nll_sum"].sum(), rel=1e-6)


def test_nan_is_an_error_not_a_number():
    def model(ids):
        return SimpleNamespace(logits=torch.full((*ids.shape, 50), math.nan))

    frame = evaluate_perplexity(random_documents(10), lengths=[4], protocol="nonoverlapping", model=model)
    assert set(frame["status"]) == {"error"}
    assert summarise(frame)["perplexity"] is None


def test_dropout_is_off_and_the_mode_is_restored():
    config = GPT2Config(vocab_size=50, n_positions=32, n_embd=16, n_layer=1, n_head=2, resid_pdrop=0.5)
    model = GPT2LMHeadModel(config).train()
    sums = {
        evaluate_perplexity(random_documents(30), lengths=[16], protocol="prefix", model=model)[
            "nll_sum"
        ].sum()
        for _ in range(3)
    }
    assert len(sums) == 1
    assert model.training


def test_load_is_called_for_each_length_in_order():
    """Case 17: 64, 128, 64 gives the same first and third numbers, each from a model of its own length."""
    asked = []

    def load(length):
        asked.append(length)
        return uniform(length)

    documents = random_documents(300, vocab_size=8)
    frame = evaluate_perplexity(documents, lengths=[64, 128, 64], protocol="prefix", load=load)
    assert asked == [64, 128, 64]
    by_length = frame.groupby("length")[["nll_sum", "num_tokens"]].sum()
    assert by_length.loc[64, "num_tokens"] == 128
    assert by_length.loc[64, "nll_sum"] == pytest.approx(128 * math.log(64))
    assert by_length.loc[128, "nll_sum"] == pytest.approx(128 * math.log(128))


def test_ids_outside_the_vocabulary_are_refused(llama):
    with pytest.raises(CheckpointError, match="token id 50 is not in the model's vocabulary of 50"):
        evaluate_perplexity([[1, 50, 2]], lengths=[4], protocol="nonoverlapping", model=llama)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"lengths": [], "protocol": "prefix"}, "at least one length"),
        ({"lengths": [0], "protocol": "prefix"}, "at least 1"),
        ({"lengths": [8], "protocol": "perfix"}, 'did you mean "prefix"'),
        ({"lengths": [8], "protocol": "sliding"}, "needs a stride"),
        ({"lengths": [8], "protocol": "prefix", "aggregation": "mean"}, "available: token, yarn"),
        ({"lengths": [8], "protocol": "prefix", "batch_tokens": 0}, "at least 1"),
        ({"lengths": [8], "protocol": "prefix", "bos_token_id": -1}, "id of a token"),
        ({"lengths": [8], "protocol": "prefix", "bos_token_id": True}, "id of a token"),
        ({"lengths": [8], "protocol": "prefix", "load": uniform}, "exactly one"),
    ],
)
def test_arguments_that_make_no_sense(arguments, message):
    with pytest.raises(UsageError, match=message):
        evaluate_perplexity([[1, 2, 3]], model=uniform(8), **arguments)


@pytest.mark.parametrize("document", [[[1, 2], [3, 4]], [0.5, 1.0], [-1, 2]])
def test_documents_must_be_ids(document):
    with pytest.raises(DataError, match="document 0"):
        evaluate_perplexity([document], lengths=[4], protocol="prefix", model=uniform(8))
