"""Which printed numbers ours agree with: known answers from constructed curves."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from pe_study.errors import UsageError
from pe_study.reporting import holding, published
from pe_study.reporting.agreements import Agreement, agreement_sentence, agreement_table

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
    unit_of_metric: a word
    bytes_per_unit: {size}
    ratios: {{longer: 200, shorter: 100, ranges: {{rope: [1.05, 1.61]}}}}
    rows:
      - {{name: rotary, encoding: rope, checkpoint: org/Model, rescale: null, values: {{100: 20, 200: 26}}}}
      - {{name: bias, encoding: alibi, values: {{100: 19.0, 200: null}}}}
"""


def tables(tmp_path: Path, compare: str, size: str = "1") -> list[published.PublishedTable]:
    path = tmp_path / "p.yaml"
    path.write_text(TABLE.format(compare=compare, size=size), encoding="utf-8")
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
        tokenizer_hash="7" * 64,
        bits_per_byte=np.log2(frame["perplexity"]),  # a token is a byte
    )


def agreements(found: list[published.PublishedTable], ours: pd.DataFrame) -> list[Agreement]:
    return holding.held(found, ours)[0]


def test_ratio_is_taken_at_about_the_same_multiple(tmp_path: Path) -> None:
    ours = curves(("rope", 64, 10.0), ("rope", 128, 12.0), ("rope", 512, 90.0))
    (found,) = agreements(tables(tmp_path, "ratio"), ours)
    assert (found.kind, found.ours, found.agrees) == ("ratio", "1.2 at 2\u00d7, at 1 bytes a unit", True)
    (found,) = agreements(tables(tmp_path, "ratio"), curves(("rope", 64, 10.0), ("rope", 128, 17.0)))
    assert found.agrees is False
    assert agreements(tables(tmp_path, "ratio"), curves(("rope", 64, 10.0), ("rope", 512, 17.0))) == []


def test_a_ratio_is_in_the_printed_unit(tmp_path: Path) -> None:
    """A byte model that reproduces 1.3 per word of 5.7 bytes agrees; 1.3 per byte is 4.46 per word."""
    per_byte = 1.3 ** (1 / 5.7)
    for ratio, agrees in ((per_byte, True), (1.3, False)):
        ours = curves(("rope", 64, 3.0), ("rope", 128, 3.0 * ratio))
        (found,) = agreements(tables(tmp_path, "ratio", "5.7"), ours)
        assert found.agrees is agrees
        assert found.ours == f"{ratio**5.7:.3g} at 2\u00d7, at 5.7 bytes a unit"


@pytest.mark.parametrize(
    ("changed", "size", "reason"),
    [
        (
            {"bits_per_byte": np.nan},
            "5",
            "the bytes of our tokens are not known, so nothing of ours is per word",
        ),
        ({}, "null", "it prints perplexity per word, and no bytes_per_unit to bring ours to it"),
        ({"corpus": "stdlib"}, "5", "ours is of stdlib, not of WikiText-103 validation: a ratio"),
        ({"encoding": "nope"}, "5", "no run of ours has one of its encodings"),
        ({"train_length": 32}, "5", "no run of ours at its training length and at about 2 times that"),
        ({"train_length": -1}, "5", "no run of ours has one of its encodings"),
    ],
)
def test_a_ratio_that_would_not_be_like_for_like_is_refused(
    tmp_path: Path, changed: dict, size: str, reason: str
) -> None:
    ours = curves(("rope", 64, 3.0), ("rope", 128, 3.6)).assign(**changed)
    found, (unheld,) = holding.held(tables(tmp_path, "ratio", size), ours)
    assert found == []
    assert unheld.reason.startswith(reason)


@pytest.mark.parametrize("compare", ["ratio", "ordering"])
def test_what_another_protocol_says_is_not_counted(tmp_path: Path, compare: str) -> None:
    ours = curves(("rope", 64, 3.0), ("rope", 128, 3.6), ("alibi", 64, 2.0)).assign(protocol="exact-context")
    (found,) = agreements(tables(tmp_path, compare), ours)
    assert found.agrees is None
    assert found.ours.endswith("(exact-context, printed: nonoverlapping)")
    assert "1 under another protocol than ours (exact-context), not counted" in agreement_sentence([found])
    assert agreement_table([found])["agrees"].tolist() == ["not counted (ours is under exact-context)"]


def test_ordering(tmp_path: Path) -> None:
    right = curves(("rope", 64, 10.0), ("alibi", 64, 9.0))
    (found,) = agreements(tables(tmp_path, "ordering"), right)
    assert (found.agrees, found.printed) == (True, "bias below rotary at 1\u00d7")
    (found,) = agreements(tables(tmp_path, "ordering"), curves(("rope", 64, 8.0), ("alibi", 64, 9.0)))
    assert found.agrees is False


def code(*values: tuple[str, int, float]) -> list[Agreement]:
    """Against the 1B models of Kazemnejad et al., trained at 1024, at twice that."""
    found = [table for table in published.read_published() if table.id == "kazemnejad-code-1b"]
    ours = curves(*values, start=1024, corpus="source code").assign(protocol="fixed-target")
    return [one for one in agreements(found, ours) if one.printed.endswith("at 2\u00d7")]


def test_an_order_is_read_at_the_nearest_length_of_both() -> None:
    """Never the first within 15 %, never two different lengths; each length of ours once."""
    nope, alibi = (
        [("nope", 1792, 50.0), ("nope", 2048, 135.0)],
        [("alibi", 1792, 60.0), ("alibi", 2048, 40.0)],
    )
    (found,) = code(*nope, *alibi)
    assert found.ours == "40 and 135 at 2\u00d7" or found.ours == "135 and 40 at 2\u00d7"
    assert code(nope[0], nope[1], alibi[1])[0].ours.split(" and ")[1].endswith("at 2\u00d7")
    assert code(nope[0], alibi[1]) == []


def test_lengths_are_matched_one_to_one() -> None:
    assert holding.matched([1.0, 1.25, 1.5], [1.0, 1.4]) == [(1.0, 1.0), (1.5, 1.4)]
    assert holding.matched([1.0, 1.25], [1.2, 1.3]) == [(1.25, 1.3)]
    assert holding.matched([1.0], [1.2]) == []
    assert holding.matched([1.0], []) == []


def test_orders_stay_within_a_tokenizer_and_a_corpus(tmp_path: Path) -> None:
    ours = curves(("rope", 64, 10.0), ("alibi", 64, 9.0))
    apart = ours.assign(tokenizer_hash=["7", "8"])
    assert agreements(tables(tmp_path, "ordering"), apart) == []
    (found,) = agreements(tables(tmp_path, "ordering"), ours.assign(corpus="stdlib"))
    assert (found.agrees, found.other_text) == (None, "stdlib")


def test_every_label_of_an_encoding_is_ordered(tmp_path: Path) -> None:
    ours = curves(("rope", 64, 10.0), ("rope", 64, 8.0), ("alibi", 64, 9.0))
    found = agreements(tables(tmp_path, "ordering"), ours.assign(label=["long", "short", "alibi"]))
    assert [(one.row, one.agrees) for one in found] == [
        ("rotary, bias (long and alibi)", True),
        ("rotary, bias (short and alibi)", False),
    ]


def test_every_shipped_table_that_is_not_held_says_why() -> None:
    """Of the demo's kind of rows: bytes as tokens, another corpus, its encodings."""
    ours = curves(
        *((name, n, 3.0) for name in ("rope", "alibi", "t5", "nope") for n in (64, 128)), corpus="stdlib"
    )
    every = published.read_published()
    found, unheld = holding.held(every, ours)
    assert {one.table for one in found} | {one.table.id for one in unheld} == {table.id for table in every}
    reasons = {one.table.id: one.reason for one in unheld}
    assert reasons["alibi-training-memory"] == "it prints memory, our rows hold losses alone"
    assert reasons["kazemnejad-tasks"] == "it prints mrr, our rows hold losses alone"
    assert reasons["yarn-llama2-7b-8k"].startswith("none of its checkpoints was evaluated (")
    assert "not of WikiText-103 validation" in reasons["alibi-wikitext103-512"]


@pytest.mark.parametrize(("value", "agrees"), [(20.02, True), (20.2, False)])
def test_a_rerun_must_meet_the_printed_number(tmp_path: Path, value: float, agrees: bool) -> None:
    ours = curves(("model", 100, value), model="org/model", start=100)
    (found,) = agreements(tables(tmp_path, "rerun"), ours)
    assert (found.kind, found.agrees) == ("rerun", agrees)
    assert agreements(tables(tmp_path, "rerun"), ours.assign(model="other")) == []


def test_disputed_numbers_are_shown_and_not_counted(tmp_path: Path) -> None:
    ours = curves(("model", 100, 40.0), model="org/model", start=100)
    found = agreements(tables(tmp_path, "disputed"), ours)
    assert [one.agrees for one in found] == [None]
    assert "1 disputed, not counted" in agreement_sentence(found)


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
    found = agreements(published.alike(published.read_published(), ours), ours)
    agree = {one.table: one.agrees for one in found}
    assert agree == {"longrope-untuned-pg19": None, "longrope-untuned-proof-pile": True}
    assert agreement_sentence(found) == (
        "Of the published numbers that these can be held against, 1 of 1 reruns agree; "
        "1 of another corpus than ours (proof-pile), not counted."
    )
    table = agreement_table(found).set_index("published")["agrees"]
    assert table["longrope-untuned-pg19"] == "not counted (ours is of proof-pile)"
    other = agreements(published.read_published(), ours.assign(corpus="EleutherAI/proof-pile-2"))
    assert agreement_sentence(other) == (
        "No published number can be held against these: 2 of another corpus than ours "
        "(EleutherAI/proof-pile-2), not counted."
    )


def test_disputed_numbers_alone_make_a_sentence(tmp_path: Path) -> None:
    ours = curves(("model", 100, 40.0), model="org/model", start=100)
    found = agreements(tables(tmp_path, "disputed"), ours)
    assert agreement_sentence(found) == (
        "No published number can be held against these: 1 disputed, not counted."
    )


def test_each_study_is_held_against_a_rerun_by_itself(tmp_path: Path) -> None:
    ours = curves(("model", 100, 20.0), model="org/model", start=100)
    both = pd.concat([ours, ours.assign(study="t", perplexity=25.0)])
    found = agreements(tables(tmp_path, "rerun"), both)
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
    (folder / "mine.yaml").write_text(TABLE.format(compare="ratio", size="5"), encoding="utf-8")
    shipped = {table.id for table in published.read_published()}
    monkeypatch.chdir(tmp_path)
    assert {table.id for table in published.read_published()} == shipped | {"one"}
    (folder / "again.yaml").write_text(TABLE.format(compare="ratio", size="5"), encoding="utf-8")
    with pytest.raises(UsageError, match=r"mine\.yaml.*: one is also the id of a table of .*again\.yaml"):
        published.read_published()
