"""Reading in chunks through the cache, and out of memory, against one plain forward pass."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    BloomConfig,
    CohereConfig,
    Gemma2Config,
    Gemma3TextConfig,
    GPT2Config,
    GPTNeoXConfig,
    LlamaConfig,
    MistralConfig,
    MptConfig,
    OPTConfig,
)

from pe_study.evaluators import sliced_head
from pe_study.evaluators.perplexity import evaluate_perplexity
from pe_study.evaluators.scoring import Scorer, token_nll

SIZES = {
    "vocab_size": 40,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "max_position_embeddings": 256,
}
CONFIGS = {
    "llama": LlamaConfig(**SIZES, num_key_value_heads=1),
    "mistral-window": MistralConfig(**SIZES, num_key_value_heads=1, sliding_window=24),
    "gemma2-soft-capped": Gemma2Config(
        **SIZES,
        num_key_value_heads=1,
        head_dim=16,
        sliding_window=24,
        final_logit_softcapping=2.0,
        attn_logit_softcapping=5.0,
    ),
    "gemma3-window": Gemma3TextConfig(
        **SIZES,
        num_key_value_heads=1,
        head_dim=16,
        sliding_window=24,
        layer_types=["sliding_attention", "full_attention"],
    ),
    "gpt-neox": GPTNeoXConfig(**SIZES),
    "gpt2": GPT2Config(vocab_size=40, n_positions=256, n_embd=32, n_layer=2, n_head=2),
    "opt": OPTConfig(**{**SIZES, "ffn_dim": 32, "word_embed_proj_dim": 32}, dropout=0.0),
    "bloom": BloomConfig(vocab_size=40, hidden_size=32, n_layer=2, n_head=2),
    "mpt": MptConfig(vocab_size=40, d_model=32, n_heads=2, n_layers=2, max_seq_len=256),
}


def ids_of(*shape):
    return np.random.default_rng(0).integers(3, 40, shape)


def plain_nll(model, ids, num_scored):
    with torch.inference_mode():
        logits = model(torch.from_numpy(ids[:, :-1]), use_cache=False).logits.double()
    chosen = logits.log_softmax(-1).gather(-1, torch.from_numpy(ids[:, 1:, None])).squeeze(-1)
    return -chosen[:, -num_scored:].numpy()


class Spy:
    """Records the largest logits tensor that a model returned."""

    def __init__(self, model):
        self.largest, self.calls = 0, 0
        model.register_forward_hook(self._see)

    def _see(self, module, arguments, output):
        self.largest, self.calls = max(self.largest, output.logits.numel()), self.calls + 1


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("num_scored", [200, 77, 1])
def test_chunks_equal_one_pass(name, num_scored):
    """Cases 15, 59: equal to 1e-6, and never more logits than asked for at once."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CONFIGS[name]).eval()
    ids = ids_of(2, 201)
    expected = plain_nll(model, ids, num_scored)
    spy = Spy(model)
    found = Scorer(model, max_logits=64 * 40).nll(ids[:, :-1], ids[:, -num_scored:])
    np.testing.assert_allclose(found, expected, rtol=2e-6)
    assert spy.largest <= 64 * 40
    assert spy.calls == (8 if num_scored > 64 else 2 if num_scored > 32 else 1)


@pytest.mark.parametrize(
    ("name", "calls"), [("llama", 1), ("gpt-neox", 1), ("cohere", 1 + 4), ("mistral-window", 4), ("gpt2", 4)]
)
def test_slices_of_one_pass_equal_chunks(name, calls, monkeypatch):
    """One pass where the head is a matrix; a scaled one shows, and other attention is read in chunks."""
    monkeypatch.setattr(sliced_head, "SHORTEST", 100)
    torch.manual_seed(0)
    config = CONFIGS.get(name) or CohereConfig(**SIZES, pad_token_id=0, bos_token_id=1, eos_token_id=2)
    model = AutoModelForCausalLM.from_config(config).eval()
    ids = ids_of(1, 201)
    expected = plain_nll(model, ids, 150)
    spy = Spy(model)
    heads = []
    model.get_output_embeddings().register_forward_hook(lambda *call: heads.append(call[2].numel()))
    found = Scorer(model, max_logits=64 * 40).nll(ids[:, :-1], ids[:, -150:])
    np.testing.assert_allclose(found, expected, rtol=2e-6)
    assert spy.calls == calls
    assert max(spy.largest, *heads) <= 64 * 40


def test_a_model_that_follows_the_running_length_is_never_cut_in_chunks():
    """Case 19: cached keys of dynamic scaling are turned by other bases, so each window is one pass."""
    scaling = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 500.0}
    config = LlamaConfig(**{**SIZES, "max_position_embeddings": 32}, rope_parameters=scaling)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).eval()
    ids = ids_of(1, 129)
    expected = plain_nll(model, ids, 128)
    np.testing.assert_allclose(
        Scorer(model, max_logits=2560).nll(ids[:, :-1], ids[:, 1:]), expected, rtol=1e-6
    )


def test_prefixes_are_one_pass_at_the_longest_length():
    """One forward costs what the longest length costs, and every prefix is what its own pass gives."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CONFIGS["llama"]).eval()
    documents = list(ids_of(3, 200))
    spy = Spy(model)
    together = evaluate_perplexity(
        documents, lengths=[16, 50, 199], protocol="prefix", model=model, batch_tokens=200
    )
    assert spy.calls == 3
    apart = evaluate_perplexity(
        documents, lengths=[16, 50, 199], protocol="prefix", load=lambda length: model
    )
    assert spy.calls == 3 + 3
    for column in ("length", "document", "position_lo", "num_tokens", "num_windows", "status"):
        assert together[column].tolist() == apart[column].tolist()
    np.testing.assert_allclose(together["nll_sum"].tolist(), apart["nll_sum"].tolist(), rtol=1e-6)
    np.testing.assert_allclose(
        together["window_mean_sum"].tolist(), apart["window_mean_sum"].tolist(), rtol=1e-6
    )


def test_prefixes_past_the_last_position_do_not_lose_the_shorter_ones():
    model = AutoModelForCausalLM.from_config(CONFIGS["gpt2"]).eval()
    frame = evaluate_perplexity([ids_of(400)], lengths=[64, 300], protocol="prefix", model=model)
    assert set(frame[frame["length"] == 64]["status"]) == {"ok"}
    assert frame[frame["length"] == 300]["status"].tolist() == ["unsupported"]


class Hungry:
    """Fails for want of memory above `most` inputs a call, like an accelerator would."""

    def __init__(self, model, most):
        self.most, self.sizes = most, []
        model.register_forward_pre_hook(self._check, with_kwargs=True)

    def _check(self, module, arguments, options):
        ids = arguments[0] if arguments else options["input_ids"]
        self.sizes.append(tuple(ids.shape))
        if ids.numel() > self.most:
            raise torch.OutOfMemoryError("CUDA out of memory")


def test_out_of_memory_becomes_smaller_batches_then_smaller_chunks():
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CONFIGS["llama"]).eval()
    ids = ids_of(4, 201)
    expected = plain_nll(model, ids, 200)
    hungry = Hungry(model, 100)
    np.testing.assert_allclose(Scorer(model).nll(ids[:, :-1], ids[:, 1:]), expected, rtol=2e-6)
    assert hungry.sizes[:3] == [(4, 200), (2, 200), (1, 200)]
    assert hungry.sizes[3] == (1, 100)


def test_out_of_memory_in_the_end_is_a_row():
    model = AutoModelForCausalLM.from_config(CONFIGS["llama"]).eval()
    Hungry(model, 60)
    frame = evaluate_perplexity([ids_of(200)], lengths=[32, 128], protocol="nonoverlapping", model=model)
    assert set(frame[frame["length"] == 32]["status"]) == {"ok"}
    assert frame[frame["length"] == 128]["status"].tolist() == ["oom"]


def test_token_nll_is_the_cross_entropy_of_float32_logits():
    logits = torch.randn(2, 300, 500, generator=torch.Generator().manual_seed(0)) * 30
    targets = torch.randint(0, 500, (2, 300), generator=torch.Generator().manual_seed(1))
    expected = -logits.double().log_softmax(-1).gather(-1, targets[..., None]).squeeze(-1)
    torch.testing.assert_close(token_nll(logits, targets), expected, rtol=1e-6, atol=1e-6)
    half = logits.half()
    assert torch.equal(token_nll(half, targets), token_nll(half.float(), targets))


def test_a_plain_callable_gets_ids_and_nothing_else():
    def model(ids):
        assert ids.shape == (1, 5)
        return SimpleNamespace(logits=torch.zeros(*ids.shape, 4))

    assert Scorer(model).nll(ids_of(1, 5), np.zeros((1, 3), dtype=np.int64)).shape == (1, 3)
