"""Tables for a paper: right columns, the best in bold, every special character escaped."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest
import synthetic_studies as synthetic

from pe_study import report, tables
from pe_study.reporting import latex
from pe_study.reporting.main_table import main_table


def drawn(**options: object) -> str:
    rows = synthetic.plain_rows(
        lengths=(64, 128), num_documents=3, protocols=("nonoverlapping",), rescales=("none",), **options
    )
    curves = tables.length_curves(rows)
    return latex.tabular(main_table(curves, "nll", "nonoverlapping", None, chosen=True))


def test_the_best_of_each_column_is_bold() -> None:
    """Worked out by hand: the lowest of each length, as often as it is tied."""
    text = drawn(encodings=["nope", "rope"], damage={"rope": 3.0})
    rows = [line.removesuffix(r" \\").split(" & ") for line in text.splitlines() if r" \\" in line]
    assert rows[0] == ["encoding", "64", "128"]
    values = {row[0]: row[1:] for row in rows[1:]}
    assert set(values) == {"nope", "rope"}
    assert [cell.startswith(r"\textbf{") for cell in values["rope"]] == [True, False]
    assert [cell.startswith(r"\textbf{") for cell in values["nope"]] == [False, True]
    assert r"\begin{tabular}{lrr}" in text
    assert "lower is better" in text.splitlines()[1]


def test_special_characters_are_escaped() -> None:
    assert latex.escaped(r"a_b & 50 % #1 {x} ~^\ $") == (
        r"a\_b \& 50 \% \#1 \{x\} \textasciitilde{}\textasciicircum{}\textbackslash{} \$"
    )
    assert latex.escaped("< 0.001, 1 > 0 \u00b1 2\u2026") == r"$<$ 0.001, 1 $>$ 0 $\pm$ 2\ldots{}"
    assert "my\\_rope" in drawn(encodings=["nope", "my_rope"])


@pytest.mark.usefixtures("undrawn")
def test_every_table_of_a_page_is_balanced(tmp_path: Path) -> None:
    rows = synthetic.rows(
        encodings=["nope", "rope", "Übung_位置"], lengths=(64, 128), num_documents=3, seeds=(0, 1)
    )
    rows = synthetic.with_status(rows, "oom", label="rope", length=128, rescale="none")
    folder = synthetic.write_study(tmp_path / "runs", rows)
    report.build([folder], tmp_path / "out", formats=("latex",))
    files = sorted((tmp_path / "out" / "tables").glob("*.tex"))
    assert {"verdicts.tex", "comparisons.tex", "cells.tex"} <= {file.name for file in files}
    for file in files:
        lines = [line for line in file.read_text(encoding="utf-8").splitlines() if line.endswith(r" \\")]
        counts = {len(re.findall(r"(?<!\\)&", line)) for line in lines}
        assert len(counts) == 1, file.name
        assert not re.search(r"(?<!\\)[_#]|(?<!\$)[<>]|[<>](?!\$)", "".join(lines)), file.name


@pytest.mark.skipif(shutil.which("pdflatex") is None, reason="no pdflatex")
def test_latex_accepts_a_table(tmp_path: Path) -> None:
    body = drawn(encodings=["nope", "rope"])
    document = rf"\documentclass{{article}}\usepackage{{booktabs}}\begin{{document}}{body}\end{{document}}"
    (tmp_path / "t.tex").write_text(document, encoding="utf-8")
    subprocess.run(["pdflatex", "-halt-on-error", "t.tex"], cwd=tmp_path, check=True, capture_output=True)
