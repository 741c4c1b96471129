"""The lm-eval adapter: its rolling log-likelihood against our sums, and an explicit context length."""

from __future__ import annotations

import warnings
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig

from pe_study.errors import UsageError
from pe_study.evaluators.perplexity import evaluate_perplexity
from pe_study.text.tokenization import byte_tokenizer

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from lm_eval.api.instance import Instance

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


PROMPT = (
    "The quick brown fox jumps over the lazy dog, and comes back in the end: who is there, said he. "  # 95
)


def scored(lm, *prompts: str, task: str = "mine") -> list[float]:
    requests = [
        Instance("loglikelihood", {}, (prompt, " yes"), number, metadata=(task, number, 1))
        for number, prompt in enumerate(prompts)
    ]
    return [value for value, _ in lm.loglikelihood(requests, disable_tqdm=True)]


def generated(lm, *prompts: str, task: str = "mine") -> list[str]:
    options = {"max_gen_toks": 5, "until": [], "do_sample": False}
    requests = [
        Instance("generate_until", {}, (prompt, options), number, metadata=(task, number, 1))
        for number, prompt in enumerate(prompts)
    ]
    return lm.generate_until(requests, disable_tqdm=True)


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    path = tmp_path_factory.mktemp("wide")
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CONFIGS["llama"])
    for parameter in model.parameters():
        parameter.data *= 5  # so that angles show in the losses
    model.save_pretrained(path)
    byte_tokenizer().save_pretrained(path)
    return str(path)


@pytest.mark.parametrize("rescale", ["none", "yarn:auto", "dynamic"])
def test_without_max_length_a_task_is_declared_for_prompt_and_answer(llama, rescale):
    """As `generate` does: the same as with max_length=, whatever other tasks are asked in between."""
    lm = PEStudyLM(llama, rescale=rescale, device="cpu")
    assert lm.max_length == 32
    short = scored(lm, PROMPT[:10], task="short")
    assert (lm.max_length, lm.get_model_info()["task_lengths"]) == (32, {})
    expected = PEStudyLM(llama, rescale=rescale, max_length=98, device="cpu")
    assert scored(lm, PROMPT) == scored(expected, PROMPT)
    assert lm.max_length == 95 + 4 - 1
    for_100 = PEStudyLM(llama, rescale=rescale, max_length=100, device="cpu")
    assert generated(lm, PROMPT) == generated(for_100, PROMPT)
    info = lm.get_model_info()
    assert (info["max_length"], info["task_lengths"]) == (32, {"mine": 100})
    assert scored(lm, PROMPT[:10], task="short") == short
    assert lm.max_length == 32


def test_tasks_of_one_call_do_not_change_each_other(llama):
    lm = PEStudyLM(llama, rescale="yarn:auto", device="cpu")
    prompts = {"a": PROMPT[:50], "b": PROMPT, "c": PROMPT[:20]}
    alone = {task: scored(lm, prompt, task=task) for task, prompt in prompts.items()}
    requests = [
        Instance("loglikelihood", {}, (prompts[task], " yes"), number, metadata=(task, number, 1))
        for number, task in enumerate("bacab")
    ]
    together = lm.loglikelihood(requests, disable_tqdm=True)
    assert [[value] for value, _ in together] == [alone[task] for task in "bacab"]
    assert lm.get_model_info()["task_lengths"] == {"a": 53, "b": 98}


def test_windows_of_a_rolling_text_stay_those_of_the_own_length(llama):
    lm, other = (PEStudyLM(llama, rescale="yarn:auto", device="cpu") for _ in range(2))
    scored(lm, PROMPT)
    text = [SimpleNamespace(args=(PROMPT * 2,))]
    found = lm.loglikelihood_rolling(text, disable_tqdm=True)
    assert lm.max_length == 32
    assert found == other.loglikelihood_rolling(text, disable_tqdm=True)


@pytest.mark.parametrize(("ask", "needed"), [(scored, 98), (generated, 100)])
def test_a_prompt_is_never_cut(folder, ask, needed):
    """LMH: refused in one line; what stands before the cut may be all that the task is about."""
    fixed = PEStudyLM(str(folder), max_length=48, device="cpu")
    with pytest.raises(UsageError) as refusal:
        ask(fixed, PROMPT, task="pe_passkey")
    assert str(refusal.value) == (
        f"pe_passkey: a prompt and its answer take {needed} tokens, max_length is 48; accepted: "
        f"max_length={needed} or more, or shorter prompts"
    )
    if "gpt2" in folder.name:
        with pytest.raises(
            UsageError, match=f"mine: .* take {needed} tokens, the model has no position past 64"
        ):
            ask(PEStudyLM(str(folder), device="cpu"), PROMPT)


def test_a_task_that_makes_its_prompts_is_told_how_long_they_may_be(llama):
    lm = PEStudyLM(llama, max_length=448, device="cpu")
    with pytest.raises(
        UsageError, match=r"""max_length=1000 .*\(--metadata '\{"length": N\}', N at most 384\)"""
    ):
        lm._length_for("pe_passkey", 1000)
