"""Retrieval scores: a model that copies finds every needle, one that does not is on the floor."""

from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
import tiny
import torch
from transformers import GPT2Config, GPT2LMHeadModel

from pe_study.data import Document, Tokenizer
from pe_study.evaluators import reader, retrieval
from pe_study.evaluators.evaluation import Evaluation
from pe_study.evaluators.haystacks import NUM_COPIED, Haystacks
from pe_study.evaluators.reader import Reader
from pe_study.evaluators.scoring import Scorer
from pe_study.evaluators.subjects import find_subjects
from pe_study.evaluators.texts import Texts
from pe_study.model import PEStudyConfig, PEStudyForCausalLM
from pe_study.plan import load_plan
from pe_study.rows import RETRIEVAL_COLUMNS, make_rows, read_rows
from pe_study.text.tokenization import byte_tokenizer
from pe_study.train import train_study

BYTES = Tokenizer(byte_tokenizer(), "byte")


class Copier(torch.nn.Module):
    """Expects what followed the latest occurrence of the longest suffix of its input; else anything."""

    def forward(self, input_ids, use_cache=False, logits_to_keep=0):
        length = input_ids.shape[1]
        kept = range(length - logits_to_keep if logits_to_keep else 0, length)
        rows = [[self.after(bytes(ids[: end + 1])) for end in kept] for ids in input_ids.tolist()]
        return SimpleNamespace(logits=torch.stack([torch.stack(row) for row in rows]))

    def after(self, text):
        logits = torch.zeros(257)
        for size in range(min(40, len(text) - 1), 0, -1):
            found = text.rfind(text[-size:], 0, len(text) - 1)
            if found >= 0:
                logits[text[found + size]] = 9.0
                break
        return logits


class Uniform(torch.nn.Module):
    def forward(self, input_ids, use_cache=False, logits_to_keep=0):
        return SimpleNamespace(logits=torch.zeros(len(input_ids), logits_to_keep or input_ids.shape[1], 257))


def needle(task="passkey", depth=0.5):
    return Haystacks(BYTES, longest_length=900).build(task, length=900, depth=depth, sample=0)


def our_model(encoding):
    config = PEStudyConfig(
        vocab_size=257,
        num_layers=2,
        d_model=32,
        num_heads=4,
        num_kv_heads=2,
        d_ff=48,
        max_positions=64,
        encoding={"name": encoding},
        train_length=32,
        length=48,
    )
    return PEStudyForCausalLM(config).eval()


@pytest.mark.parametrize("encoding", ["rope", "t5", "learned"])
@pytest.mark.parametrize("chunk", [7, 100])
def test_reading_through_the_cache_changes_nothing(encoding, chunk, monkeypatch):
    monkeypatch.setattr(reader, "CHUNK", chunk)
    model = our_model(encoding)
    ids = np.arange(40) * 7 % 257
    read = Reader(model, ids[:33])
    with torch.inference_mode():
        whole = model(torch.from_numpy(ids)[None]).logits[0, 32:]
    for count in (7, 0, 3, 7):
        torch.testing.assert_close(
            read.logits(ids[33 : 33 + count]), whole[: count + 1], rtol=1e-5, atol=1e-5
        )
    nll = Scorer(model).nll(ids[None, :-1], ids[None, 33:]).sum()
    assert read.logprob(ids[33:]) == pytest.approx(-nll, rel=1e-6)
    greedy = read.greedy(4)
    assert greedy[0] == int(whole[0].argmax())
    assert read.greedy(4).tolist() == greedy.tolist()


@pytest.mark.parametrize("depth", [0.0, 0.5, 1.0])
def test_a_copier_finds_the_needle(depth):
    row = retrieval.score_needle(Copier(), needle(depth=depth), BYTES)
    assert row["correct"] and row["rank"] == 1 and row["status"] == "ok"
    certain = 9.0 - np.log(np.exp(9.0) + 256)
    assert row["target_logprob"] == pytest.approx(len(needle().candidate_ids[0]) * certain, rel=1e-5)


def test_a_uniform_model_knows_nothing():
    """Ties count against the model: ten equally likely values leave the right one last."""
    row = retrieval.score_needle(Uniform(), needle(), BYTES)
    assert not row["correct"]
    assert row["rank"] == 10
    assert row["target_logprob"] == pytest.approx(-6 * np.log(257))


class NotANumber(Uniform):
    def forward(self, input_ids, **options):
        return SimpleNamespace(logits=super().forward(input_ids, **options).logits * np.nan)


def test_nan_ranks_nowhere():
    """Case 34: a likelihood that is NaN is no first place among ten."""
    row = retrieval.score_needle(NotANumber(), needle(), BYTES)
    assert row["status"] == "error" and "rank" not in row and "correct" not in row


def test_gain_of_a_copy_is_known():
    """A copier saves all it can save; a uniform model saves nothing."""
    text = Document(np.frombuffer(b"abcdefghij" * 60, dtype=np.uint8).astype(np.int64))
    probe = Haystacks(BYTES, longest_length=400).copy_probe(text, length=400, distance=200, sample=0)
    for model, gain in ((Uniform(), 0.0), (Copier(), None)):
        ids = np.stack([probe.with_ids, probe.without_ids])
        nll = Scorer(model).nll(ids[:, :-1], ids[:, -(NUM_COPIED - 1) :])
        if gain is not None:
            assert (nll[1] - nll[0]).tolist() == [gain] * (NUM_COPIED - 1)
        else:
            assert nll[0].mean() < 1.5 < nll[1].mean()


def rows(*records):
    columns = ("task", "length", "rescale", "correct", "status")
    shared = {"label": "rope", "train_length": 512, "depth": 0.5}
    records = [shared | dict(zip(columns, record, strict=True)) for record in records]
    return make_rows(records, RETRIEVAL_COLUMNS)


def status(frame):
    return retrieval._floored(frame)["status"].tolist()


def test_floor():
    good = [("passkey", 512, "none", True, "ok"), ("passkey", 1024, "none", False, "ok")]
    assert status(rows(*good)) == ["ok", "ok"]
    bad = [
        ("uuid", 512, "none", False, "ok"),
        ("uuid", 1024, "yarn:2", True, "ok"),
        ("uuid", 2048, "none", None, "oom"),
    ]
    assert status(rows(*good, *bad)) == ["ok", "ok", "floor", "floor", "oom"]
    unmeasured = [("passkey", 256, "none", None, "skipped"), ("passkey", 1024, "none", True, "ok")]
    assert status(rows(*unmeasured)) == ["skipped", "floor"], "nothing is known within the training length"
    rescaled = [("passkey", 512, "linear:4", False, "ok"), ("passkey", 512, "none", True, "ok")]
    assert status(rows(*rescaled)) == ["ok", "ok"], "the model as trained decides"
    copies = [("copy", 512, "none", None, "ok"), ("copy", 1024, "none", None, "ok")]
    assert status(rows(*copies)) == ["ok", "ok"]


@pytest.fixture(scope="module")
def study(tmp_path_factory):
    """A study of two tiny runs, evaluated with retrieval tasks."""
    folder = tmp_path_factory.mktemp("study")
    recipe = tiny.tiny_recipe(folder, encodings=("rope", "learned"))
    train_study(recipe, folder / "runs")
    return folder / "runs" / "tiny"


def evaluations(study, **keys):
    plan = load_plan(
        {
            "lengths": [64, 300],
            "unit": "stream",
            "tasks": ["passkey", "copy"],
            "depths": [0.0, 1.0],
            "num_samples": 2,
            **keys,
        }
    )
    subjects = find_subjects(str(study), study.parent, {}, {})
    return [Evaluation.prepare(subject, plan, "auto", Texts()) for subject in subjects]


def test_rows_of_a_study(study, tmp_path, monkeypatch):
    frame = retrieval.measure(evaluations(study, rescales=["none", "yarn:2"]), tmp_path)
    assert list(frame.columns) == list(RETRIEVAL_COLUMNS)
    pd.testing.assert_frame_equal(read_rows(tmp_path, "retrieval.parquet"), frame)
    counts = frame.groupby(["label", "task", "length", "rescale", "status"]).size().to_dict()
    for rescale in ("none", "yarn:2"):
        assert counts["rope", "passkey", 64, rescale, "skipped"] == 1, "no prompt of 64 bytes"
        assert counts["rope", "passkey", 300, rescale, "floor"] == 4
        assert counts["rope", "copy", 300, rescale, "ok"] == 4
    assert counts["learned", "passkey", 300, "none", "unsupported"] == 1, "past its table"
    assert counts["learned", "copy", 300, "none", "unsupported"] == 1
    assert frame["gain"].notna().sum() == (frame["task"].eq("copy") & frame["status"].eq("ok")).sum()

    monkeypatch.setattr(retrieval._Tasks, "_guarded", None)
    again = retrieval.measure(evaluations(study, rescales=["none", "yarn:2"]), tmp_path)
    pd.testing.assert_frame_equal(again, frame)


def test_a_copy_counts_once_where_depths_have_one_distance(study, tmp_path):
    """In windows of twice the copied tokens every depth lies at one distance: the same probe, not five."""
    prepared = evaluations(study, lengths=[64], tasks=["copy"], depths=[0.0, 0.25, 0.5, 1.0])
    frame = retrieval.measure(prepared, tmp_path)
    for _, part in frame.groupby("label"):
        assert len(part) == 2 == part["sample"].nunique()
        assert part["gain"].nunique() == 2


def test_past_the_positions_of_a_checkpoint_nothing_runs(tmp_path, monkeypatch):
    sizes = {"n_positions": 64, "n_embd": 16, "n_layer": 1, "n_head": 2}
    config = GPT2Config(vocab_size=257, bos_token_id=None, eos_token_id=None, **sizes)
    GPT2LMHeadModel(config).save_pretrained(tmp_path / "gpt2")
    byte_tokenizer().save_pretrained(tmp_path / "gpt2")
    source, read, plain = str(tmp_path / "gpt2"), [], GPT2LMHeadModel.forward

    def forward(self, input_ids, **options):
        read.append(input_ids.shape[1])
        return plain(self, input_ids, **options)

    monkeypatch.setattr(GPT2LMHeadModel, "forward", forward)
    plan = load_plan({"lengths": [300], "unit": "stream", "tasks": ["passkey", "copy"], "corpus": "stdlib"})
    [subject] = find_subjects(source, tmp_path, {}, {})
    frame = retrieval.measure([Evaluation.prepare(subject, plan, "auto", Texts())], tmp_path / "out")
    assert set(frame["status"]) == {"unsupported"}
    assert max(read) < 64, "but for the few tokens of the check that it is causal"


def test_retrieval_reads_through_the_cache_that_was_asked_for(study, tmp_path):
    """An 8-bit cache changes a copy's gain and a needle's likelihood, and the rows say so."""
    found = {}
    for cache in ("full", "fp8"):
        prepared = evaluations(study, rescales=["none"], lengths=[600], cache=cache)
        [rope] = [each for each in prepared if each.subject.name == "rope-s0"]
        found[cache] = retrieval.measure([rope], tmp_path / cache)
    assert set(found["fp8"]["dtype"]) == {"float32, fp8 cache"}
    for task in ("passkey", "copy"):
        full, eighth = (frame[frame["task"] == task]["target_logprob"] for frame in found.values())
        assert eighth.tolist() != full.tolist()
        assert eighth.tolist() == pytest.approx(full.tolist(), rel=0.01)


def test_the_factor_is_that_of_the_frequencies(study, tmp_path):
    """A needle's prompt and answer fit into the declared length; a copy has no answer behind it."""
    [rope] = [
        e for e in evaluations(study, rescales=["yarn:auto"], lengths=[300]) if e.subject.name == "rope-s0"
    ]
    declared = {"passkey": 300 + len(" 12345") + 2, "copy": 300}
    built = []
    plain = rope.subject.checkpoint.load

    def load(rescale, length, *options):
        built.append(length)
        return plain(rescale, length, *options)

    rope.subject.checkpoint.load = load
    frame = retrieval.measure([rope], tmp_path)
    assert built == list(declared.values())
    for task, length in declared.items():
        assert set(frame[frame["task"] == task]["factor"]) == {length / 16}


def test_rows_of_runs_that_are_not_picked_stay(study, tmp_path):
    both = evaluations(study, lengths=[64], tasks=["copy"])
    fingerprints = [each.subject.fingerprint for each in both]
    retrieval.measure(both, tmp_path)
    frame = retrieval.measure(both[:1], tmp_path, fingerprints)
    assert set(frame["label"]) == {"rope", "learned"}
    alone = retrieval.measure(both[:1], tmp_path)
    assert set(alone["label"]) == {both[0].subject.identity["label"]}, "the other is no more"
