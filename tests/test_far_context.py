"""The control far_context: constructed models with known answers, what is replaced, what is refused."""

from __future__ import annotations

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from tiny import tiny_recipe

from pe_study import rows
from pe_study.errors import PlanError
from pe_study.evaluators import far_context, windows
from pe_study.evaluators.jobs import Job, read_documents
from pe_study.evaluators.perplexity import measure
from pe_study.evaluators.reading import Reading
from pe_study.evaluators.study import evaluate
from pe_study.plan import load_plan
from pe_study.train import train_study

PERIOD, TRAINED, LENGTH = 12, 8, 32
VOCABULARY = 2 * PERIOD
CONTROLS = ("far_context=other-document", "far_context=shuffled")


def documents() -> list[np.ndarray]:
    """Two that repeat themselves every 12 tokens, and share no token."""
    return [np.arange(100) % PERIOD, PERIOD + np.arange(90) % PERIOD]


def copying(distance: int, share: float = 0.9):
    """A model that gives the token `distance` inputs before the target the probability `share`."""

    def model(ids_BT):
        odds = math.log(share * (VOCABULARY - 1) / (1 - share))
        shifted = torch.roll(ids_BT, distance - 1, dims=1)
        return SimpleNamespace(logits=odds * torch.nn.functional.one_hot(shifted, VOCABULARY).float())

    return model


def loss(model, control: str | None, protocol: str = "exact-context", **options) -> tuple[float, int]:
    spec = windows.protocol(protocol, **options)
    job = Job.build(read_documents(documents(), None), spec, LENGTH, longest=LENGTH)
    if control:
        job = far_context.replaced(job, control, TRAINED)
    found, reason = measure(job, lambda length: model, Reading())
    assert reason is None
    return math.fsum(row["nll_sum"] for row in found), sum(row["num_tokens"] for row in found)


def window_of(size: int):
    """A model whose logits depend on the last `size` inputs, by fixed random numbers."""
    table = torch.from_numpy(np.random.default_rng(0).normal(size=(size, VOCABULARY, VOCABULARY)))

    def model(ids_BT):
        rolled = [torch.roll(ids_BT, back, dims=1) for back in range(size)]
        return SimpleNamespace(logits=sum(table[back][ids] for back, ids in enumerate(rolled)))

    return model


@pytest.mark.parametrize("control", CONTROLS)
@pytest.mark.parametrize("protocol", ["exact-context", "fixed-target"])
def test_a_model_that_sees_the_training_length_alone_cannot_tell(control, protocol):
    """Bit for bit: what it reads is the same."""
    options = {"num_targets": 5} if protocol == "fixed-target" else {}
    model = window_of(TRAINED)
    assert loss(model, control, protocol, **options) == loss(model, None, protocol, **options)


@pytest.mark.parametrize("protocol", ["exact-context", "fixed-target"])
def test_a_model_that_sees_one_more_can_tell(protocol):
    """The border is exact: the ninth input before a first target is the first that is replaced."""
    model, options = window_of(TRAINED + 1), {"num_targets": 1}
    assert loss(model, CONTROLS[0], protocol, **options) != loss(model, None, protocol, **options)


@pytest.mark.parametrize("protocol", ["exact-context", "fixed-target"])
def test_a_model_that_copies_from_afar_loses_the_known_amount(protocol):
    """Own: -ln p. Another document, which has none of the tokens: -ln((1 - p) / (V - 1))."""
    options = {"num_targets": 3, "anchors": 2} if protocol == "fixed-target" else {}
    own, tokens = loss(copying(PERIOD), None, protocol, **options)
    other, _ = loss(copying(PERIOD), CONTROLS[0], protocol, **options)
    assert own / tokens == pytest.approx(-math.log(0.9), rel=1e-6)
    assert (other - own) / tokens == pytest.approx(math.log(0.9 * (VOCABULARY - 1) / 0.1), rel=1e-6)


def jobs(control: str, protocol: str = "exact-context", bos: int | None = None, **options) -> tuple[Job, Job]:
    spec = windows.protocol(protocol, **options)
    own = Job.build(read_documents(documents(), bos), spec, LENGTH, longest=LENGTH)
    return own, far_context.replaced(own, control, TRAINED)


@pytest.mark.parametrize("bos", [None, 0])
@pytest.mark.parametrize("control", CONTROLS)
def test_only_far_inputs_change(control, bos):
    own, changed = jobs(control, bos=bos)
    for indices in own.batches(LENGTH):
        (ids, targets), (other, same) = own.inputs(indices), changed.inputs(indices)
        assert (targets == same).all()
        assert (ids[:, -TRAINED:] == other[:, -TRAINED:]).all()
        assert (ids[:, :-TRAINED] != other[:, :-TRAINED]).any()
        begin = int(bos is not None)
        assert (ids[:, :begin] == other[:, :begin]).all()
        far, replaced = ids[0, begin:-TRAINED], other[0, begin:-TRAINED]
        if control.endswith("shuffled"):
            assert sorted(far) == sorted(replaced)
        else:
            assert not set(far) & set(replaced)
            assert (np.diff(replaced) % PERIOD == 1).all()
        assert (changed.inputs(indices)[0] == other).all()


def test_the_others_do_not_depend_on_how_many_are_read_at_once():
    _, changed = jobs(CONTROLS[0])
    together = np.concatenate([changed.inputs(indices)[0] for indices in changed.batches(1 << 20)])
    alone = np.concatenate([changed.inputs(np.array([index]))[0] for index in range(len(changed.start))])
    assert (together == alone).all()


def plan_of(**keys):
    return load_plan({"lengths": [8, 32], "protocols": ["exact-context"], "far_context": "shuffled", **keys})


@pytest.mark.parametrize(
    ("keys", "trained", "said"),
    [
        ({}, None, "its training length is unknown; accepted: own"),
        ({}, 32, "found lengths up to 32; accepted: 33 or more"),
        (
            {"protocols": ["prefix", "nonoverlapping"]},
            8,
            "found protocols prefix, nonoverlapping; accepted: exact",
        ),
        ({"protocols": [{"name": "fixed-target", "num_targets": 6}]}, 30, "accepted: 36 or more"),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(keys, trained, said):
    with pytest.raises(PlanError, match=said) as refused:
        far_context.check(plan_of(**keys).resolve(trained), "m", trained)
    assert "\n" not in str(refused.value)
    far_context.check(plan_of(**keys, far_context="own").resolve(trained), "m", trained)


def test_one_document_has_no_other():
    plan = plan_of(far_context=["own", "other-document"])
    assert far_context.asked(plan) == ("far_context=other-document",)
    twice = read_documents([np.arange(40), np.arange(40)], None)
    with pytest.raises(PlanError, match="found one document; accepted for other-document: two or more"):
        far_context.check_documents(plan, twice)
    far_context.check_documents(plan, read_documents([np.arange(40), np.arange(41)], None))


def test_a_word_that_is_none_is_refused():
    with pytest.raises(PlanError, match=r'far_context.0: .*did you mean "other-document"'):
        plan_of(far_context="other-documents")


def test_an_evaluation_keeps_its_plain_rows_and_adds_those_of_controls(tmp_path):
    """`own` measures nothing anew: the same cells as without the key, found finished."""
    train_study(tiny_recipe(tmp_path, "train.steps=2"), tmp_path / "runs")
    keys = {"name": "test", "lengths": ["1x", "2x"], "protocols": ["exact-context"], "truncation": False}
    folder = evaluate("tiny", load_plan(keys), runs_root=tmp_path / "runs")
    plain, cells = rows.read_rows(folder), {path.name for path in folder.glob("cells/*.json")}
    evaluate("tiny", load_plan({**keys, "far_context": "own"}), runs_root=tmp_path / "runs")
    assert {path.name for path in folder.glob("cells/*.json")} == cells
    controls = ["own", "other-document", "shuffled"]
    evaluate("tiny", load_plan({**keys, "far_context": controls}), runs_root=tmp_path / "runs")
    found = rows.read_rows(folder)
    assert found[found["control"] == "none"].reset_index(drop=True).equals(plain)
    assert set(found["control"]) == {"none", *CONTROLS}
    assert set(found[found["control"] != "none"]["length"]) == {32}
    assert found.groupby("control")["num_tokens"].sum().nunique() == 2  # 1x and 2x, and 2x alone
