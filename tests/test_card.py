"""The model card of a run, and what is uploaded with it: nothing, unless a repository is named."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from huggingface_hub import ModelCard
from huggingface_hub.errors import HfHubHTTPError
from tiny import tiny_recipe

from pe_study import card, cli, runs
from pe_study.errors import CheckpointError, UsageError
from pe_study.evaluators import study
from pe_study.train import train_study


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that was trained and evaluated."""
    folder = tmp_path_factory.mktemp("card")
    recipe = tiny_recipe(folder, "eval.lengths=[16, 32]", "eval.rescales=[none, 'yarn:auto']")
    result = train_study(recipe, folder / "runs")[0]
    study.evaluate(str(result.folder), recipe.eval, runs_root=folder / "runs")
    return result.folder


def test_the_card_has_the_evaluation_results(run: Path) -> None:
    path = card.write_card(run)
    assert path == run / "final" / "README.md"
    read = ModelCard.load(path)
    summary = runs.read_json(next(run.parent.glob("eval/*/results.json")))
    expected = {
        (metric, task.partition("/")[2], length): cells[f"{prefix}{length},none"]
        for task, cells in summary["results"].items()
        for prefix, metric in (("", "perplexity"), ("bits_per_byte_", "bits_per_byte"))
        for length in (16, 32)
        if f"{prefix}{length},none" in cells
    }
    found = {
        (result.metric_type, result.metric_args["how"], result.metric_args["length"]): result.metric_value
        for result in read.data.eval_results
    }
    assert found == expected
    assert len(found) >= 8, "two lengths, two rescales, two metrics"
    assert read.data.tags[-1] == "rope"
    value = summary["results"]["rope-s0/none/nonoverlapping"]["32,none"]
    assert f"{value:.4g} |" in read.text
    done = runs.read_json(run / "DONE")
    assert done["weights_sha256"] in read.text
    assert f"{done['val_loss']:.4f} on held-out documents" in read.text


def test_the_card_tells_no_paths_of_this_machine(run: Path) -> None:
    """The corpus of the recipe is a folder of this machine."""
    text = card.write_card(run).read_text(encoding="utf-8")
    assert str(run.parents[2]) not in text
    assert "| text | corpus, tokenizer byte" in text


def test_results_of_other_weights_are_left_out(
    run: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    plain = runs.read_json

    def later(path: Path) -> Any:
        found = plain(path)
        return {**found, "finished": "2999-01-01T00:00:00+00:00"} if path.name == "DONE" else found

    monkeypatch.setattr(runs, "read_json", later)
    composed = card.compose(run)
    assert composed.data.eval_results is None
    assert "Not evaluated yet" in composed.text
    assert "older than the weights of rope-s0" in caplog.text


def test_unfinished_runs_have_no_card(tmp_path: Path, run: Path) -> None:
    with pytest.raises(UsageError, match="not a run directory"):
        card.write_card(tmp_path)
    (tmp_path / "recipe.yaml").write_bytes((run / "recipe.yaml").read_bytes())
    with pytest.raises(CheckpointError, match="an unfinished run"):
        card.write_card(tmp_path)


class Hub:
    """Stands for the Hub: what was asked of it."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []

    def create_repo(self, repo_id: str, *, private: bool, exist_ok: bool) -> str:
        self.calls.append((repo_id, private, exist_ok))
        return f"https://huggingface.co/{repo_id}"

    def upload_folder(self, *, repo_id: str, folder_path: Path, commit_message: str) -> None:
        self.calls.append((repo_id, sorted(path.name for path in folder_path.iterdir())))


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Hub:
    hub = Hub()
    monkeypatch.setattr(card, "HfApi", lambda: hub)
    monkeypatch.setattr(card, "get_token", lambda: "hf_of_a_test")
    monkeypatch.setattr(card.hub, "reachable", lambda: True)
    return hub


def test_a_push_uploads_the_model_and_its_card(
    run: Path, hub: Hub, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["card", str(run)]) == 0
    assert hub.calls == [], "off by default"
    assert cli.main(["card", str(run), "--push", "me/rope-64", "--private"]) == 0
    assert hub.calls[0] == ("me/rope-64", True, True)
    assert {"README.md", "config.json", "model.safetensors", "tokenizer.json"} <= set(hub.calls[1][1])
    assert capsys.readouterr().out.splitlines()[-1] == "https://huggingface.co/me/rope-64"
    assert 'load_causal_lm("me/rope-64"' in (run / "final" / "README.md").read_text(encoding="utf-8")


def test_a_push_that_cannot_be_is_one_clear_message(
    run: Path, hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(UsageError, match='--push: found "a b"; accepted: OWNER/NAME'):
        card.push(run, "a b")
    with monkeypatch.context() as patch:
        patch.setattr(card, "get_token", lambda: None)
        with pytest.raises(UsageError, match=r"no token of the Hub; run hf auth login.*\n.*README.md"):
            card.push(run, "me/rope")
    with monkeypatch.context() as patch:
        patch.setattr(card.hub, "reachable", lambda: False)
        with pytest.raises(UsageError, match=r"cannot be reached from here\n"):
            card.push(run, "me/rope")

    def refuse(*args: Any, **options: Any) -> None:
        answer: Any = SimpleNamespace(headers={}, request=None)
        raise HfHubHTTPError("403 Forbidden: you have no rights there", response=answer)

    monkeypatch.setattr(hub, "create_repo", refuse)
    with pytest.raises(UsageError, match=r"me/rope: the Hub refused \(403 Forbidden.*\n"):
        card.push(run, "me/rope")
    assert hub.calls == []
