"""Where text comes from: each source yields (name, text) pairs in a fixed order, one document at a time.

A source is opened once, so that what is wrong with it is known before any work, and read as often as needed.
"""

from __future__ import annotations

import io
import json
import os
import sysconfig
import tokenize
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pe_study.errors import DataError, did_you_mean

Texts = Iterator[tuple[str, str]]

TEXT_SUFFIXES = (".txt", ".md", ".tex", ".py", ".rst", ".raw", ".tokens")  # the last two: WikiText's
SUFFIXES = (*TEXT_SUFFIXES, ".jsonl", ".parquet")
_NOT_LIBRARY = {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test"}
_ROWS_AT_ONCE = 256


@dataclass(frozen=True)
class Source:
    """A readable corpus: `texts()` starts a new pass over it."""

    name: str
    texts: Callable[[], Texts]


def standard_library() -> Source:
    """The source text of the running interpreter's standard library, a document a file, tests left out."""
    root = Path(sysconfig.get_path("stdlib"))
    return Source("stdlib", lambda: _library_texts(root))


def _library_texts(root: Path) -> Texts:
    for name, path in _walk(root, lambda part: part in _NOT_LIBRARY):
        if path.suffix != ".py" or path.name.startswith("_sysconfigdata"):  # the latter holds build paths
            continue
        data = path.read_bytes()
        try:
            encoding, _ = tokenize.detect_encoding(io.BytesIO(data).readline)  # PEP 263
            yield name, data.decode(encoding)
        except (SyntaxError, UnicodeDecodeError):
            continue


def files(path: Path, text_field: str) -> Source:
    """A text, JSONL or Parquet file, or a folder of them in the order of their names.

    Raises DataError naming the path when it is of another kind, or holds no such file.
    """
    if not path.is_dir():
        if path.suffix.lower() not in SUFFIXES:
            raise DataError(f'{path}: "{path.suffix}" is not read (accepted: {", ".join(SUFFIXES)})')
        return Source(str(path), lambda: _file_texts(path, path.name, text_field))
    found = [(name, file) for name, file in _walk(path, _is_hidden) if file.suffix.lower() in SUFFIXES]
    if not found:
        raise DataError(f"{path}: no file to read in this folder (accepted: {', '.join(SUFFIXES)})")

    def texts() -> Texts:
        for name, file in found:
            yield from _file_texts(file, name, text_field)

    return Source(str(path), texts)


def rows(dataset: Any, name: str, text_field: str) -> Source:
    """The rows of a `datasets.Dataset`, read a few at a time."""
    field = _field(text_field, dataset.column_names, name)

    def texts() -> Texts:
        column = dataset.select_columns([field]).with_format(None)
        for start in range(0, len(column), _ROWS_AT_ONCE):
            for index, text in enumerate(column[start : start + _ROWS_AT_ONCE][field], start):
                where = f"{name}[{index}]"
                yield where, _as_text(text, where, field)

    return Source(name, texts)


def _walk(root: Path, skip: Callable[[str], bool]) -> list[tuple[str, Path]]:
    """(relative name, path) of the files under `root`, sorted by name, in folders that are not skipped."""
    found = []
    for folder, inner, names in os.walk(root):
        inner[:] = [part for part in inner if not skip(part)]
        found += [Path(folder, name) for name in names if not _is_hidden(name)]
    return sorted((_utf8_name(path.relative_to(root)), path) for path in found)


def _utf8_name(path: Path) -> str:
    """A relative path as text, the same in every locale."""
    return os.fsencode(path.as_posix()).decode("utf-8", "replace")


def _is_hidden(part: str) -> bool:
    return part.startswith(".")


def _file_texts(path: Path, name: str, text_field: str) -> Texts:
    suffix = path.suffix.lower()
    try:
        if suffix == ".jsonl":
            yield from _jsonl_texts(path, name, text_field)
        elif suffix == ".parquet":
            yield from _parquet_texts(path, name, text_field)
        else:
            yield name, _utf8(path.read_bytes(), path)
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror or error}") from error


def _utf8(data: bytes, path: Path, line: int | None = None) -> str:
    """Decode UTF-8, a byte order mark dropped, whatever the locale."""
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        where = f"{path}:{line}" if line else f"{path}"
        raise DataError(
            f"{where}: not UTF-8: byte 0x{data[error.start]:02x} at offset {error.start}\n"
            f"convert it first, for example: iconv -f latin1 -t utf-8 {path.name}"
        ) from error


def _jsonl_texts(path: Path, name: str, text_field: str) -> Texts:
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                row = json.loads(_utf8(line, path, number))
            except ValueError as error:
                raise DataError(f"{path}:{number}: not a line of JSON: {error}") from error
            if not isinstance(row, dict):
                raise DataError(f'{path}:{number}: expected an object with "{text_field}", got {row!r:.40}')
            field = _field(text_field, list(row), f"{path}:{number}")
            yield f"{name}:{number}", _as_text(row[field], f"{path}:{number}", field)


def _parquet_texts(path: Path, name: str, text_field: str) -> Texts:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(path) as table:
            field = _field(text_field, table.schema_arrow.names, str(path))
            number = 0
            for batch in table.iter_batches(batch_size=_ROWS_AT_ONCE, columns=[field]):
                for value in batch.column(0).to_pylist():
                    yield f"{name}:{number}", _as_text(value, f"{path} row {number}", field)
                    number += 1
    except pa.ArrowException as error:
        raise DataError(f"{path}: not a readable Parquet file: {str(error).splitlines()[0]}") from error


def _field(text_field: str, fields: list[str], where: str) -> str:
    if text_field not in fields:
        raise DataError(
            f'{where}: no field "{text_field}" (data.text_field): {did_you_mean(text_field, fields)}'
        )
    return text_field


def _as_text(value: Any, where: str, field: str) -> str:
    """A field's text; null is empty. Raises DataError for other types and for half a surrogate pair."""
    if value is None:
        return ""
    if not isinstance(value, str):
        raise DataError(f'{where}: field "{field}" is {type(value).__name__}, not text (data.text_field)')
    try:
        value.encode("utf-8")
    except UnicodeEncodeError as error:
        raise DataError(
            f'{where}: field "{field}" holds half a surrogate pair; no UTF-8 text has it'
        ) from error
    return value
