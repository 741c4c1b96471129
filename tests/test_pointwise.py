"""The hand-written backward passes against torch's own."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from pe_study import pointwise
from pe_study.pointwise import rms_norm, rotate_halves, swiglu


def test_rms_norm_gradients() -> None:
    x = torch.randn(2, 3, 8, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(8, dtype=torch.float64, requires_grad=True)
    torch.testing.assert_close(rms_norm(x, weight, 1e-6), F.rms_norm(x, (8,), weight, 1e-6))
    assert torch.autograd.gradcheck(lambda x, w: rms_norm(x, w, 1e-6), (x, weight))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_rms_norm_in_every_dtype(dtype: torch.dtype) -> None:
    x, weight = torch.randn(4, 32).to(dtype), torch.randn(32).to(dtype)
    found = rms_norm(x, weight, 1e-6)
    exact = F.rms_norm(x.double(), (32,), weight.double(), 1e-6)
    assert found.dtype == dtype
    assert (found.double() - exact).abs().max() < 4 * torch.finfo(dtype).eps * exact.abs().max()


def test_rms_norm_of_zeros_is_zero() -> None:
    x = torch.zeros(2, 8, requires_grad=True)
    out = rms_norm(x, torch.ones(8), 1e-6)
    out.sum().backward()
    assert x.grad is not None
    assert bool(x.grad.isfinite().all())
    assert not out.any()


@pytest.mark.parametrize("passed", [0, 4])
@pytest.mark.parametrize("batch", [1, 2])
def test_rotation_gradients(passed: int, batch: int) -> None:
    angle = torch.randn(batch, 1, 5, 3, dtype=torch.float64)
    cos = torch.cat((angle.cos(), angle.cos(), torch.ones(batch, 1, 5, passed, dtype=torch.float64)), -1)
    x = torch.randn(2, 2, 5, 6 + passed, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: rotate_halves(x, cos, angle.sin()), (x,))


def test_rotation_in_half_precision_takes_torchs_own_path() -> None:
    angle = torch.randn(1, 1, 5, 3)
    cos, sin = torch.cat((angle.cos(), angle.cos()), -1), angle.sin()
    x = torch.randn(2, 2, 5, 6)
    low = rotate_halves(x.bfloat16(), cos.bfloat16(), sin.bfloat16())
    assert low.dtype == torch.bfloat16
    torch.testing.assert_close(low.float(), rotate_halves(x, cos, sin), atol=0.06, rtol=0)


def test_swiglu_gradients() -> None:
    x = torch.randn(2, 3, 8, dtype=torch.float64, requires_grad=True)
    gate, up = x.chunk(2, dim=-1)
    torch.testing.assert_close(swiglu(x), F.silu(gate) * up)
    assert torch.autograd.gradcheck(swiglu, (x,))


def test_swiglu_in_half_precision_takes_torchs_own_path() -> None:
    x = torch.randn(5, 8)
    low = swiglu(x.bfloat16())
    assert low.dtype == torch.bfloat16
    torch.testing.assert_close(low.float(), swiglu(x), atol=0.03, rtol=0.02)


@pytest.mark.parametrize("width", [8, 3000])
def test_blocks_cover_every_row(width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pointwise, "BLOCK", 2048)
    x = torch.randn(700, width, requires_grad=True)
    weight = torch.randn(width, requires_grad=True)
    found = torch.autograd.grad(rms_norm(x, weight, 1e-6).sin().sum(), (x, weight))
    expected = torch.autograd.grad(F.rms_norm(x, (width,), weight, 1e-6).sin().sum(), (x, weight))
    torch.testing.assert_close(found, expected, atol=2e-4, rtol=1e-4)
