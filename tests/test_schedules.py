"""Learning rates are functions of the update alone."""

import math

import pytest

from pe_study.recipe import TrainSpec
from pe_study.training.schedules import learning_rate, total_learning_rate


def spec(**changes: object) -> TrainSpec:
    return TrainSpec(
        **{"length": 8, "batch_tokens": 8, "steps": 101, "lr": 2.0, "warmup_steps": 11, **changes}
    )


@pytest.mark.parametrize("schedule", ["cosine", "wsd", "constant"])
def test_warmup_is_linear_and_ends_at_the_peak(schedule: str) -> None:
    train = spec(schedule=schedule)
    assert [learning_rate(train, k) for k in (0, 5, 10)] == pytest.approx([2 / 11, 12 / 11, 2.0])


@pytest.mark.parametrize(("schedule", "last"), [("cosine", 0.2), ("wsd", 0.2), ("constant", 2.0)])
@pytest.mark.parametrize("warmup_steps", [0, 1, 11, 100])
def test_last_rate_is_reached_at_the_last_update_only(schedule: str, last: float, warmup_steps: int) -> None:
    """case 13: not before, whatever the number of processes."""
    train = spec(schedule=schedule, warmup_steps=warmup_steps, min_lr_ratio=0.1)
    assert learning_rate(train, 100) == pytest.approx(last, rel=1e-12)
    assert all(learning_rate(train, k) > last * (1 + 1e-9) for k in range(max(warmup_steps, 1), 100)) or (
        schedule == "constant"
    )


def test_cosine_by_its_formula() -> None:
    train = spec(min_lr_ratio=0.1)
    for update in (10, 40, 55, 77):
        cosine = 0.5 * (1 + math.cos(math.pi * (update - 10) / 90))
        assert learning_rate(train, update) == pytest.approx(2.0 * (0.1 + 0.9 * cosine), rel=1e-12)


def test_wsd_is_stable_until_its_last_fifth() -> None:
    train = spec(schedule="wsd", min_lr_ratio=0.0)
    assert [learning_rate(train, k) for k in (11, 50, 82)] == pytest.approx([2.0, 2.0, 2.0])
    assert learning_rate(train, 91) == pytest.approx(1.0)


def test_warmup_of_every_step_and_a_single_step() -> None:
    assert learning_rate(spec(warmup_steps=101), 100) == 2.0
    assert learning_rate(spec(steps=1, warmup_steps=0), 0) == 2.0


def test_total_is_the_sum() -> None:
    train = spec()
    assert total_learning_rate(train) == pytest.approx(math.fsum(learning_rate(train, k) for k in range(101)))
