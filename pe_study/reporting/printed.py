"""The schema of reports/published/*.yaml: papers' tables as printed (described at the top of alibi.yaml)."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, model_validator

from pe_study.errors import UsageError
from pe_study.plan import RESCALE
from pe_study.settings import schema
from pe_study.settings.leaves import Accepts, choice, file_name, number, optional, problem, text, whole
from pe_study.settings.protocols import PROTOCOLS
from pe_study.settings.schema import Section
from pe_study.settings.yaml_strict import Document, describe, read_mapping

COMPARE = ("rerun", "ratio", "ordering", "disputed")
LENGTH = whole(1, tokens=True)


def _values(value: Any) -> dict[Any, float | None]:
    if not isinstance(value, Mapping) or not value:
        raise ValueError
    for key, printed in value.items():
        if isinstance(printed, bool) or not (
            printed is None or (type(printed) in (int, float) and printed > 0)
        ):
            raise ValueError(f"above 0, or null (found {describe(printed)} at {key})")
    return dict(value)


def _ranges(value: Any) -> dict[str, tuple[float, float]]:
    if not isinstance(value, Mapping) or not value:
        raise ValueError
    for encoding, ends in value.items():
        if not (
            isinstance(encoding, str)
            and isinstance(ends, list)
            and [type(end) in (int, float) for end in ends] == [True, True]
            and 0 < ends[0] < ends[1]
        ):
            raise ValueError
    return dict(value)


VALUES = Accepts("a mapping of lengths (or tasks) to numbers or null", _values)
RANGES = Accepts("a mapping of encodings to [low, high], low above 0", _ranges)


class PrintedRatios(Section):
    """What a ratio of perplexities is held against."""

    longer: Annotated[int, LENGTH]
    shorter: Annotated[int, LENGTH]
    ranges: Annotated[dict[str, Any], RANGES]


class PrintedRow(Section):
    """One row of a table."""

    name: Annotated[str, text("a name")]
    values: Annotated[dict[Any, Any], VALUES]
    encoding: Annotated[str | None, optional(text("an encoding"))] = None
    rescale: Annotated[str | None, optional(RESCALE)] = None
    checkpoint: Annotated[str | None, optional(text("a hub id"))] = None
    compare: Annotated[str | None, optional(choice(*COMPARE))] = None


class PrintedTable(Section):
    """One table of a paper."""

    id: Annotated[str, file_name("an id")]
    title: Annotated[str, text("a title")]
    metric: Annotated[str, choice("perplexity", "speed", "memory", "mrr")]
    compare: Annotated[str, choice(*COMPARE)]
    rows: tuple[PrintedRow, ...] = Field(min_length=1)
    where: Annotated[str | None, optional(text())] = None
    setting: Annotated[str | None, optional(text())] = None
    unit_of_metric: Annotated[str | None, optional(text())] = None
    bytes_per_unit: Annotated[float | None, optional(number(above=0))] = None
    axis: Annotated[str, choice("length", "task")] = "length"
    train_length: Annotated[int | None, optional(LENGTH)] = None
    corpus: Annotated[str | None, optional(text("a corpus"))] = None
    protocol: Annotated[str | None, optional(choice(*PROTOCOLS))] = None
    unit: Annotated[str | None, optional(choice("document", "stream"))] = None
    plan: Annotated[str | None, optional(text("a plan"))] = None
    tolerance: Annotated[float, number(above=0)] = 0.03
    ratio_group: Annotated[str | None, optional(file_name("a name"))] = None
    ratios: PrintedRatios | None = None
    note: Annotated[str | None, optional(text())] = None

    @model_validator(mode="after")
    def _whole_table(self) -> PrintedTable:
        """Keys that need one another; a ValueError names the first that is missing."""
        kinds = {self.compare, *(row.compare for row in self.rows)}
        if "ratio" in kinds and self.ratios is None:
            raise problem("compare ratio needs the key ratios: {longer, shorter, ranges}")
        if self.compare == "ordering" and self.metric == "perplexity" and self.train_length is None:
            raise problem("compare ordering needs the key train_length")
        if "rerun" in kinds and (self.protocol is None or self.corpus is None):
            raise problem("compare rerun needs the keys protocol and corpus")
        reruns = [row for row in self.rows if (row.compare or self.compare) == "rerun"]
        if reruns and not any(row.checkpoint for row in reruns):
            raise problem("compare rerun needs the key checkpoint in a row")
        for row in self.rows:
            if self.axis == "length":
                for key in row.values:
                    self._length(key, row.name)
        return self

    @staticmethod
    def _length(key: Any, row: str) -> int:
        try:
            return int(LENGTH.parse(key))
        except ValueError:
            raise problem(
                f"row {row}: values: found {describe(key)} as a key; accepted: {LENGTH.phrase}"
            ) from None

    def plain(self) -> dict[str, Any]:
        """The keys that were given; lengths as whole numbers."""
        found = self.model_dump(exclude_unset=True)
        if self.axis == "length":
            for row in found["rows"]:
                row["values"] = {
                    self._length(key, row["name"]): value for key, value in row["values"].items()
                }
        return found


class PrintedPaper(Section):
    """One file: a paper and its tables."""

    paper: Annotated[str, text("what to cite")]
    source: Annotated[str, text("an address")]
    tables: tuple[PrintedTable, ...] = Field(min_length=1)


def read_paper(file: Path) -> tuple[PrintedPaper, Document]:
    """One file, checked. UsageError in a line: file, line, key, what was found and what is accepted."""
    document = read_mapping(file, UsageError)
    return schema.validate(PrintedPaper, document, UsageError), document


_SPLITS = ("train", "training", "validation", "valid", "dev", "test")


def same_corpus(printed: str | None, ours: str) -> bool:
    """Whether text that is called `ours` is of the corpus that a table names: "Proof-pile test" and
    "hoskinson-center/proof-pile", but not "proof-pile-2"."""
    words = (printed or "").split()
    while words and words[-1].lower() in _SPLITS:
        words.pop()
    name = plain_name("".join(words))
    return bool(name) and re.search(rf"(?<!\d){re.escape(name)}(?!\d)", plain_name(ours)) is not None


def plain_name(name: str) -> str:
    """Letters and digits, small: what two spellings of one name share."""
    return "".join(character for character in name.lower() if character.isalnum())
