"""GGUF files: a Llama written as llama.cpp writes it loads with the weights and the tokens that went in."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig
from transformers.convert_slow_tokenizer import bytes_to_unicode

from pe_study import load_causal_lm
from pe_study.checkpoints import open_checkpoint
from pe_study.errors import CheckpointError

NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}
HEADS = {"attn_q": 2, "attn_k": 1}


@pytest.fixture
def model():
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=258,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=64,
        rope_parameters={"rope_type": "default", "rope_theta": 500.0},
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
    )
    return AutoModelForCausalLM.from_config(config).eval()


@pytest.fixture
def file(model, tmp_path):
    """The model as a .gguf file, its tokens the bytes, a pair of them and an end of text."""
    path = tmp_path / "tiny.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(64)
    writer.add_embedding_length(32)
    writer.add_block_count(1)
    writer.add_feed_forward_length(32)
    writer.add_head_count(2)
    writer.add_head_count_kv(1)
    writer.add_rope_freq_base(500.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(258)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list([*bytes_to_unicode().values(), "Ġt", "<|endoftext|>"])
    writer.add_token_types([gguf.TokenType.NORMAL] * 257 + [gguf.TokenType.CONTROL])
    writer.add_token_merges(["Ġ t"])
    writer.add_bos_token_id(257)
    writer.add_eos_token_id(257)
    for name, weight in tensors(model):
        writer.add_tensor(name, weight)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def tensors(model):
    weights = {name: weight.detach().numpy() for name, weight in model.named_parameters()}
    yield "token_embd.weight", weights["model.embed_tokens.weight"]
    yield "output_norm.weight", weights["model.norm.weight"]
    for theirs, name in NAMES.items():
        weight = weights[f"model.layers.0.{theirs}.weight"]
        if name in HEADS:  # llama.cpp turns neighbouring pairs
            paired = weight.reshape(HEADS[name], 2, -1, weight.shape[-1]).swapaxes(1, 2)
            weight = np.ascontiguousarray(paired.reshape(weight.shape))
        yield f"blk.0.{name}.weight", weight


def test_a_gguf_file_is_the_model_that_was_written(model, file, capfd):
    ids = torch.arange(3, 60)[None]
    loaded, tokenizer = load_causal_lm(file, "yarn:auto", length=64)
    torch.testing.assert_close(loaded(ids).logits, model(ids).logits, rtol=1e-5, atol=1e-5)
    assert tokenizer.decode(tokenizer("né t")["input_ids"]) == "né t"
    assert capfd.readouterr().err == "", "no progress bar in a pipe"
    checkpoint = open_checkpoint(file)
    assert checkpoint.original_length == 64
    assert checkpoint.rotary.base == 500.0
    same = open_checkpoint(file.parent, gguf_file=file.name).load("linear:2", 128)
    assert same.model.rotary_emb.inv_freq[0] == 0.5


def test_a_cut_file_is_one_line(file):
    file.write_bytes(file.read_bytes()[:2000])
    with pytest.raises(CheckpointError) as caught:
        load_causal_lm(file)
    assert str(file) in str(caught.value)
    assert "\n" not in str(caught.value)
