"""The rows that evaluations write and reports read, and the files they lie in. No torch here.

A row is long form: one document and position bin at one length. Columns and types are fixed, so that rows of
studies made months apart can be laid together.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from pe_study.errors import DataError
from pe_study.files import replacing

RESULTS, RETRIEVAL, OVER_TRAINING = "results.parquet", "retrieval.parquet", "over_training.parquet"
DIAGNOSTICS = "diagnostics.parquet"
LATE = "nonoverlapping-late"  # the part of nonoverlapping that exact-context draws from, for decompositions
QUANTISED_CHUNK = 256  # inputs a pass under an 8-bit cache: what lies further back is read quantised
NO_CONTROL = "none"  # `control` of a plain measurement; else such as `far_context=shuffled`

# pandas' nullable types: a number that is unknown is null, never 0 and never a NaN that looks computed.
_SUBJECT = {
    "study": "string",
    "run": "string",
    "model": "string",
    "encoding": "string",
    "label": "string",
    "seed": "Int64",
    "rescale": "string",
    "factor": "Float64",
    "kernel": "string",
    "mask_kind": "string",
    "dtype": "string",
}
ROW_COLUMNS: Mapping[str, str] = {
    **_SUBJECT,
    "protocol": "string",
    "stride": "Int64",
    "control": "string",
    "train_length": "Int64",
    "length": "Int64",
    "length_bytes": "Int64",
    "corpus": "string",
    "corpus_hash": "string",
    "tokenizer_hash": "string",
    "unit": "string",
    "bos": "boolean",
    "untrained_rows": "Int64",
    "document": "Int64",
    "position_lo": "Int64",
    "position_hi": "Int64",
    "nll_sum": "Float64",
    "num_tokens": "Int64",
    "num_bytes": "Int64",
    "num_windows": "Int64",
    "window_mean_sum": "Float64",
    "num_skipped": "Int64",
    "status": "string",
}
# Rows of snapshots on the way, in a file of their own since results.parquet holds finished runs alone: `step`
# updates made, `trained_tokens` seen by then, `device_hours` of updates (over all devices).
OVER_TRAINING_COLUMNS: Mapping[str, str] = {
    **ROW_COLUMNS,
    "step": "Int64",
    "trained_tokens": "Int64",
    "device_hours": "Float64",
}
RETRIEVAL_COLUMNS: Mapping[str, str] = {
    **_SUBJECT,
    "train_length": "Int64",
    "task": "string",
    "length": "Int64",
    "depth": "Float64",
    "sample": "Int64",
    "correct": "boolean",
    "target_logprob": "Float64",
    "rank": "Int64",
    "gain": "Float64",
    "status": "string",
}
# Two kinds of rows in one long table. `distance_lo` null: entropy_ratio, max_logit and mass_beyond of the
# queries in a position bin. Else `mass` is the mean attention mass of those queries on keys at distances
# [distance_lo, distance_hi), which together cover all. Bins of positions are those of results.parquet
# (context sizes, powers of two). `query_step` k: from index 128 on, every k-th query was measured.
DIAGNOSTICS_COLUMNS: Mapping[str, str] = {
    **_SUBJECT,
    "control": "string",
    "train_length": "Int64",
    "length": "Int64",
    "corpus": "string",
    "corpus_hash": "string",
    "tokenizer_hash": "string",
    "bos": "boolean",
    "num_documents": "Int64",
    "query_step": "Int64",
    "layer": "Int64",
    "head": "Int64",
    "position_lo": "Int64",
    "position_hi": "Int64",
    "num_queries": "Int64",
    "entropy_ratio": "Float64",
    "max_logit": "Float64",
    "mass_beyond": "Float64",
    "distance_lo": "Int64",
    "distance_hi": "Int64",
    "mass": "Float64",
    "status": "string",
}
_FILES = {
    RETRIEVAL: RETRIEVAL_COLUMNS,
    OVER_TRAINING: OVER_TRAINING_COLUMNS,
    DIAGNOSTICS: DIAGNOSTICS_COLUMNS,
}
_LATER = {"control": NO_CONTROL, "length_bytes": None}  # columns that older files lack, and what they mean


def make_rows(
    records: Sequence[Mapping[str, Any]] | pd.DataFrame, columns: Mapping[str, str] = ROW_COLUMNS
) -> pd.DataFrame:
    """A frame of exactly `columns` in order, typed; columns that no record has are null (`control`: none).

    An unknown column is a mistake of the caller (AssertionError), not of the user.
    """
    frame = pd.DataFrame(records)
    unknown = set(frame.columns) - set(columns)
    assert not unknown, f"not columns of a row: {sorted(unknown)}"
    frame = frame.reindex(columns=list(columns)).astype(dict(columns))
    return frame.assign(control=frame["control"].fillna(NO_CONTROL)) if "control" in columns else frame


def write_rows(frame: pd.DataFrame, folder: Path | str, name: str = RESULTS) -> Path:
    """Write rows to `folder/name` atomically (Parquet); returns the path."""
    columns = _FILES.get(name, ROW_COLUMNS)
    path = Path(folder) / name
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as beside:
        make_rows(frame, columns).to_parquet(beside, index=False)
    return path


def read_rows(folder: Path | str, name: str = RESULTS) -> pd.DataFrame:
    """The rows that `write_rows` wrote. DataError when the file is missing or not such rows."""
    path = Path(folder) / name
    try:
        frame = pd.read_parquet(path)
    except FileNotFoundError:
        raise DataError(f"{path}: no results there; run `pe-study eval` first") from None
    except (OSError, ValueError) as error:
        raise DataError(f"{path}: not a readable Parquet file ({str(error).splitlines()[0]})") from None
    columns = _FILES.get(name, ROW_COLUMNS)
    missing = [column for column in columns if column not in frame and column not in _LATER]
    if missing:
        raise DataError(f"{path}: not our results, or of another version (no column {', '.join(missing)})")
    return make_rows(frame.reindex(columns=list(columns)), columns)
