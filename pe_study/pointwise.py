"""The decoder's pointwise parts, with backward passes that read each tensor as few times as it takes.

A CPU training step of a small decoder spends a third of its time in these; composed of single operations
they cost twice as many passes over memory. On CUDA, and in half precision, torch's own kernels run.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


def _plain(x: Tensor) -> bool:
    """Whether the hand-written CPU backward passes apply."""
    return (
        x.device.type == "cpu"
        and x.dtype in (torch.float32, torch.float64)
        and not torch.compiler.is_compiling()
    )


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension (Zhang, Sennrich 2019, arXiv:1910.07467)."""
    if _plain(x) and x.dtype == weight.dtype:
        return _RMSNorm.apply(x, weight, eps)
    return F.rms_norm(x, (x.shape[-1],), weight, eps)


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        inverse = (
            torch.linalg.vector_norm(x, dim=-1, keepdim=True).square_().div_(x.shape[-1]).add_(eps).rsqrt_()
        )
        ctx.save_for_backward(x, weight, inverse)
        return torch.mul(x, inverse).mul_(weight)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight, inverse = ctx.saved_tensors
        normed = torch.mul(x, inverse)
        along = torch.mul(grad, normed)
        grad_weight = along.sum(tuple(range(x.ndim - 1)))
        # d/dx = inverse * (g w - n * mean(g w n)), n the normed x
        mean = (along @ weight)[..., None].div_(x.shape[-1])
        grad_x = torch.mul(grad, weight).addcmul_(normed, mean, value=-1).mul_(inverse)
        return grad_x, grad_weight, None


def rotate_halves(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x (B, H, T, K) with pair (i, i + E/2) of its first E dimensions turned by one angle.

    `cos` (B or 1, 1, T, K) holds each pair's cosine twice, ones past E; `sin` (B or 1, 1, T, E/2) its sine.
    """
    if _plain(x) and x.dtype == cos.dtype:
        return _Rotation.apply(x, cos, sin)
    half = sin.shape[-1]
    first, second, passed = x.split((half, half, x.shape[-1] - 2 * half), dim=-1)
    crossed = torch.cat((-second * sin, first * sin, torch.zeros_like(passed)), dim=-1)
    return x * cos + crossed


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    half = sin.shape[-1]
    out = x * cos
    out[..., :half].addcmul_(x[..., half : 2 * half], sin, value=-1)
    out[..., half : 2 * half].addcmul_(x[..., :half], sin)
    return out


class _Rotation(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return _rotate(x, cos, sin)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        return _rotate(grad, cos, -sin), None, None
