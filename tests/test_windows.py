"""The window planner against brute force: which targets, with which contexts."""

from __future__ import annotations

import numpy as np
import pytest

from pe_study.errors import UsageError
from pe_study.evaluators import windows
from pe_study.evaluators.windows import Cut


def scored(plan: windows.Windows) -> list[tuple[int, int]]:
    """(target, context size) of every scored target of a plan, in reading order."""
    found = []
    for start, stop, first in zip(*plan, strict=True):
        found += [(int(start + offset), int(offset + 1)) for offset in range(first, stop - start)]
    return found


def sliding_oracle(num_targets: int, length: int, stride: int) -> list[tuple[int, int]]:
    """The usual script: a window at 0, s, 2s, … scores the targets that no window before it did."""
    found, done, begin = [], 0, 0
    while done < num_targets:
        end = min(begin + length, num_targets)
        found += [(target, target - begin + 1) for target in range(done, end)]
        done, begin = end, begin + stride
    return found


@pytest.mark.parametrize("bos", [False, True])
@pytest.mark.parametrize("num_targets", [1, 2, 7, 8, 9, 31, 32, 33, 100])
@pytest.mark.parametrize(("length", "stride"), [(8, 8), (8, 3), (8, 1), (5, 4), (1, 1), (200, 50)])
def test_sliding_is_the_usual_script(num_targets, length, stride, bos):
    plan = windows.protocol("sliding", stride=stride).plan(Cut(num_targets, length, length, bos))
    assert scored(plan) == sliding_oracle(num_targets, length, stride)


@pytest.mark.parametrize("num_targets", [1, 7, 8, 9, 64, 65, 1000])
def test_every_target_once_in_context(num_targets):
    """Contexts are 1..L without overlap, and in (L-s, L] after sliding's first window."""
    whole = scored(windows.protocol("nonoverlapping").plan(Cut(num_targets, 8, 8)))
    assert [target for target, _ in whole] == list(range(num_targets))
    assert all(context == target % 8 + 1 for target, context in whole)
    slid = scored(windows.protocol("sliding", stride=3).plan(Cut(num_targets, 8, 8)))
    assert [target for target, _ in slid] == list(range(num_targets))
    assert all(5 < context <= 8 for target, context in slid if target >= 8)


def test_stride_of_the_length_is_nonoverlapping():
    for num_targets in range(1, 40):
        cut = Cut(num_targets, 8, 8)
        same = windows.protocol("sliding", stride=8).plan(cut)
        assert scored(same) == scored(windows.protocol("nonoverlapping").plan(cut))


def test_last_sliding_window_keeps_its_start():
    plan = windows.protocol("sliding", stride=4).plan(Cut(13, 8, 8))
    assert plan.start.tolist() == [0, 4, 8]
    assert plan.stop.tolist() == [8, 12, 13]
    assert plan.first.tolist() == [0, 4, 4]


def test_prefix_reads_the_first_inputs_and_nothing_else():
    assert scored(windows.protocol("prefix").plan(Cut(100, 16, 64))) == [(i, i + 1) for i in range(16)]
    assert scored(windows.protocol("prefix").plan(Cut(5, 16, 64))) == [(i, i + 1) for i in range(5)]


@pytest.mark.parametrize("bos", [False, True])
def test_exact_context_draws_the_same_targets_at_every_length(bos):
    spec = windows.protocol("exact-context", num_targets=10)
    drawn = {}
    for length in (16, 32, 64):
        plan = spec.plan(Cut(200, length, longest=64, bos=bos))
        assert np.all(plan.stop - plan.start == length)
        assert np.all(plan.first == length - 1)
        assert plan.start.min() >= 0
        assert plan.stop.max() <= 200
        drawn[length] = plan.stop.tolist()
    assert drawn[16] == drawn[32] == drawn[64]
    assert len(set(drawn[16])) == 10


def test_exact_context_draw_is_uniform_over_what_has_enough_before_it():
    counts = np.zeros(20)
    for seed in range(2000):
        counts[windows.draw_indices(20, 12, 2, (seed, 0))] += 1
    assert counts[:12].sum() == 0
    assert counts[12:].sum() == 4000
    assert abs(counts[12:] - 500).max() < 5 * np.sqrt(500 * 0.75)


def test_exact_context_takes_all_where_few_are_eligible():
    assert windows.draw_indices(15, 12, 64, (0, 0)).tolist() == [12, 13, 14]
    assert windows.draw_indices(12, 12, 64, (0, 0)).tolist() == []


@pytest.mark.parametrize("bos", [False, True])
@pytest.mark.parametrize("anchors", [1, 2, 3])
def test_fixed_target_blocks_are_the_same_at_every_length(anchors, bos):
    """Case 11: the same targets at every L, inputs t_{e-L}..t_{e-1}, the last block at the document's end."""
    spec = windows.protocol("fixed-target", num_targets=5, anchors=anchors)
    targets = {}
    for length in (8, 16, 32):
        plan = spec.plan(Cut(100, length, longest=32, bos=bos))
        assert np.all(plan.stop - plan.start == length)
        targets[length] = [target for target, _ in scored(plan)]
    assert targets[8] == targets[16] == targets[32]
    assert len(set(targets[8])) == 5 * anchors
    assert max(targets[8]) == 99


def test_fixed_target_anchors_have_the_longest_context_and_never_overlap():
    for num_tokens in range(30, 90):
        anchors = windows.anchor_indices(num_tokens, longest=32, block=7, anchors=4)
        assert all(anchors >= 32)
        assert np.all(np.diff(anchors) >= 7)
        assert (num_tokens - 1 in anchors) == (num_tokens > 32)


@pytest.mark.parametrize("bos", [False, True])
@pytest.mark.parametrize("length", [16, 20, 64])
def test_the_late_part_of_nonoverlapping_is_what_exact_context_draws_from(length, bos):
    """The same windows and contexts as `nonoverlapping`, and the targets of one index range."""
    cut = Cut(201, length, longest=64, bos=bos)
    late = scored(windows.protocol(windows.LATE).plan(cut))
    every = scored(windows.protocol("nonoverlapping").plan(cut))
    drawn = windows.protocol("exact-context", num_targets=1000).plan(cut)
    assert [target for target, _ in late] == (drawn.stop - 1).tolist()
    assert late == every[-len(late) :]
    assert len(late) == cut.num_tokens - 64


def test_a_document_without_targets_has_no_window():
    for name, options in {"nonoverlapping": {}, "sliding": {"stride": 2}, "prefix": {}}.items():
        assert windows.protocol(name, **options).plan(Cut(0, 8, 8)).num_targets == 0


def test_bins_are_half_open_powers_of_two_of_the_context():
    splits, bins = windows.context_bins(0, 9)
    assert (splits.tolist(), bins.tolist()) == ([0, 1, 3, 7], [0, 1, 2, 3])  # 1 | 2 3 | 4..7 | 8 9
    splits, bins = windows.context_bins(5, 17)
    assert (splits.tolist(), bins.tolist()) == ([0, 2, 10], [2, 3, 4])  # 6 7 | 8..15 | 16 17


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("slidng", {}, 'did you mean "sliding"'),
        ("sliding", {}, "needs a stride"),
        ("sliding", {"stride": 0}, "at least 1"),
        ("sliding", {"stride": 2.5}, "whole number"),
        ("prefix", {"stride": 4}, "takes no stride"),
        ("nonoverlapping", {"num_targets": 4}, "takes no num_targets"),
        ("exact-context", {"num_targets": -3}, "at least 1"),
    ],
)
def test_options_that_make_no_sense(name, options, message):
    with pytest.raises(UsageError, match=message):
        windows.protocol(name, **options)


def test_lengths_that_make_no_sense():
    with pytest.raises(UsageError, match="stride 9 is above the length 8"):
        windows.check_length(windows.protocol("sliding", stride=9), 8)
    with pytest.raises(UsageError, match="must be above num_targets"):
        windows.check_length(windows.protocol("fixed-target", num_targets=8), 8)
    with pytest.raises(UsageError, match="at least 1"):
        windows.check_length(windows.protocol("prefix"), 0)
