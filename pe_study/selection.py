"""Which runs of a recipe to train, and whether their folders may be used. No torch here."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from pe_study import runs
from pe_study.errors import UsageError, did_you_mean
from pe_study.recipe import Recipe, RunSpec, training_differences, training_values

_KEYS = ("encoding", "seed")


def select_runs(recipe: Recipe, only: Mapping[str, str] | None = None) -> tuple[RunSpec, ...]:
    """The runs whose encoding (label or name) and seed are as `only` says. UsageError when none is."""
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
    return (run.encoding.label, run.encoding.name) if key == "encoding" else (str(run.seed),)


def check_folder(folder: Path, recipe: Recipe, run: RunSpec) -> None:
    """UsageError for a run directory that is not ours, or that holds results of another recipe, which it
    tells apart key by key. A run that was stopped before anything was saved may be started differently."""
    if not folder.exists():
        return
    runs.claim_folder(folder, ours=(runs.PROVENANCE,))
    if not (folder / runs.PROVENANCE).exists() or not _holds_weights(folder):
        return
    trained = runs.read_json(folder / runs.PROVENANCE)["training"]
    changes = training_differences(trained, training_values(recipe, run))
    if changes:
        raise UsageError(
            f"{folder}: holds a run of another recipe ({'; '.join(changes[:5])}); "
            "give the recipe another name, choose another --runs folder, or delete this one"
        )


def _holds_weights(folder: Path) -> bool:
    return runs.is_done(folder) or any((folder / runs.SNAPSHOTS).glob("step_*"))
