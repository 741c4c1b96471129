"""Recurrent states: transformers continues them token by token only, so such models are read at once."""

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, MambaConfig, RecurrentGemmaConfig

from pe_study.evaluators import reader, scoring
from pe_study.evaluators.reader import Reader
from pe_study.evaluators.scoring import Scorer

SIZES = {"vocab_size": 40, "hidden_size": 32, "num_hidden_layers": 2}
HEADS = {**SIZES, "intermediate_size": 32, "num_attention_heads": 2, "num_key_value_heads": 1}
CONFIGS = {
    "llama": LlamaConfig(**HEADS),
    "mamba": MambaConfig(**SIZES, state_size=4),
    "recurrent-gemma": RecurrentGemmaConfig(
        **HEADS, lru_width=32, attention_window_size=7, block_types=["recurrent", "attention"]
    ),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_a_long_context_is_read_as_a_short_one(name, monkeypatch):
    """Case 59: what is read in parts is what is read at once, or it is not read in parts."""
    monkeypatch.setattr(scoring, "SMALLEST_CHUNK", 8)
    monkeypatch.setattr(reader, "CHUNK", 16)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CONFIGS[name]).eval()
    ids = np.random.default_rng(0).integers(3, 40, (2, 50))
    with torch.inference_mode():
        logits = model(torch.from_numpy(ids[:, :-1]), use_cache=False).logits.double()
    expected = -logits.log_softmax(-1).gather(-1, torch.from_numpy(ids[:, 1:, None]))[..., 0].numpy()
    found = Scorer(model, max_logits=2 * 8 * 40).nll(ids[:, :-1], ids[:, 1:])
    np.testing.assert_allclose(found, expected, rtol=1e-6)
    read = Reader(model, ids[0, :40])
    assert read.logprob(ids[0, 40:]) == pytest.approx(-expected[0, 39:].sum(), rel=1e-6)
