"""The benchmark measures what it says: the same tokens for everybody, ratios within a turn."""

from __future__ import annotations

import json
import math
from dataclasses import replace

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


@pytest.fixture
def without_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch.compile follows the code and runs torch's own kernels: no C++ compiler at work."""
    compile = torch.compile
    monkeypatch.setattr(workloads.torch, "compile", lambda model: compile(model, backend="eager"))


@pytest.mark.usefixtures("without_a_compiler")
def test_compiled_rows_stand_beside_the_others_and_compare_with_them() -> None:
    planned = bench.plan(
        ["rope", "nope"], lengths=[8], phases=["train"], compiled=True, sizes=TINY, batch_tokens=32
    )
    with torch._dynamo.config.patch(recompile_limit=1):  # else the second model would run uncompiled
        result = bench.run(planned, rounds=2)
    plain, _, compiled, _ = result["rows"]
    assert [(row["encoding"], row["compiled"]) for row in result["rows"]] == [
        ("rope", False),
        ("nope", False),
        ("rope", True),
        ("nope", True),
    ]
    assert compiled["ratio_to_rope"]["median"] == pytest.approx(
        compiled["tokens_per_second"] / plain["tokens_per_second"], rel=0.5
    )
    assert compiled["ratio_to_rope"] != {"median": 1.0, "low": 1.0, "high": 1.0}  # not to itself
    assert "peak_memory_bytes" in plain
    assert "peak_memory_bytes" not in compiled  # it would be the compiler's
    assert "| train | 8 | rope, compiled | sdpa |" in bench.markdown(result)


@pytest.mark.usefixtures("without_a_compiler")
def test_a_compiled_step_is_compiled_and_changes_the_weights() -> None:
    workload = replace(_tiny("rope", "train"), compiled=True)
    model = workloads.build(workload)
    before = [parameter.clone() for parameter in model.parameters()]
    torch.compiler.reset()
    counted = torch._dynamo.utils.counters["stats"]
    so_far = counted["unique_graphs"]
    workloads.step_of(workload, model)()
    assert counted["unique_graphs"] > so_far
    assert any(not torch.equal(old, new) for old, new in zip(before, model.parameters(), strict=True))


def test_kernels_compare_with_rope_in_their_own() -> None:
    planned = bench.plan(
        ["rope", "alibi"],
        lengths=[8],
        phases=["eval"],
        kernels=["eager", "sdpa"],
        sizes=TINY,
        batch_tokens=32,
    )
    rows = bench.run(planned, rounds=1, memory=False)["rows"]
    speed = {(row["encoding"], row["kernel"]): row["tokens_per_second"] for row in rows}
    for row in rows:
        expected = row["tokens_per_second"] / speed["rope", row["kernel"]]
        assert row["ratio_to_rope"]["median"] == pytest.approx(expected)


def test_a_peer_that_is_not_installed_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    find = workloads.importlib.util.find_spec
    monkeypatch.setattr(
        workloads.importlib.util, "find_spec", lambda name: None if name == "x_transformers" else find(name)
    )
    planned = bench.plan(["rope"], lengths=[8], phases=["eval"], peers=True, sizes=TINY)
    assert [workload.name for workload in planned] == ["rope", "LlamaForCausalLM"]


def test_without_a_compiler_the_remedy_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(graph: object, inputs: object) -> None:
        raise RuntimeError("No working C++ compiler found")

    compile = torch.compile
    monkeypatch.setattr(workloads.torch, "compile", lambda model: compile(model, backend=fails))
    planned = bench.plan(["rope"], lengths=[8], compiled=True, sizes=TINY, batch_tokens=32)
    with pytest.raises(UsageError, match="install g\\+\\+ or leave out --compile"):
        bench.run(planned, rounds=1, memory=False)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"encodings": ["ropee"]}, 'did you mean "rope"'),
        ({"phases": ["trian"]}, 'did you mean "train"'),
        ({"kernels": ["sdp"]}, 'did you mean "sdpa"'),
        ({"dtype": "float31"}, 'did you mean "float32"'),
        ({"sizes": workloads.Sizes(num_heads=3)}, "must divide"),
        ({"sizes": workloads.Sizes(d_model=15, num_heads=3, num_kv_heads=3)}, "rope in these --sizes"),
    ],
)
def test_what_does_not_exist_is_refused(options: dict, message: str) -> None:
    given = {"encodings": ["rope"], "lengths": [8], **options}
    with pytest.raises(UsageError, match=message):
        bench.plan(given.pop("encodings"), **given)


@pytest.mark.slow
def test_memory_is_measured_in_a_process_of_its_own() -> None:
    """Four times the tokens cannot take less: 16k against 4k symbols of logits a step. What this process
    holds, and the process of the measurement is born with, is no part of either."""
    held = torch.ones(2**30, dtype=torch.uint8)
    small, large = (
        bench.peak_memory(
            workloads.Workload("rope", "train", 64, "auto", n, workloads.Sizes(), "cpu", "float32")
        )
        for n in (4096, 16384)
    )
    assert large > 2 * small > 0
    assert large < held.nbytes
