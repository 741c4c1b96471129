"""Tables of retrieval rows: shares of right answers with Wilson intervals, gains of copies. No torch here.

Intervals are over samples of these weights; they say nothing of another seed.
"""

from __future__ import annotations

from collections.abc import Sequence

import pandas as pd

from pe_study import stats

SERIES = ["study", "label", "encoding", "rescale", "task", "train_length"]
FLOOR = "floor"  # the status of answers to a task that the model fails within its training length already
COPY = "copy"


def plain(rows: pd.DataFrame) -> pd.DataFrame:
    """Retrieval rows in numpy types; a label, rescale, study and status always, numbers nan where unknown."""
    text = {name: rows[name].astype(object).fillna("").astype(str) for name in ("study", "task", "model")}
    label = rows["label"].astype(object).fillna(text["model"]).astype(str)
    numbers = ("train_length", "length", "depth", "correct", "gain", "seed")
    return rows.assign(
        **text,
        label=label,
        encoding=rows["encoding"].astype(object).fillna(label).astype(str),
        rescale=rows["rescale"].astype(object).fillna("none").astype(str),
        status=rows["status"].astype(object).fillna("ok").astype(str),
        **{name: rows[name].astype("float64") for name in numbers},
    )


def accuracy(rows: pd.DataFrame, by: Sequence[str] = ("length", "depth")) -> pd.DataFrame:
    """Number and share of right answers by series, status and `by`, with 95 % Wilson bounds (low, high)."""
    answered = rows[rows["correct"].notna()]
    keys = [*SERIES, "status", *by]
    counts = answered.groupby(keys, dropna=False, sort=False)["correct"].agg(n="count", right="sum")
    counts = counts.reset_index()
    low, high = stats.wilson(counts["right"], counts["n"])
    return counts.assign(accuracy=counts["right"] / counts["n"], low=low, high=high)


def gains(rows: pd.DataFrame) -> pd.DataFrame:
    """Mean nats a token that a first occurrence saves, by series and length, with 95 % t bounds."""
    copied = rows[rows["gain"].notna()]
    records = []
    for key, part in copied.groupby([*SERIES, "length"], dropna=False, sort=False):
        interval = stats.mean_interval(part["gain"])
        low, high = interval.bounds()
        values = {"n": interval.num, "gain": interval.estimate, "low": low, "high": high}
        records.append(dict(zip([*SERIES, "length"], key, strict=True)) | values)
    return pd.DataFrame(records)


def floor_sentences(rows: pd.DataFrame) -> list[str]:
    """Which models cannot do which task at all, said plainly."""
    failed = rows[rows["status"] == FLOOR]
    if rows["study"].nunique() > 1:
        failed = failed.assign(label=failed["label"] + " (" + failed["study"] + ")")
    return [
        f"**{', '.join(dict.fromkeys(part['label']))}** cannot do {task} at all: fewer than half of the "
        "answers are right within the training length already (status floor), so nothing is said about "
        "longer text."
        for task, part in failed.groupby("task", sort=False)
    ]
