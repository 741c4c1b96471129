"""Which runs of a recipe to train, and whether their folders may be used. No torch here."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pe_study import runs
from pe_study.errors import UsageError, did_you_mean
from pe_study.recipe import Recipe, RunSpec, training_differences, training_values

_KEYS = ("encoding", "seed", "run")
# What may change between the steps of a run, since it cuts the same batch otherwise: memory does it, too.
REGROUPING = ("train.micro_batch_tokens",)


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
        refuse_changes(folder, trained, training_values(recipe, run))


def refuse_changes(folder: Path, trained: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """UsageError naming what changed, when a value of `now` differs from what `folder` was trained with."""
    compared = {key: value for key, value in now.items() if key not in REGROUPING}
    changes = training_differences({key: trained.get(key) for key in compared}, compared)
    if changes:
        more = f"; {len(changes) - 5} more" * (len(changes) > 5)
        raise UsageError(
            f"{folder}: trained with another recipe or corpus ({'; '.join(changes[:5])}{more})\n"
            "give the recipe another name, choose another --runs folder, or delete this one"
        )
