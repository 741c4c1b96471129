"""A protocol a series: nobody vanishes because another was run under a better one."""

from __future__ import annotations

import pandas as pd
import synthetic_studies as synthetic

from pe_study import tables
from pe_study.reporting import comparisons, findings, judging, page_tables, uncompared

OPTIONS = {"lengths": (64, 128, 256), "num_documents": 6}


def rows(encodings: list[str], protocol: str, rescales: tuple[str, ...] = ("none",), study: str = "A"):
    made = synthetic.plain_rows(
        study=study, encodings=encodings, protocols=(protocol,), rescales=rescales, **OPTIONS
    )
    text = ["study", "label", "encoding", "rescale", "run", "model", "protocol"]
    return made.astype(dict.fromkeys(text, object))


def page(*frames: pd.DataFrame) -> pd.DataFrame:
    return tables.prepare(pd.concat(frames, ignore_index=True))


def test_one_encoding_under_exact_context_hides_no_other() -> None:
    frame = page(rows(["nope", "rope", "alibi"], "nonoverlapping"), rows(["rope"], "exact-context"))
    found = judging.judge(frame)
    assert {v.label: v.protocol for v in found} == {
        "rope": "exact-context",
        "nope": "nonoverlapping",
        "alibi": "nonoverlapping",
    }
    assert judging.protocol_for(frame) == "nonoverlapping"
    pairs = {(one.label, one.other, one.protocol) for one in comparisons.compare(frame)}
    assert pairs == {
        (a, b, "nonoverlapping") for a, b in (("alibi", "nope"), ("alibi", "rope"), ("nope", "rope"))
    }
    said = findings.findings(found, tables.length_curves(frame))
    assert "(exact-context where it was run, else nonoverlapping)" in said[0]
    assert any("**rope (exact-context)** fails" in line for line in said)
    assert any("nope (nonoverlapping)" in line for line in said)
    assert any(line.startswith("At the training length under nonoverlapping") for line in said)
    table = page_tables.verdicts_table(found)
    assert "rope (exact-context)" in [row[0].text for row in table.rows]


def test_a_study_without_exact_context_stays_on_the_page_of_one_with_it() -> None:
    frame = page(rows(["nope", "rope"], "nonoverlapping"), rows(["nope", "rope"], "exact-context", study="B"))
    assert {(v.study, v.protocol) for v in judging.judge(frame)} == {
        ("A", "nonoverlapping"),
        ("B", "exact-context"),
    }
    found = comparisons.compare(frame)
    assert {(one.study, one.protocol) for one in found} == {("A", "nonoverlapping"), ("B", "exact-context")}
    assert page_tables.comparisons_table(found).title.endswith("(nonoverlapping or exact-context)")


def test_all_under_one_protocol_are_judged_by_the_preferred_one() -> None:
    both = [rows(["nope", "rope"], protocol) for protocol in ("nonoverlapping", "exact-context")]
    assert {v.protocol for v in judging.judge(page(*both))} == {"exact-context"}
    assert {one.protocol for one in comparisons.compare(page(*both))} == {"exact-context"}


def test_rescales_of_another_protocol_stand_beside_the_unrescaled_there() -> None:
    frame = page(rows(["rope"], "nonoverlapping", ("none", "ntk:auto")), rows(["rope"], "exact-context"))
    found = judging.judge(frame)
    assert [(v.rescale, v.protocol, v.aside) for v in found] == [
        ("none", "exact-context", False),
        ("ntk:auto", "nonoverlapping", False),
        ("none", "nonoverlapping", True),
    ]
    said = findings.findings(found, tables.length_curves(frame))
    (rescaled,) = [line for line in said if "rescaled" in line]
    assert rescaled.startswith("**rope (nonoverlapping) rescaled** in this run")
    assert "unrescaled +" in rescaled
    assert sum(line.startswith("**rope (") and "fails" in line for line in said) == 1


def test_pairs_without_a_protocol_in_common_are_named() -> None:
    frame = page(rows(["nope"], "nonoverlapping"), rows(["rope", "alibi"], "exact-context"))
    assert {(one.label, one.other) for one in comparisons.compare(frame)} == {("alibi", "rope")}
    assert any("ran for both: alibi and nope; nope and rope." in line for line in uncompared.unmade(frame))


def test_an_odd_encoding_takes_no_pair_with_it() -> None:
    """Several seeds: rope on other documents leaves the pair of the others as it is; a part of them, too."""
    made = [
        synthetic.plain_rows(
            encodings=["nope", "rope", "alibi"],
            seeds=(0, 1, 2),
            protocols=("exact-context",),
            rescales=("none",),
            **OPTIONS,
        )
    ][0]
    odd = made.assign(document=made["document"].where(made["label"] != "rope", made["document"] + 100))
    assert {(one.label, one.other) for one in comparisons.compare(odd)} == {("alibi", "nope")}
    assert any(
        "sharing no documents: alibi and rope; nope and rope" in line for line in uncompared.unmade(odd)
    )
    lost = (made["label"] == "rope") & (made["seed"] == 1) & (made["document"] > 0) & (made["length"] == 128)
    found = {(one.label, one.other, one.length): one for one in comparisons.compare(made[~lost])}
    whole = {(one.label, one.other, one.length): one for one in comparisons.compare(made)}
    pair = ("alibi", "nope", 128)
    assert found[pair].interval.estimate == whole[pair].interval.estimate
    assert "documents" not in found[pair].method
    assert found["nope", "rope", 128].method.endswith(", on 1 of 6 documents")
