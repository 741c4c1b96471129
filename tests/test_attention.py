"""Every kernel against `eager`: values, gradients, grouped queries, caches, segments, precision."""

from __future__ import annotations

import sys
import types
from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from variants import HEAD_DIM, HEADS, Variant, all_variants, draw_ids

from pe_study import attention
from pe_study.encodings.base import At, Dimensions, Encoding
from pe_study.errors import UsageError
from pe_study.kernels import fused
from pe_study.kernels import sdpa as sdpa_kernels
from pe_study.kernels.scoring import Mask, Scoring, Segments, masked_value

LENGTHS = (1, 2, 7, 64, 200, 257, 300, 513, 700)
"""On both sides of every chunk size, and no multiples of one."""
CLOSE = 2e-5
CPU = torch.device("cpu")


def biased() -> list[Variant]:
    """The variants that change scores or values inside attention, and one that does not."""
    found = []
    for variant in all_variants():
        encoding = variant.encoding()
        if encoding.has_distance_bias or encoding.has_query_bias or encoding.has_value_term:
            found.append(variant)
    return [Variant("nope"), *found]


def draw(
    length: int, keys: int, groups: int, batch: int = 2, dtype: torch.dtype = torch.float32
) -> list[Tensor]:
    generator = torch.Generator().manual_seed(length + keys)
    shapes = ((HEADS, length), (groups, keys), (groups, keys))
    drawn = [torch.randn(batch, *shape, HEAD_DIM, generator=generator) for shape in shapes]
    return [x.to(dtype).requires_grad_() for x in drawn]


def scoring(encoding: Encoding, q: Tensor, keys: int, segments: Segments | None = None) -> Scoring:
    """Queries are the last tokens of `keys`."""
    offset = keys - q.shape[2]
    positions = torch.arange(keys)[None]
    at = At(0, positions[:, offset:], positions, keys)
    return Scoring(encoding, at, q, HEAD_DIM**-0.5, Mask(offset, segments))


def outcome(
    encoding: Encoding, qkv: list[Tensor], kernel: str, segments: Segments | None = None
) -> tuple[Tensor, list[Tensor]]:
    """Output, and gradients of a fixed mix of it with regard to q, k, v and the encoding's parameters."""
    q, k, v = qkv
    out, _ = attention.attend(q, k, v, scoring(encoding, q, k.shape[2], segments), kernel)
    mix = torch.randn(out.shape, generator=torch.Generator().manual_seed(9)).to(out.dtype)
    wanted = [*qkv, *encoding.parameters()]
    grads = torch.autograd.grad((out * mix).sum(), wanted, allow_unused=True)
    return out.detach(), [torch.zeros_like(w) if g is None else g for g, w in zip(grads, wanted, strict=True)]


def assert_agree(found: tuple[Tensor, list[Tensor]], expected: tuple[Tensor, list[Tensor]]) -> None:
    """Gradients are compared relative to their largest entry: those of tables sum over all queries."""
    assert (found[0] - expected[0]).abs().max() < CLOSE
    for ours, oracle in zip(found[1], expected[1], strict=True):
        assert bool(ours.isfinite().all())
        assert (ours - oracle).abs().max() < CLOSE * max(1.0, float(oracle.abs().max()))


@pytest.mark.parametrize("variant", biased(), ids=str)
@pytest.mark.parametrize("length", LENGTHS)
def test_sdpa_equals_eager(variant: Variant, length: int) -> None:
    """Values and gradients, also grouped-query and multi-query."""
    encoding = variant.encoding()
    groups = (1, 2, 4)[LENGTHS.index(length) % 3]
    qkv = draw(length, length, groups, batch=1 if length > 64 else 2)
    assert_agree(outcome(encoding, qkv, "sdpa"), outcome(encoding, qkv, "eager"))


@pytest.mark.parametrize("variant", biased(), ids=str)
@pytest.mark.parametrize(
    ("queries", "keys", "groups"), [(1, 1, 1), (1, 300, 2), (3, 40, 1), (65, 300, 4), (140, 600, 2)]
)
def test_behind_a_cache(variant: Variant, queries: int, keys: int, groups: int) -> None:
    """case 15: query t, at index offset + t among the keys, sees the keys up to itself."""
    encoding, qkv = variant.encoding(), [x.detach() for x in draw(queries, keys, groups, batch=1)]
    with torch.no_grad():
        expected = attention.attend(*qkv, scoring(encoding, qkv[0], keys), "eager")[0]
        for kernel in ("sdpa",) if encoding.has_value_term else ("sdpa", "flex"):
            found = attention.attend(*qkv, scoring(encoding, qkv[0], keys), kernel)[0]
            assert (found - expected).abs().max() < CLOSE, kernel


@pytest.mark.parametrize("factor", [0.5, 2])
@pytest.mark.parametrize(("queries", "keys"), [(1, 40), (40, 40), (300, 300), (301, 301), (7, 300)])
@pytest.mark.parametrize("name", ["nope", "alibi", "t5"])
def test_rotated_queries_may_have_a_width_of_their_own(
    name: str, queries: int, keys: int, factor: float
) -> None:
    """`rotate` returns (B, H, T, E): E is not the width of the values."""
    q, k, v = draw(queries, keys, 2)
    width = int(HEAD_DIM * factor)
    qkv = [x.detach()[..., :1].repeat(1, 1, 1, width).cos().requires_grad_() for x in (q, k)] + [v]
    encoding = Variant(name).encoding()
    segments = Segments(*((torch.arange(n) < 5).long().expand(2, -1) for n in (queries, keys)))
    for own in (None, segments) if queries == keys else (None,):
        found, exact = (outcome(encoding, qkv, kernel, own) for kernel in ("sdpa", "eager"))
        assert found[0].shape == (2, HEADS, queries, HEAD_DIM)
        assert_agree(found, exact)


class TableBias(Encoding):
    """A learned number a distance, of no more distances than positions."""

    def __init__(self, dims: Dimensions) -> None:
        super().__init__(dims)
        self.table = torch.nn.Parameter(torch.randn(dims.max_positions, dims.num_heads))

    def distance_bias(self, distance: Tensor) -> Tensor:
        return self.table[distance.clamp(min=0)].movedim(-1, 0)


@pytest.mark.parametrize("length", [40, 300])
def test_a_bias_is_asked_for_no_distance_that_cannot_occur(length: int) -> None:
    encoding = TableBias(Dimensions(HEADS * HEAD_DIM, HEADS, HEAD_DIM, length, length))
    qkv = draw(length, length, 2)
    assert_agree(outcome(encoding, qkv, "sdpa"), outcome(encoding, qkv, "eager"))


@pytest.mark.parametrize("kernel", ["eager", "sdpa", "flex"])
def test_the_mask_is_aligned_with_the_last_key(kernel: str) -> None:
    """case 15: two queries, five keys: rows 11110 and 11111, not 10000 and 11000."""
    encoding = Variant("nope").encoding(num_heads=1, head_dim=8, d_model=8)
    q, k = torch.zeros(1, 1, 2, 8), torch.zeros(1, 1, 5, 8)
    v = torch.eye(5, 8)[None, None]
    with torch.no_grad():
        out, _ = attention.attend(q, k, v, scoring(encoding, q, 5), kernel)
    expected = torch.tensor([[1, 1, 1, 1, 0], [1, 1, 1, 1, 1]]) / torch.tensor([[4], [5]])
    torch.testing.assert_close(out[0, 0, :, :5], expected)


@pytest.mark.parametrize("variant", biased(), ids=str)
@pytest.mark.parametrize("length", [7, 300])
def test_segments(variant: Variant, length: int) -> None:
    """case 53: another document's keys and values change nothing, not by a bit; gradients agree."""
    encoding, qkv = variant.encoding(), draw(length, length, 2)
    cut = length // 3
    number = (torch.arange(length) >= cut).long().expand(2, -1)
    segments = Segments(number, number)
    assert_agree(outcome(encoding, qkv, "sdpa", segments), outcome(encoding, qkv, "eager", segments))
    other = [x.detach().clone() for x in qkv]
    for x in other[1:]:
        x[:, :, :cut] += 3.0
    with torch.no_grad():
        for kernel in ("eager", "sdpa") if encoding.has_value_term else ("eager", "sdpa", "flex"):
            q, k, v = (x.detach() for x in qkv)
            place = scoring(encoding, q, length, segments)
            before = attention.attend(q, k, v, place, kernel)[0]
            after = attention.attend(q, *other[1:], place, kernel)[0]
            assert torch.equal(before[:, :, cut:], after[:, :, cut:]), kernel
            assert not torch.equal(before[:, :, :cut], after[:, :, :cut]), kernel


@pytest.mark.parametrize("variant", biased(), ids=str)
@torch.no_grad()
def test_a_segment_in_two_pieces(variant: Variant) -> None:
    """Distances inside it no longer follow from indices: every kernel says the same all the same."""
    ids, segments = draw_ids(1, 12), torch.tensor([[0] * 4 + [1] * 4 + [0] * 4])
    eager, sdpa = (
        variant.model(kernel=kernel)(ids, segment_ids=segments).logits for kernel in ("eager", "sdpa")
    )
    torch.testing.assert_close(sdpa, eager, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("length", [64, 300])
@pytest.mark.parametrize("variant", all_variants(), ids=str)
def test_a_query_with_nothing_to_see_gives_zero(variant: Variant, length: int) -> None:
    """Left padding: padded rows give 0 and pull at nothing, though a loss reads them; others as `eager`."""
    encoding, qkv = variant.encoding(), draw(length, length, 2)
    hidden = torch.zeros(2, length, dtype=torch.long)
    hidden[0, : length - 30] = -1
    place = scoring(encoding, qkv[0], length, Segments(torch.zeros_like(hidden), hidden))
    wanted = [*qkv, *encoding.parameters()]
    outs, grads = {}, {}
    for kernel in ("eager", "sdpa"):
        outs[kernel], _ = attention.attend(*qkv, place, kernel)
        assert not outs[kernel][0, :, : length - 30].any(), kernel
        loss = (outs[kernel] + 3.0).square().sum()
        grads[kernel] = torch.autograd.grad(loss, wanted, allow_unused=True)
        grads[kernel] = tuple(grad for grad in grads[kernel] if grad is not None)
    assert_agree((outs["sdpa"], list(grads["sdpa"])), (outs["eager"], list(grads["eager"])))


@pytest.mark.parametrize("variant", biased(), ids=str)
@pytest.mark.parametrize("amplitude", [1e3, 1e5])
def test_gradients_of_large_scores(variant: Variant, amplitude: float) -> None:
    """The logsumexp is as large as the scores: no rounding of it may move weights."""
    encoding, (q, k, v) = variant.encoding(), draw(257, 257, 2)
    scaled = (q.detach() * amplitude).requires_grad_(), k, v
    place = scoring(encoding, scaled[0], 257)
    grads = {}
    for kernel in ("eager", "sdpa"):
        out, _ = attention.attend(*scaled, place, kernel)
        grads[kernel] = torch.autograd.grad(out.sin().sum(), scaled[2])[0]
    assert bool(grads["sdpa"].isfinite().all())
    if amplitude < 1e5:  # past that one step of float32 in a score moves its weight
        torch.testing.assert_close(grads["sdpa"], grads["eager"], atol=2e-4, rtol=1e-3)


@pytest.mark.parametrize("variant", biased(), ids=str)
def test_an_edge_of_a_band_is_where_it_says(variant: Variant) -> None:
    """case 54, of our kind: no distance is off by one between the kernels.

    One score is raised so far that its key takes all the weight: the output is that key's value.
    """
    encoding = variant.encoding()
    beyond = encoding.constant_beyond or 8
    length = beyond + 5
    q, k, v = (x.detach() for x in draw(length, length, 4, batch=1))
    for distance in (beyond - 1, beyond, beyond + 1):
        raised = k.clone()
        raised[:, :, length - 1 - distance] = q[:, :, -1] * 100
        with torch.no_grad():
            for kernel in ("eager", "sdpa"):
                out, _ = attention.attend(q, raised, v, scoring(encoding, q, length), kernel)
                plain = v[:, :, length - 1 - distance]
                apart = (out[:, :, -1] - plain).abs().max()
                assert apart < 1e-3 or encoding.has_value_term, (kernel, distance)


@pytest.mark.parametrize("variant", biased(), ids=str)
@pytest.mark.parametrize(
    ("dtype", "length"), [(torch.bfloat16, 64), (torch.bfloat16, 300), (torch.float16, 300)]
)
def test_low_precision_is_within_twice_plain_low_precision(
    variant: Variant, dtype: torch.dtype, length: int
) -> None:
    """The budget is derived: scores, softmax and mix computed in `dtype` are so far from the exact values."""
    encoding, qkv = variant.encoding(), draw(length, length, 2, dtype=dtype)
    with torch.no_grad():
        exact_scoring = scoring(encoding, qkv[0].float(), length)
        exact = attention.attend(*(x.float() for x in qkv), exact_scoring, "eager")[0]
        plain = plain_attention(encoding, qkv, exact_scoring)
        budget = 2 * (plain.float() - exact).square().mean().sqrt()
        for kernel in ("eager", "sdpa"):
            out, _ = attention.attend(*qkv, scoring(encoding, qkv[0], length), kernel)
            assert out.dtype == dtype
            assert (out.float() - exact).square().mean().sqrt() < budget, kernel


def plain_attention(encoding: Encoding, qkv: list[Tensor], at_float32: Scoring) -> Tensor:
    """Textbook attention with every intermediate result in the dtype of q."""
    q, k, v = (x.repeat_interleave(HEADS // x.shape[1], dim=1) for x in qkv)
    length, dtype = q.shape[2], q.dtype
    index = torch.arange(length)
    b, h = torch.arange(q.shape[0])[:, None, None, None], torch.arange(HEADS)[:, None, None]
    scores = (q @ k.mT) * at_float32.scale
    modify = encoding.score_mod(at_float32.unrotated_BHTK, at_float32.at)
    if modify is not None:
        scores = scores + modify(torch.zeros(()), b, h, index[:, None], index[None, :]).to(dtype)
    weights = scores.masked_fill(index[:, None] < index, -float("inf")).softmax(-1)
    out = weights @ v
    if encoding.has_value_term:
        out = out + encoding.value_term(weights.float(), index, at_float32.at).to(dtype)
    return out


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("variant", biased(), ids=str)
def test_a_dense_mask_has_the_dtype_of_the_queries(
    variant: Variant, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """case 56: CUDA refuses a float32 bias beside bfloat16 queries; a CPU accepts it and hides the error."""
    seen: list[Tensor] = []
    call = F.scaled_dot_product_attention

    def spy(q: Tensor, *args: Tensor, attn_mask: Tensor | None = None, **options: object) -> Tensor:
        seen.append(q)
        assert attn_mask is None or attn_mask.dtype in (torch.bool, q.dtype)
        return call(q, *args, attn_mask=attn_mask, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(F, "scaled_dot_product_attention", spy)
    encoding = variant.encoding()
    outcome(encoding, draw(64, 64, 2, dtype=dtype), "sdpa")
    assert seen or encoding.has_distance_bias or encoding.has_value_term


@pytest.mark.parametrize("length", [1024, 1025])
def test_gradients_are_finite_at_lengths_next_to_a_block(length: int) -> None:
    """case 55: a bias together with a mask gave NaN gradients at length 1025; ours are the dense ones."""
    encoding, qkv = Variant("t5").encoding(), draw(length, length, 2, batch=1)
    ours, dense = outcome(encoding, qkv, "sdpa")[1][-1], outcome(encoding, qkv, "eager")[1][-1]
    assert bool(ours.isfinite().all())
    assert (ours - dense).abs().max() < 1e-3


def test_one_scale_for_all_encodings() -> None:
    """case 39: softmax(scale * q k^T + bias): the bias is not scaled, and with q = 0 it is all there is."""
    encoding = Variant("t5").encoding()
    q, k = torch.zeros(1, HEADS, 9, HEAD_DIM), torch.randn(1, HEADS, 9, HEAD_DIM)
    v = torch.eye(9)[None, None].expand(1, HEADS, 9, 9)[..., :HEAD_DIM]
    distance = torch.arange(9)[:, None] - torch.arange(9)
    with torch.no_grad():
        bias = encoding.distance_bias(distance.clamp(min=0))
        assert bias is not None
        weights = bias.masked_fill(distance < 0, -float("inf")).softmax(-1)
        for kernel in ("eager", "sdpa", "flex"):
            out, _ = attention.attend(q, k, v, scoring(encoding, q, 9), kernel)
            torch.testing.assert_close(out[0], weights[..., :HEAD_DIM], atol=1e-6, rtol=0)


def test_kernels_that_add_slope_times_key_give_the_same_output() -> None:
    """case 52: softmax ignores a constant a row, so compare outputs, not biases."""
    encoding = Variant("alibi").encoding()
    q, k, v = (x.detach() for x in draw(50, 50, 4))
    index = torch.arange(50)
    slopes = torch.tensor([0.25, 0.0625, 0.015625, 0.00390625])[:, None, None]
    causal = torch.where(index[:, None] < index, -float("inf"), 0.0)
    theirs = F.scaled_dot_product_attention(q, k, v, attn_mask=causal + slopes * index)
    for kernel in ("eager", "sdpa"):
        ours = attention.attend(q, k, v, scoring(encoding, q, 50), kernel)[0]
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=0)


@pytest.mark.parametrize("kernel", ["eager", "sdpa"])
def test_logsumexp_is_that_of_the_scores(kernel: str) -> None:
    encoding, qkv = Variant("alibi").encoding(), draw(300, 300, 4)
    q, k, _ = (x.detach() for x in qkv)
    index = torch.arange(300)
    slopes = torch.tensor([0.25, 0.0625, 0.015625, 0.00390625])[:, None, None]
    scores = q @ k.mT * HEAD_DIM**-0.5 - slopes * (index[:, None] - index)
    expected = scores.masked_fill(index[:, None] < index, -float("inf")).logsumexp(-1)
    found = attention.attend(*qkv, scoring(encoding, q, 300), kernel)[1]
    assert found is not None
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=0)


def test_an_explicit_kernel_never_falls_back() -> None:
    """The error names the kernels that can."""
    shaw = Variant("shaw", (("values", True),)).encoding()
    with pytest.raises(UsageError, match=r"flex cannot run Shaw .* these can: eager, sdpa$"):
        attention.resolve("flex", CPU, torch.float32, shaw, "causal")
    with pytest.raises(UsageError, match=r"flash cannot run .* in float32 on cpu"):
        attention.resolve("flash", CPU, torch.float32, Variant("rope").encoding(), "causal")
    with pytest.raises(UsageError, match='did you mean "flash"'):
        attention.resolve("flashy", CPU, torch.float32, shaw, "causal")
    with pytest.raises(UsageError, match="no backward pass on a CPU"):
        outcome(Variant("t5").encoding(), draw(8, 8, 2), "flex")


def test_auto_is_resolved_by_device_encoding_and_mask() -> None:
    cuda, half = torch.device("cuda"), torch.bfloat16
    rope, t5 = Variant("rope").encoding(), Variant("t5").encoding()
    assert attention.resolve("auto", CPU, torch.float32, t5, "causal") == "sdpa"
    assert attention.resolve("auto", cuda, half, rope, "causal") == "flash"
    assert attention.resolve("auto", cuda, half, rope, "segments") == "flex"
    assert attention.resolve("auto", cuda, half, t5, "causal") == "flex"


def documented_flash_attn(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    softmax_scale: float,
    causal: bool,
    alibi_slopes: Tensor,
    deterministic: bool = False,
) -> Tensor:
    """flash-attn as its documentation has it: (B, T, H, K), mask and -slope |i + S - T - j| from the end."""
    assert causal
    assert alibi_slopes.dtype == torch.float32
    assert alibi_slopes.shape == (q.shape[2],)
    k, v = (x.repeat_interleave(q.shape[2] // x.shape[2], dim=2) for x in (k, v))
    num_queries, num_keys = q.shape[1], k.shape[1]
    i, j = torch.arange(num_queries)[:, None] + num_keys - num_queries, torch.arange(num_keys)
    scores = torch.einsum("bihk,bjhk->bhij", q, k) * softmax_scale
    scores = scores - alibi_slopes[:, None, None] * (i - j).abs()
    return torch.einsum("bhij,bjhk->bihk", scores.masked_fill(j > i, -torch.inf).softmax(-1), v)


@pytest.fixture
def with_flash_attn(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    package = types.ModuleType("flash_attn")
    package.flash_attn_func = documented_flash_attn  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "flash_attn", package)
    fused.flash_attn_func.cache_clear()
    yield
    fused.flash_attn_func.cache_clear()


@pytest.mark.usefixtures("with_flash_attn")
@pytest.mark.parametrize("groups", [1, 2, HEADS])
@pytest.mark.parametrize(("length", "keys"), [(9, 9), (4, 9), (1, 9)])
@pytest.mark.parametrize("rescale", ["none", "linear:2"])
def test_alibis_slopes_reach_flash_attn(length: int, keys: int, groups: int, rescale: str) -> None:
    encoding = Variant("alibi", rescale=rescale).encoding()
    qkv = draw(length, keys, groups)
    found, exact = (outcome(encoding, qkv, kernel) for kernel in ("flash", "eager"))
    torch.testing.assert_close(found, exact, atol=CLOSE, rtol=CLOSE)


@pytest.mark.usefixtures("with_flash_attn")
def test_flash_attn_runs_what_its_slopes_can_say() -> None:
    """Not learned biases, not `logn`, not positions out of order, not two documents in one row."""
    cuda, half, alibi = torch.device("cuda"), torch.bfloat16, Variant("alibi").encoding()
    assert attention.resolve("auto", cuda, half, alibi, "causal") == "flash"
    assert attention.resolve("auto", cuda, half, alibi, "causal", consecutive=False) == "flex"
    assert attention.resolve("auto", cuda, half, alibi, "segments") == "flex"
    assert attention.resolve("auto", cuda, torch.float32, alibi, "causal") == "flex"
    assert attention.resolve("auto", cuda, half, Variant("t5").encoding(), "causal") == "flex"
    rope = Variant("rope").encoding()  # which turns, whatever its order
    assert attention.resolve("auto", cuda, half, rope, "causal", consecutive=False) == "flash"
    tempered = Variant("alibi", rescale="logn").encoding()
    assert attention.resolve("auto", cuda, half, tempered, "causal") == "flex"


def test_without_flash_attn_alibi_runs_in_flex() -> None:
    cuda, alibi = torch.device("cuda"), Variant("alibi").encoding()
    if fused.flash_attn_func() is not None:
        pytest.skip("flash-attn is installed")
    assert attention.resolve("auto", cuda, torch.bfloat16, alibi, "causal") == "flex"
    with pytest.raises(UsageError, match=r"flash cannot run ALiBi"):
        attention.resolve("flash", cuda, torch.bfloat16, alibi, "causal")


def test_gpus_before_ampere_and_wide_heads_have_no_flash_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    cuda, rope = torch.device("cuda"), Variant("rope").encoding()
    wide = Variant("rope").encoding(head_dim=512)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    assert attention.resolve("auto", cuda, torch.float16, wide, "causal") == "sdpa"
    for capability, kernel in (((7, 5), "sdpa"), ((8, 0), "flash"), ((9, 0), "flash")):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, of=capability: of)
        assert attention.resolve("auto", cuda, torch.float16, rope, "causal") == kernel


def test_a_hidden_score_never_weighs() -> None:
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        hidden = torch.tensor([masked_value(dtype), -30.0], dtype=dtype)
        assert bool(hidden.isfinite().all())
        assert hidden.softmax(-1)[0] == 0


def test_shear_reads_a_band_as_diagonals() -> None:
    band = torch.arange(1.0, 4.0)[None, None, None]
    dense = sdpa_kernels.shear(band, 4)[0, 0]
    assert dense.tolist() == [[1, 0, 0, 0], [2, 1, 0, 0], [3, 2, 1, 0], [0, 3, 2, 1]]
