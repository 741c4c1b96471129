"""The papers' tables in reports/published: one schema, plans that exist, ratios that follow from the rows."""

from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

from pe_study import encodings, rope_scaling
from pe_study.plan import PROTOCOLS, load_plan
from pe_study.settings import yaml_strict

ROOT = Path(__file__).parent.parent
FILES = sorted((ROOT / "reports" / "published").glob("*.yaml"))
TABLES: list[dict[str, Any]] = [
    table for path in FILES for table in yaml_strict.read_mapping(path).value["tables"]
]
by_id = pytest.mark.parametrize("table", TABLES, ids=lambda table: table["id"])

REQUIRED = {"id", "title", "where", "setting", "metric", "unit_of_metric", "axis", "train_length", "corpus"}
REQUIRED |= {"protocol", "unit", "plan", "compare", "rows", "note"}
OPTIONAL = {
    "rerun": {"tolerance"},
    "ratio": {"ratios", "ratio_group", "bytes_per_unit"},
    "ordering": set(),
    "disputed": set(),
}
ROW = {"name", "encoding", "values"}
ROW_OPTIONAL = {"rescale", "checkpoint", "compare"}


def test_the_four_papers_ship_with_their_sources() -> None:
    assert [path.stem for path in FILES] == ["alibi", "kazemnejad", "longrope", "yarn"]
    for path in FILES:
        content = yaml_strict.read_mapping(path).value
        assert content.keys() == {"paper", "source", "tables"}
        assert content["source"].startswith("https://arxiv.org/abs/")
    assert len({table["id"] for table in TABLES}) == len(TABLES)


@by_id
def test_a_table_follows_the_schema(table: dict[str, Any]) -> None:
    assert table.keys() == REQUIRED | OPTIONAL[table["compare"]]
    assert table["metric"] in ("perplexity", "speed", "memory", "mrr")
    for row in table["rows"]:
        assert ROW <= row.keys() <= ROW | ROW_OPTIONAL
        assert row["encoding"] in encodings.available()
        rope_scaling.parse(row.get("rescale", "none"))
        assert row.get("compare", "disputed") in OPTIONAL
        assert row.get("compare", table["compare"]) != "rerun" or row["checkpoint"]
        expected = int if table["axis"] == "length" else str
        assert all(type(key) is expected for key in row["values"])
        assert all(value is None or value > 0 for value in row["values"].values())
        assert row["values"].keys() == table["rows"][0]["values"].keys()


@by_id
def test_a_table_of_perplexities_names_the_plan_that_measures_it(table: dict[str, Any]) -> None:
    if table["metric"] != "perplexity":
        assert table["plan"] is None
        return
    plan = load_plan(ROOT / table["plan"])
    assert table["protocol"] in PROTOCOLS
    assert [protocol.name for protocol in plan.protocols] == [table["protocol"]]
    assert plan.unit == table["unit"]
    assert list(plan.resolve_lengths(None)) == list(table["rows"][0]["values"])


def test_the_ranges_of_ratios_are_those_of_the_rows() -> None:
    """Perplexity at about 2L over that at L, over the three training lengths, to the digits given."""
    ratios = defaultdict(list)
    tables = [table for table in TABLES if table["compare"] == "ratio"]
    for table in tables:
        longer, shorter = table["ratios"]["longer"], table["ratios"]["shorter"]
        assert shorter == table["train_length"]
        assert 1.9 < longer / shorter < 2
        for row in table["rows"]:
            ratios[row["encoding"]].append(row["values"][longer] / row["values"][shorter])
    for table in tables:
        assert table["ratios"]["ranges"].keys() == ratios.keys()
        for encoding, (low, high) in table["ratios"]["ranges"].items():
            assert low == pytest.approx(min(ratios[encoding]), rel=0.01)
            assert high == pytest.approx(max(ratios[encoding]), rel=0.01)
            assert low < high


def test_untuned_yarn_of_longrope_is_disputed() -> None:
    marks = {(table["id"], row["name"]): row.get("compare") for table in TABLES for row in table["rows"]}
    assert {key for key, mark in marks.items() if mark == "disputed"} == {
        ("longrope-untuned-pg19", "YaRN"),
        ("longrope-untuned-proof-pile", "YaRN"),
    }
