"""pe-study tune: which trials, judged at which length, what is chosen and said, who takes it over."""

from __future__ import annotations

import json
import re
import shutil

import pytest
from tiny import tiny_recipe

from pe_study import chosen_rates, cli, recipe, runs, tune
from pe_study.commands import rates_table
from pe_study.errors import Interrupted, NonFiniteLossError, RecipeError, UsageError
from pe_study.model import PEStudyForCausalLM
from pe_study.train import train_study
from pe_study.training import tuning
from pe_study.training.schedules import total_learning_rate
from pe_study.training.stopping import StopRequest


def recipe_in(folder, *overrides):
    return tiny_recipe(
        folder, "train.steps=5", "train.snapshot_every=null", *overrides, encodings=("t5", "rope")
    )


@pytest.fixture(scope="module")
def tuned(tmp_path_factory):
    """The folder of runs after tuning, what tune returned, and the lengths that any model read."""
    folder, lengths = tmp_path_factory.mktemp("tune"), set()
    forward = PEStudyForCausalLM.forward

    def recording(self, input_ids=None, **options):
        lengths.add(input_ids.shape[1])
        return forward(self, input_ids=input_ids, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PEStudyForCausalLM, "forward", recording)
        result = tune.tune(recipe_in(folder), folder / "runs")
    return folder, result, lengths


def test_no_model_reads_more_than_the_training_length(tuned):
    """The claim of tuning: nothing past it decides."""
    assert tuned[2] == {16}


def test_trials_are_rates_times_multipliers_of_position_parameters(tuned):
    """rope has none; for t5 `auto` is not 1, so both are tried. A fifth of the updates."""
    folder, result, _ = tuned
    keys = ("label", "factor", "lr", "lr_mult", "multiplier")
    trials = [tuple(trial[key] for key in keys) for trial in result["trials"]]
    rates = {0.5: 0.0015, 1.0: 0.003, 2.0: 0.006}
    expected = [
        ("t5", factor, lr, *mult) for factor, lr in rates.items() for mult in ((1.0, 1.0), ("auto", 30.0))
    ]
    assert trials == expected + [("rope", factor, lr, "auto", None) for factor, lr in rates.items()]
    assert result["steps"] == 1
    for trial in result["trials"]:
        done = runs.read_json(folder / "runs" / "tiny" / trial["run"] / "DONE")
        assert done["val_loss"] == trial["val_loss"]
        assert done["step"] == 1


LONG = ("train.steps=1000", "train.warmup_steps=0", "train.schedule=constant")
"""With lr r, `auto` of t5 is 15 / 1000 r in the whole training and 15 / 200 r in its trials."""


def multipliers(grid):
    """`lr_mult` of each trial as its optimizer gets it, whatever the recipe says."""
    for run in grid.runs():
        encoding = recipe.build_encoding(grid, run.encoding, "")
        total = total_learning_rate(grid.train.at(run.encoding))
        yield encoding.auto_lr_mult(total) if run.encoding.lr_mult == "auto" else run.encoding.lr_mult


def test_a_trial_has_the_multiplier_of_the_whole_training(tmp_path):
    """`auto` of the shorter schedule would be 10, 5 and 2.5 times what the recipe trains with."""
    full = recipe_in(tmp_path, *LONG, "encodings=[t5]")
    found = list(tune.trials(full))
    autos = [each.multiplier for each in found if each.lr_mult == "auto"]
    assert autos == pytest.approx([10.0, 5.0, 2.5])
    assert list(multipliers(tune.trial_recipe(full))) == [each.multiplier for each in found]
    assert [each.encoding.label for each in found][1] == "t5@0.5x-mult-10.0"


def test_one_multiplier_is_not_tried_twice(tmp_path):
    """At 0.01, 0.02 and 0.04 `auto` of the whole training is 1.5, 1 and 1; in trials 7.5, 3.75, 1.9."""
    full = recipe_in(tmp_path, *LONG, "train.lr=0.02", "encodings=[t5]")
    found = [(each.factor, each.lr_mult, each.multiplier) for each in tune.trials(full)]
    half = [(0.5, 1.0, 1.0), (0.5, "auto", pytest.approx(1.5))]
    assert found == [*half, (1.0, "auto", 1.0), (2.0, "auto", 1.0)]
    assert list(multipliers(tune.trial_recipe(full)))[2:] == [1.0, 1.0]


def test_the_number_of_the_chosen_trial_is_trained(tmp_path):
    """The recipe, its hash and the optimizer hold the number that the trial had, not a word."""
    full = recipe_in(tmp_path, *LONG, "encodings=[t5]")
    best = next(each for each in tune.trials(full) if each.factor == 2 and each.lr_mult == "auto")
    chosen = trial(2.0, 2.0) | {"lr": best.encoding.lr, "multiplier": best.multiplier}
    chosen["encoding"] = tuning.encoding_of(full.encodings[0])
    result = {"lr": 3e-3, "conditions": tuning.conditions(full), "chosen": {"t5": tuning.choose([chosen])}}
    file = tmp_path / "runs" / "tiny" / "tune" / "tune.json"
    file.parent.mkdir(parents=True)
    runs.write_json(file, result)
    asking = recipe_in(tmp_path, *LONG, "encodings=[t5]", "train.lr=tuned")
    resolved = tuning.resolve(asking, tmp_path / "runs").encodings[0]
    assert (resolved.lr, resolved.lr_mult) == (0.006, pytest.approx(2.5))
    assert chosen_rates.table(result | {"trials": [chosen]})[0]["lr_mult"] == "auto (2.5)"
    del result["chosen"]["t5"]["multiplier"]
    runs.write_json(file, result)
    with pytest.raises(RecipeError, match=r"older version holds no number for lr_mult of t5\nrun: pe-study"):
        tuning.resolve(asking, tmp_path / "runs")


def test_the_lowest_loss_is_chosen(tuned):
    for label, chosen in tuned[1]["chosen"].items():
        losses = [trial["val_loss"] for trial in tuned[1]["trials"] if trial["label"] == label]
        assert chosen["val_loss"] == min(losses)


def test_the_results_lie_in_the_study_as_strict_json_and_a_table(tuned):
    folder, result, _ = tuned
    written = folder / "runs" / "tiny" / "tune"
    assert json.loads((written / "tune.json").read_text(), parse_constant=pytest.fail) == result
    assert "| rope |" in (written / "tune.md").read_text()
    assert list((folder / "runs").glob("tiny/*/DONE")) == []  # no run of the study itself


def test_finished_trials_are_not_redone(tuned, monkeypatch):
    folder, result, _ = tuned
    monkeypatch.setattr(tune, "train_study", lambda *args, **keys: pytest.fail("trained again"))
    assert tune.tune(recipe_in(folder), folder / "runs")["chosen"] == result["chosen"]


def test_how_fast_trials_were_computed_makes_no_others(tuned, monkeypatch):
    """As little as it changes the conditions of a choice."""
    folder, result, _ = tuned
    monkeypatch.setattr(tune, "train_study", lambda *args, **keys: pytest.fail("trained again"))
    quick = recipe_in(folder, "train.micro_batch_tokens=16", "train.kernel=eager")
    assert tune.tune(quick, folder / "runs")["chosen"] == result["chosen"]


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["train.batch_tokens=32"], r"train\.batch_tokens: 128 -> 32"),
        (["train.steps=10"], r"train\.steps: 5 -> 10"),  # as the recipe says, not as a trial does
        (["encodings.1.base=500"], r"encoding\.base: 10000\.0 -> 500\.0"),
        (["train.batch_tokens=32", "train.lr=4e-3"], r"train\.batch_tokens: 128 -> 32"),
    ],
)
def test_other_conditions_are_refused_before_any_work(tuned, monkeypatch, overrides, said):
    """In one line that names the folder of them all, what changed and two ways on."""
    folder = tuned[0]
    monkeypatch.setattr(tune, "train_study", lambda *args, **keys: pytest.fail("trained"))
    with pytest.raises(UsageError) as refused:
        tune.tune(recipe_in(folder, *overrides), folder / "runs")
    assert re.fullmatch(
        rf"\S*/runs/tiny/tune: tuned under other conditions \({said}\); delete this folder, or choose "
        r"another name, such as name=tiny-2",
        str(refused.value),
    )


def test_both_ways_on_lead_on(tmp_path):
    """From a recipe that says `tuned` under other conditions to one that trains."""
    more = ("encodings=[rope]", "train.steps=5")
    tune.tune(recipe_in(tmp_path, *more), tmp_path / "runs")
    changed = (*more, "train.batch_tokens=32")
    with pytest.raises(RecipeError, match="delete"):
        tuning.resolve(recipe_in(tmp_path, *changed, "train.lr=tuned"), tmp_path / "runs")
    named = tune.tune(recipe_in(tmp_path, *changed, "name=tiny-2"), tmp_path / "runs")
    shutil.rmtree(tmp_path / "runs" / "tiny" / "tune")
    anew = tune.tune(recipe_in(tmp_path, *changed), tmp_path / "runs")
    assert anew["chosen"] == named["chosen"]
    for rate in ("tuned", "tuned:tiny-2"):
        asking = recipe_in(tmp_path, *changed, f"train.lr={rate}")
        resolved = tuning.resolve(asking, tmp_path / "runs")
        assert resolved.encodings[0].lr == anew["chosen"]["rope"]["lr"]


def test_another_common_rate_goes_on(tmp_path, monkeypatch):
    """Trials at new rates get folders of their own, those at rates that were tried serve again, and back."""
    trained = []

    def train(grid, root, **options):
        trained.extend(run.run_id for run in grid.runs())
        return train_study(grid, root, **options)

    monkeypatch.setattr(tune, "train_study", train)
    first = recipe_in(tmp_path, *LONG, "encodings=[t5]", "train.steps=100")
    result = tune.tune(first, tmp_path / "runs")
    folder = tmp_path / "runs" / "tiny" / "tune"
    before = {path: path.read_bytes() for path in folder.glob("*/DONE")}
    del trained[:]
    other = tune.tune(
        recipe_in(tmp_path, *LONG, "encodings=[t5]", "train.steps=100", "train.lr=6e-3"), tmp_path / "runs"
    )
    assert trained == ["t5@0.012-mult-1-s0", "t5@2x-mult-12.5-s0"]
    assert {path: path.read_bytes() for path in before} == before
    rates = [(each["lr"], each["run"]) for each in other["trials"]]
    assert rates[:2] == [(0.003, "tune/t5@1x-mult-1.0-s0"), (0.003, "tune/t5@1x-mult-auto-s0")]
    losses = {(each["lr"], each["lr_mult"]): each["val_loss"] for each in result["trials"]}
    for each in other["trials"][:4]:
        assert each["val_loss"] == losses[each["lr"], each["lr_mult"]]
    assert json.loads((folder / "tune.json").read_text())["lr"] == 6e-3
    del trained[:]
    assert tune.tune(first, tmp_path / "runs")["chosen"] == result["chosen"]
    assert trained == []


def test_a_stopped_tuning_goes_on(tuned, tmp_path):
    """Only what is missing is trained, and the choice is that of an unbroken one."""
    stop = StopRequest()
    stop.requested = "SIGTERM"
    with pytest.raises(Interrupted):
        tune.tune(recipe_in(tmp_path), tmp_path / "runs", stop=stop)
    assert not (tmp_path / "runs" / "tiny" / "tune" / "tune.json").exists()
    assert tune.tune(recipe_in(tmp_path), tmp_path / "runs")["chosen"] == tuned[1]["chosen"]


def test_a_tuned_recipe_trains_with_the_numbers(tuned):
    """Recipe, hash and provenance of the runs hold the resolved rates; so does a study of another name."""
    folder, result, _ = tuned
    loaded = recipe_in(folder, "train.lr=tuned:tiny", "name=other")
    train_study(loaded, folder / "runs", {"encoding": "t5"})
    run, chosen = folder / "runs" / "other" / "t5-s0", result["chosen"]["t5"]
    written = recipe.load(run / "recipe.yaml")
    assert (written.train.lr, written.encodings[0].lr_mult) == (chosen["lr"], chosen["multiplier"])
    mult = f"encodings.0.lr_mult={chosen['multiplier']}"
    plain = recipe_in(folder, f"train.lr={chosen['lr']}", mult, "name=other")
    values = recipe.training_values(plain, plain.runs()[0])
    assert runs.read_json(run / "provenance.json")["training"] == values
    assert runs.read_json(run / "DONE")["training_hash"] == recipe.training_hash(plain, plain.runs()[0])
    assert train_study(loaded, folder / "runs", {"encoding": "t5"})[0].status == "skipped"


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (
            ["name=new", "train.lr=tuned"],
            r"tune\.json is not there\nfirst run: pe-study tune .*NUMBER name=new --runs \S*/runs$",
        ),
        (
            ["train.lr=tuned:none", "encodings=[t5, nope]"],
            r"first run: .*tiny.yaml .* 'encodings=\[t5, nope\]' train.lr=NUMBER name=none --runs \S*/runs$",
        ),
        (
            ["train.lr=tuned", "model.d_ff=64"],
            r"other conditions \(model.d_ff: 48 -> 64\)\ndelete \S*/runs/tiny/tune or choose another name= "
            r"\(train.lr=tuned:NAME takes it\), then run: pe-study tune .* model.d_ff=64 train.lr=NUMBER",
        ),
        (["train.lr=tuned", "encodings=[alibi]"], r"does not hold alibi\nrun: pe-study tune"),
        (
            ["train.lr=tuned", "encodings.1.base=500"],
            r"holds rope with other options\ndelete \S*/tune or choose",
        ),
        (["train.lr=tuned", "encodings.0.lr_mult=7"], r"holds t5 with another lr_mult\nrun"),
    ],
)
def test_what_was_not_tuned_names_the_command(tuned, overrides, said):
    with pytest.raises(RecipeError, match=said):
        train_study(recipe_in(tuned[0], *overrides), tuned[0] / "runs")


def test_rates_that_are_none_are_refused(tmp_path):
    with pytest.raises(RecipeError, match=r"train\.lr: .*a number above 0, tuned, or tuned:STUDY"):
        recipe_in(tmp_path, "train.lr=best")
    with pytest.raises(RecipeError, match="accepted for tune: a number"):
        tune.tune(recipe_in(tmp_path, "train.lr=tuned"), tmp_path / "runs")


def test_the_command_holds_for_the_default_folder_too(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(RecipeError, match=r"first run: .*train.snapshot_every=null train.lr=NUMBER$"):
        tuning.resolve(recipe_in(tmp_path, "train.lr=tuned"), "runs")


def test_a_rate_by_hand_is_not_overruled(tmp_path):
    """Beside `tuned` it is refused; `tune` tries other rates around it and says so."""
    with pytest.raises(RecipeError, match=r"encodings\.1\.lr: found 0\.01; accepted: null, .* is tuned"):
        recipe_in(tmp_path, "train.lr=tuned", "encodings.1.lr=0.01")
    by_hand = recipe_in(tmp_path, "encodings.1.lr=0.01")
    assert [each.encoding.lr for each in tune.trials(by_hand) if each.label == "rope"] == [0.005, 0.01, 0.02]
    said = tuning.choose([trial(0.5, 2.1), trial(1.0, 2.0), trial(2.0, 2.2)], own_lr=0.01)["said"]
    assert said == ["x1 is its own rate, 0.01"]


def test_a_sweep_of_rates_that_are_not_there_is_refused(tmp_path, capsys):
    """Its jobs would all be."""
    path = str(recipe_in(tmp_path).path)
    assert cli.main(["sweep", path, "train.lr=tuned", "--runs", str(tmp_path / "runs")]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert "first run: pe-study tune" in said.err


def test_keys_of_speed_and_seeds_do_not_change_the_conditions(tmp_path):
    plain, other = (recipe_in(tmp_path, *more) for more in ([], ["train.kernel=eager", "seeds=[3]"]))
    assert tuning.conditions(plain) == tuning.conditions(other)


def trial(factor: float, loss: float | None, mult: float | str = "auto") -> dict:
    encoding = {"name": "t5"}
    return {
        "label": "t5",
        "encoding": encoding,
        "factor": factor,
        "lr": factor / 100,
        "lr_mult": mult,
        "multiplier": 1.0 if mult == 1.0 else 30.0,
        "val_loss": loss,
    }


def test_ties_edges_and_losses_that_are_none_are_said():
    chosen = tuning.choose([trial(0.5, 2.0), trial(1.0, 2.001), trial(2.0, None)])
    assert (chosen["factor"], chosen["lr"]) == (0.5, 0.005)
    assert chosen["said"] == [
        "a tie: x1 within 0.1 %",
        "at the edge: the lowest rate tried, the optimum may lie beyond",
        "without a finite loss: x2",
    ]
    assert tuning.choose([trial(0.5, 2.1), trial(1.0, 2.0), trial(2.0, 2.2)])["said"] == []
    assert "highest" in tuning.choose([trial(0.5, 2.1), trial(1.0, 2.0), trial(2.0, 1.9)])["said"][0]


def test_of_equal_losses_the_recipes_own_rate_is_taken():
    trials = [trial(0.5, 2.0), trial(1.0, 2.0, 1.0), trial(1.0, 2.0), trial(2.0, 2.0)]
    chosen = tuning.choose(trials)
    assert (chosen["factor"], chosen["lr_mult"]) == (1.0, "auto")
    assert chosen["said"] == ["a tie: x0.5, x1 with lr_mult 1, x2 within 0.1 %"]


def named(label: str, *losses: float) -> list[dict]:
    return [
        trial(factor, loss) | {"label": label} for factor, loss in zip((0.5, 1.0, 2.0), losses, strict=True)
    ]


def test_a_change_of_order_is_said():
    trials = {"rope": named("rope", 2.1, 2.0, 1.9), "alibi": named("alibi", 1.8, 2.2, 2.3)}
    result = {
        "chosen": {label: tuning.choose(found) for label, found in trials.items()},
        "trials": [*trials["rope"], *trials["alibi"]],
    }
    said = chosen_rates.order_change(result)
    assert (
        "changes in these trials: alibi before rope. Lowest first at the common rate: rope, alibi; " in said
    )
    assert said.endswith("tuned: alibi, rope.")
    result["chosen"]["alibi"]["val_loss"] = 1.95
    assert "keep their order" in chosen_rates.order_change(result)


def test_a_base_among_the_runs_is_found(tmp_path):
    """Trials lie two folders deeper than the run that they go on from, wherever the runs lie."""
    base = train_study(tiny_recipe(tmp_path, "train.steps=2"), tmp_path / "elsewhere")[0]
    more = tiny_recipe(tmp_path, "name=more", "init={from: runs/tiny/rope-s0}", "train.steps=5")
    result = tune.tune(more, tmp_path / "elsewhere")
    trial = tmp_path / "elsewhere" / "more" / result["trials"][0]["run"]
    assert runs.read_json(trial / "DONE")["initial_weights"] == base.facts["weights_sha256"]


def test_no_finite_loss_at_all_is_an_error():
    with pytest.raises(UsageError, match=r"t5: no learning rate gave a finite loss; lower train\.lr"):
        tuning.choose([trial(1.0, None)])


def test_a_trial_that_diverges_is_an_answer_and_the_others_go_on(tmp_path, monkeypatch):
    def train(grid, root, **options):
        for run in grid.runs():
            if run.encoding.label == "rope@2x":
                folder = root / "tune" / run.run_id
                folder.mkdir(parents=True)
                runs.write_json(folder / "provenance.json", {"training": recipe.training_values(grid, run)})
                runs.write_json(folder / "non_finite.json", {})
                raise NonFiniteLossError("step 1: the loss is not finite")
            train_study(grid, root, {"run": run.run_id})

    monkeypatch.setattr(tune, "train_study", train)
    single = tiny_recipe(tmp_path, "train.steps=5")
    found = tune.tune(single, tmp_path / "runs")["trials"]
    assert [each["val_loss"] is None for each in found] == [False, False, True]


def test_the_command_ends_with_the_table(tuned, capsys):
    folder = tuned[0]
    path = str(recipe_in(folder).path)
    arguments = [path, "train.steps=5", "train.snapshot_every=null", "--runs", str(folder / "runs")]
    assert cli.main(["tune", *arguments]) == 0
    said = capsys.readouterr().out.splitlines()
    assert said[0].split() == ["encoding", "mult", "x0.5", "x1", "x2", "lr", "lr_mult"]
    assert [line.split()[0] for line in said[1:4]] == ["t5", "auto", "rope"]
    assert max(map(len, said[:-1])) <= 80
    assert said[-1].endswith("tiny/tune/tune.json")


def test_the_printed_table_fits_a_terminal(monkeypatch):
    """Names of any length, losses that are none, two multipliers and every note, at 80 columns."""
    monkeypatch.setenv("COLUMNS", "80")
    long = "rope-with-a-base-of-a-million-and-clipped-rows"
    trials = {
        long: named(long, 2.955612, 2.939311, 2.88),
        "t5": [trial(f, loss, mult) for f in (0.5, 1.0, 2.0) for mult, loss in ((1.0, None), ("auto", 2.94))],
    }
    chosen = {label: tuning.choose(found) for label, found in trials.items()}
    said = rates_table.text({"chosen": chosen, "trials": [each for one in trials.values() for each in one]})
    lines = said.splitlines()
    assert max(map(len, lines)) <= 80
    assert lines[1].split() == ["rope-with-a-", "2.9556", "2.9393", "2.8800", "0.02", "auto", "(30)"]
    assert "".join(line.split()[0] for line in lines[1:5]) == long
    assert lines[5].split() == ["t5", "1", *["not", "finite"] * 3, "0.01", "auto", "(30)"]
    assert lines[6].split() == ["auto", "2.9400", "2.9400", "2.9400"]
    whole = " ".join(lines)
    assert "t5: a tie: x0.5, x2 within 0.1 %; without a finite loss: x0.5 with lr_mult 1, x1" in whole
    assert f"{long}: at the edge" in whole


def test_an_encoding_may_have_a_rate_of_its_own(tmp_path):
    own = recipe_in(tmp_path, "encodings.1.lr=1e-3")
    assert [recipe.training_values(own, run)["train.lr"] for run in own.runs()] == [0.003, 0.001]
    narrowed = recipe.narrow(own, own.runs()[1])
    assert narrowed.train.lr == 0.001
    assert "lr" not in narrowed.encodings[0].model_dump()
    with pytest.raises(RecipeError, match=r"encodings\.1\.lr: .*a number above 0"):
        recipe_in(tmp_path, "encodings.1.lr=0")
