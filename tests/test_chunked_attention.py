"""The chunked kernel on its own: gradients checked numerically, memory views, edges of chunks and bands."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from pe_study.kernels.blocks import Layout
from pe_study.kernels.chunked import attend_in_chunks
from pe_study.kernels.scoring import Segments


def draw(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, dtype=torch.float64, generator=generator)


def dense(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias_HS: Tensor,
    band: Tensor | None,
    segments: Segments | None,
    layout: Layout,
) -> tuple[Tensor, Tensor]:
    """The definition, one score at a time."""
    batch, heads, queries, _ = q.shape
    keys = k.shape[2]
    scores = torch.full((batch, heads, queries, keys), -float("inf"), dtype=q.dtype)
    for t in range(queries):
        for s in range(min(keys, t + layout.offset + 1)):
            distance = t + layout.offset - s
            addend = bias_HS.expand(heads, -1)[:, distance]
            if distance < layout.width and band is not None:
                addend = band.expand(batch, heads, queries, layout.width)[:, :, t, distance]
            seen = torch.ones(batch, 1, dtype=torch.bool)
            if segments is not None:
                seen = (segments.q_BT[:, t] == segments.k_BS[:, s])[:, None]
            value = (q[:, :, t] * k[:, :, s]).sum(-1) * layout.scale + addend
            scores[:, :, t, s] = torch.where(seen, value, -float("inf"))
    return scores.softmax(-1) @ v, scores.logsumexp(-1)


CASES = [
    # queries, keys, width, chunk
    (9, 9, 0, 9),
    (9, 9, 0, 4),
    (9, 9, 3, 4),
    (9, 9, 1, 3),
    (9, 9, 9, 4),
    (5, 9, 4, 2),
    (5, 9, 0, 2),
    (1, 9, 3, 1),
    (8, 9, 8, 8),
]


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(("queries", "keys", "width", "chunk"), CASES)
def test_values_and_numerical_gradients(
    queries: int, keys: int, width: int, chunk: int, packed: bool
) -> None:
    """In float64; a band that depends on the query where there is one."""
    layout = Layout(0.7, keys - queries, width, chunk)
    q, k, v = draw(2, 2, queries, 4), draw(2, 2, keys, 4, seed=1), draw(2, 2, keys, 4, seed=2)
    bias = draw(2, keys, seed=3)
    band = draw(2, 2, queries, width, seed=4) if width else None
    segments = None
    if packed:
        number = (torch.arange(keys) >= keys // 2).long().expand(2, -1)
        segments = Segments(number[:, keys - queries :], number)
    inputs = [x.requires_grad_() for x in (q, k, v) + (() if band is None else (band,))]

    def run(*given: Tensor) -> Tensor:
        last = given[3] if width else None
        return attend_in_chunks(given[0], given[1], given[2], bias, last, segments, layout)[0]

    out, lse = attend_in_chunks(q, k, v, bias, band, segments, layout)
    expected, expected_lse = dense(q, k, v, bias, band, segments, layout)
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(lse, expected_lse)
    assert not lse.requires_grad
    assert torch.autograd.gradcheck(run, inputs, fast_mode=True)


@pytest.mark.parametrize("shape", [(1, 2, 1, 3), (2, 1, 1, 3), (1, 1, 7, 3), (1, 1, 1, 3)])
def test_gradients_of_a_shared_band_are_summed(shape: tuple[int, ...]) -> None:
    layout = Layout(0.5, 0, 3, 3)
    q, k, v = (draw(2, 2, 7, 4, seed=i) for i in range(3))
    band = draw(*shape, seed=5).requires_grad_()
    bias = torch.zeros(1, 7, dtype=torch.float64)
    assert torch.autograd.gradcheck(
        lambda band: attend_in_chunks(q, k, v, bias, band, None, layout)[0], (band,)
    )


def test_inputs_are_left_as_they_were() -> None:
    layout = Layout(0.5, 0, 3, 2)
    inputs = [draw(1, 2, 7, 4, seed=i).requires_grad_() for i in range(3)]
    band, bias = draw(1, 2, 7, 3, seed=5).requires_grad_(), draw(2, 7)
    before = [x.detach().clone() for x in (*inputs, band, bias)]
    attend_in_chunks(*inputs, bias, band, None, layout)[0].sum().backward()
    for x, kept in zip((*inputs, band, bias), before, strict=True):
        assert torch.equal(x, kept)


def test_a_bias_is_never_copied_into_a_matrix(monkeypatch: pytest.MonkeyPatch) -> None:
    """The mask that the fused kernel gets is a view of one vector: C x S numbers of C + S - 1 in memory."""
    from pe_study.kernels import blocks

    masks: list[Tensor] = []
    fused = blocks._fused

    def spy(*args: object, attn_mask: Tensor, **options: object) -> object:
        masks.append(attn_mask)
        return fused(*args, attn_mask=attn_mask, **options)

    monkeypatch.setattr(blocks, "_fused", spy)
    q, k, v = (draw(1, 2, 64, 4, seed=i).float() for i in range(3))
    attend_in_chunks(q, k, v, draw(2, 64).float(), None, None, Layout(0.5, 0, 0, 16))
    assert len(masks) == 4
    for mask in masks:
        assert mask.stride()[-2:] == (1, 1)
        assert mask.untyped_storage().nbytes() == 4 * 2 * (16 - 1 + 64)
