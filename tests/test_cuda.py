"""The CUDA kernels against `eager`; every test skips itself where there is no GPU."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from variants import Variant, all_variants, draw_ids

from pe_study import attention
from pe_study.encodings.base import At, Encoding
from pe_study.kernels import fused
from pe_study.kernels.scoring import Mask, Scoring, Segments
from pe_study.model import CACHE_FIELD

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.filterwarnings("default"),  # the compiler's own
]
HEADS, WIDTH, TRAIN = 4, 64, 256
LENGTHS = (1, 127, 128, 129, 300, 1025)


def build(name: str, **options: object) -> Encoding:
    built = Variant(name, tuple(options.items())).encoding(
        d_model=HEADS * WIDTH, head_dim=WIDTH, max_positions=4096, train_length=TRAIN
    )
    return built.cuda()


def draw(length: int, groups: int, dtype: torch.dtype) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(length)
    shapes = ((HEADS, length), (groups, length), (groups, length))
    drawn = [torch.randn(2, *shape, WIDTH, generator=generator).cuda().to(dtype) for shape in shapes]
    return [x.requires_grad_() for x in drawn]


def outcome(
    encoding: Encoding, qkv: list[torch.Tensor], kernel: str, segments: Segments | None = None
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    q, k, v = qkv
    positions = torch.arange(q.shape[2], device="cuda")[None]
    at = At(0, positions, positions, q.shape[2])
    scoring = Scoring(encoding, at, q, WIDTH**-0.5, Mask(0, segments))
    out, _ = attention.attend(q, k, v, scoring, kernel)
    grads = torch.autograd.grad(out.float().square().sum(), [*qkv, *encoding.parameters()])
    return out.detach(), list(grads)


def error(found: torch.Tensor, exact: torch.Tensor) -> float:
    """Root mean square, relative to that of the exact values."""
    apart = (found.double() - exact.double()).square().mean().sqrt()
    return float(apart / exact.double().square().mean().sqrt().clamp(min=1e-30))


@pytest.fixture(autouse=True)
def fresh_graphs() -> Iterator[None]:
    fused.reset_compilations()
    yield
    fused.reset_compilations()


@pytest.mark.parametrize("name", ["nope", "alibi", "t5", "shaw"])
@pytest.mark.parametrize("length", LENGTHS)
def test_flex_in_float32(name: str, length: int) -> None:
    """case 55: values, gradients and the bias's gradient, at lengths that are no multiple of the block."""
    encoding, qkv = build(name), draw(length, 2, torch.float32)
    exact, ours = outcome(encoding, qkv, "eager"), outcome(encoding, qkv, "flex")
    assert error(ours[0], exact[0]) < 2e-3  # TF32 products, 10 bits
    for found, expected in zip(ours[1], exact[1], strict=True):
        assert bool(found.isfinite().all())
        assert error(found, expected) < 5e-3


@pytest.mark.parametrize("name", ["nope", "alibi", "t5", "shaw"])
@pytest.mark.parametrize("kernel", ["sdpa", "flex", "flash"])
def test_half_precision(name: str, kernel: str) -> None:
    """case 56: a float32 bias beside bfloat16 queries; within twice what `eager` in bfloat16 is off."""
    encoding, qkv = build(name), draw(300, 2, torch.bfloat16)
    if kernel == "flash" and (encoding.has_distance_bias or encoding.has_query_bias):
        return
    exact = outcome(encoding, [x.detach().float().requires_grad_() for x in qkv], "eager")
    plain, ours = outcome(encoding, qkv, "eager"), outcome(encoding, qkv, kernel)
    budgets = [
        2 * error(p, e) + 2**-8 for p, e in zip((plain[0], *plain[1]), (exact[0], *exact[1]), strict=True)
    ]
    for found, expected, budget in zip((ours[0], *ours[1]), (exact[0], *exact[1]), budgets, strict=True):
        assert bool(found.isfinite().all())
        assert error(found, expected) < budget


@pytest.mark.skipif(fused.flash_attn_func() is None, reason="needs the package flash-attn")
@pytest.mark.parametrize("length", LENGTHS)
def test_flash_attn_adds_alibis_slopes(length: int) -> None:
    encoding, qkv = build("alibi"), draw(length, 2, torch.bfloat16)
    exact = outcome(encoding, [x.detach().float().requires_grad_() for x in qkv], "eager")
    plain, ours = outcome(encoding, qkv, "eager"), outcome(encoding, qkv, "flash")
    for found, near, expected in zip(
        (ours[0], *ours[1]), (plain[0], *plain[1]), (exact[0], *exact[1]), strict=True
    ):
        assert bool(found.isfinite().all())
        assert error(found, expected) < 2 * error(near, expected) + 2**-8


@pytest.mark.parametrize("name", ["nope", "t5"])
def test_segments(name: str) -> None:
    """case 53: another document's keys change nothing."""
    encoding, qkv = build(name), draw(300, 4, torch.float32)
    number = (torch.arange(300, device="cuda") >= 100).long().expand(2, -1)
    before = outcome(encoding, qkv, "flex", Segments(number, number))[0]
    with torch.no_grad():
        qkv[1][:, :, :100] += 3.0
    after = outcome(encoding, qkv, "flex", Segments(number, number))[0]
    assert torch.equal(before[:, :, 100:], after[:, :, 100:])


def test_growing_lengths_compile_a_bounded_number_of_times() -> None:
    """case 60."""
    encoding = build("t5")
    for length in range(100, 1000, 90):
        outcome(encoding, draw(length, 2, torch.float32), "flex")
    assert 0 < fused.compilations() <= 8


@pytest.mark.parametrize("variant", all_variants(), ids=str)
@torch.no_grad()
def test_the_default_path_of_every_encoding(variant: Variant) -> None:
    """auto on the GPU equals eager on the CPU, in one pass and through the cache."""
    sizes = {"d_model": 64, "max_positions": 64}
    length = variant.model(**sizes).max_length or 64
    ids = draw_ids(2, length)
    expected = variant.model(kernel="eager", length=length, **sizes)(ids).logits
    model = variant.model(length=length, **sizes).cuda()
    found = model(ids.cuda()).logits.cpu()
    assert (found - expected).abs().max() < 5e-2
    first = model(ids[:, :7].cuda(), use_cache=True)
    rest = model(ids[:, 7:].cuda(), past_key_values=first[CACHE_FIELD]).logits.cpu()
    assert (rest - expected[:, 7:]).abs().max() < 5e-2
