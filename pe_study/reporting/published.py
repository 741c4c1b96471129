"""Published numbers beside ours: reads reports/published/*.yaml and says which of ours agree.

What agreement means stands in each table: `rerun` (checkpoint and corpus, within the tolerance), `ratio` (own
runs: the ratio of two perplexities within a range), `ordering` (own runs: the same order of encodings at
about the same multiple of the training length) or `disputed` (shown, never counted).
The schema is at the top of alibi.yaml.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from pe_study import shipped
from pe_study.errors import UsageError
from pe_study.reporting.printed import plain_name, read_paper, same_corpus
from pe_study.tables import protocols_of

FOLDER = "reports/published"
NEARBY = 1.15  # two lengths count as the same multiple of the training length within this factor


@dataclass(frozen=True)
class PublishedTable:
    """One table of one paper, as printed."""

    paper: str
    source: str
    data: Mapping[str, Any]

    @property
    def id(self) -> str:
        return str(self.data["id"])

    @property
    def rows(self) -> Sequence[Mapping[str, Any]]:
        return list(self.data["rows"])

    def compare(self, row: Mapping[str, Any]) -> str:
        return str(row.get("compare", self.data["compare"]))


@dataclass(frozen=True)
class Agreement:
    """One printed statement held against ours; `agrees` is None where it is shown and not counted."""

    table: str
    row: str
    kind: str
    printed: str
    ours: str
    agrees: bool | None
    other_text: str = ""  # what ours is measured on, where the table is of another corpus


def read_published(paths: Sequence[Path | str] | None = None) -> list[PublishedTable]:
    """Every table of the given files, or of those that come with pe_study and of reports/published/ here.

    UsageError in a line, naming file, key and what is accepted; also for two tables of one id.
    """
    names = {*shipped.names(FOLDER), *(str(path) for path in Path(FOLDER).glob("*.yaml"))}
    found: list[PublishedTable] = []
    seen: dict[str, Path] = {}
    for name in sorted(names) if paths is None else paths:
        file = shipped.find(name)
        paper, document = read_paper(file)
        for number, table in enumerate(paper.tables):
            if table.id in seen:
                raise UsageError(
                    f"{document.place(('tables', number))}: tables.{number}.id: {table.id} is also the id of "
                    f"a table of {seen[table.id]}; accepted: an id of its own"
                )
            seen[table.id] = file
            found.append(PublishedTable(paper.paper, paper.source, table.plain()))
    return found


def agreements(published: Sequence[PublishedTable], curves: pd.DataFrame) -> list[Agreement]:
    """What of the published tables these curves can be held against, and whether they agree."""
    ours = curves[curves["perplexity"].notna()]
    found: list[Agreement] = []
    for table in published:
        if table.data["metric"] != "perplexity":
            continue
        found += [one for row in table.rows for one in _reruns(table, row, ours)]
        if table.data["compare"] == "ratio":
            found += _ratios(table, ours)
        if table.data["compare"] == "ordering":
            found += _orderings(table, ours)
    return list(dict.fromkeys(found))


def alike(published: Sequence[PublishedTable], rows: pd.DataFrame) -> list[PublishedTable]:
    """The tables of a corpus that ours is called by, or of a checkpoint that was evaluated."""
    corpora = set(rows["corpus"].astype(str).unique())
    models = {plain_name(name) for name in rows["model"].astype(str).unique()} - {""}
    return [table for table in published if _shares(table, corpora, models)]


def _shares(table: PublishedTable, corpora: set[str], models: set[str]) -> bool:
    checkpoints = {plain_name(str(row["checkpoint"])) for row in table.rows if row.get("checkpoint")}
    return any(same_corpus(table.data.get("corpus"), name) for name in corpora) or bool(checkpoints & models)


def _own(ours: pd.DataFrame, table: PublishedTable) -> pd.DataFrame:
    """Our own trained runs under the table's protocol, or under the first that was run."""
    plain = ours[(ours["rescale"] == "none") & (ours["train_length"] > 0)]
    ran = protocols_of(plain)
    protocol = table.data.get("protocol")
    return plain[plain["protocol"] == (protocol if protocol in ran else next(iter(ran), ""))]


def _reruns(table: PublishedTable, row: Mapping[str, Any], ours: pd.DataFrame) -> list[Agreement]:
    """The same checkpoint evaluated by us, a study and corpus at a time."""
    kind, checkpoint = table.compare(row), row.get("checkpoint")
    if kind not in ("rerun", "disputed") or not checkpoint:
        return []
    name = str(checkpoint).lower()
    same = ours[ours["model"].astype(str).str.lower().isin([name, name.split("/")[-1]])]
    same = same[same["rescale"] == (row.get("rescale") or "none")]
    same = same[same["protocol"] == table.data.get("protocol")]
    values = {n: float(v) for n, v in row["values"].items() if v is not None}
    same = same[same["length"].isin(values)]
    return [
        _rerun(table, row, part, str(corpus), values)
        for (_, corpus), part in same.groupby(["study", "corpus"], observed=True, sort=False)
    ]


def _rerun(
    table: PublishedTable,
    row: Mapping[str, Any],
    part: pd.DataFrame,
    corpus: str,
    values: Mapping[int, float],
) -> Agreement:
    """Every shared length within the tolerance; not counted on text of another name."""
    kind = table.compare(row)
    shared = part.drop_duplicates("length")
    pairs = [(int(n), values[int(n)], p) for n, p in zip(shared["length"], shared["perplexity"], strict=True)]
    like = same_corpus(table.data.get("corpus"), corpus)
    tolerance = float(table.data.get("tolerance", 0.03))
    near = all(abs(printed - p) <= tolerance for _, printed, p in pairs)
    return Agreement(
        table=table.id,
        row=str(row["name"]),
        kind=kind,
        printed=", ".join(f"{printed:g} at {n:,}" for n, printed, _ in pairs),
        ours=", ".join(f"{p:.2f} at {n:,}" for n, _, p in pairs),
        agrees=near if kind == "rerun" and like else None,
        other_text="" if like else corpus or "unknown",
    )


def _ratios(table: PublishedTable, ours: pd.DataFrame) -> list[Agreement]:
    """Perplexity at about twice the training length over that at it, within the printed range."""
    ratios = table.data["ratios"]
    times = ratios["longer"] / ratios["shorter"]
    found = []
    for encoding, (low, high) in ratios["ranges"].items():
        for (study, label), part in _grouped(_own(ours, table), encoding):
            by_times = {n / t: p for n, t, p in part[["length", "train_length", "perplexity"]].to_numpy()}
            near = min(by_times, key=lambda multiple: abs(math.log(multiple / times)))
            if 1.0 not in by_times or not 1 / NEARBY < near / times < NEARBY:
                continue
            value = by_times[near] / by_times[1.0]
            found.append(
                Agreement(
                    str(table.data.get("ratio_group") or table.id),
                    f"{label} ({study})",
                    "ratio",
                    f"{low:g} to {high:g} at about {times:.2g}\u00d7",
                    f"{value:.3g} at {near:.3g}\u00d7{_protocol_text(table, part)}",
                    bool(low <= value <= high),
                )
            )
    return found


def _orderings(table: PublishedTable, ours: pd.DataFrame) -> list[Agreement]:
    """The order of two encodings at each printed multiple of the training length that ours have too."""
    start = table.data.get("train_length")
    own = _own(ours, table)
    if not start or own.empty:
        return []
    return [
        one for _, part in own.groupby("study", observed=True) for one in _study_orderings(table, part, start)
    ]


def _study_orderings(table: PublishedTable, own: pd.DataFrame, start: int) -> list[Agreement]:
    """Of one study: an order across studies would not be like for like."""
    multiple = own["length"] / own["train_length"]
    protocol = _protocol_text(table, own)
    found = []
    rows = [row for row in table.rows if row.get("encoding")]
    for first, second in itertools.combinations(rows, 2):
        for length, value in first["values"].items():
            other = second["values"].get(length)
            near = own[(multiple / (length / start)).between(1 / NEARBY, NEARBY)]
            left, right = (near[near["encoding"] == row["encoding"]]["perplexity"] for row in (first, second))
            if value is None or other is None or left.empty or right.empty:
                continue
            order, mine = value < other, bool(left.iloc[0] < right.iloc[0])
            a, b = (first["name"], second["name"]) if order else (second["name"], first["name"])
            text = f"{left.iloc[0]:.4g} and {right.iloc[0]:.4g}{protocol}"
            found.append(
                Agreement(table.id, f"{first['name']}, {second['name']}", "ordering",
                          f"{a} below {b} at {length / start:.3g}\u00d7", text, order == mine)
            )  # fmt: skip
    return found


def _protocol_text(table: PublishedTable, own: pd.DataFrame) -> str:
    """The protocol of ours, named where it is not the table's."""
    used = str(own["protocol"].iloc[0])
    return "" if used == table.data.get("protocol") else f" ({used}, printed: {table.data.get('protocol')})"


def _grouped(own: pd.DataFrame, encoding: str) -> Any:
    return own[own["encoding"] == encoding].groupby(["study", "label"], observed=True)


def agreement_sentence(found: Sequence[Agreement]) -> str:
    """How many of the printed statements that ours can be held against agree, and what is not counted."""
    counted = [one for one in found if one.agrees is not None]
    kinds = {"rerun": "reruns", "ratio": "ratios", "ordering": "orders of two encodings"}
    parts = [
        f"{sum(bool(one.agrees) for one in of_kind)} of {len(of_kind)} {words}"
        for kind, words in kinds.items()
        if (of_kind := [one for one in counted if one.kind == kind])
    ]
    disputed = sum(one.kind == "disputed" and not one.other_text for one in found)
    texts = ", ".join(sorted({one.other_text for one in found if one.other_text}))
    aside = [f"{disputed} disputed"] if disputed else []
    if texts:
        aside.append(f"{sum(bool(one.other_text) for one in found)} of another corpus than ours ({texts})")
    if not parts:
        return f"No published number can be held against these: {' and '.join(aside)}, not counted."
    tail = f"; {' and '.join(aside)}, not counted" if aside else ""
    return f"Of the published numbers that these can be held against, {', '.join(parts)} agree{tail}."


def agreement_table(found: Sequence[Agreement]) -> pd.DataFrame:
    """The agreements as a table."""
    return pd.DataFrame(
        {
            "published": [one.table for one in found],
            "of": [one.row for one in found],
            "kind": [one.kind for one in found],
            "printed": [one.printed for one in found],
            "ours": [one.ours for one in found],
            "agrees": [_verdict(one) for one in found],
        }
    )


def _verdict(one: Agreement) -> str:
    if one.other_text:
        return f"not counted (ours is of {one.other_text})"
    return {True: "yes", False: "no", None: "not counted"}[one.agrees]
