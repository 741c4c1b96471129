"""Every number of the papers' worked examples comes out of the product's own code."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch import Tensor

from pe_study import attention, costs, encodings
from pe_study.encodings import alibi, shaw, sinusoidal, t5
from pe_study.encodings.base import At, Encoding
from pe_study.kernels.scoring import Mask, Scoring

EXAMPLES: dict[str, Any] = yaml.safe_load(
    (Path(__file__).parent / "data" / "worked_examples.yaml").read_text(encoding="utf-8")
)
PRINTED = 5.1e-4
"""Half of the last of three printed decimals."""


def build(name: str, num_heads: int = 1, head_dim: int = 4, **options: Any) -> Encoding:
    return encodings.build(
        name,
        d_model=num_heads * head_dim,
        num_heads=num_heads,
        head_dim=head_dim,
        max_positions=16,
        train_length=8,
        **options,
    )


def at(length: int, first: int = 0) -> At:
    positions = torch.arange(first, first + length)[None]
    return At(0, positions, positions, length)


def printed(found: Tensor, expected: list, bound: float = PRINTED) -> None:
    torch.testing.assert_close(
        found.double(), torch.tensor(expected, dtype=torch.float64), atol=bound, rtol=0
    )


@pytest.mark.parametrize("kernel", ["eager", "sdpa", "flex"])
def test_scaled_dot_product_attention(kernel: str) -> None:
    """With the identity for values the output is the weights."""
    example = EXAMPLES["scaled_dot_product_attention"]
    q, k, v = (torch.tensor(example[name], dtype=torch.float32)[None, None] for name in "qkv")
    assert (q @ k.mT)[0, 0].tolist() == example["raw_scores"]
    scoring = Scoring(build("nope"), at(4), q, 4**-0.5, Mask())
    with torch.no_grad():
        weights, _ = attention.attend(q, k, torch.eye(4)[None, None], scoring, kernel)
        output, _ = attention.attend(q, k, v, scoring, kernel)
    printed(weights[0, 0], example["weights"])
    printed(output[0, 0], example["output"])


def test_sinusoidal_table() -> None:
    example = EXAMPLES["sinusoidal"]
    printed(sinusoidal.table(4, 4), example["table"])
    printed(sinusoidal.angles(torch.tensor([1]), 4)[0], example["frequencies"], 1e-7)


def test_sinusoidal_adds_the_table_at_the_scale_of_the_embedding() -> None:
    added = build("sinusoidal", initializer_range=0.5).embed(torch.zeros(1, 4, 4), at(4))
    torch.testing.assert_close(added[0], sinusoidal.table(4, 4) * 0.5 * 2**0.5)


def test_shaw_clipped_distances() -> None:
    """Ours is a row number: the clipped j - i, moved up by k."""
    example = EXAMPLES["shaw"]
    index = torch.arange(4)
    rows = shaw.clipped_index(index[:, None] - index[None, :], example["clip"])
    assert (rows - example["clip"]).tolist() == example["clipped"]


def test_t5_buckets_follow_the_rule() -> None:
    """bucket(d) = d for d < B/2; geometric edges up to D_max; every d >= D_max in bucket B-1."""
    num_buckets, max_distance = EXAMPLES["t5"]["num_buckets"], EXAMPLES["t5"]["max_distance"]
    half = num_buckets // 2
    found = t5.bucket(torch.arange(1000), num_buckets, max_distance)
    assert found[:half].tolist() == list(range(half))
    assert bool((found[max_distance:] == num_buckets - 1).all())
    assert bool((found.diff() >= 0).all())
    starts = [int((found == b).nonzero()[0]) for b in range(half, num_buckets)]
    for i, start in enumerate(starts):
        edge = half * (max_distance / half) ** (i / half)
        assert edge <= start < edge + 1


def test_t5_learns_one_scalar_a_bucket_and_head() -> None:
    encoding = build("t5", num_heads=4, num_buckets=32, max_distance=128)
    assert [tuple(p.shape) for p in encoding.parameters()] == [(32, 4)]
    assert not encoding.per_layer


def to_half_split(x: Tensor) -> Tensor:
    """Consecutive pairs (0, 1), (2, 3), … -> halves: firsts of all pairs, then seconds."""
    return torch.cat((x[..., 0::2], x[..., 1::2]), dim=-1)


def to_pairs(x: Tensor) -> Tensor:
    return torch.stack(x.chunk(2, dim=-1), dim=-1).flatten(-2)


def test_rope_rotation_and_rotated_vector() -> None:
    """The papers' layout differs from ours by a permutation of dimensions."""
    example = EXAMPLES["rope"]
    encoding = build("rope")
    printed(encoding.inv_freq, example["frequencies"], 1e-7)
    vectors = torch.cat((torch.eye(4), torch.tensor([example["q"]], dtype=torch.float32)))
    x = to_half_split(vectors)[None, :, None]
    turned, _ = encoding.rotate(x, x, at(1, first=example["position"]))
    rows = to_pairs(turned[0, :, 0])
    printed(rows[:4].T, example["rotation"])
    # The example turns by the printed matrix: 0.030 + 2 * 1.000, where the exact value is 2.0291.
    by_printed_matrix = rows[:4].T.double().round(decimals=3) @ torch.tensor(example["q"]).double()
    printed(by_printed_matrix, example["rotated"], 1e-6)
    printed(rows[4], example["rotated"], 1e-3)


def test_rope_scores_depend_on_the_distance_alone() -> None:
    encoding = build("rope")
    q, k = torch.randn(2, 1, 1, 1, 4, generator=torch.Generator().manual_seed(0))

    def score(m: int, n: int) -> float:
        return float((encoding.rotate(q, q, at(1, m))[0] * encoding.rotate(k, k, at(1, n))[0]).sum())

    assert score(5, 2) == pytest.approx(score(103, 100), abs=1e-4)
    assert score(5, 2) != pytest.approx(score(5, 3), abs=1e-2)


def test_alibi_slopes_and_biased_logits() -> None:
    example = EXAMPLES["alibi"]
    assert alibi.slopes(4).tolist() == example["slopes_4_heads"]
    index = torch.arange(4)
    bias = build("alibi", num_heads=4).distance_bias(index[:, None] - index[None, :])
    assert bias is not None
    found = torch.tensor(example["logits"]) + bias[0]
    for i, row in enumerate(example["biased_head_1"]):
        for j, expected in enumerate(row):
            assert (expected is None) == (j > i)
            if expected is not None:
                assert float(found[i, j]) == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("kernel", ["eager", "sdpa", "flex"])
def test_alibi_weights_through_the_kernels(kernel: str) -> None:
    """The example's logits as scores: keys are the identity, so that a query is its row of logits."""
    example = EXAMPLES["alibi"]
    q = torch.tensor(example["logits"]).expand(1, 4, 4, 4).contiguous()
    identity = torch.eye(4).expand(1, 4, 4, 4).contiguous()
    scoring = Scoring(build("alibi", num_heads=4), at(4), q, 1.0, Mask())
    with torch.no_grad():
        weights, _ = attention.attend(q, identity, identity, scoring, kernel)
    biased = [[-float("inf") if x is None else x for x in row] for row in example["biased_head_1"]]
    torch.testing.assert_close(weights[0, 0], torch.tensor(biased).softmax(-1))


def test_cache_sizes() -> None:
    full, grouped = EXAMPLES["kv_cache"]["full"], EXAMPLES["kv_cache"]["grouped"]

    def size(example: dict[str, Any], layers: int = 1) -> int:
        return costs.kv_cache_bytes(
            num_kv_heads=example["kv_heads"],
            head_dim=example["d_k"],
            length=example["length"],
            num_layers=layers,
            bytes_per_element=example["bytes_per_element"],
        )

    assert size(full) == full["bytes_per_layer"]
    assert round(size(full, full["layers"]) / 1e9, 1) == full["total_gb"]
    assert size(grouped) / size(full) == grouped["ratio_to_64_heads"]


def test_score_matrix_entries() -> None:
    for length, entries in EXAMPLES["score_matrix_entries"].items():
        assert costs.score_matrix_entries(length) == entries
