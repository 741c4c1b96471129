"""Text that a model has seen in training, or may have: by hash for runs, by date for checkpoints."""

from __future__ import annotations

import logging
from types import SimpleNamespace

import pytest
from synthetic_studies import rows, write_study
from tiny import tiny_recipe

from pe_study import runs, shipped
from pe_study.errors import PlanError, RecipeError
from pe_study.evaluators import seen
from pe_study.evaluators.study import evaluate
from pe_study.plan import load_plan
from pe_study.reporting import cautions
from pe_study.reporting.studies import read_study
from pe_study.settings import overlays
from pe_study.train import train_study

PLAN = {"name": "test", "lengths": ["1x"], "truncation": False, "num_documents": 40}


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("seen")
    train_study(tiny_recipe(folder, "train.steps=2"), folder / "runs")
    return folder


def noted(folder) -> dict:
    return runs.read_json(folder / "results.json")["notes"]["documents"]


def test_held_out_documents_do_not_overlap(trained, caplog):
    with caplog.at_level(logging.WARNING):
        folder = evaluate("tiny", load_plan(PLAN), runs_root=trained / "runs")
    assert noted(folder)["overlap"] == []
    assert "trained on" not in caplog.text


def test_documents_of_training_are_found_by_what_they_say(trained, tmp_path, caplog):
    """A copy under another name is found, an unknown text and a changed copy are not."""
    corpus = sorted((trained / "corpus").iterdir())
    texts = [path.read_text() for path in corpus if len(path.read_text()) > 40]
    for number, text in enumerate(texts):
        (tmp_path / f"copy-{number}.txt").write_text(text)
        (tmp_path / f"other-{number}.txt").write_text(f"{text}.")
    plan = {**PLAN, "name": "copies", "corpus": str(tmp_path), "num_documents": None}
    with caplog.at_level(logging.WARNING):
        folder = evaluate("tiny", load_plan(plan), runs_root=trained / "runs")
    found = noted(folder)["overlap"]
    held_out = len(texts) - len(found)
    assert 0 < held_out < len(texts) / 2  # a fifth is validation
    assert all(name.startswith("copy-") for name in found)
    assert f"rope-s0: {len(found)} of the documents it is measured on were also trained on" in caplog.text
    study = SimpleNamespace(
        name="tiny", runs=(), evaluations=[SimpleNamespace(plan="copies", notes={"documents": noted(folder)})]
    )
    assert cautions._seen([study]) == [
        f"tiny, copies: {len(found)} of the documents measured on were also trained on "
        f"({', '.join(found[:3])}, …)."
    ]


@pytest.mark.parametrize(
    ("name", "keys", "said"),
    [
        (
            "HuggingFaceTB/SmolLM2-135M",
            {"corpus": "wikitext:x"},
            "was released on 2024-11-01, its text dates from 2016",
        ),
        ("HuggingFaceTB/SmolLM2-135M", {"corpus": "a.txt", "corpus_date": "2025-01-01"}, None),
        (
            "HuggingFaceTB/SmolLM2-135M",
            {"corpus": "a.txt", "corpus_date": "2024-11-01"},
            "may have been seen",
        ),
        ("HuggingFaceTB/SmolLM2-135M", {"corpus": "a.txt"}, None),
        ("someone/unknown", {"corpus": "wikitext"}, None),
    ],
)
def test_a_checkpoint_may_have_seen_what_is_older(name, keys, said):
    subject = SimpleNamespace(name=name, recipe=None)
    found = seen.older_than_release(subject, load_plan(keys))
    assert (found is None) if said is None else (said in found)


def test_the_longest_name_decides():
    assert seen.release_date("HuggingFaceTB/SmolLM-135M") == "2024-07-16"
    assert seen.release_date("huggingfacetb/smollm2-1.7B") == "2024-11-01"


def test_corpora_of_shipped_files_have_a_date_under_the_names_used_there():
    """Not FineWeb-Edu, which still grows."""
    found = set()
    for name in (*shipped.names("recipes"), *shipped.names("evals")):
        content = overlays.read(shipped.find(name), RecipeError).value
        parts = (content, content.get("data"), content.get("eval"))
        found |= {part.get("corpus") for part in parts if isinstance(part, dict)}
    assert found >= {"emozilla/pg19", "HuggingFaceFW/fineweb-edu"}
    undated = {name for name in found - {None} if seen.corpus_date(load_plan({"corpus": name})) is None}
    assert undated == {"HuggingFaceFW/fineweb-edu"}
    mirrors = (
        "deepmind/pg19",
        "emozilla/pg19:test",
        "emozilla/pg19-test",
        "Salesforce/wikitext:wikitext-2-v1",
    )
    dates = [seen.corpus_date(load_plan({"corpus": name})) for name in mirrors]
    assert dates == [*["1918-12-31"] * 3, "2016-09-26"]


@pytest.mark.parametrize("date", ["2024", "2024-13-01", "yesterday"])
def test_dates_that_are_none_are_refused(date):
    with pytest.raises(PlanError, match=r"corpus_date: .*accepted: a date such as 2023-07-18, or null"):
        load_plan({"corpus_date": date})


def test_short_contexts_are_on_the_page(tmp_path):
    """p50 under half the training length by more than 5 %, which borders between long documents take."""
    for p50, name in ((30, "short"), (31, "long")):
        folder = write_study(tmp_path / name, rows(encodings=("rope",)))
        for path in folder.glob("*/provenance.json"):
            facts = runs.read_json(path) | {"context": {"p10": 3, "p50": p50, "p90": 50}}
            runs.write_json(path, facts)
        said = cautions._short_context([read_study(folder)])
        if name == "long":
            assert said == []
        else:
            [line] = said
            assert "trained at length 64, but half of the training targets had at most 30 tokens" in line
