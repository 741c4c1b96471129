"""What a corpus name means: the standard library, files, a saved data set, a data set folder, or a hub id."""

from __future__ import annotations

import difflib
import re
from pathlib import Path
from typing import Any

from pe_study import hub
from pe_study.errors import DataError, did_you_mean
from pe_study.text import sources
from pe_study.text.sources import Source

BUILT_IN = ("stdlib",)
_HUB_ID = re.compile(r"\w[\w.-]*(/[\w.-]+)?")


def open_source(
    name: str,
    *,
    text_field: str = "text",
    config: str | None = None,
    split: str = "train",
    revision: str | None = None,
) -> Source:
    """The source that a corpus name means. Raises DataError, also for options that would do nothing."""
    path = Path(name).expanduser()
    if name in BUILT_IN:
        _refuse(name, "the standard library has", config=config, split=split, revision=revision)
        return sources.standard_library()
    if path.is_dir() and (path / "dataset_dict.json").exists() | (path / "state.json").exists():
        _refuse(name, "a saved data set has", config=config, revision=revision)
        return sources.rows(_saved(path, split), name, text_field)
    if path.is_dir() and (config or _has_card(path)):
        _refuse(name, "a local folder has", revision=revision)
        return sources.rows(_loaded(path, config, split), name, text_field)
    if path.exists():
        _refuse(name, "plain files have", config=config, split=split, revision=revision)
        return sources.files(path, text_field)
    if not _looks_like_hub_id(name):
        raise DataError(f'data.corpus "{name}": no such file or folder')
    if difflib.get_close_matches(name, BUILT_IN, n=1):
        raise DataError(f'data.corpus "{name}": {did_you_mean(name, BUILT_IN)}')
    return sources.rows(_downloaded(name, config, split, revision), name, text_field)


def _refuse(name: str, what: str, **options: str | None) -> None:
    """Raises DataError for an option that would do nothing."""
    for key, value in options.items():
        if value is not None and (key, value) != ("split", "train"):
            hint = "; data.validation_fraction holds documents out" if key == "split" else ""
            raise DataError(f'data.corpus "{name}": {what} no {key} "{value}"{hint}')


def _looks_like_hub_id(name: str) -> bool:
    suffix = Path(name).suffix.lower()
    is_file = suffix in sources.SUFFIXES if "/" in name else bool(suffix)
    return bool(_HUB_ID.fullmatch(name)) and not is_file


def _has_card(path: Path) -> bool:
    """Whether a folder is a hub data set's: a README whose front matter describes data."""
    try:
        front = (path / "README.md").read_bytes()[:65536]
    except OSError:
        return False
    return front.startswith(b"---") and (b"\nconfigs:" in front or b"\ndataset_info:" in front)


def _saved(path: Path, split: str) -> Any:
    """A split of a folder that `save_to_disk` wrote."""
    import datasets

    try:
        loaded = datasets.load_from_disk(str(path))
    except Exception as error:  # any of the library's own
        raise _failure(str(path), error) from error
    if not isinstance(loaded, datasets.DatasetDict):
        _refuse(str(path), "a saved data set of one part has", split=split)
        return loaded
    if split not in loaded:
        raise DataError(f'data.corpus "{path}": no split "{split}": {did_you_mean(split, loaded)}')
    return loaded[split]


def _loaded(path: Path, config: str | None, split: str) -> Any:
    """A split of a local folder laid out as a data set of the Hub."""
    import datasets

    try:
        with hub.quiet():
            return datasets.load_dataset(str(path), config, split=split)
    except Exception as error:  # any of the library's own
        raise _failure(str(path), error) from error


def _downloaded(name: str, config: str | None, split: str, revision: str | None) -> Any:
    """A split of a data set of the Hub, or of its local cache."""
    import datasets

    try:
        with hub.quiet(), hub.no_retries():
            return datasets.load_dataset(name, config, split=split, revision=revision)
    except Exception as error:  # any of the library's own, or of its HTTP client
        raise _failure(name, error, hub.why()) from error


def _failure(name: str, error: Exception, why: str = "") -> DataError:
    reason = (str(error).strip().splitlines() or [type(error).__name__])[0][:300]
    return DataError(f'data.corpus "{name}": {reason}{why}')
