"""Hooks in the attention of Hugging Face models: without a wish they change no bit, with one all is seen."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from pe_study.errors import UsageError
from pe_study.evaluators import diagnostics
from pe_study.kernels.statistics import Bins
from pe_study.loading import hf_attention

SIZES: dict[str, Any] = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "initializer_range": 0.3,
    "pad_token_id": 0,
}
SPARSE = {
    "num_key_value_heads": 4,
    "moe_intermediate_size": 16,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "kv_lora_rank": 16,
    "q_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
    "qk_nope_head_dim": 8,
    "index_topk": 6,
    "index_head_dim": 16,
    "index_n_heads": 2,
    "first_k_dense_replace": 2,
}
SHARED_KEYS = {
    "num_hidden_layers": 4,
    "head_dim": 8,
    "global_head_dim": 8,
    "num_kv_shared_layers": 2,
    "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": 61,
    "sliding_window": 512,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
}
AFMOE = {"num_experts": 4, "num_dense_layers": 2, "moe_intermediate_size": 16, "head_dim": 8}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "gemma2": {"head_dim": 8, "sliding_window": 16},
    "deepseek_v32": SPARSE,  # decides on its sparse mask by the implementation's name
    "glm_moe_dsa": SPARSE,
    "gemma4_text": SHARED_KEYS,  # reads fewer queries where fewer logits are kept, and the name, too
    "afmoe": AFMOE,  # passes its mask by keyword
    "doge": {"keep_window_size": 8},  # adds to scores through its mask
}
LENGTH = 40


def made(family: str, kernel: str | None = None) -> Any:
    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **{**SIZES, **FAMILIES[family]})
    model = AutoModelForCausalLM.from_config(config, attn_implementation=kernel).eval()
    for name, weight in model.named_parameters():
        if name.endswith(".A"):  # Doge's, zeros at first
            torch.nn.init.normal_(weight)
    return model


def ids() -> torch.Tensor:
    return torch.randint(1, 61, (1, LENGTH), generator=torch.Generator().manual_seed(1))


@torch.no_grad()
@pytest.mark.parametrize("kernel", [None, "eager"])
@pytest.mark.parametrize("family", FAMILIES)
def test_hooks_that_ask_for_nothing_change_no_bit(family: str, kernel: str | None) -> None:
    """An implementation of another name made DeepSeek V3.2 drop its sparse mask and Gemma 4 look ahead."""
    model, kept = made(family, kernel), {"use_cache": False, "logits_to_keep": 10}
    before = [model(ids(), use_cache=False).logits, model(ids(), **kept).logits]
    name = model.config._attn_implementation
    hooks = hf_attention.install(model)
    after = [model(ids(), use_cache=False).logits, model(ids(), **kept).logits]
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    assert model.config._attn_implementation == name
    assert hooks.layers == set(range(model.config.num_hidden_layers))
    assert hooks.cut is (family == "gemma4_text")
    hooks.window = LENGTH
    assert torch.equal(model(ids(), use_cache=False).logits, before[0])


@torch.no_grad()
@pytest.mark.parametrize("family", FAMILIES)
def test_every_query_and_key_is_measured(family: str) -> None:
    """Entropies are those of the weights that the eager attention gives out; no query is left out."""
    shown = made(family, "eager")(ids(), use_cache=False, output_attentions=True).attentions
    layers = diagnostics.collect(made(family), [ids()[0].numpy()], Bins(LENGTH))
    assert sorted(layers) == list(range(len(shown)))
    for layer, weights_BHTS in enumerate(shown):
        weights_HTS = weights_BHTS[0].double()
        seen_HT = (weights_HTS > 0).sum(-1)
        entropy_HT = torch.special.entr(weights_HTS).sum(-1)
        ratios_HT = torch.where(seen_HT > 1, entropy_HT / seen_HT.clamp(min=2).log(), 0.0)
        assert int(layers[layer].num_queries_P.sum()) == LENGTH
        torch.testing.assert_close(
            layers[layer].entropy_ratio_PH.sum(0), ratios_HT.sum(-1), rtol=1e-5, atol=1e-5
        )


@torch.no_grad()
@pytest.mark.parametrize("family", ["llama", "doge", "deepseek_v32"])
def test_a_window_hides_keys_and_leaves_the_rest_of_a_mask(family: str) -> None:
    """Eager weights under the window are the model's own, those far back left out."""
    window = 5
    model = made(family, "eager")
    first = {"use_cache": False, "output_attentions": True}
    own_HTS = model(ids(), **first).attentions[0][0].double()
    hooks, parts = hf_attention.install(model), []
    hooks.window, find = window, hf_attention._windowed

    def recording(*given: Any) -> Any:
        parts.append(find(*given))
        return parts[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hf_attention, "_windowed", recording)
        model(ids(), use_cache=False)
    mask = parts[0][2]
    t, s = torch.arange(LENGTH)[:, None], torch.arange(LENGTH)
    near = (s <= t) & (s > t - window)
    shown = mask if mask.dtype == torch.bool else mask > torch.finfo(mask.dtype).min / 2
    assert not (shown & ~near).any()
    assert torch.equal((own_HTS > 0) & near, shown[0].expand_as(own_HTS) & near)
    if mask.dtype != torch.bool and family == "doge":
        assert mask[0][:, near].unique().numel() > 2, "what the mask adds is kept"


def test_masks_that_are_no_matrices_are_refused() -> None:
    model = made("llama")
    model.config._attn_implementation = "flex_attention"
    with pytest.raises(UsageError, match=r"kernel flex: .*accepted: sdpa, eager"):
        hf_attention.install(model)


def test_other_models_are_left_alone() -> None:
    """The hooks of one model are no other's."""
    hooked, other = made("llama"), made("llama")
    hf_attention.install(hooked).window = 3
    assert hf_attention.installed(other) is None
    with torch.no_grad():
        changed, plain = (model(ids(), use_cache=False).logits for model in (hooked, other))
        assert not torch.equal(changed, plain)
        assert torch.equal(plain, made("llama")(ids(), use_cache=False).logits)
    assert math.isfinite(float(changed.sum()))
