"""Survives, fails by, gains to; comparisons; N = C + X: constructed rows with known answers."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
import synthetic_studies as synthetic

from pe_study import tables
from pe_study.reporting import comparisons, findings, judging, page_tables, verdicts
from pe_study.reporting.verdicts import Verdict

LENGTHS = (64, 128, 256, 512)


def constructed(change: dict[str, list[float]], seeds: int = 1, noise: float = 1e-4) -> pd.DataFrame:
    """exact-context rows of loss 2 nats plus the label's `change` at each of LENGTHS, and little noise."""
    rows = synthetic.plain_rows(
        encodings=list(change),
        seeds=range(seeds),
        lengths=LENGTHS,
        protocols=("exact-context",),
        rescales=("none",),
    )
    rng = np.random.default_rng(0)
    added = [
        change[label][LENGTHS.index(length)]
        for label, length in zip(rows["label"], rows["length"], strict=True)
    ]
    rows["nll_sum"] = rows["num_tokens"] * (2.0 + np.array(added) + rng.normal(0, noise, len(rows)))
    return rows


def judged(rows: pd.DataFrame) -> dict[str, Verdict]:
    return {verdict.label: verdict for verdict in verdicts.verdicts(rows, "exact-context")}


@pytest.mark.parametrize("seeds", [1, 4])
def test_known_answers(seeds: int) -> None:
    """delta is 0.5 % of 2 nats, 0.01."""
    found = judged(
        constructed(
            {
                "flat": [0, 0, 0, 0],
                "gains": [0, -0.02, -0.04, -0.04],
                "fails": [0, 0.002, 0.3, 0.9],
                "slips": [0, 0.02, 0.03, 0.03],
                "recovers": [0, 0.3, 0, 0],
            },
            seeds,
        )
    )
    assert {label: (v.survives, v.fails_by, v.gains_to) for label, v in found.items()} == {
        "flat": (512, None, None),
        "gains": (512, None, 256),
        "fails": (128, 256, None),
        "slips": (None, 128, None),
        "recovers": (None, 128, 256),
    }
    assert found["slips"].survives_wide == 512
    assert found["fails"].fails_by_wide == 256
    assert found["flat"].about_encoding is (seeds > 1)


def test_noise_settles_nothing() -> None:
    found = judged(constructed({"flat": [0, 0, 0, 0]}, noise=0.2))["flat"]
    assert (found.survives, found.fails_by, found.gains_to) == (None, None, None)


@pytest.mark.parametrize(("gain", "spread", "words"), [
    (0.0, 0.0, "a gain of 0.5 % from longer input is ruled out: a windowed model, in effect"),
    (0.03, 0.08, "No gain from longer input is shown, and one of 0.5 % is not ruled out"),
    (0.003, 0.02, "No gain from longer input is shown, and one of 0.5 % is not ruled out"),
    (0.03, 0.001, "A doubled length still lowers it"),
])  # fmt: skip
def test_words_are_as_strong_as_the_bounds(gain: float, spread: float, words: str) -> None:
    """Whether a gain is shown, ruled out, or neither."""
    rows = constructed({"x": [0, 0, 0, 0]}, noise=0.0)
    wobble = np.linspace(-1, 1, 12)[rows["document"]]
    rows["nll_sum"] += rows["num_tokens"] * (spread * wobble - gain) * (rows["length"] > 64)
    said = findings.findings(judging.judge(rows), tables.length_curves(rows))
    assert words in said[1]


def test_small_gains_that_add_up_are_not_ruled_out() -> None:
    """Each doubling gains 0.3 %, all of them 0.9 %."""
    rows = constructed({"x": [0, -0.006, -0.012, -0.018]}, noise=0.02)
    (found,) = judged(rows).values()
    assert found.gains_to is None
    assert found.flat_to is None


def test_a_document_with_most_of_the_targets_settles_nothing() -> None:
    rows = constructed({"x": [0, 0.1, 0.2, 0.3]})
    big = rows["document"] == 3
    rows.loc[big, ["nll_sum", "num_tokens", "num_bytes"]] *= 40
    (found,) = judged(rows).values()
    assert (found.level, found.survives, found.fails_by) == ("-", None, None)
    said = findings.findings([found], tables.length_curves(rows))
    assert "One document has more than two thirds of the targets: no interval" in said[0]
    assert "not settled. One document has more than two thirds of the targets" in said[1]
    assert "one document with most of the targets" in page_tables.verdicts_table([found]).note


def test_survival_stops_at_a_length_without_a_number() -> None:
    """case 33: an unsupported length is named and ends what is claimed."""
    rows = synthetic.with_status(constructed({"flat": [0, 0, 0, 0]}), "unsupported", length=256)
    found = judged(rows)["flat"]
    assert (found.survives, found.cannot, found.longest) == (128, ((256, "unsupported"),), 512)


def test_bounds_are_simultaneous() -> None:
    """A rise that one length alone would prove is not proven among three."""
    rows = constructed({"edge": [0, 0, 0, 0]}, noise=0.0)
    wobble = np.linspace(-1, 1, 12)
    at = rows["length"] == 512
    rows.loc[at, "nll_sum"] += rows.loc[at, "num_tokens"] * (0.012 + 0.005 * wobble[rows.loc[at, "document"]])
    interval = judged(rows)["edge"].change[512]
    assert interval.lower(0.05) > 0.01 > interval.lower(0.05 / 3)
    assert judged(rows)["edge"].fails_by is None


def test_protocols_are_preferred_in_order() -> None:
    rows = synthetic.plain_rows(lengths=(64,), protocols=("prefix", "nonoverlapping"))
    assert judging.protocol_for(rows) == "nonoverlapping"
    assert judging.protocol_for(rows[rows["protocol"] == "prefix"]) is None


def test_comparisons_at_declared_lengths() -> None:
    """One seed compares documents and says so; several compare seeds; Holm is over all pairs and lengths."""
    change = {"a": [0, 0, 0, 0], "b": [0, 0, 0, 0.05], "c": [0, 0, 0.5, 1.0]}
    alone = comparisons.compare(constructed(change), "exact-context")
    assert {one.level for one in alone} == {"a"}
    assert len(alone) == 9
    several = comparisons.compare(constructed(change, seeds=4), "exact-context")
    assert {one.level for one in several} == {"b"}
    at = {(one.label, one.other, one.length): one for one in several}
    assert at["a", "b", 512].differs
    assert at["a", "b", 512].interval.estimate == pytest.approx(-0.05, abs=1e-3)
    assert not at["a", "b", 128].differs
    assert at["a", "c", 512].method == "Welch over seeds"
    assert at["a", "b", 256].method == "pooled residual over seeds"
    assert at["a", "b", 256].interval.df == 3
    assert all(one.p_holm >= one.interval.p_value for one in several)


def test_decomposition_adds_up() -> None:
    exact = constructed({"x": [0, -0.01, -0.02, -0.02]}, seeds=2)
    windowed = constructed({"x": [0.5, 0.3, 0.2, 0.15]}, seeds=2).assign(protocol="nonoverlapping")
    found = comparisons.decompose(pd.concat([exact, windowed]))
    assert [one.length for one in found] == [128, 256, 512]
    last = found[-1]
    assert last.total.estimate == pytest.approx(last.early.estimate + last.context.estimate)
    assert last.total.estimate == pytest.approx(-0.35, abs=1e-3)
    assert last.context.estimate == pytest.approx(-0.02, abs=1e-3)
    assert not last.same_range
    late = pd.concat([exact, windowed.assign(protocol="nonoverlapping-late")])
    assert all(one.same_range for one in comparisons.decompose(late))
