"""The decoder's layers: pre-RMSNorm attention and SwiGLU, no biases.

Shape legend: B batch, T tokens of this call, S keys (cached and new), D model width, H query heads,
G key heads, K head width.
"""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.cache_utils import Cache

from pe_study import attention
from pe_study.configuration import PEStudyConfig
from pe_study.encodings.base import At, Encoding
from pe_study.kernels.scoring import Mask, Scoring, tempered
from pe_study.pointwise import rms_norm, swiglu


class RMSNorm(nn.Module):
    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps)


class Attention(nn.Module):
    """One layer's attention; queries, keys and values come out of one matrix, in that order."""

    def __init__(self, config: PEStudyConfig, layer: int) -> None:
        super().__init__()
        self.layer, self.config = layer, config
        self.num_heads, self.num_kv_heads, self.head_dim = (
            config.num_heads,
            config.num_kv_heads,
            config.head_dim,
        )
        width = (config.num_heads + 2 * config.num_kv_heads) * config.head_dim
        self.qkv = nn.Linear(config.d_model, width, bias=False)
        self.out = nn.Linear(config.num_heads * config.head_dim, config.d_model, bias=False)
        self.q_norm = RMSNorm(config.head_dim, config.rms_norm_eps) if config.qk_norm else None
        self.k_norm = RMSNorm(config.head_dim, config.rms_norm_eps) if config.qk_norm else None

    def forward(self, x_BTD: Tensor, encoding: Encoding, at: At, mask: Mask, cache: Cache | None) -> Tensor:
        at = replace(at, layer=self.layer)
        batch, length, _ = x_BTD.shape
        heads = (self.num_heads, self.num_kv_heads, self.num_kv_heads)
        qkv = self.qkv(x_BTD).view(batch, length, -1, self.head_dim).transpose(1, 2)
        q_BHTK, k_BGTK, v_BGTK = qkv.split(heads, dim=1)
        if self.q_norm is not None and self.k_norm is not None:
            q_BHTK, k_BGTK = self.q_norm(q_BHTK), self.k_norm(k_BGTK)
        unrotated_BHTK = q_BHTK
        q_BHTK, k_BGTK = encoding.rotate(q_BHTK, k_BGTK, at)
        k_BGSK, v_BGSK = k_BGTK, v_BGTK
        if cache is not None:
            k_BGSK, v_BGSK = cache.update(k_BGTK, v_BGTK, self.layer)
            num_keys = at.k_positions_BS.shape[1]  # a preallocated cache returns its empty end too
            k_BGSK, v_BGSK = k_BGSK[:, :, :num_keys], v_BGSK[:, :, :num_keys]
        kernel = attention.resolve(
            self.config.kernel,
            x_BTD.device,
            q_BHTK.dtype,
            encoding,
            mask.kind,
            consecutive=at.consecutive,
        )
        scoring = Scoring(encoding, at, unrotated_BHTK, self.head_dim**-0.5, mask)
        q_BHTK, scoring = tempered(q_BHTK, k_BGSK.shape[2], scoring)
        if at.observe is not None:
            at.observe(q_BHTK, k_BGSK, scoring)
        out_BHTK, _ = attention.attend(q_BHTK, k_BGSK, v_BGSK, scoring, kernel)
        return self.out(out_BHTK.transpose(1, 2).reshape(batch, length, -1))


class MLP(nn.Module):
    """SwiGLU (Shazeer 2020, arXiv:2002.05202); gate and up projections are one matrix, in that order."""

    def __init__(self, config: PEStudyConfig) -> None:
        super().__init__()
        self.gate_up = nn.Linear(config.d_model, 2 * config.d_ff, bias=False)
        self.down = nn.Linear(config.d_ff, config.d_model, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(swiglu(self.gate_up(x)))


class Layer(nn.Module):
    """Pre-norm attention and feed-forward, each with residual dropout; holds its encoding if one a layer."""

    def __init__(self, config: PEStudyConfig, layer: int, encoding: Encoding | None) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(config.d_model, config.rms_norm_eps)
        self.attention = Attention(config, layer)
        self.mlp_norm = RMSNorm(config.d_model, config.rms_norm_eps)
        self.mlp = MLP(config)
        self.encoding = encoding
        self.dropout = config.dropout

    def forward(self, x_BTD: Tensor, encoding: Encoding, at: At, mask: Mask, cache: Cache | None) -> Tensor:
        x_BTD = x_BTD + self._drop(self.attention(self.attention_norm(x_BTD), encoding, at, mask, cache))
        return x_BTD + self._drop(self.mlp(self.mlp_norm(x_BTD)))

    def _drop(self, x: Tensor) -> Tensor:
        return F.dropout(x, self.dropout, training=self.training) if self.dropout else x
