"""Which folder of `runs/<study>/tune/` a trial takes: what was trained serves again, and is never mixed."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pe_study import chosen_rates, runs
from pe_study.errors import UsageError
from pe_study.recipe import Recipe, RunSpec, training_differences, training_values
from pe_study.sections import EncodingSpec
from pe_study.training import tuning
from pe_study.training.run_files import NON_FINITE

_RATES = ("train.lr", "encoding.lr_mult")


def place(grid: Recipe, recipe: Recipe, folder: Path) -> Recipe:
    """The trials of `recipe`, those at rates that `folder` has no trial of in folders of their own.

    `rope@2x` is twice the rate of the first tuning; after another `train.lr` that place is taken, and the
    trial is called by its rate, `rope@0.008`. UsageError where trials there differ in more than rates.
    """
    kept = {path.parent.name: _learned(path.parent) for path in sorted(folder.glob(f"*/{runs.PROVENANCE}"))}
    there = {name: values for name, values in kept.items() if values is not None}
    encodings = []
    for run in grid.runs():
        values = tuning.learned_from(training_values(grid, run))
        before = there.get(run.run_id, values)
        _refuse_changes(folder, recipe, _beside_rates(before), _beside_rates(values))
        label = run.encoding.label
        if there.get(run.run_id) != values:
            own, new = f"{label.rpartition('@')[0]}@", label if before == values else _by_rate(run.encoding)
            alike = (name for name, each in there.items() if each == values and name.startswith(own))
            label = next(alike, new).removesuffix(f"-s{run.seed}")
        encodings.append(run.encoding.model_copy(update={"label": label}))
    return grid.model_copy(update={"encodings": tuple(encodings)})


def is_of(folder: Path, grid: Recipe, run: RunSpec) -> bool:
    """Whether what lies in `folder` was trained as this trial would be."""
    return _learned(folder) == tuning.learned_from(training_values(grid, run))


def _learned(folder: Path) -> dict[str, Any] | None:
    """What a trial was trained with; None where nothing of it is left to go on from."""
    saved = any((folder / runs.SNAPSHOTS).glob("step_*"))
    if not (runs.is_done(folder) or saved or (folder / NON_FINITE).is_file()):
        return None
    return tuning.learned_from(runs.read_json(folder / runs.PROVENANCE)["training"])


def _by_rate(spec: EncodingSpec) -> str:
    mult = "" if spec.lr_mult == "auto" else f"-mult-{spec.lr_mult:g}"
    return f"{spec.label.rpartition('@')[0]}@{spec.lr}{mult}"


def _beside_rates(values: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in values.items() if key not in _RATES}


def _refuse_changes(folder: Path, recipe: Recipe, before: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """UsageError for trials of another training; keys as the recipe has them, where the result was kept."""
    changes = training_differences(before, now)
    if not changes:
        return
    file = folder / chosen_rates.RESULT
    if file.is_file():
        was = runs.read_json(file)["conditions"]
        changes = training_differences(was, tuning.conditions(recipe)) or changes
    raise UsageError(
        f"{folder}: tuned under other conditions ({tuning.few(changes)}); delete this folder, or choose "
        f"another name, such as name={recipe.name}-2"
    )
