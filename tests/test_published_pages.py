"""Printed tables on the page, all of them where asked for, and the command that makes the page again."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest
import synthetic_studies as synthetic
from typer.testing import CliRunner

from pe_study import cli, report
from pe_study.errors import UsageError
from pe_study.reporting import published

SMALL = {
    "encodings": ["rope", "alibi"],
    "lengths": (64, 128),
    "num_documents": 3,
    "protocols": ("nonoverlapping",),
    "rescales": ("none",),
}
pytestmark = pytest.mark.usefixtures("undrawn")


def written(tmp_path: Path, corpus: str = "stdlib") -> Path:
    return synthetic.write_study(tmp_path / "runs", synthetic.rows(**SMALL).assign(corpus=corpus))


def printed(page: Path) -> set[str]:
    names = json.loads((page.parent / "report.json").read_text(encoding="utf-8"))["tables"]
    return {name.removeprefix("printed-") for name in names if name.startswith("printed-")}


def test_every_printed_table_is_shown_or_the_reason(tmp_path: Path) -> None:
    page = report.build([written(tmp_path)], tmp_path / "out", published=True, formats=())
    every = {table.id: table for table in published.read_published()}
    text = (page.parent / "report.md").read_text(encoding="utf-8")
    assert printed(page) == every.keys()
    assert "Perplexity per word of a vocabulary of 267,735." in text
    assert "In thousand words a second." in text
    for name in ("alibi-training-speed", "alibi-training-memory", "kazemnejad-tasks", "yarn-llama2-7b-8k"):
        assert re.search(rf"^\| {name} \| .+ \| (it prints|none of its checkpoints)", text, re.MULTILINE)
    assert "No published number can be held against these" in text


def test_without_the_flag_only_tables_of_the_same_text_are(tmp_path: Path) -> None:
    page = report.build([written(tmp_path)], tmp_path / "out", formats=())
    assert printed(page) == set()
    assert "Beside published numbers" not in page.read_text(encoding="utf-8")


def test_a_table_of_the_same_text_says_what_is_held_against_it(tmp_path: Path) -> None:
    page = report.build([written(tmp_path, "Salesforce/wikitext-103-raw-v1")], tmp_path / "out", formats=())
    text = (page.parent / "report.md").read_text(encoding="utf-8")
    assert {"alibi-wikitext103-512", "alibi-training-memory"} <= printed(page)
    assert re.search(r"2 of 2 ratios|1 of 2 ratios|0 of 2 ratios", text)
    assert "at 5.26 bytes a unit" in text


@pytest.mark.parametrize("watched", [[], ["--watch"]])
def test_the_command_to_redo_a_page_has_the_flags_that_decide_it(tmp_path: Path, watched: list[str]) -> None:
    view = tmp_path / "my view.yaml"
    view.write_text("tables: [main, published]\n", encoding="utf-8")
    words = [str(written(tmp_path)), "--output", str(tmp_path / "out"), "--view", str(view)]
    words += ["--title", "Mine & yours", "--format", "latex", "--published"]
    made = CliRunner().invoke(cli.app, ["report", *words, *watched])
    assert made.exit_code == 0, made.output
    text = (tmp_path / "out" / "report.md").read_text(encoding="utf-8")
    line = text[text.index("How to redo it") :].split("```sh\n")[1].split("\n```")[0].splitlines()[-1]
    assert shlex.split(line) == ["pe-study", "report", *words]


def test_the_command_of_a_plain_page_is_plain(tmp_path: Path) -> None:
    study = written(tmp_path)
    page = report.build([study], tmp_path / "out")
    line = f"pe-study report {study} --output {tmp_path / 'out'}\n"
    assert line in (page.parent / "report.md").read_text(encoding="utf-8")


def test_names_too_long_for_a_folder_ask_for_output(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="8 studies; name it with --output"):
        report.output_folder([f"study-{n}-{'x' * 40}" for n in range(8)])
    assert report.output_folder(["x" * 300], tmp_path / "out") == tmp_path / "out"
