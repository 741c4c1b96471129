"""Model objects whose frequencies follow the running length: frozen at the declared one, given back so."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, Gemma3TextConfig, LlamaConfig, Phi3Config

from pe_study.checkpoints import exact_cache_name, follows_running_length, open_checkpoint
from pe_study.errors import CheckpointError
from pe_study.evaluators.perplexity import evaluate_perplexity
from pe_study.evaluators.scoring import Scorer
from pe_study.loading.frozen import frozen

SIZES = {
    "vocab_size": 40,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "pad_token_id": 0,
}
DYNAMIC = {"rope_theta": 500.0, "rope_type": "dynamic", "factor": 2.0}
FACTORS = {"short_factor": [1.5] * 8, "long_factor": [float(n) for n in range(2, 10)]}
LONGROPE = {
    "rope_theta": 500.0,
    "rope_type": "longrope",
    "original_max_position_embeddings": 64,
    **FACTORS,
}
CONFIGS = {
    "dynamic": LlamaConfig(**SIZES, max_position_embeddings=64, rope_parameters=DYNAMIC),
    "longrope": Phi3Config(
        **SIZES,
        max_position_embeddings=256,
        original_max_position_embeddings=64,
        rope_parameters=LONGROPE,
    ),
    "nested": Gemma3TextConfig(
        **SIZES,
        head_dim=16,
        sliding_window=8,
        max_position_embeddings=64,
        layer_types=["sliding_attention", "full_attention"],
        rope_parameters={
            "full_attention": DYNAMIC,
            "sliding_attention": {"rope_theta": 100.0, "rope_type": "default"},
        },
    ),
}
IDS = np.random.default_rng(0).integers(3, 40, 301)


def built(name: str):
    """Wide weights, so that a change of angles is a change of losses."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CONFIGS[name]).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim >= 2:
                parameter.mul_(6)
    return model


@pytest.fixture(params=CONFIGS)
def name(request) -> str:
    return request.param


def total(frame, length: int, row: int = 0) -> float:
    """The NLL sum of one of the repeated lengths."""
    sums = frame.loc[frame["length"] == length, "nll_sum"].to_numpy()
    return float(np.split(sums, 2)[row].sum())


@pytest.mark.parametrize("lengths", [(64, 128, 64), (100, 200, 100)])
@pytest.mark.parametrize("protocol", ["prefix", "nonoverlapping"])
def test_the_order_of_lengths_changes_no_number(name, lengths, protocol):
    """Case 17, on a model object: first and third numbers are one, as of a model that read nothing else."""
    frame = evaluate_perplexity([IDS], lengths=lengths, protocol=protocol, model=built(name))
    assert set(frame["status"]) == {"ok"}
    assert total(frame, lengths[0]) == total(frame, lengths[0], row=1)
    alone = evaluate_perplexity([IDS], lengths=lengths[:1], protocol=protocol, model=built(name))
    assert alone["nll_sum"].sum() == total(frame, lengths[0])


def test_a_window_is_that_of_an_untouched_model(name):
    for length in (64, 65, 200):
        frame = evaluate_perplexity([IDS], lengths=[length], protocol="prefix", model=built(name))
        with torch.inference_mode():
            logits = built(name)(torch.from_numpy(IDS[None, :length])).logits[0]
        nll = torch.nn.functional.cross_entropy(
            logits, torch.from_numpy(IDS[1 : length + 1]), reduction="sum"
        )
        assert frame["nll_sum"].sum() == pytest.approx(float(nll), rel=1e-5)


def test_a_tail_window_has_the_frequencies_of_the_declared_length(name, tmp_path):
    """Design, section 4: a loaded model of that length is the reference, also for the tail of 100 tokens."""
    model = built(name)
    model.save_pretrained(tmp_path)
    loaded = evaluate_perplexity(
        [IDS],
        lengths=[200],
        protocol="nonoverlapping",
        load=lambda length: open_checkpoint(tmp_path).load("none", length),
    )
    given = evaluate_perplexity([IDS], lengths=[200], protocol="nonoverlapping", model=model)
    torch.testing.assert_close(*(torch.tensor(f["nll_sum"].to_numpy()) for f in (given, loaded)))
    with torch.inference_mode():
        tail = built(name)(torch.from_numpy(IDS[None, 200:300])).logits[0]
    nll = torch.nn.functional.cross_entropy(tail, torch.from_numpy(IDS[201:301]), reduction="sum")
    whole = evaluate_perplexity([IDS], lengths=[200], protocol="prefix", model=model)["nll_sum"].sum()
    differs = not np.isclose(given["nll_sum"].sum(), whole + float(nll), rtol=1e-5)
    assert differs == (name != "longrope")  # past 64 its long factors hold for both


def state(model) -> dict:
    """Attributes and buffers of every module, tensors by identity and by value."""
    found = {}
    for path, module in model.named_modules():
        for key, value in {**vars(module), **module._buffers}.items():
            if key.startswith("_") or callable(value):
                continue
            found[f"{path}.{key}"] = (id(value), value.clone()) if torch.is_tensor(value) else value
    return found


def test_the_model_is_given_back_as_it_was(name):
    model = built(name)
    model(torch.from_numpy(IDS[None, :128]))  # a buffer that grew stays grown
    before, config = state(model), model.config.to_dict()
    evaluate_perplexity([IDS], lengths=[64, 200], protocol="nonoverlapping", model=model)
    assert model.config.to_dict() == config
    after = state(model)
    assert after.keys() == before.keys()
    for key, value in before.items():
        if isinstance(value, tuple) and torch.is_tensor(value[1]):
            assert after[key][0] == value[0] and torch.equal(after[key][1], value[1]), key
        else:
            assert after[key] == value, key


def test_it_is_given_back_after_a_failure_too(name):
    model = built(name)
    table = rotary(model).inv_freq if name != "nested" else rotary(model).full_attention_inv_freq
    kind, values = rotary(model).rope_type, table.clone()
    with pytest.raises(RuntimeError, match="stop"), frozen(model, 200):
        assert rotary(model).rope_type != kind
        raise RuntimeError("stop")
    assert rotary(model).rope_type == kind
    assert any(buffer is table for buffer in rotary(model).buffers()) and torch.equal(table, values)
    assert follows_running_length(model)


def rotary(model):
    return model.model.rotary_emb


def test_a_cache_is_exact_while_it_is_frozen(name):
    model = built(name)
    assert exact_cache_name(model) is None
    ids, targets = IDS[None, :200], IDS[None, 1:201]
    with frozen(model, 200):
        assert exact_cache_name(model) is not None
        whole = Scorer(model).nll(ids, targets)
        chunked = Scorer(model, max_logits=64 * 40)
        chunked._slices = False
        np.testing.assert_allclose(chunked.nll(ids, targets), whole, rtol=1e-4, atol=1e-4)
    assert follows_running_length(model)


def test_what_cannot_be_frozen_is_refused():
    model = built("dynamic")
    del model.model.rotary_emb.rope_type
    with pytest.raises(CheckpointError, match="LlamaForCausalLM: its frequencies follow the running length"):
        evaluate_perplexity([IDS], lengths=[64], protocol="prefix", model=model)
