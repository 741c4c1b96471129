"""Checkpoints that cannot be believed are refused in one line; what loads is what the files hold."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, BertConfig, BertLMHeadModel, LlamaConfig

from pe_study import load_causal_lm
from pe_study.checkpoints import max_length, open_checkpoint, vocabulary_size
from pe_study.errors import CheckpointError, LengthError, RescaleError, UsageError
from pe_study.text.tokenization import byte_tokenizer

SIZES = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}


@pytest.fixture
def folder(tmp_path):
    torch.manual_seed(0)
    config = LlamaConfig(vocab_size=257, max_position_embeddings=32, **SIZES)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    byte_tokenizer().save_pretrained(tmp_path)
    return tmp_path


def refused(source, **options) -> str:
    with pytest.raises(CheckpointError) as caught:
        load_causal_lm(source, **options)
    message = str(caught.value)
    assert str(source) in message
    assert len(message.splitlines()) == 1
    assert caught.value.exit_code == 4
    return message


def test_what_loads(folder):
    model, tokenizer = load_causal_lm(folder, dtype="bfloat16")
    assert model.dtype == torch.bfloat16
    assert not model.training
    assert tokenizer("ab")["input_ids"] == [97, 98]
    assert max_length(model) is None
    assert vocabulary_size(model) == 257


def test_missing(folder):
    assert "no such file or folder" in refused(folder / "nope")
    assert "no such file or folder" in refused(str(folder / "model.gguf"))
    refused("no-such-org/no-such-model")


def test_truncated_weights(folder):
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    refused(folder)


def test_weights_that_are_not_there_are_never_drawn_at_random(folder):
    weights = load_file(folder / "model.safetensors")
    del weights["model.layers.0.mlp.up_proj.weight"]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    assert "no weights for model.layers.0.mlp.up_proj.weight" in refused(folder)
    (folder / "model.safetensors").unlink()
    refused(folder)


def test_a_model_that_looks_ahead_is_not_causal(folder):
    config = BertConfig(vocab_size=257, is_decoder=False, initializer_range=0.5, **SIZES)
    BertLMHeadModel(config).save_pretrained(folder)
    assert "not a causal language model" in refused(folder)


def test_remote_code_is_not_run_and_nobody_is_asked(folder, monkeypatch):
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("asked"))
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    config |= {"model_type": "strange", "auto_map": {"AutoConfig": "theirs.Config"}}
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    (folder / "theirs.py").write_text("raise SystemError('ran')", encoding="utf-8")
    assert "custom code" in refused(folder)


def test_damaged_config_and_missing_tokenizer(folder):
    for path in folder.glob("tokenizer*"):
        path.unlink()
    assert "tokenizer" in refused(folder)
    (folder / "config.json").write_text("{", encoding="utf-8")
    refused(folder)


def test_an_unfinished_run(tmp_path):
    (tmp_path / "recipe.yaml").write_text("name: x\n", encoding="utf-8")
    assert "unfinished run" in refused(tmp_path)


def test_options_that_make_no_sense(folder):
    with pytest.raises(UsageError, match='did you mean "float32"'):
        load_causal_lm(folder, dtype="float23")
    with pytest.raises(UsageError, match='did you mean "eager"'):
        load_causal_lm(folder, kernel="eagre")
    with pytest.raises(RescaleError):
        load_causal_lm(folder, rescale="yarn:half")


def test_a_declared_length_is_not_crossed(folder):
    """Design: frequencies are constants of the declared length, so a longer input or cache is refused."""
    model, _ = load_causal_lm(folder, rescale="yarn:auto", length=64)
    cache = model(torch.zeros(1, 60, dtype=torch.long), use_cache=True).cache
    model(torch.zeros(1, 4, dtype=torch.long), cache=cache)
    with pytest.raises(LengthError, match=r"65 tokens cross the declared length 64; load .*length=65"):
        model(torch.zeros(1, 1, dtype=torch.long), cache=cache)
    with pytest.raises(LengthError, match="65 tokens cross the declared length 64"):
        model.generate(torch.zeros(1, 60, dtype=torch.long), max_new_tokens=5)
    free, _ = load_causal_lm(folder, rescale="yarn:2", length=64)
    free(torch.zeros(1, 80, dtype=torch.long))


@pytest.mark.parametrize("spec", ["none", "dynamic:2", "ntk:auto", "yarn:auto"])
def test_generate_declares_prompt_and_new_tokens_first(folder, spec):
    """As our decoder does: the numbers are those of a model loaded for the whole length."""
    ids, new = torch.arange(1, 31)[None], 20
    options = {"max_new_tokens": new, "min_new_tokens": new, "do_sample": False, "pad_token_id": 0}
    options["attention_mask"] = torch.ones_like(ids)
    model, expected = load_causal_lm(folder, spec)[0], load_causal_lm(folder, spec, length=50)[0]
    before = model(ids).logits
    assert torch.equal(model.generate(ids, **options), expected.generate(ids, **options))
    assert torch.equal(model(ids).logits, before), "only for that call"
    assert type(model).__name__ == "LlamaForCausalLM"
    if spec != "none":
        with pytest.raises(LengthError):
            model(torch.zeros(1, 33, dtype=torch.long))


def test_an_open_checkpoint_reads_no_weights(folder):
    (folder / "model.safetensors").unlink()
    checkpoint = open_checkpoint(folder)
    assert checkpoint.original_length == 32
    assert checkpoint.rotary is not None
    assert checkpoint.rotary.rotary_dim == 16
