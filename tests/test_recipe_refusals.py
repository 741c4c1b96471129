"""What a recipe refuses, and that it says which key, what was found and what would be accepted (case 03)."""

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_recipe import TINY, refused, write

from pe_study import recipe
from pe_study.errors import RecipeError
from pe_study.plan import Plan
from pe_study.sections import DataSpec, ModelSpec, TrainSpec
from pe_study.settings import yaml_strict


@pytest.fixture
def tiny(tmp_path) -> Path:
    return write(tmp_path)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("train.lr=01", 'train.lr: found the text "01"; accepted: a number above 0'),
        ("train.lr=1:30", 'train.lr: found the text "1:30"; accepted: a number above 0'),
        ("train.lr=on", 'train.lr: found the text "on"; accepted: a number above 0'),
        ("train.lr=2024-01-01", 'train.lr: found the text "2024-01-01"; accepted: a number'),
        ("train.lr='1e-4'", 'train.lr: found the text "1e-4"; accepted: a number'),
        ("train.lr=1_000", 'train.lr: found the text "1_000"; accepted: a number'),
        ("train.lr=true", "train.lr: found true; accepted: a number above 0"),
        ("train.lr=0", "train.lr: found 0; accepted: a number above 0"),
        ("train.lr=-1e-4", "train.lr: found -0.0001; accepted: a number above 0"),
        ("train.lr=.nan", "train.lr: found .nan; accepted: finite numbers"),
        ("train.lr=.inf", "train.lr: found .inf; accepted: finite numbers"),
        ("train.lr=nan", 'train.lr: found the text "nan"'),
        ("train.lr=", "train.lr: found nothing; accepted: a number above 0"),
        ("train.lr=[1]", "train.lr: found a list; accepted: a number above 0"),
        ("train.compile=on", 'train.compile: found the text "on"; accepted: true or false'),
        ("train.compile=1", "train.compile: found 1; accepted: true or false"),
        ("train.mixed_precision=false", "train.mixed_precision: found false; accepted: one of no, bf16,"),
        ("train.mixed_precision=bf6", 'accepted: one of no, bf16, fp16 (did you mean "bf16"?)'),
        ("train.kernel=flsh", 'train.kernel: found the text "flsh"; accepted: one of auto, eager'),
        ("train.steps=1.5", "train.steps: found 1.5; accepted: a whole number of at least 1"),
        ("train.steps=-1", "train.steps: found -1; accepted: a whole number"),
        ("train.steps=1e12", "train.steps: found 1000000000000.0; accepted: at most 1073741824"),
        ("model.max_positions=1e18", "model.max_positions: found 1e+18; accepted: at most 1073741824"),
        ("train.warmup_steps=5", "train.warmup_steps: found 5; accepted: at most steps (4)"),
        ("train.betas=[0.9, 1.0]", "train.betas: found a list; accepted: two numbers of at least 0 and"),
        ("train.length=2x", 'train.length: found the text "2x"; accepted: a whole number of at least 2, or'),
        ("train.length=100", "train.batch_tokens: found 256; accepted: a multiple of train.length (100)"),
        ("train.length=512", "model.max_positions: found 256; accepted: at least train.length (512)"),
        ("train.micro_batch_tokens=32", "train.micro_batch_tokens: found 32; accepted: a multiple of"),
        ("train.micro_batch_tokens=512", "at most batch_tokens (256)"),
        ("model.num_heads=3", "model.num_heads: found 3; accepted: a divisor of d_model (32)"),
        ("model.num_kv_heads=3", "model.num_kv_heads: found 3; accepted: a divisor of num_heads (4)"),
        ("model.d_model=-32", "model.d_model: found -32; accepted: a whole number of at least 1"),
        ("model.num_layers=0", "model.num_layers: found 0; accepted: a whole number of at least 1"),
        ("model.dropout=1", "model.dropout: found 1; accepted: a number of at least 0 and below 1"),
        ("model=3", "model: found 3; accepted: a mapping"),
        ("data.validation_fraction=1", "data.validation_fraction: found 1; accepted: a number above 0 and"),
        ("data.packing=pack", "data.packing: found the text"),
        ("data.corpus=3", "data.corpus: found 3; accepted: a corpus: stdlib, a file, a folder, or a hub"),
        ("data.tokenizer=bpe", 'data.tokenizer: found the text "bpe"; accepted: byte, bpe:N such as bpe:16k'),
        ("data.tokenizer=bpe:01k", 'data.tokenizer: found the text "bpe:01k"'),
        ("data.tokenizer=bpe:100", 'data.tokenizer: found the text "bpe:100"'),
        ("data.config=raw", 'data.config: found the text "raw"; accepted: the default, since'),
        ("data.split=test", 'data.split: found the text "test"; accepted: the default'),
        ("data.validation_split=test", 'data.validation_split: found the text "test"; accepted: the default'),
        ("trian.lr=1", 'trian: unknown key; did you mean "train"?'),
        ("train.lrr=1", 'train.lrr: unknown key; did you mean "lr"?'),
        ("lr=1", 'lr: unknown key; did you mean "train.lr"?'),
        ("include=x.yaml", "include: unknown key"),
        ("path=x.yaml", "path: unknown key"),
        ("seeds=0", "seeds: found 0; accepted: a list"),
        ("seeds=[]", "seeds: found an empty list; accepted: a list of at least 1"),
        ("seeds=[1, 1]", "seeds: found 1 twice; accepted: each seed once"),
        ("seeds=[-1]", "seeds.0: found -1; accepted: a whole number of at least 0"),
        ("seeds=[true]", "seeds.0: found true; accepted: a whole number of at least 0"),
        ("encodings=[]", "encodings: found an empty list"),
        ("encodings=rope", 'encodings: found the text "rope"; accepted: a list'),
        ("encodings=[ropee]", 'encodings.0: unknown encoding'),
        ("encodings=[3]", "encodings.0: found 3; accepted: a mapping"),
        ("encodings=[{base: 3}]", "encodings.0.name: this key is required"),
        ("encodings=[rope, rope]", 'encodings.1.label: found "rope" again; accepted: a label of its own'),
        ("encodings=[rope, {name: t5, label: ROPE}]", 'encodings.1.label: found "rope" again'),
        ("encodings.rope.bse=3", 'encodings.0.bse: rope has no such option; did you mean "base"?'),
        ("encodings.rope.label=a/b", 'encodings.0.label: found the text "a/b"; accepted: a label of letters'),
        ("encodings.rope.label=..", 'encodings.0.label: found the text ".."'),
        ("encodings.rope.label='a b'", 'encodings.0.label: found the text "a b"'),
        ("encodings.rope.lr_mult=0", "encodings.0.lr_mult: found 0; accepted: a number above 0, or auto"),
        ("encodings.t5.num_buckets=-1", "encodings.2: t5"),
        ("name=a/b", 'name: found the text "a/b"; accepted: a name of letters'),
        ("name=../x", 'name: found the text "../x"'),
        ("name=.x", 'name: found the text ".x"'),
        ("name=x.", 'name: found the text "x."'),
        (f"name={'x' * 101}", "name: found the text"),
        ("name=eval", 'name: found the text "eval", the folder of checkpoint results'),
        ("name=3", "name: found 3; accepted: a name of letters, digits and . _ + @ - that starts with a"),
        ("eval.lengths=[2x, 1x]", "eval.lengths: found 1x at or below the length before it; accepted:"),
        ("eval.lengths=[64, 1x]", "eval.lengths: found 1x at or below the length before it"),
        ("eval.rescales=[linar:4]", "eval.rescales.0: "),
        ("eval.protocols=[{name: sliding, stride: 65}]", "eval.protocols: sliding: found stride 65"),
        ("init.from=x", "encodings: found 3; accepted: one encoding, that of the weights"),
        ("init={rescale: none}", "init.from: this key is required"),
        ("init={source: x}", 'init.source: unknown key; (available: from, rescale, revision)'),
        ("init={from: x, rescale: yarn}", "init.rescale: rescale 'yarn'"),
        ("init=runs/x", 'init: found the text "runs/x"; accepted: a mapping'),
        ("data.tokenizer=checkpoint", 'data.tokenizer: found the text "checkpoint"; accepted: byte'),
        ("eval=missing.yaml", "eval: missing.yaml: no such file"),
        ("eval.num_docs=3", 'eval.num_docs: unknown key; did you mean "num_documents"?'),
    ],
)  # fmt: skip
def test_what_makes_no_sense_is_refused_by_name(tiny, override: str, message: str) -> None:
    assert message in refused(tiny, override)


def test_a_rescale_is_trained_in_only_where_the_encoding_takes_one(tiny) -> None:
    assert "encodings.0: rescale 'yarn:4' needs rotary" in refused(
        tiny, "encodings=[alibi]", "init={from: x, rescale: 'yarn:4'}"
    )


VALUES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 300),
    st.integers(2**30, 2**63 - 1),
    st.floats(allow_nan=True),
    st.sampled_from(["", "on", "1e4", "2k", "4x", "rope", "auto", "no", "é", "../x", "a\0b", "01"]),
    st.lists(st.sampled_from([0, 1, "rope", "1x", "2x", None]), max_size=3),
    st.dictionaries(
        st.sampled_from(["name", "label", "lr", "base"]), st.sampled_from([1, "rope", None]), max_size=3
    ),
)
SECTIONS = {"model": ModelSpec, "data": DataSpec, "train": TrainSpec, "eval": Plan}
KEYS = ["name", "seeds", "encodings", *SECTIONS, "include"]
KEYS += [f"{section}.{key}" for section, schema in SECTIONS.items() for key in schema.model_fields]
KEYS += ["encodings.0", "encodings.rope", "encodings.rope.base", "encodings.0.label", "encodings.0.lr_mult"]


@settings(derandomize=True, database=None, deadline=None, max_examples=150)
@given(st.lists(st.tuples(st.sampled_from(KEYS), VALUES), min_size=1, max_size=3))
def test_any_overrides_give_a_recipe_or_one_clear_line(tmp_path_factory, changes) -> None:
    path = tmp_path_factory.getbasetemp() / "any.yaml"
    path.write_text(TINY)
    overrides = [f"{key}={yaml_strict.dump(value).removesuffix('...').strip()}" for key, value in changes]
    try:
        loaded = recipe.load(path, overrides)
    except RecipeError as error:
        assert 0 < len(str(error)) < 1000
    else:
        path.write_text(recipe.resolved_yaml(loaded), encoding="utf-8")
        assert recipe.load(path) == loaded
