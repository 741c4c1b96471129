"""Learning rates as pure functions of the update index: alike on any number of processes, none to save."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pe_study.recipe import TrainSpec

WSD_DECAY_FRACTION = 0.2  # of the updates; Hägele et al. 2024, arXiv:2405.18392, find 10-20 % enough


def learning_rate(train: TrainSpec, update: int) -> float:
    """The rate of update 0 … steps-1: a linear warmup to `lr`, reached at the last warmup update, then the
    schedule, which reaches `lr * min_lr_ratio` at the last update exactly (constant: stays)."""
    if update < train.warmup_steps:
        return train.peak_lr * (update + 1) / train.warmup_steps
    peak = max(train.warmup_steps - 1, 0)
    progress = (update - peak) / max(train.steps - 1 - peak, 1)
    return train.peak_lr * (train.min_lr_ratio + (1 - train.min_lr_ratio) * _SHAPES[train.schedule](progress))


def total_learning_rate(train: TrainSpec) -> float:
    """The sum of the rates of all updates: about how far Adam can move a scalar in the whole training."""
    return sum(learning_rate(train, update) for update in range(train.steps))


def _cosine(progress: float) -> float:
    return (1 + math.cos(math.pi * progress)) / 2


def _warmup_stable_decay(progress: float) -> float:
    return min(1.0, (1 - progress) / WSD_DECAY_FRACTION)


def _constant(progress: float) -> float:
    return 1.0


_SHAPES = {"cosine": _cosine, "wsd": _warmup_stable_decay, "constant": _constant}
