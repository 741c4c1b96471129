"""Files that include files, and `key=value` overrides on top; every value keeps its place."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from pe_study import shipped
from pe_study.errors import PEStudyError, did_you_mean
from pe_study.settings import yaml_strict
from pe_study.settings.yaml_strict import Document, KeyPath, Place, describe, dotted

Prepare = Callable[[Document, Path], Document]


def read(
    path: str | Path,
    error: type[PEStudyError],
    prepare: Prepare = lambda document, path: document,
    asked_by: str = "",
    chain: tuple[Path, ...] = (),
) -> Document:
    """A YAML mapping with what its `include` names merged below it.

    `include` is a file or a list of files, later ones on top, found as `find` says. Mappings merge key by
    key; lists and scalars replace. `prepare(document, path)` may rewrite a file's own layer before it is
    merged. Raises `error` with the including file and line.
    """
    path = Path(path)
    document = yaml_strict.read_mapping(path, error, asked_by)
    chain = (*chain, path.resolve())
    merged = Document({}, {(): document.place(())})
    for name, place in _includes(document, error):
        asked = f"{place}: include: "
        target = find(name, path)
        if target.resolve() in chain:
            raise error(f"{asked}{target} is being read already; files cannot include each other in a circle")
        merged = merge(merged, read(target, error, prepare, asked, chain))
    own = {key: value for key, value in document.value.items() if key != "include"}
    return merge(merged, prepare(Document(own, document.places), path))


def find(name: str, path: Path) -> Path:
    """The file that `path` names: beside it, in the folder above, in the working folder, or shipped."""
    candidates = [path.parent / name, path.parent.parent / name, shipped.find(name)]
    return next((candidate for candidate in candidates if candidate.is_file()), candidates[0])


def merge(below: Document, above: Document) -> Document:
    """`above` laid over `below`: mappings merge, anything else replaces; every value keeps its place."""
    places = dict(below.places)

    def lay(low: Any, high: Any, path: KeyPath) -> Any:
        if isinstance(low, dict) and isinstance(high, dict) and path not in above.replaced:
            return low | {key: lay(low.get(key), value, (*path, key)) for key, value in high.items()}
        for known in [known for known in places if known[: len(path)] == path]:
            del places[known]
        return high

    value = lay(below.value, above.value, ())
    return Document(value, places | above.places)


def override(document: Document, text: str, error: type[PEStudyError]) -> Document:
    """Lay one `train.lr=3e-4` over a document; the value is read as YAML.

    A part of the key picks an entry of a list by its number, its `label` or its `name`
    (`encodings.0.base=1e6`, `encodings.rope.base=1e6`). Raises `error` for what is not `key=value`.
    """
    text = _utf8(text, error)
    key, equals, value_text = text.partition("=")
    parts = key.strip().split(".")
    if not equals or not all(parts):
        raise error(f'override "{text}": accepted: key=value, such as train.lr=3e-4')
    place = Place(f'override "{text}"')
    new = yaml_strict.parse(value_text, str(place), error, inside=tuple(parts)).value
    places = dict(document.places)
    path: KeyPath = ()

    def fail(message: str) -> PEStudyError:
        return error(f"{place}: {dotted(path)}: {message}")

    def descend(value: Any, rest: list[str]) -> Any:
        nonlocal path
        if not rest:
            both = merge(Document(value, {}), Document(new, {}))
            return both.value
        if isinstance(value, list):
            index = _index(value, rest[0], fail)
            path = (*path, index)
            entry = {"name": value[index]} if isinstance(value[index], str) and rest[1:] else value[index]
            return [*value[:index], descend(entry, rest[1:]), *value[index + 1 :]]
        if value is not None and not isinstance(value, dict):
            raise fail(f"found {describe(value)}, which has no keys")
        path = (*path, rest[0])
        return (value or {}) | {rest[0]: descend((value or {}).get(rest[0]), rest[1:])}

    value = descend(document.value, parts)
    for known in [known for known in places if known[: len(path)] == path]:
        del places[known]
    for depth in range(1, len(path) + 1):
        places.setdefault(path[:depth], place)
    return Document(value, places)


def _utf8(text: str, error: type[PEStudyError]) -> str:
    """An argument as it was typed: outside UTF-8 locales Python hands its bytes over as surrogates."""
    try:
        return text.encode("utf-8", "surrogateescape").decode("utf-8")
    except UnicodeError:
        raise error(f"override {text!a}: accepted: UTF-8 text") from None


def _includes(document: Document, error: type[PEStudyError]) -> list[tuple[str, Place]]:
    names = document.value.get("include", [])
    names = [names] if isinstance(names, str) else names
    place = document.place(("include",))
    if not isinstance(names, list) or not all(isinstance(name, str) and name for name in names):
        raise error(f"{place}: include: found {describe(names)}; accepted: a file name, or a list of them")
    return [(name, place) for name in names]


def _index(entries: list[Any], part: str, fail: Callable[[str], PEStudyError]) -> int:
    """Which entry of a list a part of an override's key means."""
    names = [str(e.get("label", e.get("name")) if isinstance(e, dict) else e) for e in entries]
    if part.isascii() and part.isdigit():
        if int(part) < len(entries):
            return int(part)
        raise fail(f"found entry {part}; accepted: 0 to {len(entries) - 1}")
    if names.count(part) != 1:
        raise fail(f'found "{part}" {names.count(part)} times; {did_you_mean(part, names)}')
    return names.index(part)
