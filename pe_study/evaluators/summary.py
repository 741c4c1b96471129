"""From rows to perplexities, and to a results.json in lm-eval's shape. No torch here."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from typing import Any

import pandas as pd

from pe_study import runs
from pe_study.rows import NO_CONTROL

OK = ("ok", "skipped")
TASK_COLUMNS = ("run", "rescale", "protocol")


def summarise(frame: pd.DataFrame, aggregation: str | None = None) -> dict[str, Any]:
    """Sums and means over rows of one length: nll (nats a token), perplexity, bits_per_byte, counts, status.

    aggregation: `token` weights by tokens, `yarn` takes the mean of window means; None is the frame's own.
    What cannot be told is None; a perplexity beyond float64 is None with `overflow` True, its nll kept.
    """
    aggregation = aggregation or frame.attrs.get("aggregation", "token")
    failed = [status for status in frame["status"] if status not in OK]
    tokens = int(frame["num_tokens"].sum())
    windows = int(frame["num_windows"].sum())
    counts = {"num_tokens": tokens, "num_windows": windows, "num_skipped": int(frame["num_skipped"].sum())}
    if failed or not tokens:
        status = failed[0] if failed else "skipped"
        unknown = dict.fromkeys(("nll", "perplexity", "bits_per_byte"))
        return {**unknown, "overflow": False, **counts, "status": status}
    total = math.fsum(frame["nll_sum"].fillna(0.0))
    window_means = math.fsum(frame["window_mean_sum"].fillna(0.0))
    nll = window_means / windows if aggregation == "yarn" else total / tokens
    perplexity = safe_exp(nll)
    return {
        "nll": _finite(nll),
        "perplexity": perplexity,
        "bits_per_byte": _bits_per_byte(frame, nll * tokens),
        "overflow": perplexity is None,
        **counts,
        "status": "ok",
    }


def safe_exp(nll: float) -> float | None:
    """exp of a mean NLL; None where a float64 cannot hold it."""
    try:
        return _finite(math.exp(nll))
    except OverflowError:
        return None


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _bits_per_byte(frame: pd.DataFrame, total: float) -> float | None:
    """Nats over ln 2 and UTF-8 bytes of text; None where a document's bytes are unknown."""
    scored = frame[frame["num_tokens"] > 0]
    if scored["num_bytes"].isna().any() or not (num_bytes := int(scored["num_bytes"].sum())):
        return None
    return _finite(total / math.log(2) / num_bytes)


def results(frame: pd.DataFrame, config: Mapping[str, Any], notes: Mapping[str, Any]) -> dict[str, Any]:
    """All rows in lm-eval's shape: a task for each (run, rescale, protocol), lengths as metric names."""
    tasks: dict[str, dict[str, Any]] = {}
    flags: list[dict[str, Any]] = []
    frame = frame.assign(protocol=_protocol_names(frame))
    for (*names, length), rows in frame.groupby([*TASK_COLUMNS, "length"], sort=False, dropna=False):
        task = "/".join(str(name) for name in names)
        cell = summarise(rows, config["plan"]["aggregation"])
        entry = tasks.setdefault(task, {"alias": task})
        entry[f"{length},none"] = cell["perplexity"]
        entry[f"nll_{length},none"] = cell["nll"]
        entry[f"bits_per_byte_{length},none"] = cell["bits_per_byte"]
        if cell["overflow"] or cell["status"] != "ok":
            flag = {"status": cell["status"], "overflow": cell["overflow"]}
            flags.append({"task": task, "length": int(rows["length"].iloc[0]), **flag})
    documents = notes["documents"]
    samples = {"original": documents["total"], "effective": documents["kept"]}
    return {
        "results": tasks,
        "versions": dict.fromkeys(tasks, 1),
        "n-shot": dict.fromkeys(tasks, 0),
        "higher_is_better": {task: dict.fromkeys(_metrics(tasks[task]), False) for task in tasks},
        "n-samples": dict.fromkeys(tasks, samples),
        "config": dict(config),
        "notes": {**notes, "flags": flags},
        "package_versions": runs.versions(),
        **runs.git_commit(),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def _protocol_names(frame: pd.DataFrame) -> pd.Series:
    """Two strides at one length are two protocols: `sliding_128`, `sliding_256`; a control has its own name:
    `exact-context_far_context=shuffled`."""
    names = frame["protocol"].astype("string")
    sliding = names == "sliding"
    strides = frame[sliding].groupby(["run", "rescale", "length"])["stride"].nunique()
    if strides.max() > 1:
        names = names.where(~sliding, "sliding_" + frame["stride"].astype("string"))
    return names.where(frame["control"] == NO_CONTROL, names + "_" + frame["control"])


def _metrics(entry: Mapping[str, Any]) -> Iterable[str]:
    return (name.partition(",")[0] for name in entry if "," in name)
