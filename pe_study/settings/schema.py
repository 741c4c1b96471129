"""Sections of recipes and plans: mappings of known keys, errors that name what was found, a reference table.

Every leaf is `Annotated[type, Accepts(...)]`, see `pe_study.settings.leaves`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, TypeVar, get_args, get_origin

from pydantic import BaseModel, ConfigDict, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails, to_jsonable_python

from pe_study.errors import PEStudyError, did_you_mean
from pe_study.settings.leaves import Accepts
from pe_study.settings.yaml_strict import Document, KeyPath, describe, dotted


class Section(BaseModel):
    """A mapping of known keys, immutable once read."""

    model_config = ConfigDict(frozen=True, extra="forbid")


SectionT = TypeVar("SectionT", bound=Section)


def validate(section: type[SectionT], document: Document, error: type[PEStudyError]) -> SectionT:
    """The section a document describes, or `error` naming file, key path, what was found and accepted."""
    try:
        return section.model_validate(document.value)
    except ValidationError as invalid:
        raise error(_explain(invalid, section, document)) from None


def reference(section: type[Section], prefix: str = "") -> Iterator[tuple[str, str, str, str]]:
    """(key, accepted, default, description) of every key of a section and of those inside it, in order."""
    for key, info in _keys(section).items():
        inner, is_list = _section_of(info.annotation), get_origin(info.annotation) is tuple
        marks = [mark for mark in info.metadata if isinstance(mark, Accepts)]
        if inner is None or is_list:
            item = _item_phrase(info.annotation)
            accepted = marks[0].phrase if marks else f"a list, each {item}" if item else "a list"
            if marks or is_list:
                yield f"{prefix}{key}", accepted, _default(info), info.description or ""
        if inner is not None:
            yield from reference(inner, f"{prefix}{key}.N." if is_list else f"{prefix}{key}.")


def _keys(section: type[Section]) -> dict[str, FieldInfo]:
    """The keys of a section as they are written in YAML."""
    return {info.alias or field: info for field, info in section.model_fields.items()}


def _item_phrase(annotation: Any) -> str:
    """What the items of a list accept, where they are leaves."""
    items = [mark for item in get_args(annotation) for mark in getattr(item, "__metadata__", ())]
    return next((mark.phrase for mark in items if isinstance(mark, Accepts)), "")


def _default(info: FieldInfo) -> str:
    if info.is_required():
        return "required"
    default = info.get_default(call_default_factory=True)
    return json.dumps(to_jsonable_python(default), ensure_ascii=False)


def _explain(invalid: ValidationError, section: type[Section], document: Document) -> str:
    """One line for the first problem; unknown keys first, since they explain the missing ones."""
    parents = {found["loc"][:depth] for found in invalid.errors() for depth in range(len(found["loc"]))}
    errors = [found for found in invalid.errors() if found["loc"] not in parents]  # not "too short" as well
    errors.sort(key=lambda found: found["type"] != "extra_forbidden")
    first = errors[0]
    path: KeyPath = tuple(first["loc"])
    more = f" (and {len(errors) - 1} more)" if len(errors) > 1 else ""
    return f"{document.place(path)}: {dotted(path) or 'the file'}: {_message(first, section)}{more}"


def _message(found: ErrorDetails, section: type[Section]) -> str:
    kind, path = found["type"], tuple(found["loc"])
    if kind in ("extra_forbidden", "invalid_key"):
        return f"unknown key; {_suggest(path, section)}"
    if kind == "missing":
        return "this key is required"
    if kind == "problem":
        return found["msg"]
    accepted = {"model_type": "a mapping", "model_attributes_type": "a mapping", "tuple_type": "a list"}
    phrase = accepted.get(kind, found["msg"])
    if kind == "too_short":
        return f"found an empty list; accepted: a list of at least {found['ctx']['min_length']}"
    return f"found {describe(found['input'])}; accepted: {phrase}"


def _suggest(path: KeyPath, section: type[Section]) -> str:
    """The known key nearest to an unknown one: a sibling, or the same word in another section."""
    word, parent = str(path[-1]), section
    for part in path[:-1]:
        info = _keys(parent).get(str(part))
        inner = _section_of(info.annotation) if info else None
        parent = inner or parent
    elsewhere = [key for key, *_ in reference(section) if key.rpartition(".")[2] == word]
    if elsewhere:  # a section's own key before that of a list's items
        return f'did you mean "{min(elsewhere, key=lambda key: ".N." in key)}"?'
    return did_you_mean(word, _keys(parent))


def _section_of(annotation: Any) -> type[Section] | None:
    """The section inside an annotation: itself, or the item of `tuple[Section, ...]`."""
    for candidate in (annotation, *get_args(annotation)):
        if isinstance(candidate, type) and issubclass(candidate, Section):
            return candidate
    return None
