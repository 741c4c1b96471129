"""Documents of several plans: paired where they are known to be the same, else told apart and named."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
import synthetic_studies as synthetic

from pe_study import tables
from pe_study.reporting import (
    cautions,
    choices,
    comparisons,
    control_effects,
    findings,
    judging,
    likeness,
    uncompared,
)

OPTIONS = {"lengths": (64, 128, 256), "num_documents": 6, "rescales": ("none",)}


def rows(encodings: list[str], plan: str, level: float, protocol: str = "exact-context", **options: object):
    """Rows of one plan: a loss of `level`, and a little more a document."""
    frame = synthetic.plain_rows(encodings=encodings, protocols=(protocol,), **{**OPTIONS, **options})
    frame["nll_sum"] = frame["num_tokens"] * (level + 0.001 * frame["document"])
    return frame.assign(plan=plan)


def joined(*frames: pd.DataFrame) -> pd.DataFrame:
    """As a page has them."""
    text = ["label", "encoding", "run", "model", "protocol"]
    plain = [frame.astype(dict.fromkeys(text, object)) for frame in frames]
    return tables.prepare(pd.concat(plain, ignore_index=True))


def compared(frame: pd.DataFrame) -> set[tuple[str, str]]:
    return {(one.label, one.other) for one in comparisons.compare(frame)}


def test_documents_of_two_plans_are_not_paired_by_their_numbers() -> None:
    """alibi was measured on other, harder documents of the same numbers."""
    frame = joined(rows(["nope", "rope"], "long", 2.0), rows(["alibi"], "short", 2.4))
    assert compared(frame) == {("nope", "rope")}
    (caution,) = uncompared.across_choices(frame)
    assert "plans long and short are not known to have measured the same documents" in caution
    assert "no difference under exact-context of alibi and nope; alibi and rope." in caution
    assert caution in cautions.cautions([], frame, tables.length_curves(frame))
    told = " ".join(uncompared.unmade(frame))
    assert "Not compared at 128, 256, sharing no documents: alibi and nope; alibi and rope." in told


def test_no_order_over_documents_of_two_plans_is_marked_as_the_best() -> None:
    frame = joined(rows(["rope"], "long", 2.0), rows(["alibi"], "short", 2.4))
    curves = tables.length_curves(frame)
    assert likeness.unlike(curves, "nll") == "2 different plans' choices of documents"
    said = findings.findings(judging.judge(frame), curves)
    assert any("not on the same documents" in line for line in said if line.startswith("At the training"))
    assert "choice" not in tables.length_curves(joined(rows(["rope"], "long", 2.0)))


def test_one_series_that_both_plans_measured_proves_their_documents() -> None:
    known = rows(["rope"], "short", 2.0)
    frame = joined(rows(["nope", "rope"], "long", 2.0), known, rows(["alibi"], "short", 2.4))
    assert compared(frame) == {("alibi", "nope"), ("alibi", "rope"), ("nope", "rope")}
    assert uncompared.across_choices(frame) == []
    other = known.assign(nll_sum=known["nll_sum"] * 1.05)
    frame = joined(rows(["nope", "rope"], "long", 2.0), other, rows(["alibi"], "short", 2.4))
    assert compared(frame) == {("nope", "rope")}


@pytest.mark.parametrize("protocol", ["nonoverlapping", "sliding"])
def test_sizes_that_tell_documents_apart_prove_them(protocol: str) -> None:
    options = {"protocol": protocol, "num_documents": 8}
    parts = rows(["rope"], "long", 2.0, **options), rows(["alibi"], "short", 2.4, **options)
    assert compared(joined(*parts)) == {("alibi", "rope")}
    capped = [part.assign(num_tokens=64, num_bytes=64) for part in parts]
    assert compared(joined(*capped)) == set()
    exact = [part.assign(protocol="exact-context") for part in parts]  # draws of a document, not its size
    assert compared(joined(*exact)) == set()


def test_a_stream_is_one_text_whatever_the_plan() -> None:
    parts = rows(["rope"], "long", 2.0), rows(["alibi"], "short", 2.4)
    stream = [part[part["document"] == 0].assign(unit="stream") for part in parts]
    assert joined(*stream)["document"].unique().tolist() == [0]


def test_coincidence() -> None:
    assert choices.coincidence([5, 5, 5]) == 1
    assert choices.coincidence([1, 2, 3, 3]) == pytest.approx(1 / 4 * 1 / 4 * 1 / 2 * 1 / 2)


def test_no_decomposition_of_two_plans_documents() -> None:
    windowed = rows(["rope"], "demo", 2.2, "nonoverlapping")
    exact = rows(["rope"], "exact", 2.0)
    frame = joined(windowed, exact)
    assert comparisons.decompose(frame) == []
    assert "no decomposition for rope" in uncompared.across_choices(frame)[0]
    both = joined(windowed, exact.assign(plan="demo"))
    assert len(comparisons.decompose(both)) == 2
    assert uncompared.across_choices(both) == []


def test_a_decomposition_has_the_context_term_of_the_verdict() -> None:
    """Windows weigh documents by their sizes, draws do not; the three terms have one weight."""
    windowed = rows(["rope"], "demo", 2.2, "nonoverlapping")
    exact = rows(["rope"], "demo", 2.0)
    exact["nll_sum"] += exact["num_tokens"] * 0.01 * exact["document"] * (exact["length"] > 64)
    frame = joined(windowed, exact)
    one = comparisons.decompose(frame)[-1]
    (verdict,) = judging.judge(frame)
    assert one.context.estimate == pytest.approx(verdict.change[256].estimate)
    assert one.context.bounds() == pytest.approx(verdict.change[256].bounds())
    assert one.total.estimate == pytest.approx(one.early.estimate + one.context.estimate)


def test_a_control_stands_beside_the_rows_of_its_own_plan() -> None:
    """The longer plan is shown, on easier documents; the control changes nothing."""
    shown, own = rows(["rope"], "length", 2.0, lengths=(64, 128, 256, 512)), rows(["rope"], "far", 3.0)
    control = own.assign(control="far_context=shuffled")
    measured, controls = choices.told_apart(pd.concat([shown, own], ignore_index=True), control)
    united = tables.prepare(measured)
    assert set(united["plan"]) == {"length"}
    (effect,) = control_effects.effects(united, controls, "exact-context", measured)
    assert effect.length == 256
    assert effect.interval.estimate == pytest.approx(0, abs=1e-12)
    (unknown,) = control_effects.effects(united, controls, "exact-context")
    assert np.isnan(unknown.interval.estimate)
