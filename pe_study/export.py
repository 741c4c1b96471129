"""Write a rotary run as a plain Hugging Face Llama, for everything that knows no other decoder.

The decoder is Llama's but for two fused matrices: queries, keys and values, and the gate and up projections.
Splitting them is all that a conversion does; logits stay equal to rounding.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from torch import Tensor

from pe_study import checkpoints
from pe_study.configuration import PEStudyConfig
from pe_study.errors import UsageError, did_you_mean
from pe_study.layers import Layer
from pe_study.loading import hf_rope
from pe_study.model import PEStudyForCausalLM

if TYPE_CHECKING:
    from transformers import LlamaConfig, LlamaForCausalLM

FORMATS = ("llama",)


def export(run: str | Path, output: str | Path | None = None, *, format: str = "llama") -> Path:
    """Write the trained model of a run and its tokenizer to `output` (None: `<run>/<format>`); returns it.

    CheckpointError for an unfinished run; UsageError for a model that the format cannot hold, an unknown
    format, or a folder that already holds files.
    """
    if format not in FORMATS:
        raise UsageError(f'unknown format "{format}"; {did_you_mean(format, FORMATS)}')
    folder = Path(run) / format if output is None else Path(output)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UsageError(f"{folder}: already there; name an empty or a new folder with --output")
    model, tokenizer = checkpoints.load_causal_lm(run)
    if not isinstance(model, PEStudyForCausalLM):
        raise UsageError(f"{run}: a {type(model).__name__} of another library; export takes runs of pe-study")
    to_llama(model).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def to_llama(model: PEStudyForCausalLM) -> LlamaForCausalLM:
    """The same function as a LlamaForCausalLM, in the model's dtype and in evaluation mode.

    The rescale becomes constants for the model's declared length. UsageError where Llama has no such part:
    another encoding, partly rotated heads, normed queries and keys.
    """
    from transformers import LlamaForCausalLM

    _refuse_foreign_parts(model)
    llama = LlamaForCausalLM(llama_config(model.config, model.rotary.base))  # type: ignore[union-attr]
    # assign: the weights keep their dtype, and the frequencies, buffers of the Llama, stay in float32
    llama.load_state_dict({k: w.detach().clone() for k, w in _weights(model).items()}, assign=True)
    llama.tie_weights()
    return llama.eval()


def llama_config(config: PEStudyConfig, base: float) -> LlamaConfig:
    """Llama's sizes, and its rope parameters for the declared length and rescale."""
    from transformers import LlamaConfig

    llama = LlamaConfig(
        vocab_size=config.vocab_size,
        hidden_size=config.d_model,
        intermediate_size=config.d_ff,
        num_hidden_layers=config.num_layers,
        num_attention_heads=config.num_heads,
        num_key_value_heads=config.num_kv_heads,
        max_position_embeddings=config.train_length,
        initializer_range=config.initializer_range,
        rms_norm_eps=config.rms_norm_eps,
        tie_word_embeddings=True,
        rope_parameters={"rope_type": "default", "rope_theta": base},
        pad_token_id=config.pad_token_id,
        bos_token_id=config.bos_token_id,
        eos_token_id=config.eos_token_id,
    )
    length = config.length or config.train_length
    hf_rope.apply(llama, config.rescale, length)
    if config.rescale != "none":
        llama.max_position_embeddings = max(length, config.train_length)
    return llama


def _refuse_foreign_parts(model: PEStudyForCausalLM) -> None:
    config, rotary = model.config, model.rotary
    if model.first_encoding.rescale.logn:
        raise UsageError(f"rescale {config.rescale}: a Llama multiplies no scores; accepted: without logn")
    if rotary is None:
        raise UsageError(
            f"encoding {config.encoding_name}: a Llama has rotary positions; only rope exports to it"
        )
    if rotary.dim != config.head_dim:
        raise UsageError(
            f"rope turns {rotary.dim} of {config.head_dim} dimensions of a head; a Llama turns all of them"
        )
    if config.qk_norm:
        raise UsageError("model.qk_norm is true; a Llama has no norm on queries and keys")


def _weights(model: PEStudyForCausalLM) -> dict[str, Tensor]:
    """Our weights under Llama's names."""
    config = model.config
    queries, keys = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    weights = {"model.embed_tokens.weight": model.embedding.weight, "model.norm.weight": model.norm.weight}
    weights["lm_head.weight"] = model.embedding.weight
    for number, layer in enumerate(model.layers):
        assert isinstance(layer, Layer)
        q, k, v = layer.attention.qkv.weight.split((queries, keys, keys))
        gate, up = layer.mlp.gate_up.weight.chunk(2)
        named = {
            "input_layernorm": layer.attention_norm.weight,
            "self_attn.q_proj": q,
            "self_attn.k_proj": k,
            "self_attn.v_proj": v,
            "self_attn.o_proj": layer.attention.out.weight,
            "post_attention_layernorm": layer.mlp_norm.weight,
            "mlp.gate_proj": gate,
            "mlp.up_proj": up,
            "mlp.down_proj": layer.mlp.down.weight,
        }
        weights |= {f"model.layers.{number}.{name}.weight": weight for name, weight in named.items()}
    return weights
