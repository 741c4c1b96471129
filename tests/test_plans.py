"""Several plans of one study: united where they scored the same targets, else left out and named."""

from __future__ import annotations

import pandas as pd
import pytest
import synthetic_studies as synthetic

from pe_study import report, tables

SMALL = {"encodings": ["nope", "rope"], "num_documents": 3, "rescales": ("none",)}


def rows(protocol: str = "nonoverlapping", **options: object) -> pd.DataFrame:
    return synthetic.plain_rows(
        **{"lengths": (64, 128, 256, 512), "protocols": (protocol,), **SMALL, **options}
    )


def curve(frame: pd.DataFrame) -> pd.DataFrame:
    curves = tables.length_curves(tables.prepare(frame))
    return curves[curves["label"] == "rope"].set_index("length")


def both(one: pd.DataFrame, other: pd.DataFrame) -> pd.DataFrame:
    return pd.concat([one.assign(plan="a"), other.assign(plan="b")], ignore_index=True)


def test_seeds_of_another_plan_count() -> None:
    whole = rows(seeds=(0, 1, 2))
    found = both(whole[whole["seed"] == 0], whole)
    pd.testing.assert_frame_equal(curve(found), curve(whole))
    assert curve(found)["num_seeds"].tolist() == [3, 3, 3, 3]
    assert tables.united(found)[1] == []


def test_seeds_and_lengths_of_two_plans_are_one_grid() -> None:
    """Plan a has seed 0, plan b seed 1, with one length shared: nothing is lost, nothing counts twice."""
    whole = rows(seeds=(0, 1))
    found = both(whole[(whole["seed"] == 0)], whole[(whole["seed"] == 1) | (whole["length"] == 64)])
    pd.testing.assert_frame_equal(curve(found), curve(whole))


@pytest.mark.parametrize("protocol", ["nonoverlapping", "sliding"])
def test_lengths_of_another_plan_count_where_it_scored_every_target_too(protocol: str) -> None:
    """Eight documents of unequal sizes, which the other plan's would hardly have by chance."""
    whole = rows(protocol, num_documents=8)
    found = both(whole[whole["length"] < 512], whole[whole["length"] == 512])
    pd.testing.assert_frame_equal(curve(found), curve(whole))
    assert tables.united(found)[1] == []


def test_equal_sizes_prove_no_documents() -> None:
    """Under `tokens_per_document` every document has as many targets: other ones would, too."""
    whole = rows(num_documents=8)
    whole[["num_tokens", "num_bytes"]] = 64
    found = both(whole[whole["length"] < 512], whole[whole["length"] == 512])
    assert curve(found).index.tolist() == [64, 128, 256]
    assert "nonoverlapping of plan b (lengths 512) is left out" in tables.united(found)[1][0]


@pytest.mark.parametrize("protocol", ["exact-context", "prefix"])
def test_targets_that_rows_cannot_prove_equal_are_left_out_and_named(protocol: str) -> None:
    """exact-context draws past the longest length of a plan: 64 draws each, and other ones."""
    whole = rows(protocol)
    found = both(whole[whole["length"] < 512], whole[whole["length"] == 512])
    assert curve(found).index.tolist() == [64, 128, 256]
    assert tables.united(found)[1] == [
        f"synthetic: {protocol} of plan b (lengths 512) is left out, since plan a is not known to have "
        "scored the same targets; report one plan's folder to see it alone."
    ]


def test_a_shared_cell_proves_targets_equal_or_not() -> None:
    whole = rows("exact-context")
    other = whole[whole["length"] >= 256]
    assert curve(both(whole[whole["length"] < 512], other)).index.tolist() == [64, 128, 256, 512]
    other = other.assign(nll_sum=other["nll_sum"] * 1.1)  # other targets, as many of them
    found = both(whole[whole["length"] < 512], other)
    assert curve(found).index.tolist() == [64, 128, 256]
    assert len(tables.united(found)[1]) == 1


def test_other_documents_are_left_out() -> None:
    whole = rows()
    found = both(whole, whole[whole["document"] < 2].assign(seed=1))
    pd.testing.assert_frame_equal(curve(found), curve(whole))
    assert "of plan b (lengths 64, 128, 256, 512) is left out" in tables.united(found)[1][0]


def test_a_number_stands_before_a_status_of_another_plan() -> None:
    whole = rows()
    lost = synthetic.with_status(whole, "oom", length=512)
    pd.testing.assert_frame_equal(curve(both(lost, whole)), curve(whole))


@pytest.mark.usefixtures("undrawn")
def test_the_page_names_the_plan_that_it_leaves_out(tmp_path) -> None:
    frame = synthetic.rows(lengths=(64, 128), protocols=("exact-context",), **SMALL)
    folder = synthetic.write_study(tmp_path / "runs", frame)
    (folder / "eval" / "long").mkdir()
    synthetic.rows(lengths=(256,), protocols=("exact-context",), **SMALL).to_parquet(
        folder / "eval" / "long" / "results.parquet"
    )
    page = report.build([folder], tmp_path / "out", formats=())
    assert "exact-context of plan long (lengths 256) is left out" in page.read_text(encoding="utf-8")
