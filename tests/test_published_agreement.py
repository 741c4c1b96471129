"""Which printed numbers ours agree with: known answers from constructed curves."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
import pytest

from pe_study import published
from pe_study.errors import UsageError

TABLE = """
paper: P
source: S
tables:
  - id: one
    title: T
    metric: perplexity
    compare: {compare}
    train_length: 100
    corpus: WikiText-103 validation
    protocol: nonoverlapping
    tolerance: 0.03
    ratios: {{longer: 200, shorter: 100, ranges: {{rope: [1.05, 1.61]}}}}
    rows:
      - {{name: rotary, encoding: rope, checkpoint: org/Model, rescale: null, values: {{100: 20, 200: 26}}}}
      - {{name: bias, encoding: alibi, values: {{100: 19.0, 200: null}}}}
"""


def tables(tmp_path: Path, compare: str) -> list[published.PublishedTable]:
    path = tmp_path / "p.yaml"
    path.write_text(TABLE.format(compare=compare), encoding="utf-8")
    return published.read_published([path])


def curves(*values: tuple[str, int, float], model: str = "", start: int = 64) -> pd.DataFrame:
    frame = pd.DataFrame(values, columns=["encoding", "length", "perplexity"])
    return frame.assign(
        label=frame["encoding"],
        study="s",
        model=model,
        rescale="none",
        protocol="nonoverlapping",
        train_length=start,
    )


def test_ratio_is_taken_at_about_the_same_multiple(tmp_path: Path) -> None:
    ours = curves(("rope", 64, 10.0), ("rope", 128, 12.0), ("rope", 512, 90.0))
    (found,) = published.agreements(tables(tmp_path, "ratio"), ours)
    assert (found.kind, found.ours, found.agrees) == ("ratio", "1.2 at 2\u00d7", True)
    (found,) = published.agreements(
        tables(tmp_path, "ratio"), curves(("rope", 64, 10.0), ("rope", 128, 17.0))
    )
    assert found.agrees is False
    assert (
        published.agreements(tables(tmp_path, "ratio"), curves(("rope", 64, 10.0), ("rope", 512, 17.0))) == []
    )


def test_ordering(tmp_path: Path) -> None:
    right = curves(("rope", 64, 10.0), ("alibi", 64, 9.0))
    (found,) = published.agreements(tables(tmp_path, "ordering"), right)
    assert (found.agrees, found.printed) == (True, "bias below rotary at 1\u00d7")
    (found,) = published.agreements(
        tables(tmp_path, "ordering"), curves(("rope", 64, 8.0), ("alibi", 64, 9.0))
    )
    assert found.agrees is False


@pytest.mark.parametrize(("value", "agrees"), [(20.02, True), (20.2, False)])
def test_a_rerun_must_meet_the_printed_number(tmp_path: Path, value: float, agrees: bool) -> None:
    ours = curves(("model", 100, value), model="org/model", start=100)
    (found,) = published.agreements(tables(tmp_path, "rerun"), ours)
    assert (found.kind, found.agrees) == ("rerun", agrees)
    assert published.agreements(tables(tmp_path, "rerun"), ours.assign(model="other")) == []


def test_disputed_numbers_are_shown_and_not_counted(tmp_path: Path) -> None:
    ours = curves(("model", 100, 40.0), model="org/model", start=100)
    found = published.agreements(tables(tmp_path, "disputed"), ours)
    assert [one.agrees for one in found] == [None]
    assert "1 disputed, not counted" in published.agreement_sentence(found)


def test_only_like_corpora_or_checkpoints_are_laid_beside(tmp_path: Path) -> None:
    found = tables(tmp_path, "ratio")
    rows = pd.DataFrame({"corpus": ["Salesforce/wikitext-103-raw"], "model": ["x"]})
    assert published.alike(found, rows) == found
    assert published.alike(found, rows.assign(corpus="stdlib")) == []
    assert published.alike(found, rows.assign(corpus="stdlib", model="org/Model")) == found


def test_every_shipped_table_is_read() -> None:
    found = published.read_published()
    assert {table.data["compare"] for table in found} >= {"ratio", "ordering", "rerun"}
    assert len({table.id for table in found}) == len(found) >= 4


def test_a_table_without_its_keys_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "p.yaml"
    path.write_text("paper: P\nsource: S\ntables:\n  - {id: x}\n", encoding="utf-8")
    with pytest.raises(UsageError, match=r"p\.yaml:4: no key compare, metric, rows, title"):
        published.read_published([path])
