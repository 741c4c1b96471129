"""Hashes of recipes and runs: every key counts, and nothing else does (cases 45, 62)."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from tiny_recipe import write

from pe_study import recipe
from pe_study.settings import yaml_strict


@pytest.fixture
def tiny(tmp_path) -> Path:
    path = write(tmp_path)
    path.write_text(
        path.read_text().replace("stdlib", "a/data-set")
    )  # where every key of `data` means something
    return path


def test_the_hash_sees_content_alone(tiny, tmp_path) -> None:
    loaded = recipe.load(tiny)
    value = yaml_strict.read_mapping(tiny).value
    shuffled = {
        key: dict(reversed(v.items())) if isinstance(v, dict) else v for key, v in reversed(value.items())
    }
    other = tmp_path / "elsewhere.yaml"
    other.write_text("# a comment\n" + yaml_strict.dump(shuffled))
    assert recipe.load(other).hash == loaded.hash
    assert recipe.load(tiny, ["train.lr=0.002", "encodings.rope.base=10000"]).hash == loaded.hash
    assert recipe.load(tiny, ["train.lr=0.0021"]).hash != loaded.hash


def test_the_hash_is_the_same_in_any_process_and_locale(tiny) -> None:
    """Case 62: neither hash randomisation nor the locale touches it."""
    code = "import sys; from pe_study import recipe; print(recipe.load(*sys.argv[1:2], sys.argv[2:]).hash)"
    hashes = {recipe.load(tiny, ["name=é"]).hash}
    environment = os.environ | {
        "PYTHONHASHSEED": "7",
        "PYTHONUTF8": "0",
        "LC_ALL": "C",
        "PYTHONCOERCECLOCALE": "0",
    }
    done = subprocess.run(
        [sys.executable, "-c", code, str(tiny), "name=é"],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    assert hashes == {done.stdout.strip()}


OTHER_VALUES = {
    "model.num_layers": "3",
    "model.d_model": "64",
    "model.num_heads": "2",
    "model.num_kv_heads": "1",
    "model.d_ff": "96",
    "model.max_positions": "512",
    "model.initializer_range": "0.03",
    "model.qk_norm": "true",
    "model.dropout": "0.1",
    "data.corpus": "texts",
    "data.tokenizer": "bpe:1k",
    "data.packing": "isolate",
    "data.validation_fraction": "0.1",
    "data.text_field": "body",
    "data.config": "raw",
    "data.split": "all",
    "data.validation_split": "validation",
    "data.revision": "main",
    "train.length": "32",
    "train.batch_tokens": "512",
    "train.micro_batch_tokens": "128",
    "train.steps": "5",
    "train.lr": "1e-3",
    "train.schedule": "wsd",
    "train.warmup_steps": "2",
    "train.min_lr_ratio": "0.2",
    "train.weight_decay": "0.2",
    "train.betas": "[0.9, 0.99]",
    "train.grad_clip": "0.5",
    "train.mixed_precision": "bf16",
    "train.compile": "true",
    "train.kernel": "eager",
    "train.gradient_checkpointing": "true",
    "train.deterministic": "true",
    "train.skip_nonfinite": "2",
    "encodings.0.base": "500000",
    "encodings.0.fraction": "0.5",
    "encodings.0.lr_mult": "2",
}
BOOKKEEPING = {
    "train.log_every": "3",
    "train.eval_every": "3",
    "train.snapshot_every": "3",
    "train.keep_snapshots": "3",
    "train.keep_at": "[0.5]",
    "train.log_with": "[tensorboard]",
    "encodings.0.label": "other",
    "name": "other",
    "eval.num_documents": "3",
}


@pytest.mark.parametrize(("key", "value"), OTHER_VALUES.items())
def test_each_key_that_decides_the_weights_changes_the_training_hash(tiny, key: str, value: str) -> None:
    """Case 45: no key is read and dropped."""
    old, new = recipe.load(tiny), recipe.load(tiny, [f"{key}={value}"])
    assert recipe.training_hash(new, new.runs()[0]) != recipe.training_hash(old, old.runs()[0])
    assert new.hash != old.hash
    differences = recipe.training_differences(
        recipe.training_values(old, old.runs()[0]), recipe.training_values(new, new.runs()[0])
    )
    assert [line.partition(":")[0] for line in differences] == [key.replace("encodings.0", "encoding")]


@pytest.mark.parametrize(("key", "value"), BOOKKEEPING.items())
def test_bookkeeping_leaves_the_training_hash_alone(tiny, key: str, value: str) -> None:
    old, new = recipe.load(tiny), recipe.load(tiny, [f"{key}={value}"])
    assert recipe.training_hash(new, new.runs()[0]) == recipe.training_hash(old, old.runs()[0])
    assert new.hash != old.hash


def test_no_key_of_the_schema_is_left_out_of_these_tests(tiny) -> None:
    loaded = recipe.load(tiny)
    keys = {
        key.replace("encoding.", "encodings.0.") for key in recipe.training_values(loaded, loaded.runs()[0])
    }
    assert keys - {"encodings.0.name", "seed"} == set(OTHER_VALUES)


def test_where_the_weights_come_from_counts(tiny) -> None:
    init = ["encodings=[rope]", "init.from=runs/demo/rope-s0"]
    drawn, begun = recipe.load(tiny, init[:1]), recipe.load(tiny, init)
    stretched = recipe.load(tiny, [*init, "init.rescale=yarn:4"])
    values = [recipe.training_values(loaded, loaded.runs()[0]) for loaded in (drawn, begun, stretched)]
    assert (
        recipe.training_differences(values[0], values[1])[0] == 'init.from: (absent) -> "runs/demo/rope-s0"'
    )
    assert recipe.training_differences(values[1], values[2]) == ['init.rescale: "none" -> "yarn:4"']
    assert stretched.init is not None
    assert (stretched.init.source, stretched.init.rescale) == ("runs/demo/rope-s0", "yarn:4")


def test_differences_read_as_old_and_new(tiny) -> None:
    old, new = recipe.load(tiny), recipe.load(tiny, ["train.lr=3e-3", "encodings.0=alibi"])
    before, after = (recipe.training_values(loaded, loaded.runs()[0]) for loaded in (old, new))
    assert recipe.training_differences(before, after) == [
        'encoding.name: "rope" -> "alibi"',
        "encoding.base: 10000.0 -> (absent)",
        "encoding.fraction: 1.0 -> (absent)",
        "train.lr: 0.002 -> 0.003",
    ]
