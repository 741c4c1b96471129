"""The page while a study runs: built again whenever a file changes, until all is done and evaluated."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pandas as pd
import pytest
import synthetic_studies as synthetic
import tiny_recipe

from pe_study import planned, recipe, report
from pe_study.commands import listing
from pe_study.errors import DamagedError
from pe_study.reporting import progress, studies

SMALL = {"encodings": ["nope", "rope"], "lengths": (64, 128), "num_documents": 2, "rescales": ("none",)}


@pytest.fixture
def running(tmp_path: Path) -> Path:
    """A study of which rope is at step 200 and not evaluated."""
    rows = synthetic.rows(**SMALL, protocols=("nonoverlapping",))
    folder = synthetic.write_study(tmp_path / "runs", rows)
    evaluated = rows[rows["label"] == "nope"]
    evaluated.to_parquet(folder / "eval" / "length" / "results.parquet")
    (folder / "rope-s0" / "DONE").unlink()
    metrics = folder / "rope-s0" / "metrics.jsonl"
    lines = metrics.read_text(encoding="utf-8").splitlines()[:20]
    metrics.write_text("\n".join([*lines, '{"step": 210, "lo']), encoding="utf-8")  # a line being written
    return folder


def test_a_partial_study_names_what_is_missing(running: Path, tmp_path: Path) -> None:
    page = report.build([running], tmp_path / "out", formats=()).read_text(encoding="utf-8")
    assert "Training not finished: rope-s0 (step 200 of 300)." in page
    assert "Where every run stands" in page
    assert "not finished" in page
    (running / "rope-s0" / "DONE").write_text("{}", encoding="utf-8")
    page = report.build([running], tmp_path / "out", formats=()).read_text(encoding="utf-8")
    assert "Trained but not evaluated: rope-s0." in page
    assert "Where every run stands" not in page


def no_more_lines(folder: Path) -> None:
    metrics = folder / "rope-s0" / "metrics.jsonl"
    lines = metrics.read_text(encoding="utf-8").splitlines()[:20]
    metrics.write_text("\n".join([*lines, '{"step": 210, "loss": 1.9}\n']), encoding="utf-8")


def evaluate(folder: Path, date: str, rows: pd.DataFrame) -> None:
    """Results of `rows`, as an evaluation that ended at `date` leaves them."""
    evaluation = folder / "eval" / "length"
    evaluation.mkdir(parents=True, exist_ok=True)
    rows.to_parquet(evaluation / "results.parquet")
    (evaluation / "results.json").write_text(json.dumps({"date": date}), encoding="utf-8")


def finish(folder: Path, run: str, date: str = "2026-01-02T03:00:00+00:00") -> None:
    (folder / run / "DONE").write_text(json.dumps({"finished": date}), encoding="utf-8")


@pytest.mark.usefixtures("undrawn")
def test_watch_follows_a_study_to_its_end(
    running: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing changed: nothing is built. A line more: built again. All done and evaluated: the end."""
    rows = synthetic.rows(**SMALL, protocols=("nonoverlapping",))
    finish(running, "nope-s0")
    waits = iter(
        [
            lambda: None,
            lambda: no_more_lines(running),
            lambda: finish(running, "rope-s0"),
            lambda: evaluate(running, "2026-01-02T03:00:01+00:00", rows),
        ]
    )
    monkeypatch.setattr(report.time, "sleep", lambda seconds: next(waits)())
    seen = list(report.watch([running], tmp_path / "out", interval=7, formats=()))
    assert [line for _, line in seen] == [
        "synthetic: 1 of 2 runs done, rope-s0 at step 200 of 300",
        "synthetic: 1 of 2 runs done, rope-s0 at step 210 of 300",
        "synthetic: 2 of 2 runs done, not evaluated yet",
        "synthetic: 2 of 2 runs done",
    ]
    assert {page for page, _ in seen} == {tmp_path / "out" / "index.html"}
    assert "Where every run stands" not in seen[-1][0].read_text(encoding="utf-8")
    assert json.loads((tmp_path / "out" / "report.json").read_text(encoding="utf-8"))["studies"]


@pytest.mark.usefixtures("undrawn")
def test_watch_ends_at_once_when_all_is_done(tmp_path: Path) -> None:
    folder = synthetic.write_study(tmp_path / "runs", synthetic.rows(**SMALL, protocols=("nonoverlapping",)))
    assert len(list(report.watch([folder], tmp_path / "out", formats=()))) == 1


@pytest.mark.parametrize(
    ("date", "encodings", "finished"),
    [
        ("2026-01-02T03:00:00+00:00", ["nope", "rope"], True),
        ("2026-01-02T02:59:59+00:00", ["nope", "rope"], False),  # made before the last run was trained again
        ("2026-01-02T04:00:00+00:00", ["rope"], False),  # of one run only
        ("2026-01-02T04:30:00+01:00", ["nope", "rope"], True),  # half past three in UTC
    ],
)
def test_a_study_is_finished_when_its_evaluation_holds_every_run(
    tmp_path: Path, date: str, encodings: list[str], finished: bool
) -> None:
    folder = synthetic.write_study(tmp_path / "runs", synthetic.rows(**SMALL, protocols=("nonoverlapping",)))
    for run in ("nope-s0", "rope-s0"):
        finish(folder, run)
    evaluate(folder, date, synthetic.rows(**{**SMALL, "encodings": encodings}, protocols=("nonoverlapping",)))
    assert progress.is_finished(studies.read_study(folder)) is finished


@pytest.mark.usefixtures("undrawn")
def test_runs_of_the_recipe_that_have_not_started_are_named(tmp_path: Path) -> None:
    """On the page, in the line of --watch and in `ls runs`; a study is not finished without them."""
    folder = synthetic.write_study(tmp_path / "runs", synthetic.rows(**SMALL, protocols=("nonoverlapping",)))
    names = ["nope-s0", "rope-s0", "alibi-s0", "t5-s0"]
    (folder / "study.json").write_text(json.dumps({"runs": names}), encoding="utf-8")
    study = studies.read_study(folder)
    assert progress.progress([study]) == "synthetic: 2 of 4 runs done, not started: alibi-s0, t5-s0"
    assert not progress.is_finished(study)
    page = report.build([folder], tmp_path / "out", formats=()).read_text(encoding="utf-8")
    assert "synthetic: 2 of 4 runs have not started: alibi-s0, t5-s0." in page
    assert re.search(r'<th scope="row"><span>t5-s0</span></th><td>synthetic</td><td>not started</td>', page)
    said = listing.listed("runs", tmp_path / "runs")
    assert re.search(r"synthetic/alibi-s0 +not started", said)
    assert said.count("not started") == 2


def test_a_study_that_has_begun_nothing_is_a_page(tmp_path: Path) -> None:
    folder = tmp_path / "runs" / "new"
    folder.mkdir(parents=True)
    (folder / "study.json").write_text('{"runs": ["rope-s0"]}', encoding="utf-8")
    page = report.build([folder], tmp_path / "out", formats=()).read_text(encoding="utf-8")
    assert "new: 1 of 1 runs have not started: rope-s0." in page


def test_a_damaged_list_of_runs_is_named(tmp_path: Path) -> None:
    folder = synthetic.write_study(tmp_path / "runs", synthetic.rows(**SMALL, protocols=("nonoverlapping",)))
    (folder / "study.json").write_text('{"runs": 3}', encoding="utf-8")
    with pytest.raises(DamagedError, match=r"study\.json: damaged, no list of runs; delete it"):
        studies.read_study(folder)


def test_training_writes_the_runs_of_its_recipe(tmp_path: Path) -> None:
    """All of them, also those that were not picked; again where the recipe changed, else the file stays."""
    path = tiny_recipe.write(tmp_path)
    study = tmp_path / "study"
    planned.write_planned(study, recipe.load(path), ["t5-s1"])
    names = [f"{label}-s{seed}" for label in ("rope", "rope-1m", "t5") for seed in (0, 1)]
    assert sorted(planned.read_planned(study)) == sorted(names)
    assert planned.read_asked(study) == ("t5-s1",)
    before = (study / "study.json").stat().st_mtime_ns
    planned.write_planned(study, recipe.load(path), ["t5-s1"])
    assert (study / "study.json").stat().st_mtime_ns == before
    planned.write_planned(study, recipe.load(path), ["rope-s0"])
    assert set(planned.read_asked(study)) == {"t5-s1", "rope-s0"}
    (study / "study.json").write_text("{", encoding="utf-8")
    changed = recipe.load(path, ["encodings=[nope]", "seeds=[3, 4]"])
    planned.write_planned(study, changed, ["nope-s3"])
    assert planned.read_planned(study) == ("nope-s3", "nope-s4")
    assert planned.read_asked(study) == ("nope-s3",)


@pytest.mark.usefixtures("undrawn")
def test_the_recipe_of_one_run_leaves_the_list_of_its_study(tmp_path: Path) -> None:
    """`train runs/study/rope-s0/recipe.yaml` makes a damaged run anew; the study keeps its other runs."""
    whole = recipe.load(tiny_recipe.write(tmp_path))
    study = tmp_path / "runs" / "tiny"
    planned.write_planned(study, whole, ["rope-s0", "t5-s0"])
    kept = study / "rope-s0" / "recipe.yaml"
    kept.parent.mkdir(parents=True)
    kept.write_text(recipe.resolved_yaml(recipe.narrow(whole, whole.runs()[0])), encoding="utf-8")
    before = planned.read_planned(study)
    planned.write_planned(study, recipe.load(kept), ["rope-s0"])
    assert planned.read_planned(study) == before
    assert set(planned.read_asked(study)) == {"rope-s0", "t5-s0"}


def test_watch_does_not_wait_for_runs_that_nobody_picked(tmp_path: Path) -> None:
    """`train --only`: what was not asked for is named, and no reason to go on."""
    folder = synthetic.write_study(tmp_path / "runs", synthetic.rows(**SMALL, protocols=("nonoverlapping",)))
    facts = {"runs": ["nope-s0", "rope-s0", "alibi-s0"], "asked": ["nope-s0", "rope-s0"]}
    (folder / "study.json").write_text(json.dumps(facts), encoding="utf-8")
    assert [line for _, line in report.watch([folder], tmp_path / "out", formats=())] == [
        "synthetic: 2 of 3 runs done, not started: alibi-s0"
    ]
    facts["asked"].append("alibi-s0")
    (folder / "study.json").write_text(json.dumps(facts), encoding="utf-8")
    assert not progress.is_finished(studies.read_study(folder))
