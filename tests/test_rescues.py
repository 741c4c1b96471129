"""Rescales of every encoding, not of RoPE alone: each against an independent formula in float64."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor
from variants import HEAD_DIM, HEADS, TRAIN_LENGTH, Variant, draw_ids

from pe_study import encodings, rope_scaling
from pe_study.encodings.base import At, Encoding, divided, reach_of
from pe_study.errors import RescaleError
from pe_study.kernels.eager import eager
from pe_study.kernels.scoring import Mask, Scoring, tempered
from pe_study.kernels.sdpa import sdpa

LINEAR = ("alibi", "learned", "rope", "shaw", "sinusoidal", "t5")
S = 2.5
LONG = 40


def at_of(length: int) -> At:
    positions = torch.arange(length)[None]
    return At(0, positions, positions, length)


def built(name: str, rescale: str, **options: object) -> Encoding:
    return Variant(name, tuple(options.items()), rescale).encoding(length=LONG)


def distances() -> np.ndarray:
    return np.arange(LONG)[:, None] - np.arange(LONG)[None]


def added(encoding: Encoding, q_BHTK: Tensor) -> Tensor:
    """What the encoding adds to the score of every (query, key), (H, T, S)."""
    modify = encoding.score_mod(q_BHTK, at_of(LONG))
    assert modify is not None
    h, t, s = torch.arange(HEADS).view(-1, 1, 1), torch.arange(LONG).view(-1, 1), torch.arange(LONG)
    return modify(torch.zeros(()), torch.zeros((), dtype=torch.long), h, t, s)


@pytest.mark.parametrize(
    ("spec", "label"),
    [
        ("logn", "logn"),
        ("none+logn", "logn"),
        ("yarn:4+logn", "yarn:4+logn"),
        ("yarn:4.0:beta_fast=16+logn", "yarn:4:beta_fast=16+logn"),
        ("linear:1e+1", "linear:10"),
        ("longrope:a+b.json", "longrope:a+b.json"),
        ("longrope:a+b.json+logn", "longrope:a+b.json+logn"),
    ],
)
def test_a_spec_with_logn_has_one_spelling(spec: str, label: str) -> None:
    parsed = rope_scaling.parse(spec)
    assert parsed.label == label
    assert rope_scaling.parse(parsed.label) == parsed
    assert parsed.logn == spec.endswith("logn")


@pytest.mark.parametrize(
    "spec", ["logn:4", "logn+logn", "yarn:4+lgn", "logn+yarn:4", "yarn:4+ntk:2", "+logn"]
)
def test_wrong_sums_are_refused_in_one_line(spec: str) -> None:
    with pytest.raises(RescaleError, match=r"^rescale [^\n]+$"):
        rope_scaling.parse(spec)


@pytest.mark.parametrize("name", encodings.available())
def test_every_encoding_takes_logn_and_names_what_it_takes(name: str) -> None:
    found = encodings.find(name)
    assert found.takes("logn") and found.takes("none")
    assert found.takes("linear:4") == (name in LINEAR)
    assert found.takes("yarn:4+logn") == (name == "rope")
    if name != "rope":
        with pytest.raises(RescaleError, match="logn"):
            built(name, "yarn:4+logn")


@pytest.mark.parametrize("rescale", ["linear:1", "logn", "linear:1+logn"])
@pytest.mark.parametrize("name", encodings.available())
@torch.no_grad()
def test_a_factor_of_one_is_none_bit_for_bit(name: str, rescale: str) -> None:
    """Also logn, up to the training length."""
    if not encodings.find(name).takes(rescale):
        return
    for kernel in ("eager", "sdpa"):
        plain = Variant(name).model(length=TRAIN_LENGTH, kernel=kernel)
        scaled = Variant(name, rescale=rescale).model(length=TRAIN_LENGTH, kernel=kernel)
        ids = draw_ids(2, TRAIN_LENGTH)
        assert torch.equal(scaled(ids).logits, plain(ids).logits), kernel


def test_sinusoidal_divides_positions() -> None:
    encoding = built("sinusoidal", f"linear:{S}")
    found = encoding.embed(torch.zeros(1, LONG, HEADS * HEAD_DIM), at_of(LONG))[0]
    width = HEADS * HEAD_DIM
    angle = (np.arange(LONG) / S)[:, None] * 10000.0 ** (-np.arange(0, width, 2) / width)
    expected = np.stack([np.sin(angle), np.cos(angle)], -1).reshape(LONG, width) * math.sqrt(2) * 0.02
    np.testing.assert_allclose(found.numpy(), expected, atol=1e-7)


def test_learned_reads_between_rows_up_to_s_times_the_table() -> None:
    encoding = built("learned", f"linear:{S}")
    rows = encoding.weight.detach().double().numpy()
    assert encoding.max_length == int(S * len(rows))
    length = int(S * len(rows))
    found = encoding.embed(torch.zeros(1, length, rows.shape[1]), at_of(length))[0].detach()
    places = np.arange(length) / S
    expected = np.stack([np.interp(places, np.arange(len(rows)), column) for column in rows.T], 1)
    np.testing.assert_allclose(found.numpy(), expected, atol=1e-6)
    assert encoding.untrained_rows(TRAIN_LENGTH) == 0
    assert encoding.untrained_rows(LONG) == math.ceil((LONG - 1) / S) + 1 - TRAIN_LENGTH


def test_learned_clamps_where_it_is_told_to() -> None:
    encoding = built("learned", "linear:2", beyond="clamp")
    rows = encoding.weight.detach()
    found = encoding.embed(torch.zeros(1, LONG, rows.shape[1]), at_of(LONG))[0].detach()
    assert torch.equal(found[2 * TRAIN_LENGTH :], rows[TRAIN_LENGTH - 1].expand(LONG - 2 * TRAIN_LENGTH, -1))
    torch.testing.assert_close(found[3], (rows[1] + rows[2]) / 2)
    assert encoding.max_length is None


def test_alibi_divides_slopes() -> None:
    encoding = built("alibi", f"linear:{S}")
    slopes = 2.0 ** (-8 * np.arange(1, HEADS + 1) / HEADS) / S
    expected = -slopes[:, None, None] * np.abs(distances())
    np.testing.assert_allclose(added(encoding, torch.zeros(1, HEADS, LONG, HEAD_DIM)), expected, rtol=1e-6)
    bias = encoding.distance_bias(torch.arange(LONG))
    np.testing.assert_allclose(bias, -slopes[:, None] * np.arange(LONG), rtol=1e-6)


@pytest.mark.parametrize("scale", [1.5, S, 3.0])
def test_t5_and_shaw_divide_distances(scale: float) -> None:
    """floor(d / S), the future counted as 0, in scores, constants and values."""
    from pe_study.encodings.t5 import bucket

    floored = np.floor(np.maximum(distances(), 0) / scale).astype(np.int64)
    encoding = built("t5", f"linear:{scale:g}", num_buckets=6, max_distance=9)
    q_BHTK = torch.randn(1, HEADS, LONG, HEAD_DIM, generator=torch.Generator().manual_seed(1))
    table = encoding.weight.detach().double().numpy()
    expected = table[bucket(torch.from_numpy(floored), 6, 9).numpy()].transpose(2, 0, 1)
    np.testing.assert_allclose(added(encoding, q_BHTK).detach(), expected, atol=1e-6)

    shaw = built("shaw", f"linear:{scale:g}", clip=4, values=True)
    keys = shaw.keys.detach().double().numpy()
    q = q_BHTK[0].double().numpy()
    expected = np.einsum("htk,tsk->hts", q, keys[np.clip(-floored, -4, 4) + 4]) / math.sqrt(HEAD_DIM)
    np.testing.assert_allclose(added(shaw, q_BHTK).detach(), expected, atol=1e-5)
    weights = torch.rand(1, HEADS, LONG, LONG, generator=torch.Generator().manual_seed(2))
    values = shaw.values.detach().double().numpy()[np.clip(-floored, -4, 4) + 4]
    found = shaw.value_term(weights, torch.arange(LONG), at_of(LONG))[0].detach()
    np.testing.assert_allclose(found, np.einsum("hts,tsk->htk", weights[0].numpy(), values), atol=1e-4)


@pytest.mark.parametrize("stretch", [1.0, 1.1, 1.5, 2.5, 7.0])
def test_the_edge_of_a_divided_distance_is_exact(stretch: float) -> None:
    reached = divided(torch.arange(400), stretch)
    for edge in (0, 1, 4, 11, 30):
        first = int((reached >= edge).nonzero()[0])
        assert reach_of(edge, stretch) == first


@pytest.mark.parametrize("name", encodings.available())
@torch.no_grad()
def test_logn_multiplies_whole_scores_in_every_kernel(name: str) -> None:
    """softmax(f (q k / sqrt(K) + bias)), f = max(1, ln n / ln L): case 15 with a factor."""
    encoding = built(name, "logn")
    draw = torch.Generator().manual_seed(3)
    q, k, v = (torch.randn(1, HEADS, LONG, HEAD_DIM, generator=draw) for _ in range(3))
    rotated_q, rotated_k = encoding.rotate(q, k, at_of(LONG))
    modify = encoding.score_mod(q, at_of(LONG))
    scores = (rotated_q.double() @ rotated_k.double().mT) / math.sqrt(HEAD_DIM)
    if modify is not None:
        scores = scores + added(encoding, q).double()
    factor = np.maximum(1, np.log(np.arange(1, LONG + 1)) / np.log(TRAIN_LENGTH))
    assert factor[TRAIN_LENGTH - 1] == 1 and factor[-1] > 1.3
    scores = scores * torch.from_numpy(factor)[:, None]
    scores = scores.masked_fill(torch.ones(LONG, LONG).triu(1).bool(), -math.inf)
    expected = scores.softmax(-1) @ v.double()
    for kernel in (eager, sdpa):
        scoring = Scoring(encoding, at_of(LONG), q, HEAD_DIM**-0.5, Mask())
        tempered_q, scoring = tempered(rotated_q, LONG, scoring)
        out, _ = kernel(tempered_q, rotated_k, v, scoring)
        torch.testing.assert_close(out.double(), expected, atol=2e-5, rtol=0)


@torch.no_grad()
def test_logn_counts_the_keys_that_a_padded_query_sees() -> None:
    """Left padding is no key: the logits are those of the text alone."""
    model = Variant("rope", rescale="linear:2+logn").model(length=LONG)
    ids = draw_ids(1, LONG)
    padded = torch.cat([torch.zeros(1, 9, dtype=torch.long), ids[:, :-9]], 1)
    mask = torch.ones_like(padded)
    mask[:, :9] = 0
    found = model(padded, attention_mask=mask).logits[:, 9:]
    assert (found - model(ids[:, :-9]).logits).abs().max() < 1e-4
