"""Which runs of a recipe to train, and whether their folders may be used. No torch here."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from pe_study import runs
from pe_study.errors import UsageError, did_you_mean
from pe_study.recipe import Recipe, RunSpec, training_differences, training_values
from pe_study.training import bases

logger = logging.getLogger(__name__)

_KEYS = ("encoding", "seed", "run")
RESUME = ("auto", "never")
# What decides no weight but to rounding: it may change between the steps of a run, and after the last.
FREE = ("train.micro_batch_tokens", "train.gradient_checkpointing", "train.skip_nonfinite")
# How the same numbers are computed: it may change between the steps of a run, whose end names the last.
COMPUTING = ("train.kernel", "train.compile", "train.deterministic")
# Those of both after which losses are equal to rounding, as a reader calls them.
ROUNDING = {
    "train.micro_batch_tokens": "micro-batches",
    "train.kernel": "kernel",
    "train.compile": "compilation",
    "train.deterministic": "deterministic kernels",
}


def select_runs(recipe: Recipe, only: Mapping[str, str] | None = None) -> tuple[RunSpec, ...]:
    """The runs whose encoding (label or name), seed and run (`rope-s0`) are as `only` says. UsageError when
    none is."""
    found = recipe.runs()
    for key, value in (only or {}).items():
        if key not in _KEYS:
            raise UsageError(f'--only: unknown key "{key}"; {did_you_mean(key, _KEYS)}')
        known = {word: None for run in found for word in _words(run, key)}
        found = tuple(run for run in found if value in _words(run, key))
        if not found:
            raise UsageError(f'--only: no {key} "{value}"; {did_you_mean(value, known)}')
    return found


def _words(run: RunSpec, key: str) -> tuple[str, ...]:
    words = {
        "encoding": (run.encoding.label, run.encoding.name),
        "seed": (str(run.seed),),
        "run": (run.run_id,),
    }
    return words[key]


def check_folder(folder: Path, recipe: Recipe, run: RunSpec, *, resume: str = "auto") -> None:
    """UsageError for a run directory that is not ours, or that holds results of another recipe. A run that
    was stopped before anything was saved, or that starts over, may be of another."""
    runs.check_output(folder, ours=(runs.RECIPE, runs.PROVENANCE))
    saved = any((folder / runs.SNAPSHOTS).glob("step_*")) and resume != "never"
    if (folder / runs.PROVENANCE).exists() and (runs.is_done(folder) or saved):
        trained = runs.read_json(folder / runs.PROVENANCE)["training"]
        may_change = FREE if runs.is_done(folder) else FREE + COMPUTING
        refuse_changes(folder, trained, training_values(recipe, run), may_change=may_change)


def check_resume(resume: str, folder: Path) -> None:
    """UsageError where `--resume` names neither a way to go on nor a snapshot; the run lies in `folder`."""
    path = Path(resume)
    if resume in RESUME or (path.is_dir() and path.name.startswith("step_")):
        return
    near = [path / runs.SNAPSHOTS, path, path.parent, folder / runs.SNAPSHOTS]
    found = next((steps for place in near if (steps := sorted(place.glob("step_*")))), [])
    is_run = (path / runs.RECIPE).is_file()
    what = "a run, not a snapshot" if is_run else "no snapshot" if path.exists() else "no such folder"
    raise UsageError(
        f'--resume: found "{resume}", {what}; '
        f"{did_you_mean(resume, [*RESUME, *(str(step) for step in found[-3:])])}"
    )


def refuse_changes(
    folder: Path,
    trained: Mapping[str, Any],
    now: Mapping[str, Any],
    *,
    may_change: Collection[str] = FREE + COMPUTING,
) -> None:
    """UsageError naming what changed, when a value of `now` differs from what `folder` was trained with."""
    unknown = {*bases.NOTED} - trained.keys()  # what older runs did not note
    compared = {key: value for key, value in now.items() if key not in {*may_change, *unknown}}
    before = {key: trained.get(key) for key in compared}
    changes = training_differences(bases.by_key(before), bases.by_key(compared))
    if changes:
        more = f"; {len(changes) - 5} more" * (len(changes) > 5)
        raise UsageError(
            f"{folder}: trained with another recipe or corpus ({'; '.join(changes[:5])}{more})\n"
            "give the recipe another name, choose another --runs folder, or delete this one"
        )


def say_rounding(folder: Path, trained: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Warn of what changed between two sessions of a run, where that changes losses by rounding."""
    changed = [name for key, name in ROUNDING.items() if key in trained and trained[key] != now[key]]
    if changed:
        logger.warning("%s: other %s than before: losses equal to rounding", folder, " and ".join(changed))
