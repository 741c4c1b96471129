"""Several studies on one page: every figure and table keeps them apart, nothing is a mean over them."""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path

import pandas as pd
import pytest
import synthetic_studies as synthetic

from pe_study import report, rows
from pe_study.reporting.main_table import main_table

SMALL = {"encodings": ["nope", "rope"], "lengths": (64, 128, 256), "num_documents": 3}
SMALL |= {"protocols": ("nonoverlapping",), "rescales": ("none", "yarn:auto")}


def study(root: Path, name: str, level: float, **changed: object) -> Path:
    """A study whose losses are about `level` nats, with a control and the attention of rope."""
    frame = synthetic.rows(study=name, level={"rope": level, "nope": level}, **SMALL).assign(**changed)
    control = frame[frame["rescale"] == "none"].assign(control="far_context=shuffled")
    folder = synthetic.write_study(
        root, pd.concat([frame.assign(control="none"), control], ignore_index=True)
    )
    records = [
        {"run": "rope-s0", "label": "rope", "encoding": "rope", "model": "rope-s0", "seed": 0}
        | {"rescale": "none", "status": "ok", "control": "none", "train_length": 64, "length": 128}
        | {"layer": 0, "head": 0, "position_lo": low, "position_hi": 2 * low, "num_queries": low}
        | {"distance_lo": None, "distance_hi": None, "mass": None, "entropy_ratio": level / 10}
        | {"max_logit": level, "mass_beyond": 0.1, "corpus": name}
        for low in (32, 64)
    ]
    for distance, mass in ((0, level / 10), (1, 1 - level / 10)):
        place = {"distance_lo": distance, "distance_hi": distance + 1, "mass": mass, "max_logit": None}
        records.append(records[1] | place)
    made = rows.make_rows(records, rows.DIAGNOSTICS_COLUMNS)
    made.to_parquet(folder / "eval" / "length" / rows.DIAGNOSTICS)
    return folder


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("two")
    one = study(root / "runs", "A", 2.0)
    two = study(root / "runs", "B", 6.0, corpus="other", corpus_hash="d" * 64)
    return report.build([one, two], root / "out", formats=("svg",))


def table(page: Path, name: str) -> pd.DataFrame:
    return pd.read_csv(page.parent / "tables" / f"{name}.csv")


def figure(page: Path, name: str) -> str:
    found = re.search(rf'<figure id="figure-{name}".*?</figure>', page.read_text(encoding="utf-8"), re.DOTALL)
    assert found, name
    return found[0]


@pytest.mark.parametrize(
    "name",
    [
        "rescale-rope-nonoverlapping-bits_per_byte",
        "rescale-map-rope-nonoverlapping-bits_per_byte",
        "controls-nonoverlapping-bits_per_byte",
        "attention-heads-rope-s0",
    ],
)
def test_a_figure_of_one_study_says_whose_it_is(page: Path, name: str) -> None:
    for which in ("A", "B"):
        assert set(table(page, f"{name}-{which}")["study"]) == {which}
        assert f"({which})</h3>" in figure(page, f"{name}-{which}")
    one, two = (re.sub(r"\bid=.*?>|-[AB]\b", "", figure(page, f"{name}-{which}")) for which in "AB")
    assert one != two


def test_a_heat_map_holds_the_numbers_of_its_own_study(page: Path) -> None:
    """rope at 64 is about 2 and 6 nats: a mean of the two studies would be about 4."""
    for which, level in (("A", 2.0), ("B", 6.0)):
        shown = table(page, f"rescale-map-rope-nonoverlapping-bits_per_byte-{which}")
        value = shown.loc[(shown["rescale"] == "none") & (shown["length"] == 64), "bits_per_byte"].item()
        assert f"{value:.2f}<" in figure(page, f"rescale-map-rope-nonoverlapping-bits_per_byte-{which}")
        assert value * 0.6931 == pytest.approx(level, abs=0.6)


def test_heads_are_not_averaged(page: Path) -> None:
    assert ">20<" in figure(page, "attention-heads-rope-s0-A")
    assert ">60<" in figure(page, "attention-heads-rope-s0-B")


def test_lines_and_words_for_the_blind_carry_the_study(page: Path) -> None:
    length = figure(page, "length-nonoverlapping-bits_per_byte")
    alt = re.search(r'aria-label="([^"]+)"', length)
    assert alt
    assert {"rope, A", "rope, B", "nope, A", "nope, B"} <= set(re.findall(r"(\w+, [AB]) \d", alt[1]))
    assert "rope, A" in figure(page, "attention-position")


def test_names_are_given_once(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert [name for name, count in Counter(re.findall(r'\bid="([^"]+)"', text)).items() if count > 1] == []
    summary = json.loads((page.parent / "report.json").read_text(encoding="utf-8"))
    names = [*summary["figures"], *summary["tables"]]
    assert [name for name, count in Counter(map(str.lower, names)).items() if count > 1] == []


@pytest.mark.parametrize("labels", [("a/b", "a-b"), ("Rope", "rope")])
def test_labels_that_make_one_file_name_get_two(tmp_path: Path, labels: tuple[str, str]) -> None:
    frame = synthetic.rows(**{**SMALL, "encodings": ["rope"]})
    both = pd.concat(
        [frame.assign(label=labels[0]), frame.assign(label=labels[1], nll_sum=frame["nll_sum"] * 2)]
    )
    both = both.assign(run=both["label"].map({labels[0]: "one-s0", labels[1]: "two-s0"}))
    page = report.build([synthetic.write_study(tmp_path / "runs", both)], tmp_path / "out", formats=("svg",))
    test_names_are_given_once(page)
    summary = json.loads((page.parent / "report.json").read_text(encoding="utf-8"))
    maps = [name for name in summary["figures"] if name.startswith("rescale-map")]
    assert {label for name in maps for label in table(page, name)["label"]} == set(labels)


@pytest.mark.usefixtures("undrawn")
def test_a_study_on_two_texts_keeps_its_controls(tmp_path: Path) -> None:
    """The study becomes two by its text; so do its rows under a control."""
    folder = study(tmp_path / "runs", "A", 2.0)
    plain = pd.read_parquet(folder / "eval" / "length" / "results.parquet")
    (folder / "eval" / "wiki").mkdir()
    plain.assign(corpus="wiki", corpus_hash="e" * 64).to_parquet(folder / "eval" / "wiki" / "results.parquet")
    page = report.build([folder], tmp_path / "out", formats=("svg",))
    for text in ("stdlib", "wiki"):
        shown = table(page, f"controls-nonoverlapping-bits_per_byte-A-{text}-")
        assert set(shown["control"]) == {"none", "far_context=shuffled"}


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"stride": 8.0}, "2 different strides"),
        ({"bos": 1.0}, "2 different beginnings"),
        ({"num_documents": 6}, "2 different numbers of documents"),
        ({"num_tokens": 100}, "2 different numbers of targets"),
    ],
)
def test_no_best_where_texts_are_cut_otherwise(changed: dict, reason: str) -> None:
    from pe_study import tables

    frame = synthetic.plain_rows(**{**SMALL, "rescales": ("none",), "protocols": ("sliding",)})
    frame = frame.assign(stride=64.0)
    documents = {name: changed.pop(name) for name in list(changed) if name == "num_documents"}
    other = synthetic.plain_rows(
        **{**SMALL, "rescales": ("none",), "protocols": ("sliding",), "study": "B", **documents}
    )
    other = other.assign(**{"stride": 64.0, **changed})
    made = {}
    for name, rows_of in (("alone", [frame]), ("both", [frame, other])):
        both = pd.concat(rows_of, ignore_index=True).assign(study=lambda one: one["study"].astype(str))
        curves = tables.length_curves(both)
        made[name] = main_table(curves, "nll", "sliding", None, chosen=True)
    assert any(cell.kind == "best" for row in made["alone"].rows for cell in row)
    assert not any(cell.kind == "best" for row in made["both"].rows for cell in row)
    assert reason in made["both"].note
