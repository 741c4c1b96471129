"""One `attend`, four kernels: eager (the oracle), sdpa, flex, flash.

Shape legend: B batch, H query heads, G key heads, T queries, S keys, K head width.
Every kernel returns (out (B,H,T,K), logsumexp (B,H,T) or None). A mask is causal first: query t, at index
`offset` + t among the keys, sees the keys up to itself; segments restrict it further.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from pe_study.encodings.base import Encoding
from pe_study.errors import UsageError, did_you_mean
from pe_study.kernels.eager import eager
from pe_study.kernels.fused import flash, flash_attn_func, flex
from pe_study.kernels.scoring import Result, Scoring, blind
from pe_study.kernels.sdpa import sdpa

Kernel = Literal["auto", "eager", "sdpa", "flex", "flash"]
KERNELS = ("eager", "sdpa", "flex", "flash")
FLASH_WIDTH = 256  # the widest head of FlashAttention


def resolve(
    kernel: str,
    device: torch.device,
    dtype: torch.dtype,
    encoding: Encoding,
    mask_kind: str,
    *,
    consecutive: bool = True,
) -> str:
    """The kernel that runs; UsageError where an explicit one cannot do what is asked. Nothing falls back.

    `consecutive` is that of `At`: whether distances follow from indices.
    """
    if kernel not in (*KERNELS, "auto"):
        raise UsageError(f"kernel {kernel!r}: {did_you_mean(kernel, (*KERNELS, 'auto'))}")
    biased = encoding.has_distance_bias or encoding.has_query_bias
    can = [
        name
        for name in KERNELS
        if name in ("eager", "sdpa")
        or (name == "flex" and not encoding.has_value_term)
        or (
            name == "flash"
            and _flash_fits(device, dtype, encoding)
            and (not biased or (consecutive and _flash_adds_bias(encoding)))
            and mask_kind == "causal"
        )
    ]
    if kernel != "auto":
        if kernel not in can:
            raise UsageError(
                f"kernel {kernel} cannot run {type(encoding).__name__} with a {mask_kind} mask in "
                f"{str(dtype).removeprefix('torch.')} on {device.type}; these can: {', '.join(can)}"
            )
        return kernel
    if device.type != "cuda":
        return "sdpa"
    if "flash" in can:
        return "flash"
    masked = biased or mask_kind != "causal"
    return "flex" if masked and "flex" in can else "sdpa"


def _flash_fits(device: torch.device, dtype: torch.dtype, encoding: Encoding) -> bool:
    if device.type != "cuda" or dtype not in (torch.float16, torch.bfloat16):
        return False
    if encoding.dims.head_dim > FLASH_WIDTH:
        return False
    # FlashAttention is there from Ampere on; without a GPU the question is what one would run.
    return not torch.cuda.is_available() or torch.cuda.get_device_capability(device) >= (8, 0)


def _flash_adds_bias(encoding: Encoding) -> bool:
    """Whether flash-attn is installed and adds this bias itself; `logn` would multiply it a query."""
    return (
        flash_attn_func() is not None
        and encoding.distance_slopes(torch.device("cpu")) is not None
        and not encoding.rescale.logn
    )


def attend(q_BHTK: Tensor, k_BGSK: Tensor, v_BGSK: Tensor, scoring: Scoring, kernel: str) -> Result:
    """softmax(scale * q k^T + bias) v under the mask, by a resolved kernel; 0 where a query sees no key."""
    run = {"eager": eager, "sdpa": sdpa, "flex": flex, "flash": flash}[kernel]
    memo = scoring.at.memo
    if "blind" not in memo:
        memo["blind"] = blind(scoring.mask, q_BHTK.shape[2], k_BGSK.shape[2], q_BHTK.device)
    with torch.autocast(q_BHTK.device.type, enabled=False):
        out_BHTK, lse_BHT = run(q_BHTK, k_BGSK, v_BGSK, scoring)
    if memo["blind"] is not None:
        out_BHTK = out_BHTK.masked_fill(memo["blind"][:, None, :, None], 0.0)
    return out_BHTK, lse_BHT
