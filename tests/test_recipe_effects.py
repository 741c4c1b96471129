"""Case 45: each key of a recipe changes the model, the text or the training, or is refused before either."""

from pathlib import Path
from typing import Any

import pytest
from tiny import ENCODINGS, tiny_recipe, write_llama

from pe_study import recipe
from pe_study.data import load_corpus, load_tokenizer
from pe_study.errors import UsageError
from pe_study.train import train_study
from pe_study.training.initial import build_model

SHORT = ("train.steps=4", "train.eval_every=null", "train.snapshot_every=null")

CHANGES_WEIGHTS = {
    "model.num_layers": "1",
    "model.d_model": "64",
    "model.num_heads": "2",
    "model.num_kv_heads": "2",
    "model.d_ff": "64",
    "model.initializer_range": "0.03",
    "model.qk_norm": "true",
    "model.dropout": "0.1",
    "data.tokenizer": "bpe:300",
    "data.packing": "isolate",
    "data.validation_fraction": "0.3",
    "train.length": "32",
    "train.batch_tokens": "256",
    "train.steps": "5",
    "train.lr": "1e-3",
    "train.schedule": "constant",
    "train.warmup_steps": "1",
    "train.min_lr_ratio": "0.5",
    "train.weight_decay": "0.5",
    "train.betas": "[0.8, 0.95]",
    "train.grad_clip": "0.01",
    "train.mixed_precision": "bf16",
    "seeds": "[1]",
    "encodings.0.base": "100",
    "encodings.0.fraction": "0.5",
    "encodings.0": "alibi",
}
# These change how the same numbers are computed or what else is written: seen in the model or elsewhere.
KEEPS_WEIGHTS = {
    "model.max_positions": "128",
    "train.kernel": "eager",
    "train.gradient_checkpointing": "true",
    "train.micro_batch_tokens": "32",
    "train.compile": "true",
    "train.deterministic": "true",
    "train.skip_nonfinite": "1",
    "train.log_every": "2",
    "train.eval_every": "2",
    "train.snapshot_every": "2",
    "train.keep_snapshots": "1",
    "train.keep_at": "[0.5]",
    "train.log_with": "[tensorboard]",
    "data.corpus": "another folder",
    "data.text_field": "body",
    "data.config": "raw",
    "data.split": "test",
    "data.validation_split": "test",
    "data.revision": "main",
}


def trained(folder: Path, *overrides: str) -> dict[str, Any]:
    """The weights' hash after four updates, and the learning rate of the last."""
    study = tiny_recipe(folder, *SHORT, *overrides)
    return dict(train_study(study, folder / "runs")[0].facts)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return trained(tmp_path_factory.mktemp("plain"))


@pytest.mark.parametrize(("key", "value"), CHANGES_WEIGHTS.items())
def test_a_key_changes_the_trained_weights(
    tmp_path: Path, plain: dict[str, Any], key: str, value: str
) -> None:
    assert trained(tmp_path, f"{key}={value}")["weights_sha256"] != plain["weights_sha256"]


def test_the_same_recipe_trains_the_same_weights(tmp_path: Path, plain: dict[str, Any]) -> None:
    """The control of the test above: without a change nothing changes."""
    assert trained(tmp_path)["weights_sha256"] == plain["weights_sha256"]


def test_a_multiplier_moves_the_parameters_of_the_encoding(tmp_path: Path) -> None:
    hashes = [
        trained(tmp_path / mult, "encodings=[t5]", f"encodings.t5.lr_mult={mult}")["weights_sha256"]
        for mult in "12"
    ]
    assert hashes[0] != hashes[1]


@pytest.mark.parametrize(
    ("key", "value", "read"),
    [
        ("model.max_positions", "128", lambda model: model.config.max_positions),
        ("train.kernel", "eager", lambda model: model.config.kernel),
        ("train.gradient_checkpointing", "true", lambda model: model.is_gradient_checkpointing),
    ],
)
def test_a_key_that_keeps_the_numbers_is_seen_in_the_model(
    tmp_path: Path, key: str, value: str, read: Any
) -> None:
    def built(*overrides: str) -> Any:
        study = tiny_recipe(tmp_path, *overrides)
        tokenizer = load_tokenizer(study.data, load_corpus(study.data))
        return read(build_model(study, study.runs()[0], tokenizer))

    assert built(f"{key}={value}") != built()


# With weights to go on from, the decoder is that of the weights: these cannot be honoured.
OF_THE_BASE = {
    "model.num_layers": "1",
    "model.d_model": "64",
    "model.num_heads": "2",
    "model.num_kv_heads": "1",
    "model.d_ff": "64",
    "model.max_positions": "128",
    "model.initializer_range": "0.03",
    "model.qk_norm": "true",
    "encodings.0.base": "100",
    "encodings.0.fraction": "0.5",
}


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Weights to go on from: a run, and a Llama with as many key and value heads as heads."""
    folder = tmp_path_factory.mktemp("bases")
    run = train_study(tiny_recipe(folder, *SHORT, "train.steps=2"), folder / "runs")[0].folder
    return {"run": run, "llama": write_llama(folder / "llama", run / "final", num_key_value_heads=4)}


def from_base(folder: Path, base: Path, *overrides: str) -> dict[str, Any]:
    return trained(folder, f"init={{from: {base}}}", "train.length=64", "train.steps=2", *overrides)


@pytest.mark.parametrize("kind", ["run", "llama"])
@pytest.mark.parametrize(("key", "value"), OF_THE_BASE.items())
def test_what_the_base_cannot_honour_is_refused_by_its_key(
    tmp_path: Path, bases: dict[str, Path], kind: str, key: str, value: str
) -> None:
    with pytest.raises(UsageError, match=rf"{key.rpartition('.')[2]}\b.* there"):
        from_base(tmp_path, bases[kind], f"{key}={value}")
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("kind", ["run", "llama"])
@pytest.mark.parametrize("encoding", [name for name in ENCODINGS if name != "rope"])
def test_another_encoding_than_that_of_the_base_is_refused(
    tmp_path: Path, bases: dict[str, Path], kind: str, encoding: str
) -> None:
    with pytest.raises(UsageError, match=rf"encodings.*(found {encoding}; accepted: rope|'name': 'rope')"):
        from_base(tmp_path, bases[kind], f"encodings=[{encoding}]")


@pytest.mark.parametrize("kind", ["run", "llama"])
def test_dropout_is_honoured_with_a_base(tmp_path: Path, bases: dict[str, Path], kind: str) -> None:
    hashes = [
        from_base(tmp_path / drop, bases[kind], f"model.dropout={drop}")["weights_sha256"]
        for drop in ("0.0", "0.5")
    ]
    assert hashes[0] != hashes[1]


def test_every_key_of_the_model_is_known_with_a_base(tmp_path: Path) -> None:
    study = tiny_recipe(tmp_path)
    keys = {f"model.{key}" for key in study.content["model"]}
    keys |= {f"encodings.0.{key}" for key in study.encodings[0].options}
    assert keys == {*OF_THE_BASE, "model.dropout"}


def test_every_key_is_in_one_of_the_two_lists(tmp_path: Path) -> None:
    study = tiny_recipe(tmp_path)
    content = study.content
    keys = {f"{section}.{key}" for section in ("model", "data", "train") for key in content[section]}
    keys |= {"seeds", "encodings.0", "encodings.0.base", "encodings.0.fraction"}
    assert keys == CHANGES_WEIGHTS.keys() | KEEPS_WEIGHTS.keys()
    assert {key.partition(".")[2] for key in KEEPS_WEIGHTS if key.startswith("train.")} >= set(
        recipe.BOOKKEEPING
    )
