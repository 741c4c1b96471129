"""The flex and flash kernels, for CUDA. They are unmeasured where no GPU could be had.

Shape legend: B batch, H query heads, G key heads, T queries, S keys, K head width.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from pe_study.errors import UsageError
from pe_study.kernels.scoring import Result, Scoring, allowed, same_width


def flex(q_BHTK: Tensor, k_BGSK: Tensor, v_BGSK: Tensor, scoring: Scoring) -> Result:
    """FlexAttention: compiled on CUDA; on a CPU uncompiled, forward only, for comparison with the oracle."""
    from torch.nn.attention.flex_attention import AuxRequest, flex_attention

    on_cpu = q_BHTK.device.type == "cpu"
    if on_cpu and torch.is_grad_enabled() and q_BHTK.requires_grad:
        raise UsageError("kernel flex has no backward pass on a CPU; these can train here: eager, sdpa")
    run = flex_attention if on_cpu else _compiled_flex()
    with _uncompiled_flex() if on_cpu else nullcontext():
        out, aux = run(
            q_BHTK,
            k_BGSK,
            v_BGSK,
            score_mod=scoring.encoding.score_mod(scoring.unrotated_BHTK, scoring.at),
            block_mask=_block_mask(q_BHTK, k_BGSK.shape[2], scoring),
            scale=scoring.scale,
            enable_gqa=k_BGSK.shape[1] != q_BHTK.shape[1],
            return_aux=AuxRequest(lse=True),
        )
    return out, aux.lse


@contextmanager
def _uncompiled_flex() -> Iterator[None]:
    """FlexAttention's own switch: its definition, operation by operation, no graph traced at each call."""
    from torch.nn.attention import flex_attention as module

    before, module._FLEX_ATTENTION_DISABLE_COMPILE_DEBUG = module._FLEX_ATTENTION_DISABLE_COMPILE_DEBUG, True
    try:
        yield
    finally:
        module._FLEX_ATTENTION_DISABLE_COMPILE_DEBUG = before


@lru_cache(maxsize=1)
def _compiled_flex() -> Any:
    """One compilation for lengths of any kind; meeting the recompile limit is an error, not a warning."""
    from torch._dynamo import config
    from torch.nn.attention.flex_attention import flex_attention

    config.fail_on_recompile_limit_hit = True
    return torch.compile(flex_attention, dynamic=True)


def compilations() -> int:
    """How many graphs torch has compiled since the start or the last `reset_compilations`."""
    from torch._dynamo.utils import counters

    return int(counters["stats"]["unique_graphs"])


def reset_compilations() -> None:
    """Forgets every compiled graph: what one run compiled must not count against the next."""
    from torch._dynamo.utils import counters

    torch.compiler.reset()
    counters.clear()


def _block_mask(q_BHTK: Tensor, num_keys: int, scoring: Scoring) -> Any:
    """The mask as FlexAttention wants it, built once a forward pass."""
    from torch.nn.attention.flex_attention import create_block_mask

    memo, mask = scoring.at.memo, scoring.mask
    if "block_mask" not in memo:
        batch = None if mask.segments is None else q_BHTK.shape[0]
        memo["block_mask"] = create_block_mask(
            lambda b, h, t, s: allowed(mask, b, t, s),
            batch,
            None,
            q_BHTK.shape[2],
            num_keys,
            device=q_BHTK.device,
        )
    return memo["block_mask"]


@lru_cache(maxsize=1)
def flash_attn_func() -> Any:
    """The function of the package flash-attn that adds ALiBi's bias itself (from 2.4 on); None without it."""
    try:
        from flash_attn import flash_attn_func as function
    except ImportError:
        return None
    return function if "alibi_slopes" in inspect.signature(function).parameters else None


def flash(q_BHTK: Tensor, k_BGSK: Tensor, v_BGSK: Tensor, scoring: Scoring) -> Result:
    """SDPA's FlashAttention backend and nothing else; with a bias of slopes, the package flash-attn. CUDA,
    half precision."""
    if q_BHTK.shape[-1] != v_BGSK.shape[-1]:
        out_BHTK, _ = flash(*same_width(q_BHTK, k_BGSK, v_BGSK), scoring)
        return out_BHTK[..., : v_BGSK.shape[-1]], None
    slopes_H = scoring.encoding.distance_slopes(q_BHTK.device)
    if slopes_H is not None:
        return _flash_with_slopes(q_BHTK, k_BGSK, v_BGSK, scoring, slopes_H), None
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.nn.attention.bias import causal_lower_right

    num_queries, num_keys = q_BHTK.shape[2], k_BGSK.shape[2]
    # is_causal aligns the mask top-left, which would hide a cache (pytorch#108108)
    aligned = num_queries in (1, num_keys)
    is_causal = False
    if aligned and num_queries > 1:  # a branch, since torch.compile may not know the length
        is_causal = True
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        out = F.scaled_dot_product_attention(
            q_BHTK,
            k_BGSK,
            v_BGSK,
            attn_mask=None if aligned else causal_lower_right(num_queries, num_keys),
            is_causal=is_causal,
            scale=scoring.scale,
            enable_gqa=k_BGSK.shape[1] != q_BHTK.shape[1],
        )
    return out, None


def _flash_with_slopes(
    q_BHTK: Tensor, k_BGSK: Tensor, v_BGSK: Tensor, scoring: Scoring, slopes_H: Tensor
) -> Tensor:
    """flash-attn has heads behind tokens, and aligns its mask and distances with the last key."""
    out_BTHK = flash_attn_func()(
        *(x.transpose(1, 2) for x in (q_BHTK, k_BGSK, v_BGSK)),
        softmax_scale=scoring.scale,
        causal=True,
        alibi_slopes=slopes_H,
        deterministic=torch.are_deterministic_algorithms_enabled(),
    )
    return out_BTHK.transpose(1, 2)
