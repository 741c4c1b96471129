"""Weights kept on the way, and their rows: which steps, which weights, what they had cost."""

from __future__ import annotations

import shutil

import pytest
import safetensors.torch
from tiny import tiny_recipe

from pe_study import kept, recipe, rows, runs
from pe_study.checkpoints import load_causal_lm
from pe_study.errors import PlanError, RecipeError
from pe_study.evaluators.study import evaluate
from pe_study.plan import load_plan
from pe_study.reporting import studies
from pe_study.train import train_study

KEEP = "train.keep_at=[0.125, 0.25, 0.5]"
PLAN = {"name": "test", "lengths": ["1x"], "truncation": False, "num_documents": 2, "over_training": True}


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """The runs of a study of 8 updates that keeps three of them, evaluated over training."""
    folder = tmp_path_factory.mktemp("kept")
    recipe = tiny_recipe(folder, KEEP, encodings=("rope", "learned"))
    train_study(recipe, folder / "runs")
    evaluate("tiny", load_plan(PLAN), runs_root=folder / "runs")
    return folder / "runs"


@pytest.fixture(scope="module")
def found(root):
    return rows.read_rows(root / "tiny" / "eval" / "test", rows.OVER_TRAINING)


def weights(folder):
    return safetensors.torch.load_file(folder / "model.safetensors")


def test_the_weights_of_each_share_are_kept(root):
    assert list(kept.found(root / "tiny" / "rope-s0")) == [1, 2, 4]
    assert kept.steps_of([0.001, 0.5, 0.999], 100) == (1, 50)


def test_they_are_those_that_a_shorter_training_had(root, tmp_path):
    """The loop is the same until then: an unbroken run under a constant rate, stopped at step 4."""
    whole = tiny_recipe(tmp_path, KEEP, "train.schedule=constant", "name=whole")
    train_study(whole, tmp_path / "runs")
    half = tiny_recipe(tmp_path, "train.schedule=constant", "train.steps=4", "name=half")
    train_study(half, tmp_path / "runs")
    on_the_way = weights(kept.folder_of(tmp_path / "runs" / "whole" / "rope-s0", 4))
    final = weights(tmp_path / "runs" / "half" / "rope-s0" / "final")
    assert all((on_the_way[name] == final[name]).all() for name in final)


def test_a_resumed_run_keeps_the_same(root, tmp_path):
    """From the snapshot of step 3, after which only step 4 is kept again."""
    run = tmp_path / "runs" / "tiny" / "rope-s0"
    shutil.copytree(root / "tiny" / "rope-s0", run)
    before = weights(kept.folder_of(run, 4))
    (run / "DONE").unlink()
    shutil.rmtree(run / "snapshots" / "step_00000006")
    shutil.rmtree(kept.folder_of(run, 4))
    recipe = tiny_recipe(root.parent, KEEP, encodings=("rope", "learned"))
    train_study(recipe, tmp_path / "runs", {"encoding": "rope"})
    assert list(kept.found(run)) == [1, 2, 4]
    after = weights(kept.folder_of(run, 4))
    assert all((before[name] == after[name]).all() for name in before)


def test_a_run_that_starts_over_forgets_what_it_kept(root, tmp_path):
    run = tmp_path / "runs" / "tiny" / "rope-s0"
    shutil.copytree(root / "tiny" / "rope-s0", run)
    (run / "DONE").unlink()
    recipe = tiny_recipe(root.parent, "train.keep_at=[0.75]", encodings=("rope", "learned"))
    train_study(recipe, tmp_path / "runs", {"encoding": "rope"}, resume="never")
    assert list(kept.found(run)) == [6]


def test_a_snapshot_resumed_elsewhere_brings_what_was_kept_before_it(root, tmp_path):
    """Weights of steps that are not trained again; those after the snapshot are made anew."""
    source = tmp_path / "source" / "rope-s0"
    shutil.copytree(root / "tiny" / "rope-s0", source)
    run = tmp_path / "runs" / "tiny" / "rope-s0"
    shutil.copytree(source, run)
    (run / "DONE").unlink()
    kept.folder_of(run, 4).rename(kept.folder_of(run, 3))  # of another past
    shares = "train.keep_at=[0.125, 0.25, 0.5, 0.875]"
    recipe = tiny_recipe(root.parent, shares, encodings=("rope", "learned"))
    snapshot = str(source / "snapshots" / "step_00000006")
    train_study(recipe, tmp_path / "runs", {"encoding": "rope"}, resume=snapshot)
    assert list(kept.found(run)) == [1, 2, 4, 7]
    before, after = (weights(kept.folder_of(folder, 4)) for folder in (source, run))
    assert all((before[name] == after[name]).all() for name in before)


def test_keeping_decides_no_weight(tmp_path):
    plain, keeping = tiny_recipe(tmp_path), tiny_recipe(tmp_path, KEEP)
    assert recipe.training_hash(plain, plain.runs()[0]) == recipe.training_hash(keeping, keeping.runs()[0])


@pytest.mark.parametrize("shares", ["[0]", "[1]", "[half]"])
def test_shares_that_are_none_are_refused(tmp_path, shares):
    with pytest.raises(RecipeError, match=r"train\.keep_at\.0: .*a number above 0 and below 1"):
        tiny_recipe(tmp_path, f"train.keep_at={shares}")


def test_every_step_has_rows_at_three_lengths(found):
    assert list(found.columns) == list(rows.OVER_TRAINING_COLUMNS)
    for _, run in found.groupby("run"):
        assert sorted(set(run["step"])) == [1, 2, 4, 8]
        assert set(run.groupby("step")["length"].agg(lambda lengths: tuple(sorted(set(lengths))))) == {
            (16, 32, 128)
        }
        assert (run["trained_tokens"] == 128 * run["step"]).all()
    learned = found[found["label"] == "learned"]  # its table has 64 rows
    assert set(learned[learned["length"] == 128]["status"]) == {"unsupported"}


def test_the_last_step_is_the_finished_run(root, found):
    final = rows.read_rows(root / "tiny" / "eval" / "test")
    assert set(final["run"]) == {"rope-s0", "learned-s0"}
    for label, plain in final.groupby("label"):
        last = found[(found["label"] == label) & (found["step"] == 8) & (found["length"] == 16)]
        # The same model on texts that are cut for other longest lengths: another number, of the same size.
        ours, theirs = (part["nll_sum"].sum() / part["num_tokens"].sum() for part in (last, plain))
        assert ours == pytest.approx(theirs, rel=0.1)


def test_the_rows_are_those_of_the_kept_weights(root, found):
    """Against the model loaded by hand."""
    from pe_study.evaluators.perplexity import evaluate_perplexity
    from pe_study.evaluators.subjects import run_subject
    from pe_study.evaluators.texts import read_text

    run = root / "tiny" / "rope-s0"
    subject = run_subject(run, {})
    text = read_text(subject, load_plan({**PLAN, "lengths": ["8x"]}).resolve(16))
    model, _ = load_causal_lm(kept.folder_of(run, 2), length=32)
    ours = evaluate_perplexity(
        [sequence.ids for sequence in text.without_tails(128)],
        lengths=[32],
        protocol="nonoverlapping",
        model=model,
    )
    theirs = found[(found["label"] == "rope") & (found["step"] == 2) & (found["length"] == 32)]
    assert theirs["nll_sum"].sum() == pytest.approx(ours["nll_sum"].sum(), rel=1e-6)


def test_device_hours_come_from_the_speeds_of_the_log(tmp_path):
    """10 tokens a step: 2 steps at 5 tokens a second, 3 at 10, on two processes."""
    lines = [
        {"step": 2, "tokens": 20, "tokens_per_second": 5.0},
        {"step": 5, "tokens": 50, "tokens_per_second": 10.0},
    ]
    metrics = runs.Metrics(tmp_path)
    for line in lines:
        metrics.append(line)
    metrics.close()
    runs.write_json(tmp_path / "provenance.json", {"num_processes": 2})
    hours = [kept.device_hours(tmp_path, step) for step in (1, 2, 3, 5)]
    assert hours == pytest.approx([seconds * 2 / 3600 for seconds in (2.0, 4.0, 5.0, 7.0)])
    assert kept.device_hours(tmp_path, 6) is None


def test_hours_grow_with_the_steps(found):
    for _, run in found.groupby("run"):
        hours = run.groupby("step")["device_hours"].first()
        assert hours.is_monotonic_increasing
        assert hours.iloc[0] > 0


def test_reports_find_them_apart_from_finished_runs(root):
    [evaluation] = studies.read_study(root / "tiny").evaluations
    assert evaluation.over_training is not None
    assert set(evaluation.over_training["step"]) == {1, 2, 4, 8}
    assert "step" not in evaluation.rows


def test_a_second_call_measures_nothing_and_keeps_runs_not_picked(root, found, monkeypatch):
    from pe_study.evaluators import evaluation

    monkeypatch.setattr(evaluation.Models, "get", lambda *arguments: pytest.fail("measured again"))
    evaluate("tiny", load_plan(PLAN), runs_root=root, only={"encoding": "rope"})
    after = rows.read_rows(root / "tiny" / "eval" / "test", rows.OVER_TRAINING)
    keys = ["run", "step", "length", "document", "position_lo"]
    assert after.sort_values(keys, ignore_index=True).equals(found.sort_values(keys, ignore_index=True))


def test_runs_without_kept_weights_are_refused(tmp_path):
    train_study(tiny_recipe(tmp_path, "train.steps=2"), tmp_path / "runs")
    with pytest.raises(
        PlanError, match=r"rope-s0: no weights were kept on the way\ntrain with train\.keep_at="
    ):
        evaluate("tiny", load_plan(PLAN), runs_root=tmp_path / "runs")
    assert not (tmp_path / "runs" / "tiny" / "eval").exists()
