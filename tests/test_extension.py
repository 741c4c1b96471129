"""Runs that go on from other weights at a longer length, with a RoPE rescale built in."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import tiny_recipe, write_llama
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel, LlamaForCausalLM

from pe_study import runs, snapshots
from pe_study.checkpoints import open_checkpoint
from pe_study.commands.forecast import describe
from pe_study.commands.listing import validated
from pe_study.errors import CheckpointError, Interrupted, UsageError
from pe_study.recipe import Recipe, load
from pe_study.train import train_study
from pe_study.training.bases import configuration, weights_sha256
from pe_study.training.engine import make_accelerator
from pe_study.training.initial import build_model, load_data
from pe_study.training.validation import Validator

ROOT = Path(__file__).resolve().parent.parent
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
    found = Validator(recipe, data.validation, accelerator).evaluate(model)
    assert found is not None
    return found["val_loss"] or 0.0


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
    return write_llama(tmp_path_factory.mktemp("llama"), base / "final")


def test_a_llama_is_extended_and_stays_a_llama(llama: Path, tmp_path: Path) -> None:
    own = ("data.tokenizer=checkpoint", "model.num_kv_heads=2")
    recipe = extend(tmp_path, llama, *own, "train.gradient_checkpointing=true")
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
    from pe_study.training.foreign import ForeignDecoder

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
        with pytest.raises(CheckpointError, match='nowhere/at/all", no such file or folder; accepted'):
            train_study(extend(tmp_path, tmp_path / source), tmp_path / "runs")


def test_a_decoder_without_rope_is_refused(base: Path, tmp_path: Path) -> None:
    GPT2LMHeadModel(GPT2Config(vocab_size=257, n_layer=2, n_embd=32, n_head=4)).save_pretrained(
        tmp_path / "gpt2"
    )
    recipe = extend(tmp_path, tmp_path / "gpt2", "init.rescale=none", "encodings=[learned]")
    with pytest.raises(
        UsageError, match=r"init.from: .*gpt2 has no rotary positions.*; accepted: a checkpoint"
    ):
        train_study(recipe, tmp_path / "runs")


def test_every_difference_from_a_foreign_checkpoint_is_named_at_once(llama: Path, tmp_path: Path) -> None:
    other = ("model.d_ff=64", "encodings=[{name: rope, base: 500, fraction: 0.5}]")
    with pytest.raises(UsageError) as refused:
        train_study(extend(tmp_path, llama, *other), tmp_path / "runs")
    said = ["model.num_kv_heads is 2 there, found 4", "model.d_ff is 48 there, found 64"]
    said += ["encodings.0.base is 10000.0 there, found 500.0", "encodings.0.fraction is 1.0 there, found 0.5"]
    assert all(each in str(refused.value) for each in said)
    assert "num_layers" not in str(refused.value)


def test_the_weights_it_started_from_are_noted_and_compared(base: Path, tmp_path: Path) -> None:
    """A base that was trained anew makes another study, finished or not; one of the same weights does not."""
    source = tmp_path / "base"
    shutil.copytree(base, source)
    recipe = extend(tmp_path, source, "train.steps=4", "train.snapshot_every=2")
    done = train_study(recipe, tmp_path / "done")[0]
    hashes = runs.read_json(base / runs.DONE)["weights_sha256"]
    found = snapshots.newest(done.folder / "snapshots")
    assert found is not None
    for facts in (runs.read_json(done.folder / runs.PROVENANCE), done.facts, found.facts):
        assert facts["initial_weights"] == hashes
    shutil.copytree(tmp_path / "done", tmp_path / "half")
    (tmp_path / "half" / "longer" / "rope-s0" / runs.DONE).unlink()
    assert train_study(recipe, tmp_path / "done")[0].status == "skipped"
    shutil.rmtree(source)
    train_study(tiny_recipe(tmp_path / "again", "train.lr=1e-2"), tmp_path / "again")
    shutil.copytree(tmp_path / "again" / "tiny" / "rope-s0", source)
    for root in ("done", "half"):
        with pytest.raises(UsageError, match=f'initial_weights: "{hashes}" -> '):
            train_study(recipe, tmp_path / root)


def test_the_files_of_a_foreign_base_are_compared(llama: Path, tmp_path: Path) -> None:
    source = tmp_path / "llama"
    shutil.copytree(llama, source)
    recipe = extend(tmp_path, source, "model.num_kv_heads=2", "train.steps=2")
    first = train_study(recipe, tmp_path / "runs")[0]
    assert len(first.facts["initial_weights"]) == 64
    (source / "README.md").write_text("a card", encoding="utf-8")
    assert train_study(recipe, tmp_path / "runs")[0].status == "skipped"
    model = AutoModelForCausalLM.from_pretrained(source)
    with torch.no_grad():
        model.model.norm.weight[0] += 1
    model.save_pretrained(source)
    with pytest.raises(UsageError, match="initial_weights"):
        train_study(recipe, tmp_path / "runs")


def test_another_configuration_of_a_base_is_refused_by_its_key(llama: Path, tmp_path: Path) -> None:
    """It decides numbers that no size tells; who wrote it does not; what older runs did not note is taken."""
    source = tmp_path / "llama"
    shutil.copytree(llama, source)
    plain = json.loads((source / "config.json").read_bytes())
    write_config(source, plain | {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}})
    recipe = extend(tmp_path, source, "model.num_kv_heads=2", "train.steps=2", "train.snapshot_every=1")
    done = train_study(recipe, tmp_path / "done")[0]
    shutil.copytree(tmp_path / "done", tmp_path / "half")
    (tmp_path / "half" / "longer" / "rope-s0" / runs.DONE).unlink()
    write_config(source, plain | {"transformers_version": "9.9.9", "use_cache": False, "dtype": "bfloat16"})
    assert train_study(recipe, tmp_path / "done")[0].status == "skipped"
    less = {key: value for key, value in plain.items() if key != "attention_bias"}
    rope = {"rope_theta": 10000.0, "rope_type": "default", "partial_rotary_factor": 1.0}
    for config, said in (
        (plain | {"rms_norm_eps": 1e-2}, r"rms_norm_eps: 1e-06 -> 0\.01"),
        (plain | {"hidden_act": "gelu"}, 'hidden_act: "silu" -> "gelu"'),
        (plain | {"attention_multiplier": 2.0}, r"attention_multiplier: \(absent\) -> 2\.0"),
        (less, r"attention_bias: false -> \(absent\)"),
        (plain | {"rope_parameters": rope}, r"rope_parameters.partial_rotary_factor: \(absent\) -> 1\.0\)"),
    ):
        write_config(source, config)
        for root in ("done", "half"):
            with pytest.raises(UsageError, match=rf"\(initial_config\.{said}"):
                train_study(recipe, tmp_path / root)
    facts = json.loads((done.folder / runs.DONE).read_bytes())
    del facts["initial_config"]
    runs.write_json(done.folder / runs.DONE, facts)
    assert train_study(recipe, tmp_path / "done")[0].status == "skipped"


def write_config(folder: Path, config: dict[str, Any]) -> None:
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")


def test_numbers_that_strict_json_lacks_can_be_noted(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"time_step_limit": [0.0, Infinity]}', encoding="utf-8")
    assert configuration(str(tmp_path), {}) == {"time_step_limit": [0.0, "Infinity"]}


def test_weights_of_the_hub_are_named_once_they_are_here(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By their files, as those of a folder are: another commit of the same weights is the same base."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    stored = tmp_path / "models--me--tiny"
    assert weights_sha256("me/tiny", {}) is None
    for commit in ("abc", "def"):
        shutil.copytree(llama, stored / "snapshots" / commit)
        (stored / "refs").mkdir(exist_ok=True)
        (stored / "refs" / "main").write_text(commit, encoding="utf-8")
        assert weights_sha256("me/tiny", {}) == weights_sha256(str(llama), {})
    assert weights_sha256("me/tiny", {"revision": "other"}) is None


def test_a_finished_extension_outlives_its_base(
    base: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    source = tmp_path / "base" / "rope-s0"
    shutil.copytree(base, source)
    recipe = extend(tmp_path, source, "train.steps=2")
    train_study(recipe, tmp_path / "runs")
    shutil.rmtree(source)
    assert train_study(recipe, tmp_path / "runs")[0].status == "skipped"
    assert "not compared with what they were trained on" in caplog.text
    assert "init.from: found" in caplog.text


def test_a_damaged_base_is_refused(base: Path, tmp_path: Path) -> None:
    shutil.copytree(base, tmp_path / "rope-s0")
    weights = tmp_path / "rope-s0" / "final" / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-5] ^= 1
    weights.write_bytes(content)
    recipe = extend(tmp_path, tmp_path / "rope-s0")
    with pytest.raises(CheckpointError, match=r"init.from: .*model.safetensors: not what training wrote"):
        train_study(recipe, tmp_path / "runs")


def test_the_base_is_looked_for_where_the_runs_lie(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    shutil.copytree(base, tmp_path / "elsewhere" / "tiny" / "rope-s0")
    for source in ("runs/tiny/rope-s0", "tiny/rope-s0"):
        recipe = extend(tmp_path, Path(source), f"name={source.replace('/', '-')}", "train.steps=2")
        result = train_study(recipe, "elsewhere")[0]
        assert result.facts["initial_weights"] == runs.read_json(base / runs.DONE)["weights_sha256"]


@pytest.mark.parametrize("root", ["runs", "elsewhere"])
def test_an_absent_base_is_named_with_the_command_that_makes_it(
    root: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    recipe = load(ROOT / "recipes" / "extend-demo.yaml")
    where = "" if root == "runs" else " and none under elsewhere"
    flag = "" if root == "runs" else " --runs elsewhere"
    said = (
        f'extend-demo.yaml: init.from: found "runs/demo/rope-s0", no such run{where}; make it first: '
        f"`pe-study train {ROOT}/recipes/demo.yaml --only run=rope-s0{flag}`"
    )
    with pytest.raises(CheckpointError) as refused:
        train_study(recipe, root)
    assert str(refused.value).endswith(said)
    assert "".join(said.split()) in "".join(describe(recipe, Path(root), {}).split())
    if root == "runs":
        assert said in validated(ROOT / "recipes" / "extend-demo.yaml", [])
    assert not Path(root).exists()


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
