"""Case 45: each key of a recipe changes the model, the text or the training, or is refused before either."""

from pathlib import Path
from typing import Any

import pytest
from tiny import tiny_recipe

from pe_study import recipe
from pe_study.data import load_corpus, load_tokenizer
from pe_study.initial import build_model
from pe_study.train import train_study

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


def test_every_key_is_in_one_of_the_two_lists(tmp_path: Path) -> None:
    study = tiny_recipe(tmp_path)
    content = study.content
    keys = {f"{section}.{key}" for section in ("model", "data", "train") for key in content[section]}
    keys |= {"seeds", "encodings.0", "encodings.0.base", "encodings.0.fraction"}
    assert keys == CHANGES_WEIGHTS.keys() | KEEPS_WEIGHTS.keys()
    assert {key.partition(".")[2] for key in KEEPS_WEIGHTS if key.startswith("train.")} >= set(
        recipe.BOOKKEEPING
    )
