"""Comparisons that a change of learning rates turns round, on the page of both studies."""

from __future__ import annotations

import json

import pandas as pd
import pytest
import yaml
from synthetic_studies import rows, write_study

from pe_study import report, tables
from pe_study.errors import DataError
from pe_study.reporting import comparisons, likeness, page_tables, rates, tuned
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
    """As a page does it: the studies, the comparisons declared in advance, the rows."""
    studies = [read_study(folder) for folder in folders]
    raw = pd.concat([each.rows for each in studies], ignore_index=True)
    frame = tables.prepare(likeness.apart(raw).assign(origin=raw["study"]))
    return studies, comparisons.compare(frame), frame


def said_of(*folders):
    studies, found, frame = compared(*folders)
    return rates.sentences(found, studies, frame)


def measure_elsewhere(folder, name, *, level=None, plan="other"):
    """A second evaluation of a study, of another corpus."""
    frame = rows(
        study=name,
        encodings=("rope", "alibi"),
        rescales=("none",),
        level=level or LEVELS[name],
        damage={"rope": 0.0, "alibi": 0.0},
    ).assign(corpus="wiki", corpus_hash="d" * 64)
    (folder / "eval" / plan).mkdir()
    frame.to_parquet(folder / "eval" / plan / "results.parquet")


@pytest.fixture
def both(tmp_path):
    return study(tmp_path, "common", 3e-3), study(tmp_path, "tuned", 1.5e-3)


def test_another_sign_depends_on_the_learning_rate(both):
    studies, found, frame = compared(*both)
    assert all(each.differs for each in found)
    marked = rates.marked(found, studies, frame)
    assert all(each.depends_on_rate for each in marked)
    table = page_tables.comparisons_table(marked)
    texts = [{cell.text for cell in row} for row in table.rows]
    assert all("depends on the learning rate" in row and "yes" not in row for row in texts)
    said = said_of(*both)
    assert (
        said[0]
        == "**common and tuned** differ in learning rates alone (0.003 for all; against 0.0015 for all)."
    )
    where = [sentence.partition(" at ")[2].split()[0] for sentence in said[1:]]
    assert where == ["64", "128", "256", "512"]  # the training length, and 2, 4 and 8 of it
    assert "at 128 depends on the learning rate: in common rope is lower by 0.1" in said[2]
    assert "in tuned alibi is lower by 0.1" in said[2]
    assert {each.length for each in found} == {128, 256, 512}  # what was declared in advance stays so


def test_each_text_of_two_studies_is_compared_with_itself(both):
    """On two texts a page calls each study by its text: no change of sign is lost, none is made up."""
    for name, folder in zip(LEVELS, both, strict=True):
        measure_elsewhere(folder, name)
    studies, found, frame = compared(*both)
    marked = rates.marked(found, studies, frame)
    assert {each.study for each in marked} == {
        f"{name} ({text})" for name in LEVELS for text in ("stdlib", "wiki")
    }
    assert all(each.depends_on_rate for each in marked)
    said = said_of(*both)
    assert len(said) == 1 + 2 * 4
    assert "in common (wiki) rope is lower by" in said[-1]
    assert "in tuned (wiki) alibi is lower by" in said[-1]


def test_a_text_that_turns_nothing_says_so_for_itself(both):
    measure_elsewhere(both[0], "common")
    measure_elsewhere(both[1], "tuned", level=LEVELS["common"])
    said = said_of(*both)
    assert sum(rates.DEPENDS in sentence for sentence in said) == 4
    assert [sentence for sentence in said if sentence.startswith("At ")] == [
        "At 64, 128, 256 and 512, no difference between encodings that is shown in common (wiki) or "
        "tuned (wiki) has another sign in the other."
    ]


def test_another_text_is_no_comparison(tmp_path):
    """What one study shows on one text says nothing of the other study on another."""
    folders = study(tmp_path, "common", 3e-3), study(tmp_path, "tuned", 1.5e-3)
    path = folders[1] / "eval" / "length" / "results.parquet"
    pd.read_parquet(path).assign(corpus="wiki", corpus_hash="d" * 64).to_parquet(path)
    studies, found, frame = compared(*folders)
    assert not any(each.depends_on_rate for each in rates.marked(found, studies, frame))
    assert said_of(*folders)[1:] == [
        "No comparison of encodings is in both common and tuned: none is on one text, by one protocol, at "
        "one length."
    ]


def test_at_the_training_length_alone_the_declared_lengths_may_lack(tmp_path):
    """Rates are chosen there: encodings are compared there, on the page of any grid."""
    folders = study(tmp_path, "common", 3e-3), study(tmp_path, "tuned", 1.5e-3)
    for folder in folders:
        path = folder / "eval" / "length" / "results.parquet"
        frame = pd.read_parquet(path)
        frame[frame["length"].isin([64, 96])].to_parquet(path)
    assert compared(*folders)[1] == []
    said = said_of(*folders)
    assert len(said) == 2
    assert "at 64 depends on the learning rate" in said[1]


def test_a_sign_that_changes_without_being_shown_is_not_denied(tmp_path):
    levels = [{"rope": 1.9, "alibi": 1.9}, {"rope": 1.9, "alibi": 1.91}]
    folders = [
        study(tmp_path, name, lr, level) for name, lr, level in zip("ab", (3e-3, 1e-3), levels, strict=True)
    ]
    found = compared(*folders)[1]
    assert not any(each.differs for each in found)
    signs = {}
    for each in found:
        signs.setdefault(each.length, set()).add(each.interval.estimate > 0)
    assert [len(signs[length]) for length in (128, 256, 512)] == [2, 1, 2]
    assert said_of(*folders)[1:] == [
        "At 64, 128, 256 and 512, no difference between encodings that is shown in a or b has another sign "
        "in the other.",
        "Not shown in a or b, but of another sign in the other: alibi against rope at 128 and 512.",
    ]


def test_the_same_sign_does_not(tmp_path):
    levels = [{"rope": 1.84, "alibi": 1.96}, {"rope": 1.80, "alibi": 1.96}]
    folders = [
        study(tmp_path, name, lr, level) for name, lr, level in zip("ab", (3e-3, 1e-3), levels, strict=True)
    ]
    studies, found, frame = compared(*folders)
    assert not any(each.depends_on_rate for each in rates.marked(found, studies, frame))
    assert said_of(*folders)[1:] == [
        "At 64, 128, 256 and 512, no difference between encodings that is shown in a or b has another sign "
        "in the other."
    ]


@pytest.mark.parametrize("other", [{"lr": 3e-3}, {"lr": 1e-3, "weight_decay": 0.5}])
def test_studies_that_differ_in_nothing_or_in_more_are_no_pair(tmp_path, other):
    folders = study(tmp_path, "common", 3e-3), study(tmp_path, "tuned", **other)
    studies, found, frame = compared(*folders)
    assert said_of(*folders) == []
    assert not any(each.depends_on_rate for each in rates.marked(found, studies, frame))


def test_rates_of_one_study_are_told_apart(tmp_path):
    folder = study(tmp_path, "tuned", 3e-3)
    path = next(folder.glob("rope*/recipe.yaml"))
    recipe = yaml.safe_load(path.read_text())
    recipe["train"]["lr"] = 6e-3
    recipe["encodings"][0] = {"name": "rope", "label": "rope", "lr_mult": 1.0}
    path.write_text(yaml.safe_dump(recipe))
    assert rates._rates_of(read_study(folder)) == "alibi 0.003, rope 0.006 with lr_mult 1"


@pytest.mark.usefixtures("undrawn")
@pytest.mark.parametrize("several", [False, True])
def test_the_page_says_it(both, tmp_path, several):
    """In words and in the table of comparisons, also where each study was measured on two texts."""
    for name, folder in zip(LEVELS, both, strict=True):
        if several:
            measure_elsewhere(folder, name)
    page = report.build(both, tmp_path / "page", formats=("svg",))
    text = (page.parent / "report.md").read_text()
    where = "common (stdlib)" if several else "common"
    assert f"depends on the learning rate: in {where} rope is lower" in text
    rows_of_table = [line for line in text.splitlines() if line.startswith("| alibi \u2212 rope ")]
    assert len(rows_of_table) == (12 if several else 6)
    assert all("depends on the learning rate" in line for line in rows_of_table)


TRIALS = {"rope": {0.5: 1.9, 1.0: 1.8, 2.0: 1.7}, "alibi": {0.5: 1.6, 1.0: 1.7, 2.0: None}}


def tune_study(folder, **chosen: float):
    """`tune.json` of a study as tuning writes it; `chosen`: the factor of each encoding."""
    trials = [
        {"label": label, "factor": factor, "lr": factor * 3e-3, "lr_mult": "auto", "multiplier": None}
        | {"val_loss": loss, "encoding": {"name": label}, "run": f"tune/{label}@{factor:g}x-s0"}
        for label, losses in TRIALS.items()
        for factor, loss in losses.items()
    ]
    best = {
        each["label"]: {**each, "said": ["a tie: x1 within 0.1 %"] if each["label"] == "rope" else []}
        for each in trials
        if chosen[each["label"]] == each["factor"]
    }
    facts = {"study": folder.name, "lr": 3e-3, "length": 64, "steps": 60, "full_steps": 300, "seed": 0}
    (folder / "tune").mkdir()
    text = json.dumps({**facts, "chosen": best, "trials": trials})
    (folder / "tune" / "tune.json").write_text(text)


def test_a_tuned_study_shows_its_rates(both, tmp_path):
    """A table with its CSV on the page, and which study trained so."""
    tune_study(both[0], rope=0.5, alibi=0.5)
    page = report.build(both, tmp_path / "page", formats=("svg",))
    text = (page.parent / "report.md").read_text()
    _, _, section = text.partition("## Learning rates")
    section = section.partition("\n## ")[0]
    assert "training length, 64, and at no other, after 60 of 300 updates" in section
    assert "Trained at them: tuned." in section
    assert "| rope | 1.9000 | 1.8000 | 1.7000 | 0.0015 | auto | a tie: x1 within 0.1 % |" in section
    assert "| alibi | 1.6000 | 1.7000 | not finite | 0.0015 | auto |  |" in section
    kept = pd.read_csv(page.parent / "tables" / "rates.csv")
    assert kept["chosen"].tolist() == [True, False, False, True, False, False]
    assert kept["val_loss"].isna().tolist() == [False] * 5 + [True]


def test_a_page_without_the_tuned_runs_says_how_they_are_trained(both):
    tune_study(both[0], rope=2.0, alibi=0.5)
    studies = [read_study(folder) for folder in both]
    said = "No study here was trained at them; `train.lr=tuned:common` trains one."
    assert tuned._who(studies[0], studies) == said
    assert read_study(both[1]).tuning is None
    (both[0] / "tune" / "tune.json").write_text("{")
    with pytest.raises(DataError, match=r"tune\.json: cannot be read"):
        read_study(both[0])


def test_a_chosen_multiplier_is_part_of_the_rate(tmp_path):
    """A word trains with the number that tuning found in it; another number is another rate."""
    folder = study(tmp_path, "tuned", 3e-3)
    tune_study(folder, rope=1.0, alibi=1.0)
    file = folder / "tune" / "tune.json"
    tuning = json.loads(file.read_text())
    tuning["chosen"]["rope"]["multiplier"] = 30.0
    path = next(folder.glob("rope*/recipe.yaml"))
    recipe = yaml.safe_load(path.read_text())
    for mult, trained in (("auto", True), (30.0, True), (7.0, False), (1.0, False)):
        recipe["encodings"][0] = {"name": "rope", "label": "rope", "lr_mult": mult}
        path.write_text(yaml.safe_dump(recipe))
        assert all(tuned._at(run, tuning) for run in read_study(folder).runs) is trained
