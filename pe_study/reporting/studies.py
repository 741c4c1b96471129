"""Reads what trainings and evaluations left on disk, for reports; writes nothing."""

from __future__ import annotations

import difflib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pandas as pd
import yaml

from pe_study import chosen_rates
from pe_study.errors import DataError, UsageError
from pe_study.planned import read_asked, read_planned
from pe_study.rows import (
    NO_CONTROL,
    OVER_TRAINING,
    RESULTS,
    RETRIEVAL,
    ROW_COLUMNS,
    make_rows,
    read_rows,
)
from pe_study.runs import METRICS, PROVENANCE, RECIPE, is_done, read_done

SUMMARY = "results.json"
_TEXT = [name for name, kind in ROW_COLUMNS.items() if kind == "string"]
_WHOLE = (
    "length",
    "train_length",
    "seed",
    "document",
    "position_lo",
    "position_hi",
    "num_windows",
    "num_tokens",
)


@dataclass(frozen=True)
class Run:
    """One training run: its narrowed recipe, provenance and metrics, and whether it finished."""

    run_id: str
    recipe: Mapping[str, Any]
    provenance: Mapping[str, Any]
    metrics: pd.DataFrame
    done: bool
    finished: Mapping[str, Any] = field(default_factory=dict)  # what DONE says: time, memory, last losses

    @property
    def label(self) -> str:
        spec = self.recipe["encodings"][0]
        return str(spec if isinstance(spec, str) else spec.get("label") or spec["name"])

    @property
    def encoding(self) -> str:
        spec = self.recipe["encodings"][0]
        return str(spec if isinstance(spec, str) else spec["name"])

    @property
    def seed(self) -> int:
        return int(self.recipe["seeds"][0])

    @property
    def train(self) -> Mapping[str, Any]:
        return self.recipe.get("train", {})

    @property
    def last_loss(self) -> float:
        return float(self.metrics["loss"].iloc[-1]) if len(self.metrics) else math.nan

    @property
    def last_step(self) -> int:
        return int(self.metrics["step"].max()) if "step" in self.metrics and len(self.metrics) else 0


@dataclass(frozen=True)
class Evaluation:
    """One evaluation plan's results: rows of a results.parquet, its summary file and its retrieval rows.

    controls: rows measured under a control, which stand in no table of plain ones. over_training: rows of
    snapshots, `rows.OVER_TRAINING_COLUMNS`.
    """

    plan: str
    folder: Path
    rows: pd.DataFrame
    summary: Mapping[str, Any]
    retrieval: pd.DataFrame | None = None
    controls: pd.DataFrame | None = None
    over_training: pd.DataFrame | None = None

    @property
    def notes(self) -> Mapping[str, Any]:
        return self.summary.get("notes") or {}


@dataclass(frozen=True)
class Study:
    """A study, or a checkpoint's evaluation (then without runs)."""

    name: str
    path: Path
    runs: tuple[Run, ...] = ()
    evaluations: tuple[Evaluation, ...] = field(default=())
    planned: tuple[str, ...] = ()  # the runs that its recipe has, where training wrote them down
    asked: tuple[str, ...] = ()  # those of them that were picked for training so far
    tuning: Mapping[str, Any] | None = None  # what `pe-study tune` chose

    @property
    def waiting(self) -> tuple[str, ...]:
        """Runs of the recipe that have not begun."""
        begun = {run.run_id for run in self.runs}
        return tuple(name for name in self.planned if name not in begun)

    @property
    def due(self) -> tuple[str, ...]:
        """Those of `waiting` that were picked for training."""
        return tuple(name for name in self.waiting if name in self.asked)

    @property
    def rows(self) -> pd.DataFrame:
        frames = [evaluation.rows.assign(plan=evaluation.plan) for evaluation in self.evaluations]
        return pd.concat(frames, ignore_index=True) if frames else plain(make_rows([])).assign(plan="")


def read_study(path: Path | str) -> Study:
    """Read a study folder, one run of it, a checkpoint's evaluation folder, or a results.parquet.

    UsageError when nothing is there, DataError when it holds neither runs nor results or a file is damaged.
    """
    path = Path(path)
    if not path.exists():
        raise UsageError(f"{path}: no such study{_nearby(path)}")
    if path.is_file():
        path = path.parent
    if (path / RECIPE).is_file():
        return Study(path.name, path, (read_run(path),), _evaluations(path))
    runs = tuple(read_run(recipe.parent) for recipe in sorted(path.glob(f"*/{RECIPE}")))
    evaluations = _evaluations(path)
    planned = read_planned(path)
    if not runs and not evaluations and not planned:
        raise DataError(
            f"{path}: neither runs nor results there; run `pe-study train` and `pe-study eval` first"
        )
    tuned = path / chosen_rates.FOLDER / chosen_rates.RESULT
    tuning = _parse(tuned, json.loads) if tuned.is_file() else None
    return Study(_name(path, evaluations), path, runs, evaluations, planned, read_asked(path), tuning)


def read_run(folder: Path) -> Run:
    """One run directory. DataError naming the file that cannot be read."""
    recipe = _parse(folder / RECIPE, yaml.safe_load)
    provenance = folder / PROVENANCE
    metrics = folder / METRICS
    return Run(
        run_id=folder.name,
        recipe=recipe,
        provenance=_parse(provenance, json.loads) if provenance.exists() else {},
        metrics=_read_metrics(metrics) if metrics.exists() else pd.DataFrame(),
        done=is_done(folder),
        finished=read_done(folder) or {},
    )


def _evaluations(path: Path) -> tuple[Evaluation, ...]:
    found = {file.parent for pattern in ("", "eval/*/") for file in path.glob(pattern + RESULTS)}
    found |= {file.parent for file in path.glob(f"eval/*/{RETRIEVAL}")}
    return tuple(_read_evaluation(folder) for folder in sorted(found))


def _read_evaluation(folder: Path) -> Evaluation:
    rows = read_rows(folder) if (folder / RESULTS).is_file() else pd.DataFrame(columns=list(ROW_COLUMNS))
    summary = folder / SUMMARY
    controlled = (rows["control"] != NO_CONTROL).fillna(False).to_numpy(bool)
    return Evaluation(
        plan=folder.name,
        folder=folder,
        rows=plain(rows[~controlled]),
        summary=_parse(summary, json.loads) if summary.is_file() else {},
        retrieval=read_rows(folder, RETRIEVAL) if (folder / RETRIEVAL).is_file() else None,
        controls=plain(rows[controlled]) if controlled.any() else None,
        over_training=_read_over_training(folder),
    )


def _read_over_training(folder: Path) -> pd.DataFrame | None:
    return plain(read_rows(folder, OVER_TRAINING)) if (folder / OVER_TRAINING).is_file() else None


def plain(rows: pd.DataFrame) -> pd.DataFrame:
    """Rows in numpy types, which group fast: text as categories, unknown numbers as nan, a label always."""
    numbers = [name for name in rows.columns if name not in _TEXT]
    rows = rows.assign(**{name: rows[name].astype("float64") for name in numbers})
    rows["label"] = rows["label"].fillna(rows["model"]).fillna("model")
    rows["encoding"] = rows["encoding"].fillna(rows["label"])
    rows["rescale"] = rows["rescale"].fillna("none")
    rows["status"] = rows["status"].fillna("ok")
    whole = {name: rows[name].fillna(-1).astype("int64") for name in _WHOLE}
    text = {name: rows[name].fillna("").astype(str).astype("category") for name in _TEXT}
    return rows.assign(**whole, **text)


def _read_metrics(path: Path) -> pd.DataFrame:
    """Lines of metrics.jsonl; a last line cut short by a kill is left out."""
    lines = path.read_text(encoding="utf-8").splitlines()
    parsed = []
    for number, line in enumerate(lines, start=1):
        try:
            parsed.append(json.loads(line))
        except ValueError:
            if number < len(lines):
                raise DataError(f"{path}: line {number} is not a JSON object") from None
    return pd.DataFrame(parsed)


def _parse(path: Path, parse: Any) -> Mapping[str, Any]:
    try:
        found = parse(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, ValueError, yaml.YAMLError) as error:
        raise DataError(f"{path}: cannot be read ({str(error).splitlines()[0]})") from None
    if not isinstance(found, Mapping):
        raise DataError(f"{path}: not a mapping of keys to values")
    return found


def _name(path: Path, evaluations: tuple[Evaluation, ...]) -> str:
    """A folder's own name; an evaluation folder is called by the study its rows name."""
    if (path / RESULTS).is_file() and evaluations and len(evaluations[0].rows):
        named = str(evaluations[0].rows["study"].iloc[0])
        return named or path.name
    return path.resolve().name


def _nearby(path: Path) -> str:
    parent = path.parent
    names = sorted(item.name for item in parent.iterdir() if item.is_dir()) if parent.is_dir() else []
    close = difflib.get_close_matches(path.name, names, n=1)
    return (
        f'; did you mean "{parent / close[0]}"?'
        if close
        else f" (in {parent}: {', '.join(names) or 'nothing'})"
    )
