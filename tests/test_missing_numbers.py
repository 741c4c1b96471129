"""Losses that are not finite, cells that are missing, documents and seeds that sides do not share."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import synthetic_studies as synthetic

from pe_study import report, tables
from pe_study.reporting import (
    cautions,
    comparisons,
    control_effects,
    findings,
    judging,
    outcomes,
    page_tables,
    uncompared,
    verdicts,
)
from pe_study.reporting.comparisons import Comparison
from pe_study.reporting.verdicts import Verdict

LENGTHS = (64, 128, 256, 512)
FLAT = {"nope": 0.0, "rope": 0.0}


def flat(
    labels: dict[str, float] | list[str] = FLAT,
    seeds: int = 3,
    lengths: tuple[int, ...] = LENGTHS,
    **options: object,
) -> pd.DataFrame:
    """exact-context rows whose loss stays 2 nats at every length, but for noise of 1e-4."""
    settings = {"encodings": list(labels), "rescales": ("none",), "protocols": ("exact-context",)}
    rows = synthetic.plain_rows(**{**settings, "seeds": range(seeds), "lengths": lengths, **options})
    noise = np.random.default_rng(0).normal(0, 1e-4, len(rows))
    return rows.assign(nll_sum=rows["num_tokens"] * (2.0 + noise))


def where(rows: pd.DataFrame, **values: object) -> pd.Series:
    return pd.Series(np.logical_and.reduce([rows[key] == value for key, value in values.items()]), rows.index)


def shifted(rows: pd.DataFrame, by: float, chosen: pd.Series) -> pd.DataFrame:
    return rows.assign(nll_sum=rows["nll_sum"] + by * rows["num_tokens"] * chosen)


def judged(rows: pd.DataFrame) -> dict[str, Verdict]:
    return {one.label: one for one in verdicts.verdicts(rows, str(rows["protocol"].iloc[0]))}


def told(rows: pd.DataFrame) -> tuple[list[str], list[str]]:
    """Findings and cautions of rows."""
    rows = tables.prepare(rows)
    curves = tables.length_curves(rows)
    return findings.findings(judging.judge(rows), curves), cautions.cautions([], rows, curves)


def compared(rows: pd.DataFrame) -> dict[tuple[str, str, int], Comparison]:
    found = comparisons.compare(rows, "exact-context")
    return {(one.label, one.other, one.length): one for one in found}


# --- losses that are not finite --------------------------------------------------------------------------


@pytest.mark.parametrize("value", [np.inf, np.nan])
@pytest.mark.parametrize("labels", [FLAT, ["rope"]])
def test_one_seed_without_a_finite_loss_fails(value: float, labels: dict[str, float]) -> None:
    """However few documents explode, and also where there is no other encoding."""
    rows = flat(labels, seeds=1)
    rows.loc[where(rows, label="rope", length=512, document=3), "nll_sum"] = value
    found = judged(rows)["rope"]
    assert (found.survives, found.fails_by, found.fails_by_wide, found.longest) == (256, 512, 512, 256)
    said, warned = told(rows)
    assert "**rope** fails, in this run, by 512 (8×): no finite loss at 512." in said
    assert not any("rope" in line and "holds" in line for line in said)
    assert "rope: no finite loss at 512; no number there." in warned


def test_seeds_without_a_finite_loss_fail_and_are_named() -> None:
    rows = flat()
    rows.loc[where(rows, label="rope") & (rows["length"] >= 256) & (rows["seed"] > 0), "nll_sum"] = np.nan
    found = judged(rows)["rope"]
    assert (found.survives, found.fails_by, found.num_seeds) == (128, 256, 3)
    assert np.isnan(found.change[512].error)  # one seed of three: no interval of this level
    said, warned = told(rows)
    assert "**rope** fails by 256 (4×): no finite loss at 256 (seeds 1 and 2)." in said
    assert "rope: no finite loss at 256, 512 in seeds 1 and 2; means there are over the others." in warned


def test_a_rise_that_ends_without_a_number_says_both() -> None:
    rows = flat()
    rows = shifted(rows, 0.5, where(rows, label="rope", length=128))
    rows.loc[where(rows, label="rope", length=512, seed=2), "nll_sum"] = np.inf
    (said,) = [line for line in told(rows)[0] if "fails" in line]
    assert said.startswith("**rope** fails by 128 (2×): the loss is more than 0.5 %")
    assert said.endswith("; rope no finite loss at 512 (seed 2)).")


def test_an_exploding_rescale_is_not_dropped() -> None:
    rows = flat(["rope"], rescales=("none", "linear:auto", "yarn:auto"))
    rows.loc[where(rows, rescale="yarn:auto", length=512), "nll_sum"] = np.inf
    rows.loc[where(rows, rescale="linear:auto") & (rows["length"] > 64), "nll_sum"] = np.inf
    (said,) = [line for line in told(rows)[0] if "rescaled" in line]
    assert re.search(r"yarn:auto [+-]0\.000 \[.*\] nats \(fails by 512\)", said)
    assert "linear:auto has no number (no finite loss)" in said


def test_no_finite_loss_at_the_training_length_is_the_reason() -> None:
    rows = flat()
    rows.loc[where(rows, label="rope", length=64), "nll_sum"] = np.nan
    said, _ = told(rows)
    assert "**rope**: nothing is said, for no number at its training length, 64 (not finite)." in said
    rows.loc[rows["length"] == 64, "nll_sum"] = np.nan
    assert told(rows)[0] == [
        "No series has a finite loss at its training length, so nothing is said about what happens past it."
    ]


# --- cells that are missing or lost ----------------------------------------------------------------------


def test_a_seed_out_of_memory_is_named_and_ends_survival() -> None:
    rows = synthetic.with_status(flat(), "oom", label="rope", length=512, seed=1)
    found = judged(rows)["rope"]
    assert (found.survives, found.fails_by, found.cannot) == (256, None, ((512, "oom, seed 1"),))
    said, warned = told(rows)
    assert "**rope** has no number at 512 (oom, seed 1)." in said
    assert "rope: oom at 512 in seed 1; means there are over the others." in warned


@pytest.mark.parametrize("seeds", [1, 3])
def test_a_length_that_was_not_run_ends_survival(seeds: int) -> None:
    rows = flat(seeds=seeds)
    rows = rows[~where(rows, label="rope", length=128)]
    assert judged(rows)["rope"].survives is None
    assert judged(rows)["rope"].cannot == ((128, "not run"),)
    assert judged(rows)["nope"].survives == 512
    said, _ = told(rows)
    alone = "**rope**: nothing is said past the training length, for it has no number at 128 (not run)."
    assert [line for line in said if line.startswith("**rope")] == [alone]


def test_a_seed_that_lacks_a_length_is_no_crash_and_no_mixture() -> None:
    """Each seed's own change is zero, seed 0 is better by 0.4 and lacks the last length."""
    rows = flat(["rope"], seeds=2)
    rows = shifted(rows, 0.4, where(rows, seed=1))
    rows = rows[~where(rows, seed=0, length=512)]
    found = judged(rows)["rope"]
    assert found.change[512].estimate == pytest.approx(0, abs=1e-3)
    assert (found.survives, found.fails_by, found.cannot) == (256, None, ((512, "not run, seed 0"),))


def test_seeds_are_paired_by_their_numbers() -> None:
    """Three encodings that lack a seed each, 0.3 nats between seeds, and no difference at any one seed."""
    rows = flat(["nope", "rope", "t5"])
    for seed in (1, 2):
        rows = shifted(rows, 0.3 * seed, where(rows, seed=seed))
    for lacks, label in enumerate(("rope", "nope", "t5")):
        rows = rows[~where(rows, label=label, seed=lacks, length=512)]
    found = compared(rows)
    assert len(found) == 9
    for one in found.values():
        assert one.interval.estimate == pytest.approx(0, abs=1e-3)
        assert not one.differs
    assert found["nope", "rope", 512].interval.num == 1
    assert found["nope", "rope", 512].method == "pooled residual over seeds"


def test_encodings_without_a_seed_in_common_are_not_compared() -> None:
    rows = flat(seeds=2)
    rows = rows[(rows["label"] == "rope") == (rows["seed"] == 1)]
    assert compared(rows) == {}
    (said,) = uncompared.unmade(rows, "exact-context")
    assert said == "Not compared, having no seed in common: nope and rope."


# --- documents that sides do not share -------------------------------------------------------------------


@pytest.mark.parametrize("seeds", [1, 3])
def test_encodings_are_compared_on_shared_documents(seeds: int) -> None:
    """The same models; nope was also measured on ten documents that are harder by half a nat."""
    rows = flat(seeds=seeds, num_documents=20)
    hard = rows["document"] >= 10
    rows = shifted(rows, 0.5, hard)[~(hard & (rows["label"] == "rope"))]
    for one in compared(rows).values():
        assert one.interval.estimate == pytest.approx(0, abs=1e-3)
        assert not one.differs
    said, warned = told(rows)
    (left,) = [line for line in warned if "leave out" in line]
    assert "not every encoding was measured on the same documents at 64, 128, 256, 512" in left
    assert "leave out up to 10 documents" in left
    assert any("not on the same documents" in line for line in said if line.startswith("At the training"))
    assert not any("leave out" in line for line in told(flat())[1])


def test_a_change_uses_the_documents_of_both_lengths() -> None:
    rows = flat(["rope"])
    rows = shifted(rows, 0.5, rows["document"] >= 6)
    rows = rows[~((rows["length"] == 512) & (rows["document"] >= 6))]
    assert judged(rows)["rope"].change[512].estimate == pytest.approx(0, abs=1e-3)


def test_decompositions_and_controls_use_what_all_sides_share() -> None:
    exact = flat(["rope"])
    exact = shifted(exact, 0.3, where(exact, seed=2))
    windowed = exact.assign(protocol="nonoverlapping")
    partial = pd.concat([exact[~where(exact, seed=2, length=512)], windowed])
    for one in comparisons.decompose(partial):
        assert one.num_seeds == (2 if one.length == 512 else 3)
        assert one.total.estimate == pytest.approx(one.early.estimate + one.context.estimate)
        assert one.context.estimate == pytest.approx(0, abs=1e-3)
    control = exact[(exact["seed"] > 0) & (exact["document"] > 2)].assign(control="shuffle_positions")
    (effect,) = control_effects.effects(exact, control, "exact-context")
    assert effect.num_seeds == 2
    assert effect.interval.estimate == pytest.approx(0, abs=1e-3)
    (effect,) = control_effects.effects(exact, control.assign(nll_sum=np.inf), "exact-context")
    assert "rope not known, without a finite loss" in control_effects.sentences([effect])[0]


# --- one document ----------------------------------------------------------------------------------------


def stream(seeds: int, change: dict[str, float]) -> pd.DataFrame:
    """One document; each label changes by so much at every length past the first."""
    rows = flat(list(change), seeds=seeds, num_documents=1).assign(unit="stream")
    added = rows["label"].map(change).astype(float) * (rows["length"] > 64)
    return rows.assign(nll_sum=rows["nll_sum"] + added * rows["num_tokens"])


def test_one_document_and_several_seeds_are_judged_over_seeds() -> None:
    rows = stream(3, {"nope": 0.0, "sinusoidal": 3.09})
    found = judged(rows)
    assert (found["nope"].survives, found["sinusoidal"].fails_by) == (512, 128)
    assert found["nope"].level == "b"
    assert found["sinusoidal"].change[512].df == 2
    said, _ = told(rows)
    assert "intervals are over seeds alone" in said[0]
    assert "about new seeds on this text" in said[0]
    assert "**nope** holds, on this text, to 512 (8×) within 0.5 %, and a gain of 0.5 % from" in said[1]
    assert any(line.startswith("**sinusoidal** fails, on this text, by 128 (2×)") for line in said)
    assert (
        "Bounds speak of new seeds on these documents."
        in page_tables.verdicts_table(list(found.values())).note
    )


def test_one_document_and_one_seed_settle_nothing() -> None:
    rows = stream(1, {"nope": 0.0, "sinusoidal": 3.09})
    assert all((one.survives, one.fails_by, one.level) == (None, None, "") for one in judged(rows).values())
    said, _ = told(rows)
    assert "One seed on one document each: no interval" in said[0]
    assert "One seed on one document gives no interval" in said[1]
    assert not any("more documents or seeds would" in line for line in said)


# --- what a grid cannot tell -----------------------------------------------------------------------------


@pytest.mark.parametrize("lengths", [(64, 192), (64, 96, 160)])
def test_a_gain_that_no_length_tests_is_not_denied(lengths: tuple[int, ...]) -> None:
    rows = flat(["rope"], lengths=lengths)
    rows = shifted(rows, -0.5, rows["length"] > 64)
    (said,) = [line for line in told(rows)[0] if "holds" in line]
    assert "windowed" not in said
    assert "Whether longer input lowers the loss cannot be tested" in said


def test_lengths_off_the_grid_are_said_where_comparisons_stand() -> None:
    rows = flat(lengths=(64, 80, 256))
    (said,) = uncompared.unmade(rows, "exact-context")
    assert said == (
        "Encodings were not compared at 128, 512 (2× and 8× the training length of 64): not on the grid of "
        "lengths."
    )
    assert uncompared.unmade(flat(), "exact-context") == []
    assert uncompared.unmade(flat(["rope"], lengths=(64, 80)), "exact-context") == []


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"protocol": "prefix"}, "Only prefix was run, which scores other targets at every length"),
        ({"train_length": -1}, "The training length is not known"),
        ({"train_length": 32}, "No series was evaluated at its training length"),
        ({"rescale": "yarn:auto"}, "No unrescaled series was evaluated at its training length"),
    ],
)
def test_the_reason_for_silence_is_the_true_one(change: dict[str, object], said: str) -> None:
    found, _ = told(flat().assign(**change))
    assert found[0].startswith(said)
    assert "two documents" not in found[0]
    (empty,), _ = told(flat().head(0))
    assert empty.startswith("No series was evaluated yet")


# --- several studies -------------------------------------------------------------------------------------


@pytest.mark.parametrize("first", [0, 1])
def test_studies_of_one_and_of_several_seeds_are_told_apart(first: int) -> None:
    """In either order: sentences, cautions and the notes under tables name the study that they are about."""
    parts = [flat(seeds=1).assign(study="A"), flat(seeds=3).assign(study="B")]
    parts = [part.assign(untrained_rows=np.where(part["label"] == "rope", 3, 0)) for part in parts]
    parts[0] = synthetic.with_status(parts[0], "oom", label="rope", length=512)
    parts[1].loc[where(parts[1], label="nope", length=512), "nll_sum"] = np.inf
    rows = pd.concat([parts[first], parts[1 - first]], ignore_index=True)
    said, warned = told(rows)
    assert "nope (A) and rope (A): one seed each" in said[0]
    assert "nope (B) and rope (B): 3 seeds each" in said[0]
    assert any(line.startswith("**rope (A)** ran out of memory at 512") for line in said)
    assert any(line.startswith("A: one seed each") for line in warned)
    assert not any(line.startswith("B: one seed each") for line in warned)
    assert "rope (A): oom at 512; no number there." in warned
    assert "nope (B): no finite loss at 512; no number there." in warned
    assert {line[:8] for line in warned if "position table" in line} == {"rope (A)", "rope (B)"}
    note = page_tables.verdicts_table(verdicts.verdicts(rows, "exact-context")).note
    assert "A: these weights on new documents" in note
    assert "B: new seeds and new documents" in note
    note = page_tables.comparisons_table(comparisons.compare(rows, "exact-context")).note
    assert "A: these weights on new documents" in note
    assert "B: new seeds on these documents" in note


def test_what_a_table_speaks_of_is_named_by_label_within_a_study() -> None:
    rows = flat()
    rows = rows[(rows["label"] != "rope") | (rows["seed"] == 0)]
    said = outcomes.speaks_of(verdicts.verdicts(rows, "exact-context"))
    assert (
        said
        == "nope (synthetic): new seeds and new documents; rope (synthetic): these weights on new documents"
    )


@pytest.mark.usefixtures("undrawn")
def test_a_page_of_missing_cells(tmp_path: Path) -> None:
    """Three seeds, of which one lacks a length, one is lost at another and one explodes, draw and say so."""
    rows = synthetic.rows(
        encodings=["nope", "rope", "t5"],
        seeds=(0, 1, 2),
        lengths=(64, 128, 256),
        protocols=("nonoverlapping", "exact-context"),
        rescales=("none",),
        num_documents=3,
    )
    rows = rows[~where(rows, label="rope", seed=2, length=128)]
    rows = synthetic.with_status(rows, "oom", label="nope", seed=0, length=256)
    rows.loc[where(rows, label="t5", seed=1, length=256), "nll_sum"] = np.inf
    report.build([synthetic.write_study(tmp_path / "runs", rows)], tmp_path / "out", formats=())
    text = (tmp_path / "out" / "index.html").read_text(encoding="utf-8")
    assert "has no number at 128 (not run, seed 2)" in text
    assert "no finite loss at 256 (seed 1)" in text
    assert "256: oom, seed 0" in text
    assert "Encodings were not compared at 512 (8× the training length of 64)" in text


@pytest.mark.usefixtures("undrawn")
def test_lost_cells_that_only_decompositions_need_are_not_listed(tmp_path: Path) -> None:
    settings = {"encodings": ["nope", "rope"], "lengths": LENGTHS, "num_documents": 3, "rescales": ("none",)}
    rows = synthetic.rows(**settings, protocols=("nonoverlapping", "exact-context"))
    late = rows[rows["protocol"] == "nonoverlapping"].assign(protocol=tables.LATE)
    lost = synthetic.with_status(pd.concat([rows, late], ignore_index=True), "oom", label="rope", length=512)
    report.build([synthetic.write_study(tmp_path / "runs", lost)], tmp_path / "out", formats=())
    cells = pd.read_csv(tmp_path / "out" / "tables" / "cells.csv")
    assert sorted(cells["protocol"]) == ["exact-context", "nonoverlapping"]
