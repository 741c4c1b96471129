"""Comparisons that a change of learning rates turns round, on the page of both studies."""

from __future__ import annotations

import pandas as pd
import pytest
import yaml
from synthetic_studies import rows, write_study

from pe_study import report, tables
from pe_study.reporting import comparisons, page_tables, rates
from pe_study.reporting.studies import read_study

LEVELS = {"common": {"rope": 1.84, "alibi": 1.96}, "tuned": {"rope": 1.96, "alibi": 1.84}}


def study(root, name: str, lr: float, level: dict[str, float] | None = None, **train):
    """A study of two encodings that holds at every length, all its runs at one rate."""
    frame = rows(
        study=name,
        encodings=("rope", "alibi"),
        rescales=("none",),
        level=level or LEVELS[name],
        damage={"rope": 0.0, "alibi": 0.0},
    )
    folder = write_study(root, frame)
    for path in folder.glob("*/recipe.yaml"):
        recipe = yaml.safe_load(path.read_text())
        recipe["train"] = {**recipe["train"], "lr": lr, **train}
        path.write_text(yaml.safe_dump(recipe))
    return folder


def compared(*folders):
    studies = [read_study(folder) for folder in folders]
    frame = tables.prepare(pd.concat([each.rows for each in studies], ignore_index=True))
    return studies, comparisons.compare(frame, "nonoverlapping")


@pytest.fixture
def both(tmp_path):
    return study(tmp_path, "common", 3e-3), study(tmp_path, "tuned", 1.5e-3)


def test_another_sign_depends_on_the_learning_rate(both):
    studies, found = compared(*both)
    assert all(each.differs for each in found)
    marked = rates.marked(found, studies)
    assert all(each.depends_on_rate for each in marked)
    table = page_tables.comparisons_table(marked)
    texts = [{cell.text for cell in row} for row in table.rows]
    assert all("depends on the learning rate" in row and "yes" not in row for row in texts)
    said = rates.sentences(found, studies)
    assert (
        said[0]
        == "**common and tuned** differ in learning rates alone (0.003 for all; against 0.0015 for all)."
    )
    assert len(said) == 1 + 3  # at 2, 4 and 8 training lengths
    assert "at 128 depends on the learning rate: in common rope is lower by 0.1" in said[1]
    assert "in tuned alibi is lower by 0.1" in said[1]


def test_the_same_sign_does_not(tmp_path):
    levels = [{"rope": 1.84, "alibi": 1.96}, {"rope": 1.80, "alibi": 1.96}]
    folders = [
        study(tmp_path, name, lr, level) for name, lr, level in zip("ab", (3e-3, 1e-3), levels, strict=True)
    ]
    studies, found = compared(*folders)
    assert not any(each.depends_on_rate for each in rates.marked(found, studies))
    assert rates.sentences(found, studies)[1].startswith(
        "No difference between encodings that is shown in a or b"
    )


@pytest.mark.parametrize("other", [{"lr": 3e-3}, {"lr": 1e-3, "weight_decay": 0.5}])
def test_studies_that_differ_in_nothing_or_in_more_are_no_pair(tmp_path, other):
    folders = study(tmp_path, "common", 3e-3), study(tmp_path, "tuned", **other)
    studies, found = compared(*folders)
    assert rates.sentences(found, studies) == []
    assert not any(each.depends_on_rate for each in rates.marked(found, studies))


def test_rates_of_one_study_are_told_apart(tmp_path):
    folder = study(tmp_path, "tuned", 3e-3)
    path = next(folder.glob("rope*/recipe.yaml"))
    recipe = yaml.safe_load(path.read_text())
    recipe["train"]["lr"] = 6e-3
    recipe["encodings"][0] = {"name": "rope", "label": "rope", "lr_mult": 1.0}
    path.write_text(yaml.safe_dump(recipe))
    assert rates._rates_of(read_study(folder)) == "alibi 0.003, rope 0.006 with lr_mult 1"


def test_the_page_says_it(both, tmp_path):
    page = report.build(both, tmp_path / "page", formats=("svg",))
    text = (page.parent / "report.md").read_text()
    assert "depends on the learning rate: in common rope is lower" in text
