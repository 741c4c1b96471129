"""YAML as people mean it, with the file and line of every value.

PyYAML follows YAML 1.1, where `5e-5` is text, `on` is true, `01` is 1, `1:30` is 90 and `2024-01-01` is
a date. Here the scalars are those of YAML 1.2 without its surprises: `true`/`false`, `null`, decimal
numbers with or without an exponent; everything else is text, for a schema to accept or refuse. Duplicate
keys, numbers that are not finite, tags, recursive anchors and alias bombs are errors. Files are read as
UTF-8 whatever the locale.
"""

from __future__ import annotations

import math
import re
from collections.abc import Hashable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from pe_study.errors import PEStudyError, RecipeError, did_you_mean

KeyPath = tuple[str | int, ...]

MAX_NODES = 100_000  # after aliases are expanded: far above any recipe, far below an alias bomb

_TAG = "tag:yaml.org,2002:"
_IMPLICIT = {
    "null": (re.compile(r"^(?:~|null|Null|NULL|)$"), ["~", "n", "N", ""]),
    "bool": (re.compile(r"^(?:true|True|TRUE|false|False|FALSE)$"), list("tTfF")),
    "int": (re.compile(r"^[-+]?(?:0|[1-9][0-9]*)$"), list("-+0123456789")),
    "float": (
        re.compile(
            r"^(?:[-+]?(?:\.[0-9]+|(?:0|[1-9][0-9]*)(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?"
            r"|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN))$"
        ),
        list("-+0123456789."),
    ),
    "merge": (re.compile(r"^<<$"), ["<"]),
}


@dataclass(frozen=True)
class Place:
    """Where a value was written: a file and a line, or the command line."""

    file: str
    line: int | None = None

    def __str__(self) -> str:
        return self.file if self.line is None else f"{self.file}:{self.line}"


@dataclass(frozen=True)
class Document:
    """A value read from YAML and the place of each key path in it.

    `replaced` holds the key paths whose mapping replaces what an included file says, instead of merging.
    """

    value: Any
    places: dict[KeyPath, Place]
    replaced: frozenset[KeyPath] = field(default=frozenset())

    def place(self, path: KeyPath) -> Place:
        """The place of `path`, or of the nearest thing around it that was written down."""
        while path not in self.places and path:
            path = path[:-1]
        return self.places[path]

    def latest(self, path: KeyPath) -> Place:
        """The place of `path`, or of an override of something inside it."""
        inside = [place for known, place in self.places.items() if known[: len(path)] == path]
        return next((place for place in inside if place.line is None), self.place(path))


def dotted(path: KeyPath) -> str:
    """`("encodings", 1, "label")` as `encodings.1.label`, the spelling of an override."""
    return ".".join(str(part) for part in path)


class _Loader(yaml.SafeLoader):
    """Starts without YAML 1.1's idea of what a plain scalar means."""


class _Dumper(yaml.SafeDumper):
    """Quotes whatever this loader or a YAML 1.1 loader would take for something other than text."""

    def ignore_aliases(self, data: object) -> bool:
        return True


def _represent_text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    """Line breaks of Unicode are escaped: PyYAML folds them to spaces in other styles."""
    style = '"' if not text.isprintable() else None
    return dumper.represent_scalar(_TAG + "str", text, style=style)


_Dumper.add_representer(str, _represent_text)
_Loader.yaml_implicit_resolvers = {}
for _name, (_pattern, _first) in _IMPLICIT.items():
    _Loader.add_implicit_resolver(_TAG + _name, _pattern, _first)
    _Dumper.add_implicit_resolver(_TAG + _name, _pattern, _first)


def read_mapping(path: str | Path, error: type[PEStudyError] = RecipeError, asked_by: str = "") -> Document:
    """Read a YAML file whose top level is a mapping.

    `asked_by` is put before the message when the file itself cannot be read ("demo.yaml:2: include: ").
    Raises `error` naming file and line, for whatever the file holds.
    """
    document = parse(_read_text(Path(path), error, asked_by), str(path), error)
    if document.value is None:
        raise error(f"{path}: the file is empty; accepted: a mapping of keys to values")
    if not isinstance(document.value, dict):
        raise error(f"{document.place(())}: found {describe(document.value)}; accepted: a mapping")
    return document


def parse(
    text: str, file: str, error: type[PEStudyError] = RecipeError, inside: KeyPath | None = None
) -> Document:
    """The value of one YAML document; `file` is what messages call it. Raises `error`, never another.

    `inside` is the key path that the text is the value of, where it is no file and has no lines.
    """
    converter = _Converter(file, error, has_lines=inside is None)
    root = inside or ()
    try:
        node = yaml.compose(text, Loader=_Loader)
        if node is None:
            return Document(None, {root: converter.place(0)})
        return Document(converter.convert(node, root), converter.places)
    except yaml.MarkedYAMLError as problem:
        mark = problem.problem_mark or problem.context_mark
        place = converter.place(mark.line if mark else 0)
        raise error(f"{place}: not valid YAML: {problem.problem or problem.context}") from None
    except yaml.reader.ReaderError as problem:
        place = converter.place(text.count("\n", 0, problem.position))
        raise error(f"{place}: not valid YAML: a character that text cannot hold") from None
    except RecursionError:
        raise error(f"{file}: nested too deeply") from None
    except (ValueError, OverflowError) as problem:  # PyYAML lets chr(0xFFFFFFFF) of an escape through
        raise error(f"{file}: not valid YAML: {problem}") from None


def dump(value: object) -> str:
    """Plain data as YAML that `parse` reads back to an equal value, keys in their given order."""
    return yaml.dump(
        value, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=110, default_flow_style=None
    )


def describe(value: object) -> str:
    """What was found, for an error message: `the text "on"`, `true`, `-3`, `a list`, `nothing`."""
    if isinstance(value, str):
        return f'the text "{value if len(value) <= 60 else value[:57] + "..."}"'
    if isinstance(value, bool):
        return str(value).lower()
    if value is None:
        return "nothing"
    if isinstance(value, dict):
        return "a mapping"
    return "a list" if isinstance(value, list | tuple) else str(value)


def _read_text(path: Path, error: type[PEStudyError], asked_by: str) -> str:
    try:
        raw = path.read_bytes()
    except FileNotFoundError:
        siblings = sorted(sibling.name for sibling in path.parent.glob("*.yaml"))
        hint = f"; {did_you_mean(path.name, siblings)}" if siblings else ""
        raise error(f"{asked_by}{path}: no such file{hint}") from None
    except IsADirectoryError:
        raise error(f"{asked_by}{path}: found a folder; accepted: a YAML file") from None
    except ValueError:  # a NUL in the name
        raise error(f"{asked_by}{str(path)!r} is not a file name") from None
    except OSError as problem:
        raise error(f"{asked_by}{path}: cannot be read: {problem.strerror}") from None
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as problem:
        line = raw.count(b"\n", 0, problem.start) + 1
        found = f"byte 0x{raw[problem.start]:02x}"
        raise error(f"{path}:{line}: found {found}, which is not UTF-8; accepted: UTF-8 text") from None


class _Converter:
    """Turns a node graph into plain data, recording the place of every key path."""

    def __init__(self, file: str, error: type[PEStudyError], has_lines: bool) -> None:
        self.file = file
        self.error = error
        self.has_lines = has_lines
        self.places: dict[KeyPath, Place] = {}
        self.open: set[int] = set()
        self.num_nodes = 0

    def fail(self, node: yaml.Node, path: KeyPath, message: str) -> PEStudyError:
        key = f"{dotted(path)}: " if path else ""
        return self.error(f"{self.place(node.start_mark.line)}: {key}{message}")

    def place(self, line: int) -> Place:
        """The place of a line that PyYAML counts from 0."""
        return Place(self.file, line + 1 if self.has_lines else None)

    def convert(self, node: yaml.Node, path: KeyPath) -> Any:
        self.num_nodes += 1
        if self.num_nodes > MAX_NODES:
            raise self.fail(node, path, f"aliases expand to more than {MAX_NODES} values")
        self.places.setdefault(path, self.place(node.start_mark.line))
        if isinstance(node, yaml.ScalarNode):
            return self.scalar(node, path)
        if node.tag not in (_TAG + "seq", _TAG + "map"):
            raise self.fail(node, path, f"found the tag {node.tag}; accepted: values without tags")
        if id(node) in self.open:
            raise self.fail(node, path, "found an anchor that contains itself")
        self.open.add(id(node))
        if isinstance(node, yaml.SequenceNode):
            value: Any = [self.convert(item, (*path, i)) for i, item in enumerate(node.value)]
        else:
            assert isinstance(node, yaml.MappingNode)
            value = self.mapping(node, path)
        self.open.remove(id(node))
        return value

    def mapping(self, node: yaml.MappingNode, path: KeyPath) -> dict[str | int, Any]:
        lines: dict[Hashable, int] = {}
        merged: dict[str | int, Any] = {}
        own: dict[str | int, Any] = {}
        for key_node, value_node in node.value:
            is_merge = key_node.tag == _TAG + "merge"
            key = "<<" if is_merge else self.key(key_node, path)
            line = key_node.start_mark.line
            if key in lines:
                raise self.fail(key_node, (*path, key), f"found twice; first on line {lines[key] + 1}")
            lines[key] = line
            if is_merge:
                merged = self.merge(value_node, path)
            else:
                self.places[(*path, key)] = self.place(line)
                own[key] = self.convert(value_node, (*path, key))
        return {**merged, **own}

    def merge(self, node: yaml.Node, path: KeyPath) -> dict[str | int, Any]:
        """What `<<` brings in: a mapping, or a list of mappings of which the earlier win."""
        sources = node.value if isinstance(node, yaml.SequenceNode) else [node]
        merged: dict[str | int, Any] = {}
        for source in sources:
            if not isinstance(source, yaml.MappingNode):
                raise self.fail(source, (*path, "<<"), "accepted: a mapping, or a list of mappings")
            merged = {**self.convert(source, path), **merged}
        return merged

    def key(self, node: yaml.Node, path: KeyPath) -> str | int:
        key = self.scalar(node, path) if isinstance(node, yaml.ScalarNode) else None
        if isinstance(key, bool) or not isinstance(key, str | int):
            raise self.fail(node, path, "found a key that is neither text nor a whole number")
        return key

    def scalar(self, node: yaml.ScalarNode, path: KeyPath) -> str | int | float | bool | None:
        kind, text = node.tag.removeprefix(_TAG), node.value
        if kind == "str":
            if any(char == "\0" or "\ud800" <= char <= "\udfff" for char in text):
                raise self.fail(node, path, "found a character that text cannot hold")
            return text
        if kind not in ("null", "bool", "int", "float") or not _IMPLICIT[kind][0].match(text):
            raise self.fail(node, path, f"found {node.tag} {text!r}; accepted: values without tags")
        if kind == "null":
            return None
        if kind == "bool":
            return text.lower() == "true"
        value = int(text) if kind == "int" and len(text) <= 20 else float(_plain(text))
        if not math.isfinite(value) or (kind == "int" and abs(value) >= 2**63):
            raise self.fail(node, path, f"found {text[:40]}; accepted: finite numbers of at most 64 bits")
        return value


def _plain(text: str) -> str:
    """`.inf` and `.nan` as Python spells them."""
    return re.sub(r"^([-+]?)\.(inf|nan)$", r"\1\2", text.lower())
