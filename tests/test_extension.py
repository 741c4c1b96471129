"""Runs that go on from other weights at a longer length, with a RoPE rescale built in."""

from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import tiny_recipe
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from pe_study import runs, snapshots
from pe_study.checkpoints import open_checkpoint
from pe_study.engine import make_accelerator
from pe_study.errors import CheckpointError, Interrupted, UsageError
from pe_study.initial import build_model, load_data
from pe_study.recipe import Recipe
from pe_study.train import train_study
from pe_study.validation import Validator

LONGER = ("name=longer", "train.length=64", "train.batch_tokens=256", "train.steps=12", "train.lr=2e-3")


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run trained at length 16."""
    folder = tmp_path_factory.mktemp("base")
    recipe = tiny_recipe(folder, "train.steps=60", "train.eval_every=null", "train.snapshot_every=null")
    return train_study(recipe, folder / "runs")[0].folder


def extend(folder: Path, source: Path, *overrides: str) -> Recipe:
    init = f"init={{from: {source}, rescale: 'yarn:4'}}"
    return tiny_recipe(folder, init, *LONGER, *overrides)


def validation_loss(recipe: Recipe, model: torch.nn.Module) -> float:
    accelerator = make_accelerator(recipe)
    data = load_data(recipe, accelerator)
    return Validator(recipe, data.validation, accelerator).evaluate(model)["val_loss"] or 0.0


def test_an_extended_run_beats_the_untuned_rescale(base: Path, tmp_path: Path) -> None:
    recipe = extend(tmp_path, base)
    untuned = AutoModelForCausalLM.from_pretrained(base / "final", length=64, rescale="yarn:4")
    result = train_study(recipe, tmp_path / "runs")[0]
    assert result.facts["val_loss"] < validation_loss(recipe, untuned) - 0.02
    tuned = AutoModelForCausalLM.from_pretrained(result.folder / "final")
    assert (tuned.config.rescale, tuned.config.length, tuned.config.train_length) == ("yarn:4", 64, 16)
    assert validation_loss(recipe, tuned) == pytest.approx(result.facts["val_loss"], rel=1e-6)


def test_it_starts_from_the_weights_named(base: Path, tmp_path: Path) -> None:
    recipe = extend(tmp_path, base)
    data = load_data(recipe, make_accelerator(recipe))
    model = build_model(recipe, recipe.runs()[0], data.tokenizer)
    stored = AutoModelForCausalLM.from_pretrained(base / "final")
    for name, weight in stored.named_parameters():
        assert torch.equal(dict(model.named_parameters())[name], weight)


def test_an_interrupted_extension_goes_on_from_its_own_snapshot(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from test_train import stop_after, trace

    recipe = extend(tmp_path, base)
    whole = train_study(recipe, tmp_path / "whole")[0]
    with monkeypatch.context() as patch:
        stop_after(patch, 5)
        with pytest.raises(Interrupted):
            train_study(recipe, tmp_path / "parts")
    parts = train_study(recipe, tmp_path / "parts")[0]
    assert trace(parts.folder) == trace(whole.folder)
    assert parts.facts["weights_sha256"] == whole.facts["weights_sha256"]


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (("model.d_ff=64",), "d_ff is 48 there"),
        (("encodings=[{name: rope, base: 500}]",), "'base': 10000.0"),
        (("data.tokenizer=bpe:400", "eval.unit=stream"), "use tokenizer: checkpoint"),
    ],
)
def test_weights_that_do_not_fit_are_refused(
    base: Path, tmp_path: Path, overrides: tuple[str, ...], said: str
) -> None:
    with pytest.raises(UsageError, match=said):
        train_study(extend(tmp_path, base, *overrides), tmp_path / "runs")
    assert not list((tmp_path / "runs").rglob("DONE"))


def test_missing_and_unfinished_sources_are_refused(base: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="nowhere"):
        train_study(extend(tmp_path, tmp_path / "nowhere", "data.tokenizer=checkpoint"), tmp_path / "runs")
    unfinished = tmp_path / "rope-s0"
    unfinished.mkdir()
    (unfinished / runs.RECIPE).write_bytes((base / runs.RECIPE).read_bytes())
    with pytest.raises(CheckpointError, match="unfinished"):
        train_study(extend(tmp_path, unfinished, "data.tokenizer=checkpoint"), tmp_path / "runs")


@pytest.fixture(scope="module")
def llama(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama of random weights with the tokenizer of the base run."""
    folder = tmp_path_factory.mktemp("llama")
    torch.manual_seed(0)
    sizes: dict[str, Any] = {
        "vocab_size": 257,
        "num_hidden_layers": 2,
        "hidden_size": 32,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 48,
        "max_position_embeddings": 16,
        "tie_word_embeddings": True,
    }
    LlamaForCausalLM(LlamaConfig(**sizes)).save_pretrained(folder)
    AutoTokenizer.from_pretrained(base / "final").save_pretrained(folder)
    return folder


def test_a_llama_is_extended_and_stays_a_llama(llama: Path, tmp_path: Path) -> None:
    recipe = extend(tmp_path, llama, "data.tokenizer=checkpoint", "train.gradient_checkpointing=true")
    result = train_study(recipe, tmp_path / "runs")[0]
    rows = runs.read_metrics(result.folder)
    assert rows[-1]["loss"] < rows[0]["loss"] - 0.2
    model = AutoModelForCausalLM.from_pretrained(result.folder / "final")
    assert isinstance(model, LlamaForCausalLM)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert model.config.rope_parameters["rope_type"] == "yarn"
    assert model.config.rope_parameters["factor"] == 4.0
    assert validation_loss(recipe, wrapped(model)) == pytest.approx(result.facts["val_loss"], rel=1e-6)
    newest = snapshots.newest(result.folder / "snapshots")
    assert newest is not None
    assert newest.step == 9


def wrapped(model: Any) -> torch.nn.Module:
    from pe_study.foreign import ForeignDecoder

    return ForeignDecoder(model)


def test_isolated_documents_need_our_decoder(llama: Path, tmp_path: Path) -> None:
    recipe = extend(tmp_path, llama, "data.packing=isolate", "data.tokenizer=checkpoint")
    with pytest.raises(UsageError, match="isolate needs our own decoder"):
        train_study(recipe, tmp_path / "runs")


@pytest.mark.parametrize("source", ["nowhere/at/all", "llama"])
def test_what_cannot_be_gone_on_from_is_refused_before_any_work(
    llama: Path, tmp_path: Path, source: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pe_study.train.load_data", lambda *_: pytest.fail("read the text first"))
    if source == "llama":
        recipe = extend(tmp_path, llama, "model.d_ff=64")
        with pytest.raises(UsageError, match="d_ff is 48 there"):
            train_study(recipe, tmp_path / "runs")
    else:
        with pytest.raises(CheckpointError, match="nowhere/at/all: no such file or folder"):
            train_study(extend(tmp_path, tmp_path / source), tmp_path / "runs")


@pytest.mark.parametrize("spec", ["yarn:4", "yarn:auto"])
def test_no_rescale_is_the_one_that_was_trained_in(base: Path, tmp_path: Path, spec: str) -> None:
    """As a scaling that a Hugging Face checkpoint brings: kept under `none` and S = 1, replaced by any other;
    `auto` stays at the factor of training, whatever length is read."""
    result = train_study(extend(tmp_path, base, f"init.rescale={spec}"), tmp_path / "runs")[0]
    stored = AutoModelForCausalLM.from_pretrained(result.folder / "final", length=128)
    assert stored.config.rescale == "yarn:4"
    ids = torch.arange(100)[None] % 250
    expected = stored(ids).logits
    checkpoint = open_checkpoint(result.folder)
    for same in ("none", "yarn:1", "linear:1", "yarn:1:attention_factor=1.3"):
        model = checkpoint.load(same, length=128)
        assert (model.config.rescale, checkpoint.depends_on_length(same)) == ("yarn:4", False)
        assert torch.equal(model(ids).logits, expected)
        assert checkpoint.kept_scaling(same, 128) == ("yarn", 4.0)
        frequencies = checkpoint.frequencies(same, 128)
        assert frequencies is not None
        assert torch.equal(frequencies[0], checkpoint.frequencies("yarn:4", 16)[0])  # type: ignore[index]
    assert checkpoint.load("yarn:auto", length=128).config.rescale == "yarn:auto"
    assert checkpoint.depends_on_length("yarn:auto")
    assert not torch.equal(checkpoint.load("yarn:8", length=128)(ids).logits, expected)
    again = extend(tmp_path, result.folder, "name=again", "init.rescale=none")
    data = load_data(again, make_accelerator(again))
    assert build_model(again, again.runs()[0], data.tokenizer).config.rescale == "yarn:4"
