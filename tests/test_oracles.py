"""Each paper's formula, written naively in float64 loops, against attention as the product runs it."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from pe_study import attention, encodings
from pe_study.encodings.base import At, Encoding
from pe_study.kernels.scoring import Mask, Scoring, Segments

LENGTH, HEADS, WIDTH = 13, 3, 8
SLOPES = [2.0**-4, 2.0**-8, 2.0**-2]
"""Three heads: the two of n = 2, then the first of n = 4."""

Score = Callable[[Tensor, Tensor, int, int, int], Tensor]


def build(name: str, **options: object) -> Encoding:
    built = encodings.build(
        name,
        d_model=HEADS * WIDTH,
        num_heads=HEADS,
        head_dim=WIDTH,
        max_positions=64,
        train_length=16,
        **options,
    )
    with torch.no_grad():
        for parameter in built.parameters():
            parameter.normal_(generator=torch.Generator().manual_seed(3))
    return built


def run(encoding: Encoding, kernel: str) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    q, k, v = torch.randn(3, 1, HEADS, LENGTH, WIDTH, generator=torch.Generator().manual_seed(1))
    positions = torch.arange(LENGTH)[None]
    at = At(0, positions, positions, LENGTH)
    turned_q, turned_k = encoding.rotate(q, k, at)
    scoring = Scoring(encoding, at, q, WIDTH**-0.5, Mask())
    with torch.no_grad():
        out, _ = attention.attend(turned_q, turned_k, v, scoring, kernel)
    return q[0].double(), k[0].double(), v[0].double(), out[0].double()


def softmax_loop(q: Tensor, k: Tensor, v: Tensor, score: Score, value: Score | None = None) -> Tensor:
    """softmax over keys j <= i of score(q_i, k_j, head, i, j), times v_j (+ value(…))."""
    out = torch.zeros_like(v)
    for h in range(HEADS):
        for i in range(LENGTH):
            scores = torch.stack([score(q[h, i], k[h, j], h, i, j) for j in range(i + 1)])
            weights = (scores - scores.max()).exp()
            weights = weights / weights.sum()
            for j in range(i + 1):
                extra = 0 if value is None else value(q[h, i], k[h, j], h, i, j)
                out[h, i] += weights[j] * (v[h, j] + extra)
    return out


def dot(q: Tensor, k: Tensor) -> Tensor:
    return (q * k).sum() / math.sqrt(WIDTH)


KERNELS = ("eager", "sdpa", "flex")


@pytest.mark.parametrize("kernel", KERNELS)
def test_nope(kernel: str) -> None:
    q, k, v, out = run(build("nope"), kernel)
    torch.testing.assert_close(out, softmax_loop(q, k, v, lambda q, k, h, i, j: dot(q, k)), atol=1e-5, rtol=0)


@pytest.mark.parametrize("kernel", KERNELS)
def test_rope(kernel: str) -> None:
    """Su et al., equation 34: R_i q · R_j k, pair (n, n + K/2) turned by position * 10000^(-2n/K)."""

    def turn(x: Tensor, position: int) -> Tensor:
        turned = x.clone()
        for n in range(WIDTH // 2):
            angle = position * 10000.0 ** (-2 * n / WIDTH)
            a, b = x[n], x[n + WIDTH // 2]
            turned[n] = a * math.cos(angle) - b * math.sin(angle)
            turned[n + WIDTH // 2] = a * math.sin(angle) + b * math.cos(angle)
        return turned

    q, k, v, out = run(build("rope"), kernel)
    expected = softmax_loop(q, k, v, lambda q, k, h, i, j: dot(turn(q, i), turn(k, j)))
    torch.testing.assert_close(out, expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("kernel", KERNELS)
def test_alibi(kernel: str) -> None:
    """Press et al., section 3: q·k / sqrt(K) - m_h (i - j), also for a head count that is no power of two."""
    q, k, v, out = run(build("alibi"), kernel)
    expected = softmax_loop(q, k, v, lambda q, k, h, i, j: dot(q, k) - SLOPES[h] * (i - j))
    torch.testing.assert_close(out, expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("kernel", KERNELS)
def test_t5(kernel: str) -> None:
    """Raffel et al., section 2.1, with one scale for all our encodings (case 39)."""
    encoding = build("t5", num_buckets=6, max_distance=9)
    table = next(encoding.parameters()).detach().double()

    def bucket(distance: int) -> int:
        if distance < 3:
            return distance
        return min(5, 3 + int(math.log(distance / 3) / math.log(9 / 3) * 3 + 1e-9))

    q, k, v, out = run(encoding, kernel)
    expected = softmax_loop(q, k, v, lambda q, k, h, i, j: dot(q, k) + table[bucket(i - j), h])
    torch.testing.assert_close(out, expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("values", [False, True])
@pytest.mark.parametrize("clip", [1, 4, 30])
def test_shaw(clip: int, values: bool) -> None:
    """Shaw et al., equations 3, 4: e_ij = q_i (k_j + a^K_ij) / sqrt(K), z_i = sum_j w_ij (v_j + a^V_ij)."""
    encoding = build("shaw", clip=clip, values=values)
    tables = {name: table.detach().double() for name, table in encoding.named_parameters()}

    def row(i: int, j: int) -> int:
        return max(-clip, min(clip, j - i)) + clip

    def score(q: Tensor, k: Tensor, h: int, i: int, j: int) -> Tensor:
        return dot(q, k + tables["keys"][row(i, j)])

    def value(q: Tensor, k: Tensor, h: int, i: int, j: int) -> Tensor:
        return tables["values"][row(i, j)]

    for kernel in ("eager", "sdpa") if values else KERNELS:
        q, k, v, out = run(encoding, kernel)
        expected = softmax_loop(q, k, v, score, value if values else None)
        torch.testing.assert_close(out, expected, atol=1e-5, rtol=0)


def test_sinusoidal() -> None:
    """Vaswani et al., section 3.5, entry by entry, times sqrt(2) * initializer_range."""
    width = HEADS * WIDTH
    x = torch.randn(1, LENGTH, width)
    positions = torch.arange(LENGTH)[None]
    found = build("sinusoidal", initializer_range=0.3).embed(x, At(0, positions, positions, LENGTH)) - x
    for p in range(LENGTH):
        for i in range(width // 2):
            angle = p / 10000 ** (2 * i / width)
            assert float(found[0, p, 2 * i]) == pytest.approx(0.3 * 2**0.5 * math.sin(angle), abs=1e-6)
            assert float(found[0, p, 2 * i + 1]) == pytest.approx(0.3 * 2**0.5 * math.cos(angle), abs=1e-6)


def test_learned() -> None:
    encoding = build("learned")
    table = next(encoding.parameters())
    x, positions = torch.randn(2, LENGTH, HEADS * WIDTH), torch.arange(LENGTH)[None]
    found = encoding.embed(x, At(0, positions, positions, LENGTH))
    for p in range(LENGTH):
        assert torch.equal(found[:, p], x[:, p] + table[p])


@pytest.mark.parametrize("kernel", ["eager", "sdpa"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("last", [7, 4096, 100_000])
def test_alibi_weights_of_adjacent_keys_far_out(kernel: str, dtype: torch.dtype, last: int) -> None:
    """case 31: with q k^T = 0 the ratio is e^-slope, at position 4096 and at 100000, whatever the dtype.

    One query behind that many keys, of which it sees alone the eight 1000 back, as if of its own document.
    A bias in half precision would make those neighbours equal.
    """
    encoding, size = build("alibi"), 8
    first = max(0, last - 1000 - size)
    q, k = torch.zeros(1, HEADS, 1, WIDTH, dtype=dtype), torch.zeros(1, HEADS, last + 1, WIDTH, dtype=dtype)
    v, shown = torch.zeros_like(k), torch.full((1, last + 1), -1)
    v[:, :, first : first + size, :size] = torch.eye(size, dtype=dtype)
    shown[:, first : first + size] = 0
    positions = torch.arange(last + 1)[None]
    mask = Mask(last, Segments(torch.zeros(1, 1, dtype=torch.long), shown))
    scoring = Scoring(encoding, At(0, positions[:, -1:], positions, last + 1), q, 1.0, mask)
    with torch.no_grad():
        weights, _ = attention.attend(q, k, v, scoring, kernel)
    ratio = weights[0, :, 0, : size - 1].float() / weights[0, :, 0, 1:size].float()
    expected = torch.tensor(SLOPES).neg().exp()[:, None].expand_as(ratio)
    torch.testing.assert_close(ratio, expected, rtol=2e-4 if dtype == torch.float32 else 2e-2, atol=0)


def test_alibi_is_exact_at_32768_positions() -> None:
    """Within 1e-5 of float64 in float32, rows chosen across the sequence, by the default kernel."""
    length, width = 32768, 8
    encoding = build("alibi")
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, HEADS, length, width, generator=generator) for _ in range(3))
    rows = torch.tensor([0, 1, 511, 512, 4097, 20000, 32766, 32767])
    positions = torch.arange(length)[None]
    chunk = 64
    with torch.no_grad():
        for row in rows.tolist():
            first = max(0, row + 1 - chunk)
            at = At(0, positions[:, first : row + 1], positions[:, : row + 1], length)
            scoring = Scoring(encoding, at, q[:, :, first : row + 1], width**-0.5, Mask(offset=first))
            keys, values = k[:, :, : row + 1], v[:, :, : row + 1]
            out, _ = attention.attend(q[:, :, first : row + 1], keys, values, scoring, "sdpa")
            scores = (q[0, :, row, None].double() @ k[0, :, : row + 1].double().mT)[:, 0] * width**-0.5
            distance = torch.arange(row, -1, -1).double()
            weights = (scores - torch.tensor(SLOPES).double()[:, None] * distance).softmax(-1)
            expected = (weights[:, None] @ v[0, :, : row + 1].double())[:, 0]
            assert (out[0, :, -1].double() - expected).abs().max() < 1e-5


@pytest.mark.slow
def test_alibi_is_exact_in_one_pass_over_32768_positions() -> None:
    """The whole sequence at once, as an evaluation reads it."""
    length, width = 32768, 8
    encoding = build("alibi")
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, HEADS, length, width, generator=generator) for _ in range(3))
    positions = torch.arange(length)[None]
    scoring = Scoring(encoding, At(0, positions, positions, length), q, width**-0.5, Mask())
    with torch.no_grad():
        out, _ = attention.attend(q, k, v, scoring, "sdpa")
    for row in range(0, length, 1009):
        scores = (q[0, :, row, None].double() @ k[0, :, : row + 1].double().mT)[:, 0] * width**-0.5
        weights = (scores - torch.tensor(SLOPES).double()[:, None] * torch.arange(row, -1, -1)).softmax(-1)
        expected = (weights[:, None] @ v[0, :, : row + 1].double())[:, 0]
        assert (out[0, :, row].double() - expected).abs().max() < 1e-5
