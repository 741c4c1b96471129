"""What decides how a text is read: BOS and tails, the precision of the cache, and what that costs."""

from __future__ import annotations

import numpy as np
import pytest
from test_evaluate import llama_folder, plan_of
from tiny import tiny_recipe

from pe_study import rows, runs
from pe_study.checkpoints import load_causal_lm
from pe_study.commands import listing
from pe_study.evaluators import perplexity
from pe_study.evaluators.jobs import Job, read_documents
from pe_study.evaluators.reading import Reading
from pe_study.evaluators.study import evaluate
from pe_study.evaluators.windows import protocol
from pe_study.train import train_study


@pytest.fixture(scope="module")
def study(tmp_path_factory):
    folder = tmp_path_factory.mktemp("study")
    train_study(tiny_recipe(folder, "train.steps=2", encodings=("rope",)), folder / "runs")
    return folder / "runs"


@pytest.mark.parametrize("unit", ["document", "stream"])
def test_with_bos_documents_leave_no_tail_and_streams_do(study, tmp_path, unit):
    """A document of k L + 1 tokens would leave a window of BOS and one target; sampled targets stay."""
    sampled = [{"name": "exact-context", "num_targets": 3}, {"name": "fixed-target", "num_targets": 4}]
    plan = plan_of(
        lengths=["1x", "2x"],
        protocols=["nonoverlapping", {"name": "sliding", "stride": 8}, "prefix", *sampled],
        rescales=["none"],
        truncation=True,
        unit=unit,
        num_documents=2,
        tokens_per_document=64,
    )
    targets = {}
    for bos in (False, True):
        evaluate(
            "tiny",
            plan.with_overrides([f"bos={str(bos).lower()}"]),
            runs_root=study,
            output=tmp_path / str(bos),
        )
        frame = rows.read_rows(tmp_path / str(bos))
        frame = frame[frame["num_tokens"] > 0]
        assert set(frame["bos"]) == {bos}
        keys = ["rescale", "protocol", "length", "document"]
        targets[bos] = frame.groupby(keys)[["num_tokens", "num_windows"]].sum()
    more = (targets[True] - targets[False])["num_tokens"].to_dict()
    assert len(more) == len(targets[False])
    for (_, name, _, _), difference in more.items():
        whole = unit == "stream" and name in ("nonoverlapping", "sliding")
        assert difference == (1 if whole else 0)  # of a stream, its first token
    if unit == "document":
        assert targets[True]["num_windows"].to_dict() == targets[False]["num_windows"].to_dict()


def test_one_pass_where_no_frequency_changes(tmp_path, monkeypatch):
    """A rescale by the length is none up to the original one (32): prefixes there are cut from one pass."""
    source, text = str(llama_folder(tmp_path / "llama")), tmp_path / "a.txt"
    text.write_text("a line of words, and some more of them. " * 30, encoding="utf-8")
    read = []
    plain = perplexity.losses

    def losses(job, *rest, **options):
        read.append((job.protocol.name, job.length))
        return plain(job, *rest, **options)

    monkeypatch.setattr(perplexity, "losses", losses)
    plan = plan_of(corpus=str(text), lengths=[8, 16, 32, 64, 128], num_documents=1)
    frames = {}
    for rescale, lengths in (
        ("none", [128]),
        ("yarn:auto", [32, 64, 128]),
        ("dynamic", [32, 64, 128]),
        ("ntk:2", [128]),
    ):
        read.clear()
        folder = evaluate(source, plan.with_overrides([f"rescales=[{rescale}]"]), runs_root=tmp_path)
        assert [length for name, length in read if name == "prefix"] == lengths
        assert [length for name, length in read if name != "prefix"] == [8, 16, 32, 64, 128]
        frame = rows.read_rows(folder)
        frame = frame[(frame["rescale"] == rescale) & (frame["protocol"] == "prefix")]
        frames[rescale] = frame.groupby("length")["nll_sum"].sum()
    for rescale in ("yarn:auto", "dynamic"):
        within = [8, 16, 32]
        assert frames[rescale][within].tolist() == pytest.approx(frames["none"][within].tolist(), rel=1e-6)
        assert frames[rescale][128] != pytest.approx(frames["none"][128], rel=1e-6)


def test_an_8_bit_cache_reads_alike_in_any_batch(tmp_path):
    """Its scales are those of all windows that are read together, so they are read one at a time."""
    source = str(llama_folder(tmp_path / "llama"))
    model, _ = load_causal_lm(source)
    documents = [np.random.default_rng(seed).integers(0, 256, 600) for seed in range(3)]
    found = []
    for rows_at_once in (3, 1):
        job = Job.build(read_documents(documents, None), protocol("prefix"), 599, longest=599)
        reading = Reading(599 * rows_at_once, "fp8")
        found.append(np.concatenate([nll for _, nll in perplexity.losses(job, model, reading)]))
    assert np.array_equal(found[0], found[1])
    exact = np.concatenate([nll for _, nll in perplexity.losses(job, model, Reading(599 * 3))])
    assert not np.array_equal(found[0], exact)


def test_windows_of_one_pass_read_no_quantised_key(tmp_path):
    """The constant that sentences go by is where numbers begin to differ."""
    model, _ = load_causal_lm(str(llama_folder(tmp_path / "llama")))
    documents = read_documents([np.random.default_rng(0).integers(0, 256, 600)], None)
    for length, exact in ((rows.QUANTISED_CHUNK, True), (rows.QUANTISED_CHUNK + 1, False)):
        job = Job.build(documents, protocol("prefix"), length, longest=length)
        readings = [Reading(cache=cache) for cache in ("full", "fp8")]
        full, eighth = (next(perplexity.losses(job, model, reading))[1] for reading in readings)
        assert np.array_equal(full, eighth) == exact


def test_cells_that_read_no_quantised_key_are_not_counted(tmp_path):
    """Short windows, and those that truncation cuts to the training length (32)."""
    source, text = str(llama_folder(tmp_path / "llama")), tmp_path / "a.txt"
    text.write_text("a line of words, and some more of them. " * 30, encoding="utf-8")
    plan = plan_of(
        corpus=str(text),
        lengths=[64, 512],
        protocols=["prefix", {"name": "fixed-target", "num_targets": 40}],
        rescales=["none"],
        num_documents=1,
        truncation=True,
    )
    for lengths, said in (
        ("[64, 512]", "nats a token over 2 cells that"),
        ("[64, 256]", "no window was read through the cache: up to 256 tokens are one pass."),
    ):
        for cache in ("full", "fp8"):
            chosen = plan.with_overrides([f"lengths={lengths}", f"cache={cache}"])
            folder = evaluate(source, chosen, runs_root=tmp_path, output=tmp_path / lengths)
        costs = runs.read_json(folder / "results.json")["notes"]["cache_costs"]
        assert len(costs) == 8
        cut = {cost["protocol"]: cost["window"] for cost in costs if cost["rescale"] == "truncation"}
        assert cut == {"prefix": 32, "fixed-target": 40}
        assert said in listing.results(folder)


def test_the_cost_of_an_8_bit_cache_is_told(tmp_path):
    source = str(llama_folder(tmp_path / "llama"))
    text = tmp_path / "a.txt"
    text.write_text("a line of words, and some more of them. " * 30, encoding="utf-8")
    plan = plan_of(corpus=str(text), lengths=[512], protocols=["prefix"], rescales=["none"], num_documents=1)
    quantised = plan.with_overrides(["cache=fp8"])
    folder = evaluate(source, quantised, runs_root=tmp_path)
    eighth = rows.read_rows(folder)
    assert "costs is not known: run the same command with --cache full" in listing.results(folder)
    assert listing.results(folder).splitlines()[1].split() == ["label", "rescale", "512"], "of one study"
    full = rows.read_rows(evaluate(source, plan, runs_root=tmp_path))
    assert set(eighth["dtype"]) == {"float32, fp8 cache"}
    assert eighth["num_tokens"].sum() == full["num_tokens"].sum() == 512
    assert eighth["nll_sum"].sum() == pytest.approx(full["nll_sum"].sum(), rel=0.01)
    assert eighth["nll_sum"].sum() != full["nll_sum"].sum()
    difference = (eighth["nll_sum"].sum() - full["nll_sum"].sum()) / 512
    for again in (plan, quantised):  # whichever was asked for last
        evaluate(source, again, runs_root=tmp_path)
        [cost] = runs.read_json(folder / "results.json")["notes"]["cache_costs"]
        assert cost["difference"] == pytest.approx(difference)
        assert cost["nll"] == pytest.approx(full["nll_sum"].sum() / 512)
        assert {"rescale": "none", "length": 512, "protocol": "prefix"}.items() <= cost.items()
        assert f"The 8-bit cache adds at most {difference:+.4f} nats" in listing.results(folder)
