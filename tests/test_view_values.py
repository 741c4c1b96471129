"""A view names what was measured, or is refused with what would be accepted."""

from __future__ import annotations

from pathlib import Path

import pytest
import synthetic_studies as synthetic

from pe_study import report
from pe_study.errors import UsageError

SMALL = {"encodings": ["nope", "rope"], "lengths": (64, 128), "num_documents": 3, "rescales": ("none",)}


@pytest.fixture(scope="module")
def study(tmp_path_factory: pytest.TempPathFactory) -> Path:
    frame = synthetic.rows(**SMALL, protocols=("nonoverlapping",))
    return synthetic.write_study(tmp_path_factory.mktemp("view"), frame)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("protocol: slidng", r'v\.yaml:1: protocol: found the text "slidng".*; accepted: nonoverlapping$'),
        ("lengths: [64, 7]", r"v\.yaml:1: lengths: found 7.*; accepted: 64, 128$"),
        ("attention_run: nosuch", r"v\.yaml:1: attention_run: found .*; accepted: nope-s0, rope-s0$"),
    ],
)
def test_what_was_not_measured_is_refused(study: Path, tmp_path: Path, line: str, message: str) -> None:
    view = tmp_path / "v.yaml"
    view.write_text(line + "\n", encoding="utf-8")
    with pytest.raises(UsageError, match=message):
        report.build([study], tmp_path / "out", view=view, formats=())
    assert not (tmp_path / "out" / "index.html").exists()


@pytest.mark.usefixtures("undrawn")
def test_what_was_measured_is_shown(study: Path, tmp_path: Path) -> None:
    view = tmp_path / "v.yaml"
    view.write_text("protocol: nonoverlapping\nlengths: [128]\nattention_run: rope-s0\n", encoding="utf-8")
    text = report.build([study], tmp_path / "out", view=view, formats=()).read_text(encoding="utf-8")
    main = text[text.index('id="table-main-nonoverlapping-bits_per_byte"') :]
    assert '<th scope="col" class="n">128</th></tr>' in main[: main.index("</thead>")]


def test_a_study_without_results_takes_any_view(study: Path, tmp_path: Path) -> None:
    """While it trains, nothing is measured that a value could be held against."""
    view = tmp_path / "v.yaml"
    view.write_text("protocol: sliding\nlengths: [4096]\n", encoding="utf-8")
    frame = synthetic.rows(**SMALL, protocols=("nonoverlapping",))
    folder = synthetic.write_study(tmp_path / "runs", frame)
    (folder / "eval" / "length" / "results.parquet").unlink()
    assert report.build([folder], tmp_path / "out", view=view, formats=()).is_file()
