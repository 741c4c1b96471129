"""Rescales on Hugging Face families: frequencies against `rope_scaling`, logits against their own."""

from __future__ import annotations

import copy
import json

import pytest
import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    Gemma3TextConfig,
    GPT2Config,
    GPTNeoXConfig,
    LlamaConfig,
    MistralConfig,
    MptConfig,
    Phi3Config,
    Qwen2Config,
    Qwen3Config,
)

from pe_study import rope_scaling
from pe_study.checkpoints import Checkpoint, follows_running_length, open_checkpoint
from pe_study.errors import RescaleError
from pe_study.evaluators.perplexity import evaluate_perplexity
from pe_study.loading import hf_rope

SIZES = {
    "vocab_size": 40,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "max_position_embeddings": 32,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
FAMILIES = {
    "llama": LlamaConfig(
        **SIZES, num_key_value_heads=1, rope_parameters={"rope_theta": 500.0, "rope_type": "default"}
    ),
    "mistral": MistralConfig(**SIZES, num_key_value_heads=1, sliding_window=None),
    "qwen2": Qwen2Config(**SIZES, num_key_value_heads=1),
    "qwen3": Qwen3Config(**SIZES, num_key_value_heads=1, head_dim=16),
    "gpt-neox": GPTNeoXConfig(**SIZES, rope_parameters={"rope_theta": 10000.0, "partial_rotary_factor": 0.5}),
    "phi3": Phi3Config(**SIZES, num_key_value_heads=1, original_max_position_embeddings=32),
    "gemma3": Gemma3TextConfig(
        **SIZES,
        num_key_value_heads=1,
        head_dim=16,
        sliding_window=8,
        layer_types=["sliding_attention", "full_attention"],
    ),
}
RESCALES = (
    "none",
    "linear:2",
    "ntk:2",
    "ntk-by-parts:4",
    "dynamic",
    "dynamic:2",
    "yarn:2",
    "yarn:auto",
    "yarn:4:beta_fast=16:beta_slow=2:attention_factor=1.0:truncate=false",
    "llama3:4",
)


@pytest.fixture(scope="module", params=FAMILIES)
def checkpoint(request, tmp_path_factory) -> Checkpoint:
    folder = tmp_path_factory.mktemp(request.param)
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(FAMILIES[request.param]).save_pretrained(folder)
    return open_checkpoint(folder)


def rotary_tables(model) -> dict[str, tuple[torch.Tensor, float]]:
    """(inverse frequencies, attention factor) of each layer type, "" where there is one for all."""
    [module] = [m for name, m in model.named_modules() if name.endswith("rotary_emb")]
    found = {}
    for name, table in module.named_buffers():
        if name.endswith("inv_freq") and not name.endswith("original_inv_freq"):
            layer_type = name.removesuffix("inv_freq").rstrip("_")
            prefix = f"{layer_type}_" if layer_type else ""
            found[layer_type] = (table, float(getattr(module, f"{prefix}attention_scaling")))
    return found


@pytest.mark.parametrize("spec", RESCALES)
def test_global_layers_turn_by_our_frequencies(checkpoint, spec):
    """Cases 01, 24, 41, 42: frequencies of the declared length, on the checkpoint's own base and fraction."""
    model = checkpoint.load(spec, length=96)
    own = checkpoint.rotary
    expected, factor = rope_scaling.frequencies(
        spec, rotary_dim=own.rotary_dim, base=own.base, original_length=own.original_length, length=96
    )
    tables = rotary_tables(model)
    for layer_type, (table, attention_factor) in tables.items():
        if layer_type == "sliding_attention":
            unscaled = rotary_tables(checkpoint.load("none", length=96))[layer_type][0]
            assert torch.equal(table, unscaled)
        else:
            torch.testing.assert_close(table, expected, rtol=2e-6, atol=0)
            assert attention_factor == pytest.approx(factor, rel=1e-12)
    assert not follows_running_length(model)


@pytest.mark.parametrize(
    "spec", ["linear:1", "ntk:1", "ntk-by-parts:1", "yarn:1", "llama3:1", "yarn:auto", "dynamic"]
)
def test_a_factor_of_one_changes_nothing(checkpoint, spec):
    ids = torch.arange(3, 35)[None]
    plain = checkpoint.load("none", length=32)(ids).logits
    assert torch.equal(checkpoint.load(spec, length=32)(ids).logits, plain)


@pytest.mark.parametrize(
    "spec", ["none", "linear:auto", "ntk:auto", "ntk-by-parts:auto", "dynamic", "yarn:auto"]
)
def test_the_order_of_lengths_changes_no_number(checkpoint, spec):
    """Cases 17, 19: 64, 128, 64 give the same first and third numbers."""
    ids = torch.randint(3, 40, (300,), generator=torch.Generator().manual_seed(0)).numpy()
    frame = evaluate_perplexity(
        [ids],
        lengths=[64, 128, 64],
        protocol="prefix",
        load=lambda length: checkpoint.load(spec, length),
    )
    rows = frame[frame["length"] == 64]["nll_sum"].tolist()
    assert rows[: len(rows) // 2] == rows[len(rows) // 2 :]


def save_llama(folder, **changes):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(LlamaConfig(**SIZES, num_key_value_heads=1))
    model.save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    for key in [key for key, value in changes.items() if value is None]:
        config.pop(key, None)
    config |= {key: value for key, value in changes.items() if value is not None}
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


@pytest.mark.parametrize(
    ("spec", "scaling"),
    [
        ("linear:4", {"type": "linear", "factor": 4.0}),
        ("yarn:4", {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}),
        (
            "llama3:4",
            {
                "rope_type": "llama3",
                "factor": 4.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 32,
            },
        ),
    ],
)
def test_logits_equal_hugging_face_s_own_in_both_spellings(tmp_path, spec, scaling):
    """Case 45: v4's `rope_theta` + `rope_scaling` and v5's `rope_parameters` are one checkpoint."""
    ids = torch.randint(3, 40, (1, 100), generator=torch.Generator().manual_seed(0))
    theirs = save_llama(tmp_path / "theirs", rope_parameters=None, rope_theta=500.0, rope_scaling=scaling)
    expected = AutoModelForCausalLM.from_pretrained(theirs)(ids).logits
    old = save_llama(tmp_path / "old", rope_parameters=None, rope_theta=500.0)
    new = save_llama(tmp_path / "new", rope_parameters={"rope_theta": 500.0, "rope_type": "default"})
    for folder in (old, new):
        assert torch.equal(open_checkpoint(folder).load(spec, 128)(ids).logits, expected)


def test_dynamic_is_hugging_face_s_base_of_the_declared_length(tmp_path):
    """Case 19: the logits of a window equal Hugging Face's, which rebuilds its base for that window."""
    ids = torch.randint(3, 40, (1, 100), generator=torch.Generator().manual_seed(0))
    folder = save_llama(
        tmp_path, rope_parameters={"rope_theta": 500.0, "rope_type": "dynamic", "factor": 2.0}
    )
    expected = AutoModelForCausalLM.from_pretrained(folder)(ids).logits
    model = open_checkpoint(folder).load("none", 100)
    torch.testing.assert_close(model(ids).logits, expected, rtol=1e-5, atol=1e-5)
    assert not follows_running_length(model)
    plain = save_llama(tmp_path / "plain", rope_parameters={"rope_theta": 500.0, "rope_type": "default"})
    torch.testing.assert_close(
        open_checkpoint(plain).load("dynamic:2", 100)(ids).logits, expected, rtol=1e-5, atol=1e-5
    )


def test_longrope_from_a_file_is_chosen_by_the_declared_length(tmp_path):
    """Case 43: the short list up to the original length, the long one past it, for windows of any size."""
    factors = {"short_factor": [1.0] * 8, "long_factor": [2.0] * 8}
    file = tmp_path / "factors.json"
    file.write_text(json.dumps(factors), encoding="utf-8")
    checkpoint = open_checkpoint(save_llama(tmp_path / "plain"))
    short, long = (checkpoint.load(f"longrope:{file}", length) for length in (32, 64))
    (table, factor), (halved, raised) = rotary_tables(short)[""], rotary_tables(long)[""]
    torch.testing.assert_close(halved, table / 2)
    assert (factor, raised) == (1.0, pytest.approx((1 + 0.2) ** 0.5))  # 1 + ln 2 / ln 32
    ids = torch.arange(3, 13)[None]
    assert not torch.equal(short(ids).logits, long(ids).logits)


def test_a_checkpoint_s_own_scaling_is_kept_under_none(tmp_path):
    scaling = {"rope_theta": 500.0, "rope_type": "linear", "factor": 4.0}
    model = open_checkpoint(save_llama(tmp_path, rope_parameters=scaling)).load("none", 64)
    assert rotary_tables(model)[""][0][0] == 0.25


def test_models_without_rope_take_none_only(tmp_path):
    config = GPT2Config(vocab_size=40, n_positions=32, n_embd=16, n_layer=1, n_head=2)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    checkpoint = open_checkpoint(tmp_path)
    assert checkpoint.rotary is None
    assert checkpoint.original_length == 32
    checkpoint.load("none", 32)
    with pytest.raises(RescaleError, match="gpt2 has no rotary positions"):
        checkpoint.load("yarn:2", 64)


@pytest.mark.parametrize("kind", ["granite_swa", "granitemoe_swa"])
def test_bases_of_single_layers_take_none_only(kind):
    """A larger base in the config would reach no layer: each has its own; numbers would be plain RoPE's."""
    config = AutoConfig.for_model(kind, num_hidden_layers=2, layer_rope_theta=[10000.0, 500.0])
    for spec in ("ntk:2", "dynamic", "yarn:2"):
        with pytest.raises(RescaleError, match="a base of its own"):
            hf_rope.apply(config, spec, 2 * config.max_position_embeddings)
    before = copy.deepcopy(config.rope_parameters)
    for spec in ("none", "ntk:1"):
        hf_rope.apply(config, spec, 64)
        assert config.rope_parameters == before


def test_mpt_s_computed_limit_is_lifted(tmp_path):
    """Case 32: 64 tokens at max_seq_len 32 run, and short logits do not change."""
    config = MptConfig(vocab_size=40, d_model=32, n_heads=2, n_layers=1, max_seq_len=32)
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    checkpoint = open_checkpoint(tmp_path)
    ids = torch.arange(3, 33)[None]
    short, long = checkpoint.load("none", 32), checkpoint.load("none", 64)
    torch.testing.assert_close(long(ids).logits, short(ids).logits)
    assert long(torch.arange(64)[None] % 40).logits.shape == (1, 64, 40)


def test_low_precision_keeps_float32_tables(tmp_path):
    """Case 21: loaded in bfloat16, the table is the float32 one."""
    folder = save_llama(tmp_path)
    table = rotary_tables(open_checkpoint(folder, dtype="bfloat16").load("yarn:4", 128))[""][0]
    assert table.dtype == torch.float32
    assert torch.equal(table, rotary_tables(open_checkpoint(folder).load("yarn:4", 128))[""][0])


def test_frequencies_of_the_cases(tmp_path):
    """Case 42: head width 16, linear x8: the local table unscaled, the global one divided."""
    config = Gemma3TextConfig(
        **SIZES, num_key_value_heads=1, head_dim=16, layer_types=["sliding_attention", "full_attention"]
    )
    assert hf_rope.rotary(config) == hf_rope.Rotary(16, 1_000_000.0, 32)
    hf_rope.apply(config, "linear:8", 256)
    assert config.rope_parameters["sliding_attention"]["rope_type"] == "default"
    assert config.rope_parameters["full_attention"]["factor"] == 8
