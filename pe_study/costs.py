"""What a decoder costs, from its dimensions alone: parameters, cache, attention memory, arithmetic.

Counts are exact for the decoder of model.py without what its encoding adds; bytes and operations are those
of the usual accounting (Kaplan et al. 2020, section 2.1; multiply and add are two operations).
"""

from __future__ import annotations


def decoder_parameters(
    *,
    vocab_size: int,
    num_layers: int,
    d_model: int,
    num_heads: int,
    num_kv_heads: int,
    d_ff: int,
    qk_norm: bool = False,
) -> int:
    """Trainable numbers of the decoder: tied embedding, attention, SwiGLU, RMSNorms; no biases."""
    head_dim = d_model // num_heads
    attention = 2 * d_model * d_model + 2 * d_model * num_kv_heads * head_dim
    norms = 2 * d_model + (2 * head_dim if qk_norm else 0)
    return vocab_size * d_model + num_layers * (attention + 3 * d_model * d_ff + norms) + d_model


def kv_cache_bytes(
    *, num_kv_heads: int, head_dim: int, length: int = 1, num_layers: int = 1, bytes_per_element: int = 2
) -> int:
    """Bytes of keys and values of `length` tokens; the default length is the price of one more token."""
    return 2 * num_kv_heads * head_dim * length * num_layers * bytes_per_element


def score_matrix_entries(length: int) -> int:
    """Entries of one head's full score matrix, which no default evaluation path ever holds."""
    return length * length


def attention_bytes(*, num_heads: int, num_queries: int, length: int, bytes_per_element: int = 4) -> int:
    """Bytes of the scores of `num_queries` queries against `length` keys: one layer, one sequence."""
    return num_heads * num_queries * length * bytes_per_element


def training_operations(
    *, num_parameters: int, num_layers: int, d_model: int, length: int, num_tokens: int
) -> int:
    """Floating-point operations to train on `num_tokens` in causal chunks of `length`.

    Six a parameter and token (the tied matrix works once, as the head). Scores and mixing add, under a causal
    mask, 2 * length * d_model a layer and token in the forward pass and twice that in the backward.
    """
    return num_tokens * (6 * num_parameters + 6 * num_layers * d_model * length)
