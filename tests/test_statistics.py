"""Attention statistics: known answers, and the dense definition in float64."""

from __future__ import annotations

import math

import pytest
import torch
from variants import TRAIN_LENGTH, Variant, all_rescaled, all_variants, draw_ids

from pe_study.evaluators import diagnostics
from pe_study.kernels import statistics
from pe_study.kernels.statistics import Bins, Collector, Sums

LENGTH, WIDTH = 50, 8


def collected(q: torch.Tensor, k: torch.Tensor, bins: Bins, **options: object) -> Sums:
    collector = Collector(bins)
    collector.add(0, q, k, 1.0, **options)  # type: ignore[arg-type]
    return collector.layers[0]


def test_uniform_attention_has_entropy_ratio_one_and_known_mass() -> None:
    """n equal weights: entropy ln n; of a query with n keys, n - L of them lie at distance L and beyond."""
    sums = collected(torch.zeros(1, 2, LENGTH, WIDTH), torch.ones(1, 2, LENGTH, WIDTH), Bins(LENGTH, 16))
    ratio = sums.entropy_ratio_PH / sums.num_ratios_P.clamp(min=1)[:, None]
    torch.testing.assert_close(ratio[1:], torch.ones(5, 2, dtype=torch.float64), atol=1e-6, rtol=0)
    assert sums.num_ratios_P.tolist() == [0, 2, 4, 8, 16, 19]
    assert sums.num_queries_P.tolist() == [1, 2, 4, 8, 16, 19]
    expected = sum((n - 16) / n for n in range(32, 51))
    torch.testing.assert_close(sums.beyond_PH[5], torch.full((2,), expected, dtype=torch.float64))
    nearest = sum(1 / n for n in range(32, 51))
    torch.testing.assert_close(sums.mass_PHN[5, :, 0], torch.full((2,), nearest, dtype=torch.float64))
    assert sums.max_score_PH.abs().max() == 0


def test_attention_to_one_key_has_entropy_zero_and_all_mass_there() -> None:
    """Every query of the last bin looks at key 10 alone: distance 22 to 39."""
    q, k = torch.zeros(1, 1, LENGTH, WIDTH), torch.zeros(1, 1, LENGTH, WIDTH)
    q[..., 0], k[:, :, 10, 0] = 1.0, 500.0
    bins = Bins(LENGTH, 16)
    sums = collected(q, k, bins)
    assert sums.entropy_ratio_PH[5].item() == pytest.approx(0, abs=1e-6)
    assert sums.beyond_PH[5].item() == pytest.approx(19)
    assert sums.max_score_PH[5].item() == pytest.approx(500)
    at_16 = [lo for lo, _ in bins.distances].index(16)
    assert sums.mass_PHN[5, 0, at_16].item() == pytest.approx(sum(16 <= i - 10 < 32 for i in range(31, 50)))


def dense(scores: torch.Tensor, seen: torch.Tensor, bins: Bins) -> list[dict[str, float]]:
    """(H,T,S) scores in float64 -> the statistics of each head and position bin, by their definition."""
    weights = scores.masked_fill(~seen, -math.inf).softmax(-1)
    entropy = -(weights * weights.clamp(min=1e-300).log()).sum(-1)
    count = seen.sum(-1).expand(entropy.shape)
    distance = torch.arange(scores.shape[1])[:, None] - torch.arange(scores.shape[2])
    found = []
    for bin_ in range(bins.num_positions):
        rows = [t for t in range(scores.shape[1]) if 1 << bin_ <= t + 1 < 2 << bin_]
        ratios = [t for t in rows if count[0, t] > 1]
        for head in range(scores.shape[0]):
            far = torch.where(distance >= (bins.train_length or 0), weights[head], 0.0).sum(-1)
            found.append(
                {
                    "ratio": sum(float(entropy[head, t] / math.log(count[head, t])) for t in ratios),
                    "beyond": float(far[rows].sum()),
                    "top": float(scores.masked_fill(~seen, -math.inf)[head, rows].max()),
                    **{
                        f"mass{lo}": float(
                            torch.where((distance >= lo) & (distance < hi), weights[head], 0.0)[rows].sum()
                        )
                        for lo, hi in bins.distances
                    },
                }
            )
    return found


def assert_dense(sums: Sums, scores: torch.Tensor, seen: torch.Tensor, bins: Bins) -> None:
    expected = iter(dense(scores.double(), seen, bins))
    for bin_ in range(bins.num_positions):
        for head in range(scores.shape[0]):
            wanted = next(expected)
            assert sums.entropy_ratio_PH[bin_, head].item() == pytest.approx(wanted["ratio"], abs=1e-4)
            assert sums.beyond_PH[bin_, head].item() == pytest.approx(wanted["beyond"], abs=1e-4)
            assert sums.max_score_PH[bin_, head].item() == pytest.approx(wanted["top"], rel=1e-5, abs=1e-5)
            for number, (lo, _) in enumerate(bins.distances):
                mass = sums.mass_PHN[bin_, head, number].item()
                assert mass == pytest.approx(wanted[f"mass{lo}"], abs=1e-4), (bin_, head, lo)


@pytest.mark.parametrize("window", [None, 1, 7])
@pytest.mark.parametrize("block", [1, 300, 1 << 20])
def test_grouped_heads_biases_and_windows(block: int, window: int | None, monkeypatch) -> None:
    """However many queries a block holds, and with the training length inside a bin of distances."""
    monkeypatch.setattr(statistics, "BLOCK", block)
    draw = torch.Generator().manual_seed(0)
    q, k = torch.randn(1, 4, LENGTH, WIDTH, generator=draw), torch.randn(1, 2, LENGTH, WIDTH, generator=draw)
    bias = torch.randn(4, LENGTH, generator=draw)
    bins = Bins(LENGTH, 12)
    sums = collected(q, k, bins, bias_HS=bias, window=window)
    distance = torch.arange(LENGTH)[:, None] - torch.arange(LENGTH)
    scores = q[0] @ k[0].repeat_interleave(2, 0).mT + bias[:, distance.clamp(min=0)]
    seen = (distance >= 0) & (distance < (window or LENGTH))
    assert_dense(sums, scores, seen, bins)


def test_a_step_measures_every_kth_query_past_the_first_128(monkeypatch) -> None:
    """And of those the numbers that all queries would have had; read in two calls as in one."""
    length = 300
    monkeypatch.setattr(statistics, "BLOCK", 9000)
    draw = torch.Generator().manual_seed(0)
    q, k = (torch.randn(1, 2, length, WIDTH, generator=draw) for _ in range(2))
    sums = collected(q, k, Bins(length, 64, step=7))
    measured = [*range(128), *(i for i in range(128, length) if i % 7 == 0)]
    assert sums.num_queries_P.sum() == len(measured)
    distance = torch.arange(length)[:, None] - torch.arange(length)
    weights = (q @ k.mT)[0].masked_fill(distance < 0, -math.inf).double().softmax(-1)
    far = torch.where(distance >= 64, weights, 0.0).sum(-1)
    last = [i for i in measured if i + 1 >= 256]
    torch.testing.assert_close(sums.beyond_PH[8], far[:, last].sum(1), atol=1e-5, rtol=0)
    collector = Collector(Bins(length, 64, step=7))
    collector.add(0, q[:, :, :150], k[:, :, :150], 1.0)
    collector.add(0, q[:, :, 150:], k, 1.0)
    torch.testing.assert_close(collector.layers[0].beyond_PH, sums.beyond_PH, atol=1e-5, rtol=0)
    torch.testing.assert_close(collector.layers[0].mass_PHN, sums.mass_PHN, atol=1e-5, rtol=0)
    assert torch.equal(collector.layers[0].num_queries_P, sums.num_queries_P)


OURS = [*all_variants(), *(v for v in all_rescaled() if "logn" in v.rescale or v.name == "t5")]


@pytest.mark.parametrize("variant", OURS, ids=str)
@torch.no_grad()
def test_our_layers_are_measured_as_the_eager_kernel_weighs(variant: Variant, monkeypatch) -> None:
    """Every encoding with its biases: the statistics of what softmax sees in the oracle."""
    length = 2 * TRAIN_LENGTH
    model = variant.model(length=length, kernel="eager")
    if model.max_length is not None and model.max_length < length:
        length = TRAIN_LENGTH
    seen_scores: list[torch.Tensor] = []
    own = torch.Tensor.softmax

    def watched(scores: torch.Tensor, dim: int) -> torch.Tensor:
        seen_scores.append(scores)
        return own(scores, dim)

    ids, bins = draw_ids(1, length), Bins(length, TRAIN_LENGTH)
    monkeypatch.setattr(torch.Tensor, "softmax", watched)
    model(ids)
    monkeypatch.undo()
    layers = diagnostics.collect(variant.model(length=model.config.length), [ids[0].numpy()], bins)
    assert sorted(layers) == [0, 1]
    seen = torch.ones(length, length).tril().bool()
    for layer, scores in enumerate(seen_scores):
        assert_dense(layers[layer], scores[0], seen, bins)
