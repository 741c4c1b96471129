"""The lengths of a main table: always the training length and the longest; said where some are left out."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import synthetic_studies as synthetic

from pe_study import report, tables
from pe_study.reporting.main_table import columns_of, main_table

TWELVE = (64, 80, 96, 112, 128, 192, 256, 384, 512, 768, 1024, 2048)
FOURTEEN = (48, *TWELVE, 4096)
ONE = {"num_documents": 3, "protocols": ("nonoverlapping",), "rescales": ("none",), "encodings": ["rope"]}


def shown(rows: pd.DataFrame, lengths: tuple[int, ...] | None = None) -> tuple[list[int], str]:
    table = main_table(tables.length_curves(rows), "nll", "nonoverlapping", lengths, chosen=True)
    return [int(column.text.replace(",", "")) for column in table.columns[1:]], table.note


@pytest.mark.parametrize("lengths", [TWELVE, FOURTEEN])
@pytest.mark.parametrize("train_length", [64, 96])
def test_the_training_length_and_the_longest_always_stay(lengths: tuple[int, ...], train_length: int) -> None:
    rows = synthetic.plain_rows(lengths=lengths, train_length=train_length, **ONE)
    columns, note = shown(rows)
    assert len(columns) == 10
    assert train_length in columns
    assert columns[-1] == max(lengths)
    assert note.endswith(f"10 of {len(lengths)} lengths; the CSV has all.")


def test_ten_lengths_are_all_shown_and_nothing_is_said() -> None:
    columns, note = shown(synthetic.plain_rows(lengths=TWELVE[:10], **ONE))
    assert columns == list(TWELVE[:10])
    assert "CSV" not in note


def test_lengths_that_a_view_asks_for_are_all_shown() -> None:
    columns, note = shown(synthetic.plain_rows(lengths=FOURTEEN, **ONE), FOURTEEN[1:])
    assert columns == list(FOURTEEN[1:])
    assert "CSV" not in note


def test_every_study_keeps_its_own_ends() -> None:
    """The training length and the longest of a study, not those of the page alone."""
    one = synthetic.plain_rows(lengths=TWELVE, **ONE)
    other = synthetic.plain_rows(lengths=FOURTEEN, train_length=112, **ONE).assign(study="other")
    columns, _ = shown(pd.concat([one, other], ignore_index=True))
    assert {64, 112, 2048, 4096} <= set(columns)


def test_lengths_in_bytes_keep_the_ends_of_each_tokenizer() -> None:
    one = synthetic.plain_rows(lengths=TWELVE, **ONE)
    other = one.assign(study="other", tokenizer_hash="9" * 64, length_bytes=one["length"] * 3 + 1)
    columns, note = shown(pd.concat([one.assign(length_bytes=one["length"]), other], ignore_index=True))
    assert {64, 2048, 193, 6145} <= set(columns)
    assert note.endswith("10 of 24 lengths; the CSV has all.")


def test_no_best_where_lengths_are_tokens_of_two_tokenizers() -> None:
    """64 tokens are four times the text for one of them: bits per byte do not compare column by column."""
    one = synthetic.plain_rows(lengths=(64, 128), **ONE).assign(length_bytes=np.nan)
    other = one.assign(study="other", tokenizer_hash="9" * 64)
    both = pd.concat([one, other], ignore_index=True)
    known = both.assign(length_bytes=both["length"] * 4)
    for rows, best in ((both, False), (known, True)):
        table = main_table(tables.length_curves(rows), "bits_per_byte", "nonoverlapping", None, chosen=True)
        assert any(cell.kind == "best" for row in table.rows for cell in row) is best
        assert ("lengths in tokens of 2 tokenizers" in table.note) is not best


def test_what_must_stay_may_be_more_than_the_columns_there_are() -> None:
    assert columns_of(range(1, 15), range(1, 13)) == list(range(1, 13))
    assert columns_of([], {5}) == []


def test_the_page_and_its_markdown_and_latex_say_so(tmp_path: Path) -> None:
    folder = synthetic.write_study(tmp_path / "runs", synthetic.rows(lengths=FOURTEEN, **ONE))
    page = report.build([folder], tmp_path / "out", formats=("latex",))
    said = "10 of 14 lengths; the CSV has all."
    tex = tmp_path / "out" / "tables" / "main-nonoverlapping-nll.tex"
    for path in (page, tmp_path / "out" / "report.md", tex):
        text = path.read_text(encoding="utf-8")
        assert said in text
        assert "4,096" in text
    table = pd.read_csv(tmp_path / "out" / "tables" / "main-nonoverlapping-nll.csv")
    assert sorted(set(table["length"])) == sorted(FOURTEEN)
