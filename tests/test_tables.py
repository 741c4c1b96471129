"""From rows to tables: sums first, then division, then seeds, then the exponential."""

from __future__ import annotations

import math

import numpy as np
import pandas as pd
import pytest
import synthetic_studies as synthetic

from pe_study import stats, tables


def made(**options: object) -> pd.DataFrame:
    """Plain rows of a small study, as `studies` reads them."""
    settings = {
        "encodings": ["rope", "nope"],
        "lengths": (64, 128),
        "rescales": ("none",),
        "num_documents": 4,
    }
    return synthetic.plain_rows(**{**settings, **options})


def cell(rows: pd.DataFrame, label: str = "rope", length: int = 64) -> pd.Series:
    curves = tables.length_curves(rows)
    chosen = curves[(curves["label"] == label) & (curves["length"] == length)]
    return chosen[chosen["protocol"] == "nonoverlapping"].iloc[0]


def test_perplexity_is_exp_of_the_token_weighted_mean() -> None:
    """case 05: 1000 tokens at NLL 2 and 10 at NLL 4 give 7.5368."""
    rows = made(protocols=("nonoverlapping",))
    rows = rows[(rows["label"] == "rope") & (rows["length"] == 64)].head(2)
    rows = rows.assign(document=[0, 1], num_tokens=[1000, 10], nll_sum=[2000.0, 40.0])
    assert cell(rows)["perplexity"] == pytest.approx(7.5368, abs=1e-4)


def test_seeds_are_averaged_before_the_exponential() -> None:
    """case 57: seed NLLs 1, 2, 3 give 2 +- 2.484 and perplexity e^2 = 7.389, not 10.064."""
    rows = made(seeds=(0, 1, 2), protocols=("nonoverlapping",))
    rows["nll_sum"] = rows["num_tokens"] * (rows["seed"] + 1.0)
    found = cell(rows)
    assert found["nll"] == pytest.approx(2)
    assert found["nll_high"] - found["nll"] == pytest.approx(2.484138, abs=1e-6)
    assert found["perplexity"] == pytest.approx(math.exp(2))
    assert found["num_seeds"] == 3


def test_intervals_are_those_of_stats() -> None:
    rows = made(seeds=(0, 1, 2, 3))
    found = cell(rows)
    seeds = tables.cells(rows)
    chosen = seeds[
        (seeds["label"] == "rope") & (seeds["length"] == 64) & (seeds["protocol"] == "nonoverlapping")
    ]
    expected = stats.mean_interval(chosen["nll"])
    assert (found["nll_low"], found["nll_high"]) == pytest.approx(expected.bounds())


def test_one_seed_has_no_band_and_a_nan_seed_is_counted_as_lost() -> None:
    """case 57: n = 1 has no band; a NaN seed distorts nothing and is counted."""
    assert math.isnan(cell(made())["nll_low"])
    rows = made(seeds=(0, 1, 2))
    expected = cell(rows[rows["seed"] != 2])
    rows.loc[rows["seed"] == 2, "nll_sum"] = np.nan
    found = cell(rows)
    assert found["nll"] == pytest.approx(expected["nll"])
    assert (found["num_seeds"], found["lost_seeds"], found["status"]) == (2, 1, "ok")
    rows["nll_sum"] = np.nan
    assert cell(rows)["status"] == "not finite"


def test_a_loss_of_710_keeps_the_loss_and_flags_the_perplexity() -> None:
    """case 34: NLL 710 is kept, its perplexity is null and flagged, nothing overflows."""
    rows = made()
    rows["nll_sum"] = rows["num_tokens"] * 710.0
    found = cell(rows)
    assert found["nll"] == pytest.approx(710)
    assert math.isnan(found["perplexity"])
    assert found["overflow"]


def test_statuses_keep_their_cell_without_a_number() -> None:
    rows = synthetic.with_status(made(), "unsupported", label="rope", length=128)
    found = cell(rows, length=128)
    assert found["status"] == "unsupported"
    assert math.isnan(found["nll"])
    curves = tables.length_curves(rows)
    shown = tables.main_table(curves[curves["protocol"] == "nonoverlapping"], "nll", [64, 128])
    assert shown.loc[("synthetic", "rope", "none"), 128] == "unsupported"


def test_a_skipped_document_adds_nothing() -> None:
    """case 35: a document without targets is skipped, not a NaN in the mean."""
    rows = made()
    empty = rows[(rows["label"] == "rope") & (rows["length"] == 64)].head(1)
    empty = empty.assign(
        num_tokens=0, nll_sum=np.nan, num_bytes=0, document=99, status="skipped", num_skipped=1
    )
    assert cell(pd.concat([rows, empty]))["nll"] == pytest.approx(cell(rows)["nll"])
    assert cell(pd.concat([rows, empty]))["num_documents"] == 4


def test_bits_per_byte_needs_every_byte_count() -> None:
    rows = made()
    rows["num_bytes"] = rows["num_tokens"] * 4.0
    found = cell(rows)
    assert found["bits_per_byte"] == pytest.approx(found["nll"] / math.log(2) / 4)
    rows.loc[rows.index[0], "num_bytes"] = np.nan
    curves = tables.length_curves(rows)
    assert curves["bits_per_byte"].isna().sum() == 1


def test_two_plans_do_not_count_a_target_twice() -> None:
    rows = made()
    both = pd.concat([rows.assign(plan="a"), rows[rows["length"] == 64].assign(plan="b")])
    assert cell(tables.prepare(both))["num_tokens"] == cell(rows)["num_tokens"]


def test_two_strides_are_two_protocols() -> None:
    rows = made(protocols=("sliding",))
    both = pd.concat([rows.assign(stride=32.0, plan="a"), rows.assign(stride=16.0, plan="a")])
    assert tables.protocols_of(tables.prepare(both)) == ["sliding_16", "sliding_32"]


def test_the_control_comes_first() -> None:
    labels = list(
        dict.fromkeys(tables.length_curves(made(encodings=["zeta", "alibi", "rope", "nope"]))["label"])
    )
    assert labels == ["nope", "rope", "alibi", "zeta"]


def test_rows_under_a_control_stand_in_no_table_of_plain_ones() -> None:
    rows = made()
    both = pd.concat([rows, rows.assign(control="attention_window=8")], ignore_index=True)
    for table in (tables.length_curves, tables.position_curves):
        with pytest.raises(AssertionError, match="under a control"):
            table(both)
        assert len(table(rows)) == len(table(rows.assign(control="attention_window=8")))
