"""Every option of every rescale on every family, against formulas in float64, where the option matters."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from test_hf_rope import rotary_tables
from transformers import (
    AutoModelForCausalLM,
    Gemma3TextConfig,
    GPTNeoXConfig,
    LlamaConfig,
    MistralConfig,
    Phi3Config,
    Qwen2Config,
    Qwen3Config,
)

from pe_study import rescales, rope_scaling
from pe_study.checkpoints import open_checkpoint
from pe_study.evaluators import evaluation
from pe_study.loading import hf_rope
from pe_study.model import PEStudyConfig, PEStudyForCausalLM

ORIGINAL, LENGTH = 2048, 8192
SIZES = {
    "vocab_size": 8,
    "hidden_size": 64,
    "intermediate_size": 8,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "max_position_embeddings": ORIGINAL,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
GROUPED = {**SIZES, "num_key_value_heads": 1}


def turning(base: float, **more: float) -> dict:
    return {"rope_theta": base, "rope_type": "default", **more}


CONFIGS = {  # config, rotated width, base
    "llama": (LlamaConfig(**GROUPED, rope_parameters=turning(5e5)), 32, 5e5),
    "mistral": (MistralConfig(**GROUPED, sliding_window=None, rope_parameters=turning(1e6)), 32, 1e6),
    "qwen2": (Qwen2Config(**GROUPED, rope_parameters=turning(1e6)), 32, 1e6),
    "qwen3": (Qwen3Config(**GROUPED, head_dim=48, rope_parameters=turning(5e6)), 48, 5e6),
    "gpt-neox": (GPTNeoXConfig(**SIZES, rope_parameters=turning(1e4, partial_rotary_factor=0.5)), 16, 1e4),
    "phi3": (
        Phi3Config(
            **GROUPED,
            original_max_position_embeddings=ORIGINAL,
            rope_parameters=turning(1e4, partial_rotary_factor=0.75),
        ),
        24,
        1e4,
    ),
    "gemma3": (
        Gemma3TextConfig(
            **GROUPED,
            head_dim=32,
            sliding_window=8,
            layer_types=["sliding_attention", "full_attention"],
            rope_parameters={"sliding_attention": turning(1e4), "full_attention": turning(1e6)},
        ),
        32,
        1e6,
    ),
    "ours": (
        PEStudyConfig(
            vocab_size=8,
            num_layers=1,
            d_model=64,
            num_heads=2,
            num_kv_heads=1,
            d_ff=8,
            max_positions=ORIGINAL,
            encoding={"name": "rope"},
            train_length=ORIGINAL,
        ),
        32,
        1e4,
    ),
}
PLAIN = ("linear:4", "ntk:4", "ntk-by-parts:4", "dynamic", "dynamic:2", "yarn:4", "llama3:8", "longrope:FILE")
OPTIONS = {  # kind: (spec without, an option that matters)
    "ntk-by-parts": [("ntk-by-parts:4", "beta_fast=8"), ("ntk-by-parts:4", "beta_slow=4")],
    "yarn": [
        ("yarn:4", "beta_fast=4"),
        ("yarn:4", "beta_slow=6"),
        ("yarn:4", "attention_factor=1.3"),
        ("yarn:4", "mscale=0.7:mscale_all_dim=1.5"),
        ("yarn:4", "truncate=false"),
        ("yarn:8", "beta_fast=16:beta_slow=2:attention_factor=0.9:truncate=false"),
    ],
    "llama3": [("llama3:8", "low_freq_factor=3"), ("llama3:8", "high_freq_factor=16")],
    "longrope": [("longrope:FILE", "attention_factor=1.3")],
}
SPECS = [(spec, "") for spec in PLAIN] + [pair for pairs in OPTIONS.values() for pair in pairs]


def ramp(low: float, high: float, count: int) -> np.ndarray:
    return np.clip((np.arange(count) - low) / (high - low), 0, 1)


def yarn(theta: np.ndarray, base: float, s: float, o: dict[str, str]) -> tuple[np.ndarray, float]:
    """Peng et al. 2023, section 3.4 and the authors' code."""
    dim = 2 * len(theta)

    def dimension(turns: float) -> float:
        return dim * math.log(ORIGINAL / (turns * 2 * math.pi)) / (2 * math.log(base))

    low, high = (
        dimension(float(o.get(key, default))) for key, default in (("beta_fast", 32), ("beta_slow", 1))
    )
    if o.get("truncate") != "false":
        low, high = math.floor(low), math.ceil(high)
    divided = ramp(max(low, 0), min(high, dim - 1), len(theta))

    def g(mscale: float) -> float:
        return 1 + 0.1 * mscale * math.log(s)

    factor = g(float(o["mscale"])) / g(float(o["mscale_all_dim"])) if "mscale" in o else g(1)
    return theta / s * divided + theta * (1 - divided), float(o.get("attention_factor", factor))


def expected(kind: str, s: float, o: dict[str, str], dim: int, base: float) -> tuple[np.ndarray, float]:
    """Frequencies and attention factor at LENGTH, written down once more in float64."""
    exponent = np.arange(0, dim, 2) / dim
    theta, turns = base**-exponent, ORIGINAL * base**-exponent / (2 * math.pi)
    if kind == "linear":
        return theta / s, 1.0
    if kind in ("ntk", "dynamic"):
        stretch = s if kind == "ntk" else s * LENGTH / ORIGINAL - (s - 1)
        return (base * stretch ** (dim / (dim - 2))) ** -exponent, 1.0
    if kind == "yarn":
        return yarn(theta, base, s, o)
    if kind == "longrope":
        factor = math.sqrt(1 + math.log(LENGTH / ORIGINAL) / math.log(ORIGINAL))
        return theta / np.array(factors(dim)["long_factor"]), float(o.get("attention_factor", factor))
    names = ("low_freq_factor", "high_freq_factor") if kind == "llama3" else ("beta_slow", "beta_fast")
    defaults = (1, 4) if kind == "llama3" else (1, 32)
    low, high = (float(o.get(name, default)) for name, default in zip(names, defaults, strict=True))
    kept = np.clip((turns - low) / (high - low), 0, 1)
    return kept * theta + (1 - kept) * theta / s, 1.0


def factors(dim: int) -> dict[str, list[float]]:
    return {"short_factor": [1.0] * (dim // 2), "long_factor": [1.5 + 0.3 * n for n in range(dim // 2)]}


def formula(spec: str, dim: int, base: float) -> tuple[np.ndarray, float]:
    kind, *parts = spec.split(":")
    options = dict(part.split("=") for part in parts if "=" in part)
    numbers = [part for part in parts if "=" not in part and part != "FILE"]
    return expected(kind, float(numbers[0]) if numbers else 1.0, options, dim, base)


@pytest.fixture(scope="module", params=CONFIGS)
def family(request, tmp_path_factory):
    config, dim, base = CONFIGS[request.param]
    folder = tmp_path_factory.mktemp(request.param)
    torch.manual_seed(0)
    build = PEStudyForCausalLM if request.param == "ours" else AutoModelForCausalLM.from_config
    build(config).save_pretrained(folder)
    (folder / "factors.json").write_text(json.dumps(factors(dim)), encoding="utf-8")
    return open_checkpoint(folder), dim, base


def tables(model) -> dict[str, tuple[torch.Tensor, float]]:
    if isinstance(model, PEStudyForCausalLM):
        return {"": (model.first_encoding.inv_freq, model.first_encoding.attention_factor)}
    return rotary_tables(model)


@pytest.mark.parametrize(("spec", "option"), SPECS)
def test_the_model_turns_by_the_formula(family, spec, option):
    checkpoint, dim, base = family
    asked = f"{spec}:{option}" if option else spec
    theta, factor = formula(asked, dim, base)
    named = asked.replace("FILE", str(Path(checkpoint.name) / "factors.json"))
    found = tables(checkpoint.load(named, LENGTH))
    if "sliding_attention" in found:
        local, its_factor = found.pop("sliding_attention")
        np.testing.assert_allclose(local.double(), 1e4 ** -(np.arange(0, dim, 2) / dim), rtol=2e-6)
        assert its_factor == 1.0
    ((inv_freq, attention_factor),) = found.values()
    np.testing.assert_allclose(inv_freq.double(), theta, rtol=3e-6)
    assert attention_factor == pytest.approx(factor, rel=1e-9)
    noted = checkpoint.frequencies(named, LENGTH)
    assert torch.equal(noted[0], inv_freq) and noted[1] == attention_factor


@pytest.mark.parametrize(("spec", "option"), [pair for pairs in OPTIONS.values() for pair in pairs])
@pytest.mark.parametrize("name", CONFIGS)
def test_the_option_matters_at_these_sizes(name, spec, option):
    """Else the test above would pass where an option is ignored."""
    _, dim, base = CONFIGS[name]
    (theta, factor), (plain, its_factor) = (formula(s, dim, base) for s in (f"{spec}:{option}", spec))
    assert max(np.abs(theta / plain - 1).max(), abs(factor / its_factor - 1)) > 1e-3


def test_no_option_is_left_out():
    tried = {kind: {part.split("=")[0] for _, option in pairs for part in option.split(":")}
             for kind, pairs in OPTIONS.items()}  # fmt: skip
    assert tried == {kind: set(options) for kind, options in rescales.OPTIONS.items() if options}
    assert {spec.split(":")[0] for spec in PLAIN} == set(rescales.OPTIONS) - {"none"}


AT_ONE = [
    f"{kind}:{one}:{option}"
    for kind, pairs in OPTIONS.items()
    for _, option in pairs
    for one in ("1", "auto")
    if kind != "longrope"
]


@pytest.mark.parametrize("spec", AT_ONE)
def test_a_factor_of_one_changes_nothing_whatever_the_options(family, spec):
    checkpoint, _, _ = family
    for (table, factor), (own, its_factor) in zip(
        tables(checkpoint.load(spec, ORIGINAL)).values(),
        tables(checkpoint.load("none", ORIGINAL)).values(),
        strict=True,
    ):
        assert torch.equal(table, own) and factor == its_factor == 1.0


@pytest.mark.parametrize("dim", [16, 80, 96, 128])
@pytest.mark.parametrize("base", [500.0, 1e4, 1e6])
@pytest.mark.parametrize(
    "spec", ["yarn:auto:attention_factor=1", "yarn:1:attention_factor=1.3:truncate=false"]
)
def test_a_factor_of_one_is_bit_equal_at_many_sizes(dim, base, spec):
    for original in (64, 512, 8192):
        config = LlamaConfig(
            hidden_size=dim,
            num_attention_heads=1,
            max_position_embeddings=original,
            rope_parameters=turning(base),
        )
        for found in (
            hf_rope.frequencies(config, spec, original),
            rope_scaling.frequencies(
                spec, rotary_dim=dim, base=base, original_length=original, length=original
            ),
        ):
            assert torch.equal(found[0], rope_scaling.unscaled(dim, base)) and found[1] == 1.0


def test_cells_whose_options_were_read_otherwise_are_measured_again():
    for spec in (
        "none",
        "linear:4",
        "yarn:4",
        "yarn:auto",
        "yarn:4:beta_fast=8",
        "llama3:8:low_freq_factor=2",
    ):
        assert evaluation.factors_of(spec) == {}
    for spec in ("yarn:auto:attention_factor=1", "yarn:4:truncate=false"):
        assert evaluation.factors_of(spec) == {"options": 2}
