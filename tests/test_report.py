"""A study on disk becomes a page: whole, partial, odd, or a clear message."""

from __future__ import annotations

import json
import math
import re
import subprocess
import sys
import threading
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import synthetic_studies as synthetic

from pe_study import report
from pe_study import rows as rows_module
from pe_study.errors import DataError, UsageError
from pe_study.reporting import rendering

SMALL = {
    "encodings": ["nope", "learned", "rope"],
    "lengths": (64, 128, 512),
    "num_documents": 4,
    "protocols": ("nonoverlapping",),
    "rescales": ("none", "yarn:auto"),
}


def strict_json(text: str) -> object:
    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is not JSON")

    return json.loads(text, parse_constant=refuse)


@pytest.fixture(scope="module")
def study(tmp_path_factory: pytest.TempPathFactory) -> Path:
    rows = synthetic.rows(**{**SMALL, "protocols": ("nonoverlapping", "exact-context")}, seeds=(0, 1, 2))
    rows = synthetic.with_status(rows, "unsupported", label="learned", length=512)
    return synthetic.write_study(tmp_path_factory.mktemp("runs"), rows)


@pytest.fixture(scope="module")
def page(study: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return report.build([study], tmp_path_factory.mktemp("report") / "out")


def build_rows(tmp_path: Path, rows: pd.DataFrame) -> tuple[str, dict]:
    """The page and the strict JSON summary of a study of `rows`."""
    path = report.build([synthetic.write_study(tmp_path / "runs", rows)], tmp_path / "out", formats=())
    summary = strict_json((tmp_path / "out" / "report.json").read_text(encoding="utf-8"))
    assert isinstance(summary, dict)
    return path.read_text(encoding="utf-8"), summary


def test_no_torch_is_imported() -> None:
    code = "import pe_study.report, sys; assert not {'torch', 'transformers'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_everything_lies_in_the_folder(page: Path) -> None:
    folder = page.parent
    summary = strict_json((folder / "report.json").read_text(encoding="utf-8"))
    assert {path.name for path in folder.iterdir()} == {
        "index.html",
        "report.md",
        "report.json",
        "figures",
        "tables",
    }
    text = page.read_text(encoding="utf-8")
    for link in re.findall(r'href="((?:figures|tables)/[^"]+)"', text):
        assert (folder / link).is_file(), link
    for name in summary["figures"]:
        assert (folder / "figures" / f"{name}.svg").is_file()
        assert (folder / "tables" / f"{name}.csv").is_file()
    first = "length-exact-context-bits_per_byte"
    for size in ("", "-one-column"):
        for theme in ("", "-dark"):
            for form in ("png", "svg"):
                assert (folder / "figures" / f"{first}{size}{theme}.{form}").stat().st_size > 1000


def test_the_page_asks_nothing_of_the_network(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    links = re.findall(r'(?:src|href)="([^"]+)"', text)
    assert all(link.startswith(("#", "figures/", "tables/", "data:,")) for link in links)
    assert not re.search(r"@import|url\((?!#)|fetch\(|XMLHttpRequest", text)


class Structure(HTMLParser):
    """Collects what a screen reader relies on."""

    def __init__(self) -> None:
        super().__init__()
        self.ids: list[str] = []
        self.references: list[str] = []
        self.headings: list[int] = []
        self.unnamed: list[str] = []
        self.labels = 0
        self.inputs = 0

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        if "id" in values:
            self.ids.append(str(values["id"]))
        self.references += [str(values[name]) for name in ("aria-labelledby",) if name in values]
        if re.fullmatch("h[1-6]", tag):
            self.headings.append(int(tag[1]))
        if values.get("role") in ("img", "region") and not {"aria-label", "aria-labelledby"} & set(values):
            self.unnamed.append(tag)
        self.labels += tag == "label"
        self.inputs += tag == "input"


def test_the_page_is_built_for_screen_readers(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    structure = Structure()
    structure.feed(text)
    assert '<html lang="en">' in text
    assert len(structure.ids) == len(set(structure.ids))
    assert set(structure.references) <= set(structure.ids)
    assert structure.headings[0] == 1
    assert structure.headings.count(1) == 1
    assert all(b - a <= 1 for a, b in zip(structure.headings, structure.headings[1:], strict=False))
    assert structure.unnamed == []
    assert structure.labels == structure.inputs


def test_words_follow_the_rows(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert "3 seeds each" in text
    assert "learned</strong> cannot run at 512" in text
    assert re.search(r"rope[^.]*</strong> fails? by", text)
    assert "rows of its position table that training never touched" in text
    assert "nearly none is left alone at training length 64, so this is no small copy" in text
    assert "unsupported" in text


@pytest.mark.usefixtures("undrawn")
def test_one_seed_speaks_of_this_run(tmp_path: Path) -> None:
    text, summary = build_rows(tmp_path, synthetic.rows(**SMALL))
    assert "One seed each" in summary["findings"][0]
    assert all(
        "in this run" in said for said in summary["findings"] if "fail by" in said or "fails by" in said
    )
    assert "n = 1 seed each, so no bands" in text


@pytest.mark.usefixtures("undrawn")
def test_lengths_that_score_other_targets_are_flagged(tmp_path: Path) -> None:
    """case 11: the same documents and targets at every length, or it is said."""
    rows = synthetic.rows(**SMALL)
    _, summary = build_rows(tmp_path / "same", rows)
    assert not any("not the same targets" in said for said in summary["warnings"])
    other = rows[~((rows["length"] == 512) & (rows["document"] == 2))]
    _, summary = build_rows(tmp_path / "other", other)
    assert any("not the same targets" in said for said in summary["warnings"])


@pytest.mark.usefixtures("undrawn")
def test_windows_that_never_slid_are_reported(tmp_path: Path) -> None:
    """case 11: where a document is one window, nothing slid."""
    rows = synthetic.rows(**{**SMALL, "protocols": ("sliding",)})
    rows["num_windows"] = np.where(rows["length"] == 512, 1, rows["num_windows"].clip(lower=2))
    _, summary = build_rows(tmp_path, rows)
    assert "sliding at 512: every document fits one window, so nothing slid." in summary["warnings"]


@pytest.mark.usefixtures("undrawn")
def test_another_mean_than_the_page_s_is_said(tmp_path: Path) -> None:
    """Case of aggregation yarn: results.json holds means of windows, the page weights by tokens."""
    folder = synthetic.write_study(tmp_path / "runs", synthetic.rows(**SMALL))
    summary = folder / "eval" / "length" / "results.json"
    for aggregation in ("token", "yarn"):
        content = json.loads(summary.read_text(encoding="utf-8"))
        content["config"]["plan"]["aggregation"] = aggregation
        summary.write_text(json.dumps(content), encoding="utf-8")
        report.build([folder], tmp_path / aggregation, formats=())
        said = json.loads((tmp_path / aggregation / "report.json").read_text(encoding="utf-8"))["warnings"]
        assert any("evaluated with aggregation yarn" in line for line in said) == (aggregation == "yarn")


def test_a_loss_past_exp_stays_a_page(tmp_path: Path) -> None:
    """case 34: NLL 710 is kept, its perplexity is null with a flag, the JSON is strict."""
    rows = synthetic.rows(**SMALL)
    at = (rows["label"] == "rope") & (rows["length"] == 512)
    rows.loc[at, "nll_sum"] = rows.loc[at, "num_tokens"] * 710.0
    text, _ = build_rows(tmp_path, rows)
    assert ">overflow<" in text
    data = pd.read_csv(tmp_path / "out" / "tables" / "main-nonoverlapping-perplexity.csv")
    row = data[(data["label"] == "rope") & (data["length"] == 512) & (data["rescale"] == "none")].iloc[0]
    assert row["nll"] == pytest.approx(710)
    assert math.isnan(row["perplexity"])
    assert row["overflow"]


def test_a_nan_seed_is_named_and_left_out(tmp_path: Path) -> None:
    """case 57."""
    rows = synthetic.rows(**SMALL, seeds=(0, 1))
    rows.loc[(rows["label"] == "rope") & (rows["seed"] == 1) & (rows["length"] == 512), "nll_sum"] = np.nan
    text, summary = build_rows(tmp_path, rows)
    said = "rope, rope (yarn:auto): no finite loss at 512 in seed 1; means there are over the others."
    assert said in summary["warnings"]
    assert any("rope</strong> fails by 512 (8×): no finite loss at 512 (seed 1)" in line for line in [text])
    assert not re.search(r">\s*nan\b", text, re.IGNORECASE)


@pytest.mark.parametrize(
    "options",
    [
        {"encodings": ["rope"], "rescales": ("none",)},
        {"lengths": (64,)},
        {"lengths": (64,), "encodings": ["rope"], "num_documents": 1},
        pytest.param(
            {"encodings": [f"mine-{n}" for n in range(30)], "lengths": (64, 128)}, marks=pytest.mark.slow
        ),
        {"encodings": ["nope", "Übung·位置"]},
        {"lengths": (32, 128), "train_length": 64},
    ],
    ids=[
        "one encoding",
        "one length",
        "one document",
        "thirty encodings",
        "other scripts",
        "no training length",
    ],
)
def test_odd_studies_are_right_pages(tmp_path: Path, options: dict) -> None:
    settings = {**SMALL, **options}
    text, summary = build_rows(tmp_path, synthetic.rows(**settings))
    assert summary["findings"]
    for label in settings["encodings"]:
        assert label in text


@pytest.mark.usefixtures("undrawn")
def test_missing_cells_are_named(tmp_path: Path) -> None:
    rows = synthetic.rows(**{**SMALL, "rescales": ("none",)}, seeds=(0, 1))
    rows = rows[~((rows["label"] == "rope") & (rows["length"] == 128))]
    rows = rows[~((rows["label"] == "nope") & (rows["seed"] == 1))]
    text, summary = build_rows(tmp_path, rows)
    assert "rope (synthetic, nonoverlapping): not evaluated at 128 for every seed." in summary["warnings"]
    assert any(
        said.startswith("nope (synthetic, nonoverlapping): fewer seeds") for said in summary["warnings"]
    )
    assert ">not run<" in text


@pytest.mark.usefixtures("undrawn")  # one such page is drawn: the fixture's
@pytest.mark.parametrize("status", ["unsupported", "oom", "error"])
def test_a_status_stands_where_the_number_would(tmp_path: Path, status: str) -> None:
    """case 33: one length without a number, the others whole; also where no label has a number."""
    rows = synthetic.rows(**{**SMALL, "rescales": ("none",)}, seeds=(0, 1))
    lost = synthetic.with_status(rows, status, label="rope", length=512)
    text, summary = build_rows(tmp_path / "one", lost)
    assert any(said.startswith(f"rope: {status} at 512") for said in summary["warnings"])
    assert f">{status}<" in text
    nothing = synthetic.with_status(lost, status, seed=0)
    nothing = synthetic.with_status(nothing, status, seed=1)
    _, summary = build_rows(tmp_path / "all", nothing)
    assert "nothing is said about what happens past it" in summary["findings"][0]


def test_names_of_other_scripts_reach_the_files(tmp_path: Path) -> None:
    rows = synthetic.rows(**{**SMALL, "study": "étude 位置"}).replace({"label": {"rope": "Übung·位置/β"}})
    folder = synthetic.write_study(tmp_path / "Läufe", rows)
    page = report.build([folder], tmp_path / "Bericht é", formats=("svg", "latex"))
    text = page.read_text(encoding="utf-8")
    assert "<title>étude 位置</title>" in text
    for link in re.findall(r'href="((?:figures|tables)/[^"]+)"', text):
        assert (page.parent / link).is_file(), link
    assert "Übung·位置/β" in (page.parent / "report.md").read_text(encoding="utf-8")
    data = pd.read_csv(page.parent / "tables" / "main-nonoverlapping-nll.csv")
    assert "Übung·位置/β" in set(data["label"])


def test_a_markdown_report_links_what_was_written(tmp_path: Path) -> None:
    few = {**SMALL, "encodings": ["rope"], "lengths": (64, 128), "rescales": ("none",)}
    folder = synthetic.write_study(tmp_path / "runs", synthetic.rows(**few))
    for formats in (("svg",), ("png",), ()):
        page = report.build([folder], tmp_path / "-".join(["out", *formats]), formats=formats)
        images = re.findall(
            r"!\[[^\]]*\]\(([^)]+)\)", (page.parent / "report.md").read_text(encoding="utf-8")
        )
        assert all((page.parent / image).is_file() for image in images)
        assert bool(images) is bool(formats)


@pytest.mark.filterwarnings(
    "ignore:.*multi-threaded:DeprecationWarning"
)  # by the test runner, not by reports
def test_two_processes_draw_the_same_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The files do not depend on whether drawings were shared out."""
    few = synthetic.rows(**{**SMALL, "encodings": ["nope", "rope"], "lengths": (64, 128)})
    study, made = synthetic.write_study(tmp_path / "runs", few), {}
    for forked in (True, False):
        monkeypatch.setattr(rendering, "_may_fork", lambda forked=forked: forked)
        page = report.build([study], tmp_path / str(forked), formats=("svg",))
        files = sorted(path for path in page.parent.rglob("*.*") if path.suffix in (".svg", ".csv"))
        made[forked] = {path.name: path.read_bytes() for path in files}
    assert made[True] == made[False]


def test_no_fork_beside_threads() -> None:
    """A process with threads of its own draws alone."""
    stop = threading.Event()
    thread = threading.Thread(target=stop.wait)
    thread.start()
    try:
        assert not rendering._may_fork()
    finally:
        stop.set()
        thread.join()


@pytest.mark.usefixtures("undrawn")
def test_a_long_table_ends_on_the_page_and_not_in_its_file(tmp_path: Path) -> None:
    """Twelve encodings give 198 comparisons, thirteen 234: more than a page shows."""
    settings = {**SMALL, "encodings": [f"mine-{n}" for n in range(13)], "lengths": (64, 128, 256, 512)}
    text, _ = build_rows(tmp_path, synthetic.rows(**{**settings, "num_documents": 3}))
    assert "The first 200 of 234 rows; the CSV has all." in text
    assert len(pd.read_csv(tmp_path / "out" / "tables" / "comparisons.csv")) == 234


def checkpoint(folder: Path, name: str, **changed: object) -> Path:
    """Results of a checkpoint of which nothing is known, as `pe-study eval ID` leaves them."""
    frame = synthetic.rows(**{**SMALL, "encodings": ["rope"], "rescales": ("none",)})
    unknown = dict.fromkeys(("train_length", "label", "encoding", "seed"), None)
    frame = frame.assign(**unknown, study=name, run=name, model=f"org/{name}", **changed)
    rows_module.write_rows(frame, folder / name)
    return folder / name


def test_a_checkpoint_of_unknown_training_length_is_a_page(tmp_path: Path) -> None:
    page = report.build([checkpoint(tmp_path, "one")], tmp_path / "out", formats=())
    text = page.read_text(encoding="utf-8")
    assert "training length not known" in text
    assert "The training length is not known, so nothing is said about what happens past it." in text
    assert not re.search(r"trained at (?!length L)|>-1<|length -1", text)


def test_lengths_in_bytes_are_the_axis_where_tokenizers_differ(tmp_path: Path) -> None:
    """Two tokenizers, the same bytes: one column a number of bytes, and no word of tokens."""
    sizes = {64: 256, 128: 512, 512: 2048}
    one = checkpoint(tmp_path, "one")
    frame = rows_module.read_rows(one)
    rows_module.write_rows(frame.assign(length_bytes=frame["length"].map(sizes)), one)
    other = frame.assign(length_bytes=frame["length"].map(sizes), length=frame["length"] * 2)
    other = other.assign(study="two", run="two", model="org/two", tokenizer_hash="8" * 64)
    rows_module.write_rows(other, tmp_path / "two")
    page = report.build([one, tmp_path / "two"], tmp_path / "out", formats=())
    text = page.read_text(encoding="utf-8")
    assert "Bits per byte by length in bytes (nonoverlapping)" in text
    assert "length, bytes of text" in text
    heads = re.findall(r'<th scope="col" class="n">([\d,]+)</th>', text)
    assert heads[:3] == ["256", "512", "2,048"]


def test_names_are_text_not_markup(tmp_path: Path) -> None:
    rows = synthetic.rows(**SMALL).replace({"label": {"rope": "<b>&rope"}})
    text, _ = build_rows(tmp_path, rows)
    assert "<b>&rope" not in text
    assert "&lt;b&gt;&amp;rope" in text


def test_a_study_without_results_shows_its_training(tmp_path: Path) -> None:
    folder = synthetic.write_study(tmp_path / "runs", synthetic.rows(**SMALL))
    for path in sorted((folder / "eval").rglob("*"), reverse=True):
        path.unlink() if path.is_file() else path.rmdir()
    (folder / "rope-s0" / "DONE").unlink()
    page = report.build([folder], tmp_path / "out", formats=()).read_text(encoding="utf-8")
    assert "Training not finished: rope-s0 (step 300 of 300)" in page
    assert "Training loss" in page


def test_clear_messages(tmp_path: Path) -> None:
    folder = synthetic.write_study(tmp_path / "runs", synthetic.rows(**SMALL))
    with pytest.raises(UsageError, match=r'no such study; did you mean ".*synthetic"'):
        report.build([folder.parent / "syntetic"], tmp_path / "out")
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match="neither runs nor results"):
        report.build([tmp_path / "empty"], tmp_path / "out")
    (folder / "eval" / "length" / "results.json").write_text("{", encoding="utf-8")
    with pytest.raises(DataError, match=r"results\.json"):
        report.build([folder], tmp_path / "out")
    (folder / "eval" / "length" / "results.json").unlink()
    (folder / "eval" / "length" / "results.parquet").write_bytes(b"no")
    with pytest.raises(DataError, match=r"results\.parquet"):
        report.build([folder], tmp_path / "out")


def test_an_output_that_is_not_ours_is_left_alone(study: Path, tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("years", encoding="utf-8")
    with pytest.raises(UsageError, match="not ours"):
        report.build([study], tmp_path)
    assert (tmp_path / "thesis.tex").read_text(encoding="utf-8") == "years"
