"""What papers' printed numbers say beside ours: each statement, what it is held against, the words for all.

What agreement means stands in each printed table: `rerun` (checkpoint and corpus, within the tolerance),
`ratio` (own runs: the ratio of two perplexities, in the printed unit, within a range), `ordering` (own runs:
the same order of encodings at about the same multiple of the training length) or `disputed` (shown, never
counted). Nothing of another corpus or protocol than the printed one is counted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pandas as pd

from pe_study.reporting.captions import joined
from pe_study.reporting.published import PublishedTable


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
    other_protocol: str = ""  # what ours is measured under, where the table is of another protocol


@dataclass(frozen=True)
class Unheld:
    """A printed table without a number that ours can be held against, and why."""

    table: PublishedTable
    reason: str


def agreement_sentence(found: Sequence[Agreement]) -> str:
    """How many of the printed statements that ours can be held against agree, and what is not counted."""
    counted = [one for one in found if one.agrees is not None]
    kinds = {"rerun": "reruns", "ratio": "ratios", "ordering": "orders of two encodings"}
    parts = [
        f"{sum(bool(one.agrees) for one in of_kind)} of {len(of_kind)} {words}"
        for kind, words in kinds.items()
        if (of_kind := [one for one in counted if one.kind == kind])
    ]
    aside = _not_counted(found)
    if not parts:
        none = "No published number can be held against these"
        return f"{none}: {joined(aside)}, not counted." if aside else f"{none}."
    tail = f"; {joined(aside)}, not counted" if aside else ""
    return f"Of the published numbers that these can be held against, {', '.join(parts)} agree{tail}."


def _not_counted(found: Sequence[Agreement]) -> list[str]:
    others = [one for one in found if not one.other_text]
    texts = [one.other_text for one in found if one.other_text]
    protocols = [one.other_protocol for one in others if one.other_protocol]
    disputed = sum(one.kind == "disputed" for one in others)
    said = [f"{disputed} disputed"] if disputed else []
    for what, of in (("of another corpus", texts), ("under another protocol", protocols)):
        said += [f"{len(of)} {what} than ours ({', '.join(sorted(set(of)))})"] if of else []
    return said


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
    if one.other_protocol:
        return f"not counted (ours is under {one.other_protocol})"
    return {True: "yes", False: "no", None: "not counted"}[one.agrees]
