"""What a report shows: reports/*.yaml, read strictly."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from pe_study.errors import UsageError, did_you_mean
from pe_study.settings.yaml_strict import describe, read_mapping
from pe_study.tables import METRICS

FIGURES = (
    "length",
    "differences",
    "protocols",
    "decomposition",
    "position",
    "rescale",
    "retrieval",
    "controls",
    "attention",
    "over_training",
    "training",
    "cost",
)
TABLES = ("main", "verdicts", "comparisons", "published", "rates", "cost", "cells")


@dataclass(frozen=True)
class View:
    """A report's choices; the defaults show everything that the rows can show."""

    title: str | None = None
    metric: str = "bits_per_byte"
    protocol: str | None = None
    figures: tuple[str, ...] = FIGURES
    tables: tuple[str, ...] = TABLES
    lengths: tuple[int, ...] | None = None
    attention_run: str | None = None  # whose heads are drawn; None = the first that was measured
    published: bool = False  # also printed tables of other corpora than ours
    places: Mapping[str, str] = field(default_factory=dict, compare=False)  # where each key was written

    def check(self, known: Mapping[str, Collection[Any]]) -> None:
        """UsageError for a value of `protocol`, `lengths` or `attention_run` that nothing measured goes by.

        `known`: what there is, by key; a key without any is not checked, since nothing is measured yet.
        """
        for key, accepted in known.items():
            asked = getattr(self, key)
            values = list(asked) if isinstance(asked, tuple) else [] if asked is None else [asked]
            strange = [value for value in values if value not in accepted]
            if strange and accepted:
                words = ", ".join(str(value) for value in accepted)
                raise UsageError(
                    f"{self.places.get(key, key)}: found {', '.join(map(describe, strange))}, which was not "
                    f"measured; accepted: {words}"
                )


def read_view(path: Path | str | None) -> View:
    """The view of a file, or the default one. UsageError naming file, line and key."""
    if path is None:
        return View()
    document = read_mapping(path, UsageError)
    names = [one.name for one in fields(View) if one.name != "places"]
    values: dict[str, Any] = {}
    places: dict[str, str] = {}
    for key, value in document.value.items():
        where = f"{document.place((key,))}: {key}"
        if key not in names:
            raise UsageError(f"{where}: unknown key; {did_you_mean(str(key), names)}")
        values[key] = _check(key, value, where)
        places[key] = where
    return View(**values, places=places)


def _check(key: str, value: Any, where: str) -> Any:
    if key == "metric":
        return _one_of(value, tuple(METRICS), where)
    if value is None and key in ("title", "protocol", "attention_run", "lengths"):
        return None
    if key in ("title", "protocol", "attention_run"):
        if not isinstance(value, str):
            raise UsageError(f"{where}: found {describe(value)}; accepted: text or null")
        return value
    if key == "published":
        if not isinstance(value, bool):
            raise UsageError(f"{where}: found {describe(value)}; accepted: true or false")
        return value
    if not isinstance(value, list):
        raise UsageError(f"{where}: found {describe(value)}; accepted: a list")
    if key == "lengths":
        if not value or not all(type(item) is int and item > 0 for item in value):
            raise UsageError(f"{where}: accepted: positive whole numbers")
        return tuple(value)
    return tuple(_one_of(item, FIGURES if key == "figures" else TABLES, where) for item in value)


def _one_of(value: Any, names: tuple[str, ...], where: str) -> str:
    if value in names:
        return str(value)
    raise UsageError(f"{where}: found {describe(value)}; {did_you_mean(str(value), names)}")
