"""Recipes: what a recipe says, how files and overrides combine, and what is written back (case 03)."""

from pathlib import Path

import pytest
from tiny_recipe import TINY, refused, write

from pe_study import recipe


@pytest.fixture
def tiny(tmp_path) -> Path:
    return write(tmp_path)


def test_the_runs_of_a_recipe_are_encoding_major(tiny) -> None:
    loaded = recipe.load(tiny)
    assert [run.run_id for run in loaded.runs()] == [
        *("rope-s0", "rope-s1", "rope-1m-s0", "rope-1m-s1", "t5-s0", "t5-s1")
    ]
    assert loaded.path == tiny
    assert loaded.encodings[1].options["base"] == 1e6
    assert loaded.encodings[2].options == {"num_buckets": 32, "max_distance": "auto"}


@pytest.mark.parametrize(
    ("override", "key", "value"),
    [
        ("train.lr=5e-5", "lr", 0.00005),
        ("train.lr=1e-4", "lr", 0.0001),
        ("train.lr=1", "lr", 1.0),
        ("train.steps=1e4", "steps", 10_000),
        ("train.batch_tokens=2k", "batch_tokens", 2048),
        ("train.batch_tokens=0.5k", "batch_tokens", 512),
        ("train.micro_batch_tokens=64", "micro_batch_tokens", 64),
        ("train.mixed_precision=no", "mixed_precision", "no"),
        ("train.grad_clip=null", "grad_clip", None),
    ],
)
def test_numbers_are_numbers_however_they_are_written(tiny, override: str, key: str, value: object) -> None:
    """Case 03: `lr: 1e-4` is a number, not text; 2k is 2048."""
    found = getattr(recipe.load(tiny, [override]).train, key)
    assert found == value
    assert type(found) is type(value)


def test_an_error_names_the_file_and_line_a_key_came_from(tiny, tmp_path) -> None:
    top = tmp_path / "top.yaml"
    top.write_text("include: tiny.yaml\nname: top\ntrain:\n  lrr: 1\n")
    assert refused(top).startswith("top.yaml:4: train.lrr: unknown key")
    top.write_text("include: tiny.yaml\nname: top\nmodel:\n  num_heads: 8\n")
    assert recipe.load(top).model.num_heads == 8
    tiny.write_text(TINY.replace("lr: 2.0e-3", "lr: fast"))
    assert "tiny.yaml:9: train.lr: found the text" in refused(top)
    assert refused(top, "train.lr=slow").startswith('override "train.lr=slow": train.lr: ')


def test_a_plan_file_is_named_where_it_is_wrong(tiny, tmp_path) -> None:
    plan = tmp_path / "mine.yaml"
    tiny.write_text(TINY[: TINY.index("eval:")] + "eval: mine.yaml\n")
    plan.write_text("lengths: [1x, 2x]\nunits: stream\n")
    assert 'mine.yaml:2: eval.units: unknown key; did you mean "unit"?' in refused(tiny)
    plan.write_text("lengths: [1x, 2x]\nnum_documents: 5\n")
    assert recipe.load(tiny).eval.name == "mine"
    top = tmp_path / "top.yaml"
    top.write_text("include: tiny.yaml\neval: {lengths: [1x]}\n")
    assert (recipe.load(top).eval.lengths, recipe.load(top).eval.num_documents) == (("1x",), 5)
    (tmp_path / "other.yaml").write_text("lengths: [3x]\n")
    top.write_text("include: tiny.yaml\neval: other.yaml\n")
    assert (recipe.load(top).eval.name, recipe.load(top).eval.num_documents) == ("other", 24)


def test_kv_heads_follow_the_heads_unless_they_are_named(tiny) -> None:
    assert recipe.load(tiny, ["model.num_kv_heads=null", "model.num_heads=8"]).model.num_kv_heads == 8


def test_the_resolved_recipe_reloads_to_an_equal_one(tiny, tmp_path) -> None:
    loaded = recipe.load(
        tiny,
        ["train.lr=5e-5", 'data.corpus="no: such\\tplace"', "name=dé.1", "eval.rescales=[none, 'yarn:auto']"],
    )
    copy = tmp_path / "copy" / "recipe.yaml"
    copy.parent.mkdir()
    copy.write_text(recipe.resolved_yaml(loaded), encoding="utf-8")
    again = recipe.load(copy)
    assert again == loaded
    assert again.hash == loaded.hash
    assert recipe.resolved_yaml(again) == recipe.resolved_yaml(loaded)


def test_a_run_narrows_to_a_recipe_of_one(tiny, tmp_path) -> None:
    loaded = recipe.load(tiny)
    run = loaded.runs()[-1]
    path = tmp_path / "narrow.yaml"
    path.write_text(recipe.resolved_yaml(recipe.narrow(loaded, run)), encoding="utf-8")
    narrowed = recipe.load(path)
    assert narrowed.runs() == (run,)
    assert recipe.training_hash(narrowed, run) == recipe.training_hash(loaded, run)


def test_the_reference_lists_every_key() -> None:
    table = recipe.reference()
    for key in (
        "train.lr",
        "model.num_kv_heads",
        "data.corpus",
        "eval.lengths",
        "eval.truncation",
        "encodings",
    ):
        assert f"| `{key}" in table


def test_what_ships_is_found_from_any_folder(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.yaml").write_text("include: recipes/base.yaml\nname: mine\neval: evals/rescale.yaml\n")
    loaded = recipe.load("mine.yaml")
    assert (loaded.name, loaded.eval.name, loaded.train.length) == ("mine", "rescale", 64)
