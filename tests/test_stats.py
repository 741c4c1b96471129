"""Intervals and tests with known answers; their coverage by simulation is in test_coverage.py."""

from __future__ import annotations

import math

import numpy as np
import pytest

from pe_study import stats
from pe_study.stats import Variance


def test_three_seeds_give_the_t_interval() -> None:
    """case 57: seeds 1, 2, 3 give 2 +- 2.484 and a perplexity of e^2."""
    low, high = stats.mean_interval([1, 2, 3]).bounds()
    assert (low, high) == pytest.approx((2 - 2.484138, 2 + 2.484138), abs=1e-6)


def test_one_seed_has_no_interval_and_nan_is_not_counted() -> None:
    """case 57: n = 1 has no band; a NaN seed is left out and not counted."""
    one = stats.mean_interval([5.0])
    assert one.num == 1
    assert all(map(math.isnan, one.bounds()))
    assert math.isnan(one.p_value)
    assert stats.mean_interval([1, 2, 3, math.nan, math.inf]) == stats.mean_interval([1, 2, 3])
    assert stats.mean_interval([math.nan]).num == 0


def test_documents_of_equal_weight_give_the_paired_t_interval() -> None:
    difference = [0.1, 0.3, -0.1, 0.2]
    expected = stats.mean_interval(difference)
    found = stats.over_documents(difference)
    assert found.estimate == pytest.approx(expected.estimate)
    assert found.error == pytest.approx(expected.error)
    assert found.df == 3


def test_documents_are_weighted_by_their_targets() -> None:
    found = stats.over_documents([2.0, 4.0], [1000, 10])
    assert found.estimate == pytest.approx(2040 / 1010)
    assert stats.over_documents([1.0, 3.0, 99.0], [1, 1, 0]) == stats.over_documents([1.0, 3.0])


def test_unequal_documents_have_satterthwaites_degrees_of_freedom() -> None:
    """Against the matrices of the quadratic form that estimates the variance."""
    weight, value = np.array([3.0, 1, 2, 5, 1, 1, 4]), np.array([0.1, 0.4, -0.2, 0.3, 0.0, 0.2, -0.1])
    share = weight / weight.sum()
    centred = np.eye(7) - np.outer(np.ones(7), share)
    form = centred.T @ np.diag(share**2) @ centred
    found = stats.over_documents(value, weight)
    assert found.df == pytest.approx(np.trace(form) ** 2 / np.trace(form @ form))
    assert found.error**2 == pytest.approx(value @ form @ value * (share @ share) / np.trace(form))
    assert found.df < 6
    nearly = stats.over_documents(value, [1, 1, 1, 1, 1, 1, 1 + 1e-9])
    equal = stats.over_documents(value)
    assert nearly.bounds() == pytest.approx(equal.bounds(), abs=1e-8)


def test_equal_documents_keep_their_numbers() -> None:
    value = np.array([0.1, 0.4, -0.2, 0.3])
    found = stats.over_documents(value, [7] * 4)
    assert found.error == math.sqrt(4 / 3 * float(np.sum((0.25 * (value - found.estimate)) ** 2)))
    assert found.df == 3


@pytest.mark.parametrize("weight", [[1000, 10], [256, 1024, 13056, 1024, 39424, 3328]])
def test_a_document_that_dominates_leaves_no_interval(weight: list[float]) -> None:
    value = np.linspace(0.0, 0.1, len(weight))
    alone = stats.over_documents(value, weight)
    assert alone.num == len(weight)
    assert math.isnan(alone.error)
    assert math.isnan(stats.own_interval(np.stack([value, value + 0.1]), weight).error)
    assert not stats.dominates([510, 500])
    assert not stats.dominates([510])


def test_pooled_residual_removes_both_means() -> None:
    """Seed and encoding effects alone leave nothing; a known residual comes back with (k-1)(n-1) degrees."""
    effects = np.array([0.0, 0.5, -0.2])[:, None] + np.array([1.0, 2.0, 3.0, 4.0])
    assert stats.pooled_residual(effects).value == pytest.approx(0, abs=1e-12)
    residual = np.array([[1, -1], [-1, 1]]) * 0.1
    found = stats.pooled_residual(np.array([[1.0, 2.0], [1.3, 2.3]]) + residual)
    assert found.value == pytest.approx(4 * 0.01)
    assert found.df == 1
    assert stats.pooled_residual(np.ones((1, 3))).df == 0


def test_seed_difference_uses_the_pooled_residual() -> None:
    found = stats.seed_difference([1.0, 1.2, 1.1], [0.5, 0.7, 0.6], Variance(0.01, 8))
    assert found.estimate == pytest.approx(0.5)
    assert found.error == pytest.approx(math.sqrt(2 * 0.01 / 3))
    assert found.df == 8


def test_welch_is_scipys() -> None:
    from scipy.stats import ttest_ind

    left, right = [1.0, 1.4, 1.1, 1.9], [0.2, 0.25, 0.22]
    expected = ttest_ind(left, right, equal_var=False)
    found = stats.welch(left, right)
    assert found.p_value == pytest.approx(expected.pvalue)
    assert found.df == pytest.approx(expected.df)


def test_within_variance_knows_that_seeds_are_shared() -> None:
    """Encodings that move together with the seed give no more degrees of freedom than the seeds."""
    shared = np.array([0.0, 1.0, 2.0])[:, None] * np.ones(5)
    found = stats.pooled_within(shared)
    assert found.value == pytest.approx(1.0)
    assert found.df == pytest.approx(2)
    alone = np.random.default_rng(0).normal(size=(3, 200))
    assert stats.pooled_within(alone).df > 100


def test_both_levels_add_up() -> None:
    """Without a document x seed residual, level (c) is the sum of the two variances."""
    seed, document = np.array([0.0, 0.2, 0.4]), np.array([1.0, 1.1, 1.5, 1.2])
    value = seed[:, None] + document
    over = Variance(float(seed.var(ddof=1)) / 3, 2)
    found = stats.over_both(value, np.ones(4), over)
    assert found.error**2 == pytest.approx(over.value + document.var(ddof=1) / 4)
    assert found.estimate == pytest.approx(value.mean())


def test_holm_is_the_textbooks() -> None:
    assert stats.holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    with_nan = stats.holm([0.02, math.nan, 0.5])
    assert with_nan[0] == pytest.approx(0.04)
    assert math.isnan(with_nan[1])
    assert stats.holm([]).size == 0


def test_equal_units_are_certain() -> None:
    assert stats.over_documents([0.5, 0.5]).p_value == 0
    assert stats.over_documents([0.0, 0.0]).p_value == 1


def test_one_sided_bounds_are_tighter_than_two_sided() -> None:
    interval = stats.mean_interval([1, 2, 3])
    low, high = interval.bounds()
    assert low < interval.lower() < interval.estimate < interval.upper() < high
    assert interval.lower(0.025) == pytest.approx(low)
