"""A finished run is believed as long as it holds what its training wrote, on the text it was trained on."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from tiny import tiny_recipe
from transformers import AutoModelForCausalLM

from pe_study import card, cli, finished, runs
from pe_study.checkpoints import load_causal_lm
from pe_study.commands.forecast import describe
from pe_study.errors import CheckpointError, UsageError
from pe_study.export import export
from pe_study.train import train_study
from pe_study.training import state
from pe_study.training.run_files import RunFiles

WEIGHTS = "model.safetensors"


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("finished")
    train_study(tiny_recipe(folder, "train.keep_at=[0.5]"), folder / "runs")
    return folder


@pytest.fixture
def study(trained: Path, tmp_path: Path) -> Path:
    """A study of one finished run, to be damaged."""
    shutil.copytree(trained / "runs", tmp_path / "runs")
    return tmp_path / "runs" / "tiny"


def flip(path: Path, place: int) -> None:
    content = bytearray(path.read_bytes())
    content[place] ^= 1
    path.write_bytes(content)


def damage(run: Path, how: str) -> None:
    final = run / "final"
    if how == "bit":
        flip(final / WEIGHTS, -3)
    elif how == "header":
        flip(final / WEIGHTS, 40)
    elif how == "cut":
        (final / WEIGHTS).write_bytes((final / WEIGHTS).read_bytes()[:-8])
    elif how == "base":
        text = (final / "config.json").read_text(encoding="utf-8")
        (final / "config.json").write_text(text.replace("10000.0", "10001.0"), encoding="utf-8")
    elif how == "old":  # as before DONE named the files
        done = runs.read_json(run / "DONE")
        del done["files"]
        (run / "DONE").write_text(json.dumps(done), encoding="utf-8")
        flip(final / WEIGHTS, -3)


HOW = ("bit", "header", "cut", "base", "old")


def test_a_whole_run_is_whole(study: Path) -> None:
    run = study / "rope-s0"
    assert finished.is_intact(run)
    hashes = runs.read_json(run / "DONE")["files"]
    assert set(hashes) == {path.name for path in (run / "final").iterdir()}
    card.write_card(run)
    assert finished.is_intact(run), "its card is written later"
    done = {key: value for key, value in runs.read_json(run / "DONE").items() if key != "files"}
    (run / "DONE").write_text(json.dumps(done), encoding="utf-8")
    assert finished.is_intact(run)


def test_stored_weights_have_the_hash_of_those_in_memory(study: Path) -> None:
    final = study / "rope-s0" / "final"
    model = AutoModelForCausalLM.from_pretrained(final)
    assert finished.has_weights(final, state.sha256(state.weights(model)))
    assert finished.has_weights(final, state.sha256(state.weights(torch.nn.ModuleDict({"decoder": model}))))
    assert not finished.has_weights(final, "0" * 64)


@pytest.mark.parametrize("how", HOW)
def test_a_damaged_run_is_trained_again(
    trained: Path, study: Path, how: str, caplog: pytest.LogCaptureFixture
) -> None:
    run = study / "rope-s0"
    before = runs.read_json(run / "DONE")["weights_sha256"]
    damage(run, how)
    result = train_study(tiny_recipe(trained, "train.keep_at=[0.5]"), study.parent)[0]
    assert result.status == "trained"
    assert result.facts["weights_sha256"] == before
    assert "final/ is gone or damaged; trained again from its newest snapshot" in caplog.text
    assert finished.is_intact(run)


def test_a_dry_run_says_that_a_damaged_run_is_trained_again(trained: Path, study: Path) -> None:
    recipe = tiny_recipe(trained, "train.keep_at=[0.5]")
    assert "done, will be skipped" in describe(recipe, study.parent, {})
    damage(study / "rope-s0", "bit")
    assert "done, but final/ is damaged: will be trained again" in describe(recipe, study.parent, {})


@pytest.mark.parametrize("how", HOW)
def test_nothing_else_reads_a_damaged_run(study: Path, how: str, tmp_path: Path) -> None:
    run = study / "rope-s0"
    damage(run, how)
    name = "config.json" if how == "base" else WEIGHTS
    said = (
        rf"final/{name}: not what training wrote; `pe-study train {run}/recipe.yaml --runs {study.parent}` "
        "makes it anew$"
    )
    with pytest.raises(CheckpointError, match=said):
        load_causal_lm(run)
    with pytest.raises(CheckpointError, match=said):
        load_causal_lm(run / "final")
    with pytest.raises(CheckpointError, match=said):
        card.write_card(run)
    with pytest.raises(CheckpointError, match=said):
        export(run, tmp_path / "llama")
    assert not (tmp_path / "llama").exists()


def test_eval_says_it_and_its_remedy_works(study: Path, capfd: pytest.CaptureFixture[str]) -> None:
    run = study / "rope-s0"
    damage(run, "bit")
    command = ["eval", str(study), "--runs", str(study.parent), "--lengths", "16"]
    assert cli.main(command) == 4
    complaint = capfd.readouterr().err
    assert complaint.count("\n") == 1
    remedy = complaint.split("`")[1].split()[1:]
    assert cli.main(remedy) == 0
    assert cli.main(command) == 0


def test_damaged_weights_that_were_kept_are_refused(study: Path) -> None:
    folder = next((study / "rope-s0" / "kept").iterdir())
    load_causal_lm(folder)
    flip(folder / WEIGHTS, -3)
    with pytest.raises(CheckpointError, match=r"step_00000004/model.safetensors: not what training wrote"):
        load_causal_lm(folder)


def test_a_changed_corpus_is_noticed_when_all_runs_are_finished(tmp_path: Path) -> None:
    recipe = tiny_recipe(tmp_path)
    train_study(recipe, tmp_path / "runs")
    for path in (tmp_path / "corpus").iterdir():
        path.write_text(path.read_text(encoding="utf-8") + " more", encoding="utf-8")
    with pytest.raises(UsageError, match=r"another recipe or corpus \(corpus_hash: "):
        train_study(recipe, tmp_path / "runs")


def test_a_finished_run_outlives_its_corpus(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    recipe = tiny_recipe(tmp_path)
    train_study(recipe, tmp_path / "runs")
    shutil.rmtree(tmp_path / "corpus")
    assert train_study(recipe, tmp_path / "runs")[0].status == "skipped"
    assert "tiny: finished runs were not compared with what they were trained on: data.corpus" in caplog.text


def test_weights_are_named_by_what_was_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the disk made of the weights between writing and naming them is not certified."""
    plain = RunFiles._write_model

    def write(self: RunFiles, folder: Path, *args: object) -> None:
        plain(self, folder, *args)  # type: ignore[arg-type]
        flip(folder / WEIGHTS, -3)

    monkeypatch.setattr(RunFiles, "_write_model", write)
    with pytest.raises(CheckpointError, match="not what was written"):
        train_study(tiny_recipe(tmp_path), tmp_path / "runs")
    assert not (tmp_path / "runs" / "tiny" / "rope-s0" / "DONE").exists()
