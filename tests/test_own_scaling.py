"""Checkpoints that bring a scaling of their own, and models whose positions lie in tables of their own."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    CodeGenConfig,
    CTRLConfig,
    Gemma3TextConfig,
    GPTJConfig,
    LlamaConfig,
    OpenAIGPTConfig,
    OPTConfig,
    Phi3Config,
    RobertaConfig,
)

from pe_study import rope_scaling
from pe_study.checkpoints import open_checkpoint
from pe_study.errors import LengthError, RescaleError
from pe_study.evaluators import study
from pe_study.evaluators.perplexity import evaluate_perplexity
from pe_study.evaluators.subjects import checkpoint_subject
from pe_study.loading.hf_rope import Rotary, rope_parameters
from pe_study.rope_scaling import parse

SIZES = {
    "vocab_size": 40,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
ORIGINAL = {"rope_theta": 500.0, "original_max_position_embeddings": 32}
SCALINGS = {
    "llama3": {
        **ORIGINAL,
        "rope_type": "llama3",
        "factor": 4.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
    },
    "yarn": {**ORIGINAL, "rope_type": "yarn", "factor": 4.0},
    "linear": {**ORIGINAL, "rope_type": "linear", "factor": 4.0},
    "dynamic": {"rope_theta": 500.0, "rope_type": "dynamic", "factor": 4.0},
    "longrope": {**ORIGINAL, "rope_type": "longrope", "short_factor": [1.5] * 8, "long_factor": [3.0] * 8},
}


def saved(config, folder):
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return open_checkpoint(folder)


@pytest.fixture(scope="module", params=SCALINGS)
def checkpoint(request, tmp_path_factory):
    scaling = SCALINGS[request.param]
    longest = 128 if "original_max_position_embeddings" in scaling else 32
    options = {**SIZES, "max_position_embeddings": longest, "rope_parameters": scaling}
    if request.param == "longrope":
        config = Phi3Config(**options, original_max_position_embeddings=32)
    else:
        config = LlamaConfig(**options)
    return saved(config, tmp_path_factory.mktemp(request.param))


@pytest.mark.parametrize(
    "spec",
    [
        "linear:1",
        "ntk:1",
        "ntk-by-parts:1:beta_fast=8",
        "yarn:1",
        "llama3:1",
        "yarn:auto",
        "yarn:auto:attention_factor=1",
        "yarn:1:attention_factor=1.3:truncate=false",
        "dynamic",
        "dynamic:2",
    ],
)
def test_a_factor_of_one_keeps_a_scaling_of_the_checkpoint_s_own(checkpoint, spec):
    """S = 1 changes nothing, bit for bit: that is `none`, not the frequencies before the checkpoint's own."""
    ids = torch.arange(3, 33)[None]
    plain = checkpoint.load("none", 32)(ids).logits
    assert torch.equal(checkpoint.load(spec, 32)(ids).logits, plain)
    assert not torch.equal(checkpoint.load("linear:7", 32)(ids).logits, plain)


def test_none_is_hugging_face_s_own(checkpoint):
    ids = torch.randint(3, 40, (1, 100), generator=torch.Generator().manual_seed(0))
    expected = AutoModelForCausalLM.from_pretrained(checkpoint.name).eval()(ids).logits
    torch.testing.assert_close(checkpoint.load("none", 100)(ids).logits, expected, rtol=1e-5, atol=1e-5)


def test_without_a_declared_length_it_is_the_checkpoint_s_own_and_is_not_crossed(checkpoint):
    """Cases 19, 43: what follows the length is built for the original one, and says so past it."""
    model = checkpoint.load("none")
    model(torch.ones(1, 32, dtype=torch.long))
    longer = torch.ones(1, 33, dtype=torch.long)
    if not checkpoint.depends_on_length("none"):
        model(longer)
        return
    with pytest.raises(LengthError, match="33 tokens cross the declared length 32"):
        model(longer)
    cache = model(longer[:, :32], use_cache=True).cache
    for name in ("cache", "past_key_values"):
        with pytest.raises(LengthError, match="33 tokens cross"):
            model(longer[:, :1], **{name: cache})


GEMMA = Gemma3TextConfig(
    **SIZES,
    max_position_embeddings=128,
    num_key_value_heads=2,
    head_dim=16,
    sliding_window=8,
    layer_types=["sliding_attention", "full_attention"],
    rope_parameters={
        "full_attention": {"rope_theta": 1e6, "rope_type": "linear", "factor": 8.0},
        "sliding_attention": {"rope_theta": 1e4, "rope_type": "default"},
    },
)
LONGCHAT = LlamaConfig(
    **SIZES, max_position_embeddings=128, rope_parameters={"rope_type": "linear", "factor": 8.0}
)


@pytest.mark.parametrize("config", [GEMMA, LONGCHAT], ids=["gemma3", "longchat"])
def test_a_linear_scaling_that_names_no_original_length_is_kept_or_refused(config, tmp_path):
    """Gemma 3 states the length after its scaling, Vicuna the one before: no factor can be anchored."""
    checkpoint = saved(config, tmp_path)
    assert checkpoint.load("none", 256) is not None
    assert checkpoint.load("yarn:auto", 128) is not None
    for spec in ("linear:2", "yarn:2", "ntk:auto", "dynamic", "llama3:2"):
        with pytest.raises(RescaleError, match=r"scaled already \(linear:8\).*original_max_position"):
            checkpoint.load(spec, 256)
        with pytest.raises(RescaleError, match="accepted: none"):
            checkpoint.frequencies(spec, 256)


def test_a_stated_original_length_is_the_anchor(tmp_path):
    config = copy.deepcopy(LONGCHAT)
    config.rope_parameters["original_max_position_embeddings"] = 16
    checkpoint = saved(config, tmp_path)
    assert checkpoint.rotary.original_length == 16
    inv_freq, _ = rope_scaling.frequencies(
        "yarn:8", rotary_dim=16, base=checkpoint.rotary.base, original_length=16, length=128
    )
    torch.testing.assert_close(checkpoint.load("yarn:auto", 128).model.rotary_emb.inv_freq, inv_freq)


@pytest.mark.parametrize(("longest", "warned"), [(32, False), (64, True), (128, False)])
def test_a_yarn_factor_that_its_lengths_belie_is_used_and_told(longest, warned, tmp_path, caplog):
    """Case 24: 4 and not 64 / 32. Where the maximum is the original length there is no ratio to compare."""
    options = {**SIZES, "max_position_embeddings": longest, "rope_parameters": SCALINGS["yarn"]}
    checkpoint = saved(LlamaConfig(**options), tmp_path)
    inv_freq, _ = rope_scaling.frequencies(
        "yarn:4", rotary_dim=16, base=500.0, original_length=32, length=longest
    )
    torch.testing.assert_close(checkpoint.load("none").model.rotary_emb.inv_freq, inv_freq)
    said = [record.getMessage() for record in caplog.records if record.name == "pe_study.checkpoints"]
    assert len(said) == int(warned)
    if warned:
        assert "its YaRN factor is 4, its lengths make it 2" in said[0]


def test_notes_tell_the_frequencies_that_the_model_has(checkpoint):
    """Under `none` and S = 1 those of the checkpoint's own scaling, which is no `unscaled`."""
    subject = checkpoint_subject(checkpoint.source, {})
    kind = checkpoint.config.rope_parameters["rope_type"]
    for spec, length, own in (("none", 128, True), ("linear:1", 32, True), ("linear:7", 128, False)):
        note = study.rescale_note(subject, spec, length)
        rotary = checkpoint.load(spec, length).model.rotary_emb
        inv_freq, attention_factor = checkpoint.frequencies(spec, length)
        assert torch.equal(inv_freq, rotary.inv_freq)
        assert note["attention_factor"] == attention_factor == rotary.attention_scaling
        assert note["own_scaling"] == (kind if own else None)
        assert note["factor"] == (checkpoint.config.rope_parameters.get("factor") if own else 7.0)
        unscaled = rope_scaling.unscaled(16, 500.0)
        kept = int(torch.isclose(inv_freq, unscaled, rtol=1e-5, atol=0).sum())
        assert note["kept"] == kept
        assert note["kept"] + note["blended"] + note["interpolated"] == 8


def test_frequencies_of_an_unknown_kind_are_not_replaced():
    own = {"rope_theta": 500.0, "rope_type": "proportional", "partial_rotary_factor": 0.25}
    geometry = Rotary(4, 500.0, 32)
    assert rope_parameters(parse("yarn:1"), own, geometry, 32) is own
    with pytest.raises(RescaleError, match="turns by proportional frequencies"):
        rope_parameters(parse("yarn:2"), own, geometry, 64)


TABLES = {"vocab_size": 40, "n_positions": 32, "n_embd": 32, "n_layer": 1, "n_head": 2}
COMPUTED = {
    "gptj": GPTJConfig(**TABLES, rotary_dim=8),
    "codegen": CodeGenConfig(**{**TABLES, "n_head": 4}, n_ctx=32, rotary_dim=4),
    "ctrl": CTRLConfig(**TABLES, dff=32),
}
LEARNED = {
    "openai-gpt": OpenAIGPTConfig(**TABLES),
    "opt": OPTConfig(
        vocab_size=40,
        max_position_embeddings=32,
        hidden_size=32,
        word_embed_proj_dim=32,
        ffn_dim=32,
        num_hidden_layers=1,
        num_attention_heads=2,
    ),
    "roberta": RobertaConfig(**{**SIZES, "pad_token_id": 1}, max_position_embeddings=34, is_decoder=True),
}


def statuses(checkpoint) -> list:
    ids = np.random.default_rng(0).integers(3, 40, 100)
    frame = evaluate_perplexity(
        [ids], lengths=[32, 33], protocol="prefix", load=lambda length: checkpoint.load("none", length)
    )
    return [set(frame[frame["length"] == length]["status"]) for length in (32, 33)]


@pytest.mark.parametrize("name", COMPUTED)
def test_a_computed_table_grows(name, tmp_path):
    """Case 32 as a kind: what no file holds limits nothing, and short logits stay."""
    checkpoint = saved(COMPUTED[name], tmp_path)
    assert checkpoint.original_length == 32
    assert statuses(checkpoint) == [{"ok"}, {"ok"}]
    why = "has no rotary positions" if name == "ctrl" else "turns by a table of its own"
    with pytest.raises(RescaleError, match=f"{name} {why}"):
        checkpoint.load("yarn:2", 64)
    ids = torch.arange(3, 33)[None]
    short, long = checkpoint.load("none", 32), checkpoint.load("none", 64)
    torch.testing.assert_close(long(ids).logits, short(ids).logits)


@pytest.mark.parametrize("name", LEARNED)
def test_a_learned_table_ends_before_any_kernel_runs(name, tmp_path):
    """Case 33 as a kind, whatever the table is called and wherever its first position lies."""
    assert statuses(saved(LEARNED[name], tmp_path)) == [{"ok"}, {"unsupported"}]
