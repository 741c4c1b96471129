"""`pe-study tune`: short trainings at several learning rates, judged at the training length and nowhere else.

Each trial is a training run under `runs/<study>/tune/`, made by the one training loop: finished ones are not
redone, an interrupted one goes on, several run at once. What is chosen is written whole or not at all.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pe_study import chosen_rates, runs
from pe_study.commands.forecast import position_parameters
from pe_study.errors import NonFiniteLossError, RecipeError
from pe_study.files import write_json, write_text
from pe_study.plan import Plan
from pe_study.recipe import Recipe, RunSpec, build_encoding
from pe_study.sections import EncodingSpec, TrainSpec
from pe_study.terminal import is_main_process
from pe_study.train import train_study
from pe_study.training import bases, trial_folders, tuning
from pe_study.training.run_files import NON_FINITE
from pe_study.training.schedules import total_learning_rate
from pe_study.training.stopping import StopRequest

FACTORS = (0.5, 1.0, 2.0)
SHARE = 5  # of the updates of the recipe, one in so many


@dataclass(frozen=True)
class Trial:
    """One training: `factor` times the rate of the encoding of a recipe that is called `label`.

    `lr_mult` is what a recipe would say, `multiplier` the number that this means in the whole training of the
    recipe at this rate (None: no position parameters). `encoding` is what the trial trains: its schedule is
    shorter, where `auto` may mean another number.
    """

    label: str
    factor: float
    lr_mult: float | str
    multiplier: float | None
    encoding: EncodingSpec


def tune(
    recipe: Recipe,
    runs_root: Path | str = "runs",
    *,
    jobs: int | str = 1,
    progress: bool = False,
    stop: StopRequest | None = None,
) -> dict[str, Any]:
    """Train every trial that is not finished; returns what `tune.json` then holds.

    RecipeError for a recipe whose rate is itself tuned; UsageError, before any work, where trials of another
    training lie there; what `train_study` raises. Interrupted when stopped: the same call goes on. A trial
    without a finite loss counts as finished and is not chosen.
    """
    if isinstance(recipe.train.lr, str):
        found = f"{recipe.path}: train.lr: found {recipe.train.lr}"
        raise RecipeError(f"{found}; accepted for tune: a number, such as train.lr=3e-3 behind the recipe")
    root = runs.study_dir(runs_root, recipe)
    grid = trial_folders.place(_located(trial_recipe(recipe), runs_root), recipe, root / chosen_rates.FOLDER)
    last: list[RunSpec] = []
    while todo := [run for run in grid.runs() if _loss(root, grid, run) is None]:
        try:
            train_study(_only(grid, todo), root, jobs=jobs, progress=progress, stop=stop)
        except NonFiniteLossError:  # said in the folder of its trial, which is an answer; the others go on
            if todo == last:
                raise
        last = todo
    result = _result(recipe, grid, root)
    folder = root / chosen_rates.FOLDER
    if is_main_process():
        write_json(folder / chosen_rates.RESULT, result)
        write_text(folder / tuning.TABLE, tuning.markdown(result))
    return result


def trial_recipe(recipe: Recipe) -> Recipe:
    """The trials as a recipe: an encoding each, a fifth of the updates, the first seed, no other length."""
    update = {
        "name": chosen_rates.FOLDER,
        "seeds": recipe.seeds[:1],
        "encodings": tuple(trial.encoding for trial in trials(recipe)),
        "train": _shortened(recipe.train),
        "eval": Plan(lengths=("1x",)),
    }
    return recipe.model_copy(update=update)


def _located(grid: Recipe, runs_root: Path | str) -> Recipe:
    """The trials lie deeper than the runs that they may go on from."""
    if grid.init is None:
        return grid
    source = bases.locate(grid.init.source, runs_root)
    return grid.model_copy(update={"init": grid.init.model_copy(update={"source": source})})


def trials(recipe: Recipe) -> Iterator[Trial]:
    """Every trial: encodings, at each the rates, at each the multipliers of position parameters."""
    for spec in recipe.encodings:
        learned = position_parameters(recipe, spec) > 0
        encoding = build_encoding(recipe, spec, spec.label)
        for factor in FACTORS:
            lr = _rate(recipe.train.at(spec).peak_lr, factor)
            whole = recipe.train.model_copy(update={"lr": lr})
            auto, auto_here = (
                encoding.auto_lr_mult(total_learning_rate(train)) for train in (whole, _shortened(whole))
            )
            mults = tuning.mults_of(spec, auto if learned else None)
            for mult, number in mults:
                trained = mult if number is None or mult != "auto" or auto_here == number else number
                label = f"{spec.label}@{factor:g}x"
                if len(mults) > 1:
                    label += f"-mult-{trained if isinstance(trained, str) else round(trained, 4)}"
                own = spec.model_copy(update={"label": label, "lr": lr, "lr_mult": trained})
                yield Trial(spec.label, factor, mult, number, own)


def _shortened(train: TrainSpec) -> TrainSpec:
    """A fifth of the updates, the warmup in proportion."""
    steps = max(train.steps // SHARE, 1)
    warmup = min(round(train.warmup_steps * steps / train.steps), steps)
    return train.model_copy(update={"steps": steps, "warmup_steps": warmup, "eval_every": None})


def _rate(lr: float, factor: float) -> float:
    return float(f"{lr * factor:.12g}")


def _only(grid: Recipe, todo: list[RunSpec]) -> Recipe:
    return grid.model_copy(update={"encodings": tuple(run.encoding for run in todo)})


def _loss(root: Path, grid: Recipe, run: RunSpec) -> dict[str, Any] | None:
    """What became of a trial: its validation loss, None where it was not finite; None: not finished."""
    folder = runs.run_dir(root, grid, run)
    done = runs.is_done(folder)
    if not done and not (folder / NON_FINITE).is_file():
        return None
    if not trial_folders.is_of(folder, grid, run):
        return None
    return {"val_loss": runs.read_json(folder / runs.DONE)["val_loss"] if done else None}


def _result(recipe: Recipe, grid: Recipe, root: Path) -> dict[str, Any]:
    found: list[dict[str, Any]] = [
        {
            "label": trial.label,
            "encoding": tuning.encoding_of(trial.encoding),
            "factor": trial.factor,
            "lr": trial.encoding.lr,
            "lr_mult": trial.lr_mult,
            "multiplier": trial.multiplier,
            **(_loss(root, grid, run) or {}),
            "run": f"{chosen_rates.FOLDER}/{run.run_id}",
        }
        for trial, run in zip(trials(recipe), grid.runs(), strict=True)
    ]
    own = {spec.label: spec.lr for spec in recipe.encodings}
    return {
        "study": recipe.name,
        "command": runs.command_line(),
        "lr": recipe.train.peak_lr,
        "length": recipe.train.length,
        "steps": grid.train.steps,
        "full_steps": recipe.train.steps,
        "seed": recipe.seeds[0],
        "conditions": tuning.conditions(recipe),
        "chosen": {
            label: tuning.choose([trial for trial in found if trial["label"] == label], own_lr=lr)
            for label, lr in own.items()
        },
        "trials": found,
        "versions": runs.versions(),
        **runs.git_commit(),
    }
