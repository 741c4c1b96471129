"""The benchmark measures what it says: the same tokens for everybody, ratios within a turn."""

from __future__ import annotations

import json
import math

import pytest
import torch

from pe_study import bench, workloads
from pe_study.errors import UsageError

TINY = workloads.Sizes(num_layers=1, d_model=16, num_heads=2, num_kv_heads=2, d_ff=16, vocab_size=11)


def _tiny(name: str, phase: str) -> workloads.Workload:
    return workloads.Workload(name, phase, 8, "auto", 32, TINY, "cpu", "float32")


def test_rows_count_tokens_and_compare_within_a_turn() -> None:
    planned = bench.plan(["rope", "alibi"], lengths=[8, 16], sizes=TINY, batch_tokens=32)
    result = bench.run(planned, rounds=2, memory=False)
    json.dumps(result, allow_nan=False)
    assert [(row["encoding"], row["phase"], row["length"]) for row in result["rows"]] == [
        (name, phase, length)
        for phase in ("train", "eval")
        for length in (8, 16)
        for name in ("rope", "alibi")
    ]
    for row in result["rows"]:
        assert row["num_tokens"] == 32
        assert row["tokens_per_second"] > 0
        assert 0 < row["matmul_share"] < 1
        spread = row["ratio_to_rope"]
        assert spread["low"] <= spread["median"] <= spread["high"]
    plain = sum(p.numel() for p in workloads.build(_tiny("nope", "eval")).parameters())
    assert {row["num_parameters"] for row in result["rows"]} == {plain}  # rope and alibi add none
    assert result["rows"][0]["ratio_to_rope"] == {"median": 1.0, "low": 1.0, "high": 1.0}
    assert "| train | 8 | alibi |" in bench.markdown(result)


def test_llama_does_the_same_work() -> None:
    """The peer has our decoder's parameters and sees the same ids and targets."""
    ours, llama = (
        workloads.Workload(name, "train", 8, "auto", 32, TINY, "cpu", "float32")
        for name in ("nope", "LlamaForCausalLM")
    )
    counts = [sum(p.numel() for p in workloads.build(w).parameters()) for w in (ours, llama)]
    assert counts[0] == counts[1]
    uniform = workloads.build(llama)
    torch.nn.init.zeros_(uniform.get_input_embeddings().weight)
    ids = torch.zeros(2, 8, dtype=torch.int64)
    assert workloads._loss(llama, uniform, ids, ids).item() == pytest.approx(math.log(11))


def test_a_training_step_changes_the_weights_and_an_evaluation_does_not() -> None:
    for phase, changes in (("train", True), ("eval", False)):
        workload = _tiny("rope", phase)
        model = workloads.build(workload)
        before = {name: parameter.clone() for name, parameter in model.named_parameters()}
        workloads.step_of(workload, model)()
        changed = any(not torch.equal(before[n], p) for n, p in model.named_parameters())
        assert changed is changes


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"encodings": ["ropee"]}, 'did you mean "rope"'),
        ({"phases": ["trian"]}, 'did you mean "train"'),
        ({"kernels": ["sdp"]}, 'did you mean "sdpa"'),
        ({"dtype": "float31"}, 'did you mean "float32"'),
        ({"sizes": workloads.Sizes(num_heads=3)}, "must divide"),
    ],
)
def test_what_does_not_exist_is_refused(options: dict, message: str) -> None:
    given = {"encodings": ["rope"], "lengths": [8], **options}
    with pytest.raises(UsageError, match=message):
        bench.plan(given.pop("encodings"), **given)


@pytest.mark.slow
def test_memory_is_measured_in_a_process_of_its_own() -> None:
    """Four times the tokens cannot take less: 16k against 4k symbols of logits a step."""
    small, large = (
        bench.peak_memory(
            workloads.Workload("rope", "train", 64, "auto", n, workloads.Sizes(), "cpu", "float32")
        )
        for n in (4096, 16384)
    )
    assert large > small > 0
