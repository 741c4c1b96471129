"""Controls, rescues and diagnostics through `evaluate`: rows, files, what is refused and what is kept."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from tiny import tiny_recipe

from pe_study import rows
from pe_study.commands import flags, listing
from pe_study.errors import PlanError, RescaleError
from pe_study.evaluators import diagnostics, evaluation
from pe_study.evaluators.study import evaluate
from pe_study.plan import load_plan
from pe_study.reporting import findings
from pe_study.train import train_study

PLAN = {
    "name": "probes",
    "lengths": ["1x", "2x"],
    "protocols": ["prefix"],
    "rescales": ["none", "linear:auto", "yarn:auto"],
    "num_documents": 3,
    "truncation": False,
    "attention_window": "0.5x",
    "shuffle_positions": True,
    "diagnostics": True,
    "diagnostics_step": 3,
}
CONTROLS = {"none", "attention_window=8", "shuffle_positions"}


@pytest.fixture(scope="module")
def study(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("study")
    train_study(tiny_recipe(folder, "train.steps=2", encodings=("rope", "alibi")), folder / "runs")
    return folder / "runs"


@pytest.fixture(scope="module")
def results(study) -> Path:
    return evaluate("tiny", load_plan(PLAN), runs_root=study)


def test_each_model_runs_the_rescales_it_knows_under_each_control(results) -> None:
    frame = rows.read_rows(results)
    assert set(frame["status"]) == {"ok"}
    assert set(frame["control"]) == CONTROLS
    found = {label: set(part["rescale"]) for label, part in frame.groupby("label")}
    assert found == {"rope": {"none", "linear:auto", "yarn:auto"}, "alibi": {"none", "linear:auto"}}
    linear = frame[(frame["label"] == "alibi") & (frame["rescale"] == "linear:auto")]
    assert linear.groupby("length")["factor"].unique().map(list).to_dict() == {16: [1.0], 32: [2.0]}
    sums = frame.groupby(["label", "rescale", "length", "control"])["nll_sum"].sum().unstack()
    at_1x = sums.xs(16, level="length")
    assert (at_1x["none"] != at_1x["attention_window=8"]).all()
    assert (at_1x["none"] != at_1x["shuffle_positions"]).all()
    assert at_1x.loc[("alibi", "none"), "none"] == at_1x.loc[("alibi", "linear:auto"), "none"]


def test_a_printed_line_is_plain_or_of_one_control(results) -> None:
    """What is printed is what results.json has, where a control is a task of its own; plain lines first."""
    summary = json.loads((results / "results.json").read_text())["results"]
    title, head, *lines = listing.results(results).split("\n")
    assert title == "bits per byte, prefix"
    assert head.split() == ["label", "rescale", "16", "32"]
    printed = [(line.split("  ", 1)[0].strip(), *_told(line)) for line in lines]
    controls = [control for _, _, control, _ in printed]
    assert controls == sorted(controls, key=lambda name: ("", *sorted(CONTROLS - {"none"})).index(name))
    assert set(controls) == {"", *CONTROLS} - {"none"}
    assert len(printed) == len(summary) == 15
    for label, rescale, control, values in printed:
        task = summary[f"{label}-s0/{rescale}/prefix{'_' * bool(control)}{control}"]
        assert values == [f"{task[f'bits_per_byte_{length},none']:.3f}" for length in (16, 32)]


def _told(line: str) -> tuple[str, str, list[str]]:
    """Rescale, control and numbers of a printed line."""
    _, rescale, *control, first, second = line.replace(", ", " ").split()
    return rescale, "".join(control), [first, second]


def test_controls_of_an_earlier_call_stay_on_lines_of_their_own(results, study) -> None:
    """A call without controls prints the plain lines of the one before it."""
    before = listing.results(results)
    plain = load_plan({**PLAN, "attention_window": None, "shuffle_positions": False, "diagnostics": False})
    assert listing.results(evaluate("tiny", plain, runs_root=study)) == before


def test_the_cost_of_an_8_bit_cache_is_that_of_plain_cells() -> None:
    cell = {"run": "r", "rescale": "none", "protocol": "prefix", "length": 512}
    costs = [{**cell, "difference": 0.01}, {**cell, "control": "none", "difference": 0.02}]
    costs.append({**cell, "control": "shuffle_positions", "difference": 0.5})
    assert "at most +0.0200 nats a token over 2 cells" in (findings.cache_sentence(costs) or "")
    assert findings.cache_sentence(costs[2:]) is None


def test_windows_of_one_pass_say_nothing_of_an_8_bit_cache() -> None:
    """They read no quantised key; neither does `truncation` that cuts long contexts to as few tokens."""
    cell = {"run": "r", "rescale": "none", "protocol": "prefix", "difference": 0.9}
    short = [{**cell, "length": 256}, {**cell, "rescale": "truncation", "length": 512, "window": 256}]
    read = [{**cell, "length": 257, "difference": 0.01}, {**cell, "length": 512, "difference": 0.02}]
    told = findings.cache_sentence([*short, *read]) or ""
    assert "at most +0.0200 nats a token over 2 cells" in told and "length 512)" in told
    told = findings.cache_sentence(short) or ""
    assert told.endswith("no window was read through the cache: up to 256 tokens are one pass.")
    assert "adds" not in told


def test_what_lies_within_the_window_is_scored_as_without_it(results) -> None:
    """Own equals controlled where the control hides nothing: the first 8 tokens of a prefix."""
    frame = rows.read_rows(results)
    near = frame[(frame["rescale"] == "none") & (frame["position_hi"] <= 8)]
    keys = ["label", "length", "document", "position_lo"]
    by = near.set_index([*keys, "control"])["nll_sum"].unstack()
    assert (by["none"] - by["attention_window=8"]).abs().max() < 1e-4


def test_diagnostics_lie_beside_the_results(results) -> None:
    frame = rows.read_rows(results, rows.DIAGNOSTICS)
    assert list(frame.columns) == list(rows.DIAGNOSTICS_COLUMNS)
    assert set(frame["status"]) == {"ok"} and set(frame["query_step"]) == {3}
    places = ["label", "rescale", "length", "layer", "head", "position_lo"]
    whole = frame[frame["distance_lo"].isna()]
    assert not whole.duplicated(places).any()
    assert set(whole["layer"]) == {0, 1} and set(whole["head"]) == {0, 1, 2, 3}
    assert whole["max_logit"].notna().all() and whole["mass_beyond"].between(0, 1).all()
    assert (whole[whole["position_hi"] <= 16]["mass_beyond"] == 0).all()
    assert (whole["entropy_ratio"].isna() == (whole["position_lo"] == 1)).all()
    mass = frame[frame["distance_lo"].notna()].groupby(places)["mass"].sum()
    assert len(mass) == len(whole) and (mass - 1).abs().max() < 1e-5
    far = frame[frame["distance_lo"] >= 16].groupby(places)["mass"].sum()
    beyond = whole.set_index(places)["mass_beyond"]
    assert (beyond.reindex(far.index) - far).abs().max() < 1e-5


def test_finished_probes_are_kept_and_plain_cells_keep_their_keys(results, study, monkeypatch) -> None:
    before = rows.read_rows(results, rows.DIAGNOSTICS)
    monkeypatch.setattr(diagnostics, "collect", lambda *_: pytest.fail("measured again"))
    monkeypatch.setattr(evaluation, "measure_together", lambda *_: pytest.fail("measured again"))
    evaluate("tiny", load_plan(PLAN), runs_root=study)
    plain = {
        key: value for key, value in PLAN.items() if not key.startswith(("attention", "shuffle", "diag"))
    }
    evaluate("tiny", load_plan(plain), runs_root=study, only={"encoding": "rope"})
    assert len(rows.read_rows(results, rows.DIAGNOSTICS)) == len(before)


def probed(study, output, plan, **options):
    """Figures of diagnostics by rescale, run and length, as the file of an evaluation holds them."""
    narrow = {**PLAN, "attention_window": None, "shuffle_positions": False, **plan}
    folder = evaluate("tiny", load_plan(narrow), runs_root=study, output=output, **options)
    if not (folder / rows.DIAGNOSTICS).exists():
        return {}
    return rows.read_rows(folder, rows.DIAGNOSTICS).groupby(["rescale", "run", "length"])["max_logit"].sum()


def test_diagnostics_follow_the_file_of_a_rescale(study, tmp_path) -> None:
    file, found = tmp_path / "factors.json", []
    plan = {"rescales": [f"longrope:{file}"], "rescale_all": False}
    for factor in (1.0, 3.0):
        divisors = [factor] * 4
        file.write_text(json.dumps({"short_factor": divisors, "long_factor": divisors}), encoding="utf-8")
        found.append(probed(study, tmp_path / "eval", plan, only={"encoding": "rope"}))
    assert list(found[0].index) == list(found[1].index)
    assert (found[0] != found[1]).all()


def test_diagnostics_of_weights_that_are_gone_go_too(tmp_path) -> None:
    """A run is trained anew with another rate: whatever is evaluated next, the old rows leave the file."""
    runs_root, eval_folder = tmp_path / "runs", tmp_path / "eval"
    plan = {"rescales": ["none"]}
    train_study(tiny_recipe(tmp_path, "train.steps=2", encodings=("rope", "alibi")), runs_root)
    before = probed(runs_root, eval_folder, plan)
    shutil.rmtree(runs_root / "tiny" / "rope-s0")
    again = tiny_recipe(tmp_path, "train.steps=2", "train.lr=0.03", encodings=("rope", "alibi"))
    train_study(again, runs_root, {"encoding": "rope"})
    kept = probed(runs_root, eval_folder, plan | {"diagnostics": False}, only={"encoding": "rope"})
    assert set(kept.index.get_level_values("run")) == {"alibi-s0"}
    after = probed(runs_root, eval_folder, plan, only={"encoding": "rope"})
    assert list(after.index) == list(before.index)
    differs = (after != before).groupby("run").all()
    assert differs.to_dict() == {"alibi-s0": False, "rope-s0": True}


def test_rescales_can_be_kept_to_rope(study, tmp_path) -> None:
    narrow = load_plan({**PLAN, "rescale_all": False, "diagnostics": False})
    cells = evaluate("tiny", narrow, runs_root=study, output=tmp_path, dry_run=True)
    assert {cell["rescale"] for cell in cells if cell["run"].startswith("alibi")} == {"none"}
    assert {cell["control"] for cell in cells} == CONTROLS


def test_rescales_that_no_model_knows_are_refused(study, tmp_path) -> None:
    alone = {"only": {"encoding": "alibi"}, "runs_root": study, "output": tmp_path, "dry_run": True}
    said = r"found yarn:2; accepted: none, linear:S, logn \(alibi-s0 has no rotary positions to rescale\)$"
    with pytest.raises(RescaleError, match=said):
        evaluate("tiny", load_plan({"rescales": ["yarn:2"]}), **alone)
    said = r"found linear:2; accepted: none, with rescale_all true also linear:S, logn \(alibi-s0 has no"
    with pytest.raises(RescaleError, match=said):
        evaluate("tiny", load_plan({"rescales": ["linear:2"], "rescale_all": False}), **alone)
    cells = evaluate("tiny", load_plan({"rescales": ["linear:2", "logn"], "lengths": ["1x"]}), **alone)
    assert {cell["rescale"] for cell in cells} >= {"linear:2", "logn"}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"attention_window": 0}, "plan: attention_window: found 0"),
        ({"attention_window": "near"}, 'plan: attention_window: found the text "near"'),
        ({"shuffle_positions": 1}, "plan: shuffle_positions: found 1"),
        ({"diagnostics_step": "often"}, "plan: diagnostics_step: "),
        ({"diagnostics_documents": 0}, "plan: diagnostics_documents: found 0"),
    ],
)
def test_wrong_keys_are_one_line(change, message) -> None:
    with pytest.raises(PlanError) as refused:
        load_plan(change)
    assert str(refused.value).startswith(message)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("lengths", [["1x", "2x"], ["16B", "32B"]])
def test_a_window_that_holds_every_key_is_refused(lengths, study, tmp_path) -> None:
    """Every cell would be measured twice."""
    plan = {**PLAN, "lengths": lengths, "diagnostics": False}
    longest = 32 if lengths == ["1x", "2x"] else 31
    for window in ("100x", longest):
        said = (
            rf"^attention_window: found \d+ with lengths up to {longest}, .*; accepted: less than {longest}$"
        )
        with pytest.raises(PlanError, match=said):
            evaluate("tiny", load_plan({**plan, "attention_window": window}), runs_root=study, dry_run=True)
    cells = evaluate(
        "tiny", load_plan({**plan, "attention_window": longest - 1}), runs_root=study, dry_run=True
    )
    assert {cell["control"] for cell in cells} >= {f"attention_window={longest - 1}"}


def test_a_bare_switch_says_true() -> None:
    typed = ["eval", "--diagnostics", "runs/demo", "--truncation", "false", "--shuffle-positions"]
    expected = [
        "eval",
        "--diagnostics=true",
        "runs/demo",
        "--truncation",
        "false",
        "--shuffle-positions=true",
    ]
    assert flags.filled(typed) == expected
    assert flags.filled(["eval", "--diagnostics=false"]) == ["eval", "--diagnostics=false"]
