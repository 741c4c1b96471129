"""The lm-eval adapter: its rolling log-likelihood against our sums, and an explicit context length."""

from __future__ import annotations

import warnings
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig

from pe_study.errors import UsageError
from pe_study.evaluators.perplexity import evaluate_perplexity
from pe_study.tokenization import byte_tokenizer

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from pe_study.lm_eval import PEStudyLM

pytestmark = pytest.mark.filterwarnings("ignore")

CONFIGS = {
    "llama": LlamaConfig(
        vocab_size=257,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=32,
    ),
    "gpt2": GPT2Config(vocab_size=257, n_positions=64, n_embd=32, n_layer=1, n_head=2),
}


@pytest.fixture(scope="module", params=CONFIGS)
def folder(request, tmp_path_factory):
    path = tmp_path_factory.mktemp(request.param)
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(CONFIGS[request.param]).save_pretrained(path)
    byte_tokenizer().save_pretrained(path)
    return path


def test_rolling_loglikelihood_is_our_nonoverlapping_sum(folder):
    """Documents of 1 + 3 x 64 tokens, the first the one that lm-eval puts before a text."""
    lm = PEStudyLM(str(folder), max_length=64, batch_size=2)
    text = "the quick brown fox jumps over the lazy dog, " * 5
    text = text[: 3 * 64]
    [found] = lm.loglikelihood_rolling([SimpleNamespace(args=(text,))], disable_tqdm=True)
    ids = [lm.prefix_token_id, *text.encode("utf-8")]
    frame = evaluate_perplexity([ids], lengths=[64], protocol="nonoverlapping", model=lm.model)
    assert frame["num_tokens"].sum() == 3 * 64
    assert -found == pytest.approx(frame["nll_sum"].sum(), rel=1e-6)


def test_the_context_length_is_the_declared_one_and_is_recorded(folder):
    """LMH: never what the architecture's config happens to say."""
    lm = PEStudyLM(str(folder), max_length="2k" if "llama" in folder.name else 48)
    expected = 2048 if "llama" in folder.name else 48
    assert lm.max_length == expected
    assert lm.get_model_info()["max_length"] == expected
    assert PEStudyLM(str(folder)).max_length == (32 if "llama" in folder.name else 64)


def test_a_rescale_changes_the_frequencies_of_what_it_loads(tmp_path):
    path = tmp_path
    AutoModelForCausalLM.from_config(CONFIGS["llama"]).save_pretrained(path)
    byte_tokenizer().save_pretrained(path)
    lm = PEStudyLM(str(path), rescale="linear:4", max_length=128)
    assert lm.model.model.rotary_emb.inv_freq[0] == 0.25
    assert lm.get_model_info()["rescale"] == "linear:4"
    with pytest.raises(UsageError, match="max_length"):
        PEStudyLM(str(path), max_length="long")


def test_a_length_that_a_model_has_no_positions_for(tmp_path):
    """Case 33: refused before any kernel runs."""
    AutoModelForCausalLM.from_config(CONFIGS["gpt2"]).save_pretrained(tmp_path)
    byte_tokenizer().save_pretrained(tmp_path)
    with pytest.raises(UsageError, match="no position past 64"):
        PEStudyLM(str(tmp_path), max_length=65)
