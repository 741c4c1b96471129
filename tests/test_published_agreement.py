"""Which printed numbers ours agree with: known answers from constructed curves."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
import pytest

from pe_study.errors import UsageError
from pe_study.reporting import published

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


WIKI = "Salesforce/wikitext-103-raw-v1"


def curves(
    *values: tuple[str, int, float], model: str = "", start: int = 64, corpus: str = WIKI
) -> pd.DataFrame:
    frame = pd.DataFrame(values, columns=["encoding", "length", "perplexity"])
    return frame.assign(
        label=frame["encoding"],
        study="s",
        model=model,
        corpus=corpus,
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


def test_a_rerun_counts_on_its_own_corpus_only(tmp_path: Path) -> None:
    """Llama 2 on Proof-pile is held against the tables of Proof-pile and no other."""
    ours = curves(("llama", 8192, 3.65), model="meta-llama/Llama-2-7b-hf", start=4096, corpus="proof-pile")
    ours = ours.assign(protocol="sliding", rescale="linear:auto")
    found = published.agreements(published.alike(published.read_published(), ours), ours)
    agree = {one.table: one.agrees for one in found}
    assert agree == {"longrope-untuned-pg19": None, "longrope-untuned-proof-pile": True}
    assert published.agreement_sentence(found) == (
        "Of the published numbers that these can be held against, 1 of 1 reruns agree; "
        "1 of another corpus than ours (proof-pile), not counted."
    )
    table = published.agreement_table(found).set_index("published")["agrees"]
    assert table["longrope-untuned-pg19"] == "not counted (ours is of proof-pile)"
    other = published.agreements(published.read_published(), ours.assign(corpus="EleutherAI/proof-pile-2"))
    assert published.agreement_sentence(other) == (
        "No published number can be held against these: 2 of another corpus than ours "
        "(EleutherAI/proof-pile-2), not counted."
    )


def test_disputed_numbers_alone_make_a_sentence(tmp_path: Path) -> None:
    ours = curves(("model", 100, 40.0), model="org/model", start=100)
    found = published.agreements(tables(tmp_path, "disputed"), ours)
    assert published.agreement_sentence(found) == (
        "No published number can be held against these: 1 disputed, not counted."
    )


def test_each_study_is_held_against_a_rerun_by_itself(tmp_path: Path) -> None:
    ours = curves(("model", 100, 20.0), model="org/model", start=100)
    both = pd.concat([ours, ours.assign(study="t", perplexity=25.0)])
    found = published.agreements(tables(tmp_path, "rerun"), both)
    assert [one.agrees for one in found] == [True, False]


ROW = "{name: a, encoding: rope, checkpoint: org/m, values: {64: 1.5, 128: 2}}"
RERUN = "compare: rerun, protocol: sliding, corpus: PG19"


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("  - {id: x}", r"p\.yaml:4: tables\.0\.title: this key is required \(and 3 more\)"),
        ("  3", r"p\.yaml:\d: tables: found 3; accepted: a list"),
        ("  - 5", r"p\.yaml:4: tables\.0: found 5; accepted: a mapping"),
        ("ratio", r"p\.yaml:4: tables\.0: compare ratio needs the key ratios"),
        (
            "compare: ordring",
            r'p\.yaml:4: tables\.0\.compare: found the text "ordring"; accepted: one of .*ordering',
        ),
        ("compare: ordering", r"p\.yaml:4: tables\.0: compare ordering needs the key train_length"),
        ("compare: rerun", r"p\.yaml:4: tables\.0: compare rerun needs the keys protocol and corpus"),
        (f"{RERUN}, tolerence: 1", r"p\.yaml:4: tables\.0\.tolerence: unknown key; did you mean"),
        (RERUN + " {name: a}", r"p\.yaml:4: tables\.0\.rows\.0\.values: this key is required"),
        (
            RERUN + " {name: a, values: {64: 1}}",
            r"p\.yaml:4: tables\.0: compare rerun needs the key checkpoint in a row",
        ),
        (
            RERUN + " {name: a, checkpoint: b, values: {8q: 1}}",
            r'p\.yaml:4: .*row a: values: found the text "8q" as a key',
        ),
        (
            RERUN + " {name: a, checkpoint: b, values: {64: x}}",
            r'p\.yaml:4: tables\.0\.rows\.0\.values: .*"x" at 64',
        ),
    ],
)
def test_a_file_that_is_wrong_is_one_line(tmp_path: Path, body: str, message: str) -> None:
    keys, _, row = body.partition(" {")
    keys = f"compare: {keys}" if keys == "ratio" else keys
    row = "{" + row if row else ROW
    table = f"  - {{id: x, title: t, metric: perplexity, {keys}, rows: [{row}]}}"
    path = tmp_path / "p.yaml"
    path.write_text(
        "paper: P\nsource: S\ntables:\n" + (body if body.startswith("  ") else table) + "\n", encoding="utf-8"
    )
    with pytest.raises(UsageError, match=message) as refused:
        published.read_published([path])
    assert "\n" not in str(refused.value)


def test_lengths_may_be_written_with_a_k(tmp_path: Path) -> None:
    path = tmp_path / "p.yaml"
    table = f"  - {{id: x, title: t, metric: perplexity, {RERUN}, rows: [{ROW}]}}".replace("128", "8k")
    path.write_text(f"paper: P\nsource: S\ntables:\n{table}\n", encoding="utf-8")
    (found,) = published.read_published([path])
    assert dict(found.rows[0]["values"]) == {64: 1.5, 8192: 2}


def test_files_of_the_working_directory_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "reports" / "published"
    folder.mkdir(parents=True)
    (folder / "mine.yaml").write_text(TABLE.format(compare="ratio"), encoding="utf-8")
    shipped = {table.id for table in published.read_published()}
    monkeypatch.chdir(tmp_path)
    assert {table.id for table in published.read_published()} == shipped | {"one"}
    (folder / "again.yaml").write_text(TABLE.format(compare="ratio"), encoding="utf-8")
    with pytest.raises(UsageError, match=r"mine\.yaml.*: one is also the id of a table of .*again\.yaml"):
        published.read_published()
