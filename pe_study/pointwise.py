"""The decoder's pointwise parts, with backward passes that read each tensor as few times as it takes.

A CPU training step of a small decoder spends a third of its time in these; composed of single operations
they cost twice as many passes over memory. Large tensors are worked through in blocks that stay in a core's
cache between one operation and the next. On CUDA, and in half precision, torch's own kernels run.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

BLOCK = 2**18
"""Elements of a block."""


def _plain(x: Tensor) -> bool:
    """Whether the hand-written CPU backward passes apply."""
    return (
        x.device.type == "cpu"
        and x.dtype in (torch.float32, torch.float64)
        and not torch.compiler.is_compiling()
    )


def _blocks(x: Tensor) -> Iterator[slice]:
    """Slices of the first dimension, each of about BLOCK elements."""
    step = max(1, BLOCK * x.shape[0] // max(1, x.numel()))
    return (slice(start, start + step) for start in range(0, x.shape[0], step))


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension (Zhang, Sennrich 2019, arXiv:1910.07467)."""
    if _plain(x) and x.dtype == weight.dtype:
        return _RMSNorm.apply(x, weight, eps)
    return F.rms_norm(x, (x.shape[-1],), weight, eps)


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        rows = x.reshape(-1, x.shape[-1])
        inverse = (
            torch.linalg.vector_norm(rows, dim=-1, keepdim=True)
            .square_()
            .div_(x.shape[-1])
            .add_(eps)
            .rsqrt_()
        )
        out = torch.empty_like(rows)
        for block in _blocks(rows):
            torch.mul(rows[block], inverse[block], out=out[block]).mul_(weight)
        ctx.save_for_backward(x, weight, inverse)
        return out.view(x.shape)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight, inverse = ctx.saved_tensors
        width = x.shape[-1]
        rows, grads = x.reshape(-1, width), grad.reshape(-1, width)
        grad_x, grad_weight = torch.empty_like(rows), torch.zeros_like(weight)
        for block in _blocks(rows):
            normed = torch.mul(rows[block], inverse[block])
            along = torch.mul(grads[block], normed)
            grad_weight += along.sum(0)
            # d/dx = inverse * (g w - n * mean(g w n)), n the normed x
            mean = (along @ weight)[:, None].div_(width)
            torch.mul(grads[block], weight, out=grad_x[block])
            grad_x[block].addcmul_(normed, mean, value=-1).mul_(inverse[block])
        return grad_x.view(x.shape), grad_weight, None


def swiglu(gate_up: Tensor) -> Tensor:
    """(..., 2F) -> (..., F): silu of the first half times the second (Shazeer 2020, arXiv:2002.05202)."""
    if _plain(gate_up):
        return _SwiGLU.apply(gate_up)
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate_up: Tensor) -> Tensor:
        ctx.save_for_backward(gate_up)
        rows = gate_up.reshape(-1, gate_up.shape[-1])
        out = rows.new_empty(rows.shape[0], rows.shape[1] // 2)
        gate, up = rows.chunk(2, dim=-1)
        torch.ops.aten.silu.out(gate, out=out).mul_(up)
        return out.view(*gate_up.shape[:-1], -1)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (gate_up,) = ctx.saved_tensors
        rows = gate_up.reshape(-1, gate_up.shape[-1])
        grads, out = grad.reshape(rows.shape[0], -1), torch.empty_like(rows)
        gate, up = rows.chunk(2, dim=-1)
        grad_gate, grad_up = out.chunk(2, dim=-1)
        torch.ops.aten.silu.out(gate, out=grad_up).mul_(grads)
        torch.mul(grads, up, out=grad_gate)
        torch.ops.aten.silu_backward.grad_input(grad_gate, gate, grad_input=grad_gate)
        return out.view(gate_up.shape)


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
    cos, sin = cos.expand(x.shape[0], -1, -1, -1), sin.expand(x.shape[0], -1, -1, -1)
    out = torch.empty_like(x)
    for block in _blocks(x):
        read, turned = x[block], out[block]
        torch.mul(read, cos[block], out=turned)
        turned[..., :half].addcmul_(read[..., half : 2 * half], sin[block], value=-1)
        turned[..., half : 2 * half].addcmul_(read[..., :half], sin[block])
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
