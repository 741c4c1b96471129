"""Results that several calls write into one folder: no target counts twice, and every length has the same."""

from __future__ import annotations

import json
import os
import shutil

import pandas as pd
import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from pe_study.checkpoints import Checkpoint
from pe_study.evaluators import cells, evaluation, summary
from pe_study.evaluators.study import evaluate
from pe_study.evaluators.subjects import _files_hash, checkpoint_subject
from pe_study.evaluators.windows import LATE
from pe_study.plan import load_plan
from pe_study.rows import make_rows, read_rows
from pe_study.text.tokenization import byte_tokenizer


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> str:
    folder = tmp_path_factory.mktemp("llama")
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = LlamaConfig(vocab_size=257, max_position_embeddings=16, **sizes)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def text(tmp_path_factory) -> str:
    path = tmp_path_factory.mktemp("text") / "a.txt"
    path.write_text("a line of words, and some more of them. " * 10, encoding="utf-8")
    return str(path)


@pytest.fixture
def run(source, text, tmp_path):
    """Evaluates into one folder; the rows that lie there afterwards."""

    def evaluate_into(**keys) -> pd.DataFrame:
        plan = {"lengths": [16], "unit": "stream", "corpus": text, "truncation": False, **keys}
        return read_rows(evaluate(source, load_plan(plan), runs_root=tmp_path, output=tmp_path / "out"))

    return evaluate_into


def targets(frame: pd.DataFrame) -> dict:
    """Targets by protocol and length, without those that only a decomposition needs."""
    asked = frame[frame["protocol"] != LATE]
    return asked.groupby(["protocol", "length"])["num_tokens"].sum().to_dict()


def test_a_longer_length_later_leaves_one_draw_of_targets(run):
    """Case 11: exact-context draws behind the longest length, so what was drawn for a shorter one must go."""
    run(lengths=[16, 32], protocols=["exact-context", "nonoverlapping"])
    frame = run(lengths=[16, 64], protocols=["exact-context", "nonoverlapping"])
    assert targets(frame) == {
        ("exact-context", 16): 64,
        ("exact-context", 64): 64,
        ("nonoverlapping", 16): 399,
        ("nonoverlapping", 32): 399,
        ("nonoverlapping", 64): 399,
    }


def test_other_numbers_of_targets_replace_each_other(run):
    draws = [{"name": "exact-context", "num_targets": count} for count in (10, 20)]
    run(protocols=draws[:1])
    assert targets(run(protocols=draws[1:])) == {("exact-context", 16): 20}
    kept = {("exact-context", 16): 20, ("prefix", 16): 16}
    assert targets(run(protocols=["prefix"])) == kept, "of a protocol that is not asked for, the latest draw"


def test_what_leaves_the_results_is_named(run, caplog):
    """Another choice of documents cannot stand in one table with them; the cells stay and come back."""
    run(protocols=["nonoverlapping"], unit="document")
    run(protocols=["nonoverlapping"], unit="document", lengths=[16, 32])
    assert "make room" not in caplog.text
    run(protocols=["prefix"], tokens_per_document=32)
    assert "(nonoverlapping) lay there, of other documents" in caplog.text
    assert "--output FOLDER keeps both" in caplog.text
    frame = run(protocols=["nonoverlapping"], unit="document")
    assert set(frame["protocol"]) == {"nonoverlapping"}
    assert set(frame["length"]) == {16, 32}


def test_another_longest_length_measures_only_what_it_changes(run, monkeypatch):
    """The longest length decides the targets of sampled protocols; others are what they were."""
    protocols = ["exact-context", "nonoverlapping"]
    run(lengths=[16, 32], protocols=protocols)
    measured = []
    plain = evaluation.measure_together
    monkeypatch.setattr(
        evaluation, "measure_together", lambda jobs, *rest: measured.extend(jobs) or plain(jobs, *rest)
    )
    run(lengths=[16, 64], protocols=protocols)
    assert [(job.protocol.name, job.length) for job in measured] == [
        ("exact-context", 16),
        ("exact-context", 64),
        ("nonoverlapping", 64),
        (LATE, 16),
        (LATE, 64),
    ]


def test_what_lies_beside_the_weights_is_not_the_model(source, tmp_path):
    """Results that are written into the folder of a checkpoint do not make it another one."""
    shutil.copytree(source, tmp_path / "model")
    before = checkpoint_subject(str(tmp_path / "model"), {}).fingerprint
    (tmp_path / "model" / "runs").mkdir()
    assert checkpoint_subject(str(tmp_path / "model"), {}).fingerprint == before
    os.utime(tmp_path / "model" / "model.safetensors", (0, 0))
    assert checkpoint_subject(str(tmp_path / "model"), {}).fingerprint != before
    for name in ("a.gguf", "b.gguf"):
        (tmp_path / name).write_bytes(b"GGUF")
    checkpoints = [
        Checkpoint(name, str(tmp_path), "float32", {"gguf_file": name}) for name in ("a.gguf", "b.gguf")
    ]
    for checkpoint in checkpoints:
        checkpoint.__dict__["config"] = LlamaConfig()
    first, second = map(_files_hash, checkpoints)
    (tmp_path / "b.gguf").write_bytes(b"GGUF, longer")
    assert (_files_hash(checkpoints[0]) == first) and (_files_hash(checkpoints[1]) != second)


def test_a_changed_file_of_factors_is_measured_again(run, tmp_path):
    file = tmp_path / "factors.json"
    sums = []
    for factor in (1.0, 4.0):
        file.write_text(json.dumps({"short_factor": [1.0] * 4, "long_factor": [factor] * 4}))
        frame = run(lengths=[64], rescales=[f"longrope:{file}"])
        assert frame["num_tokens"].sum() == 399
        sums.append(frame["nll_sum"].sum())
    assert sums[0] != sums[1]


def test_two_strides_are_two_protocols_in_the_summary():
    row = {"run": "r", "rescale": "none", "length": 64, "protocol": "sliding", "num_tokens": 10}
    row |= {"num_windows": 1, "num_skipped": 0, "status": "ok"}
    frame = make_rows([{**row, "stride": 1, "nll_sum": 10.0}, {**row, "stride": 64, "nll_sum": 30.0}])
    config, notes = {"plan": {"aggregation": "token"}}, {"documents": {"total": 1, "kept": 1}}
    both = summary.results(frame, config, notes)["results"]
    assert {task: cell["nll_64,none"] for task, cell in both.items()} == {
        "r/none/sliding_1": 1.0,
        "r/none/sliding_64": 3.0,
    }
    assert set(summary.results(frame[:1], config, notes)["results"]) == {"r/none/sliding"}


def test_a_setting_tells_places_from_draws():
    protocol = {"name": "sliding", "stride": 2, "num_targets": None, "anchors": None, "seed": 0}
    key = {"text": "t", "dtype": "float32", "kernel": "auto", "version": 1, "longest": 8, "length": 4}
    key |= {"fingerprint": "f", "identity": {"run": "r"}, "rescale": "none", "protocol": protocol}
    one, other = cells.setting({**key, "longest": None}), cells.setting({**key, "longest": 16})
    assert one.draw is None
    assert other.place == one.place and other.draw is not None
    assert cells.setting({**key, "protocol": {**protocol, "stride": 4}}).place != one.place
    sampled = {**key, "protocol": {**protocol, "name": "exact-context", "stride": None, "num_targets": 9}}
    assert cells.setting(sampled).draw == (8, 9, None, 0)
