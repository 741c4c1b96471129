"""Learning rates chosen by `pe-study tune`: where they lie, and how recipes that say `tuned` get them.

No torch here. `runs/<study>/tune/tune.json` holds every trial, what was chosen, and under which conditions.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pe_study.chosen_rates import FOLDER, RESULT, order_change, table, trained_multiplier
from pe_study.errors import RecipeError, UsageError
from pe_study.files import read_json
from pe_study.recipe import Recipe, training_differences, training_values
from pe_study.sections import EncodingSpec

TABLE = "tune.md"
DEFAULT_ROOT = Path("runs")
TIE = 1e-3  # of the loss: rates closer than this are called a tie
# Keys of training that decide how fast it is computed, not what is learned.
_SPEED = (
    "kernel",
    "compile",
    "micro_batch_tokens",
    "gradient_checkpointing",
    "deterministic",
    "skip_nonfinite",
)


def resolve(recipe: Recipe, runs_root: Path | str) -> Recipe:
    """The recipe with numbers where it says `lr: tuned`, one for each encoding; others as they are.

    RecipeError where no result is there, where an encoding was not tuned, or under other conditions.
    """
    if not isinstance(recipe.train.lr, str):
        return recipe
    study = recipe.train.lr.partition(":")[2] or recipe.name
    path = Path(runs_root) / study / FOLDER / RESULT
    command = _command(recipe, study, runs_root)
    where = f"{recipe.path or 'RECIPE'}: train.lr: found {recipe.train.lr}"
    if not path.is_file():
        raise RecipeError(f"{where}, but {path} is not there\nfirst run: {command}")
    tuning = read_json(path)
    _check(f"{where}, but {path}", tuning, recipe, path.parent, command)
    encodings = tuple(_at_rate(spec, tuning["chosen"][spec.label]) for spec in recipe.encodings)
    update = {"encodings": encodings, "train": recipe.train.model_copy(update={"lr": tuning["lr"]})}
    return recipe.model_copy(update=update)


def conditions(recipe: Recipe) -> dict[str, Any]:
    """What a choice holds under: everything that decides what is learned but encodings, seeds and rates."""
    values = learned_from(training_values(recipe, recipe.runs()[0]))
    left_out = ("encoding.", "seed", "train.lr")
    return {key: value for key, value in values.items() if not key.startswith(left_out)}


def learned_from(values: Mapping[str, Any]) -> dict[str, Any]:
    """The `training_values` that decide what is learned, not how fast it is computed."""
    speed = {f"train.{word}" for word in _SPEED}
    return {key: value for key, value in values.items() if key not in speed}


def encoding_of(spec: EncodingSpec) -> dict[str, Any]:
    """Name and options of an encoding, without its label and rates."""
    return {"name": spec.name, **spec.options}


def mults_of(spec: EncodingSpec, auto: float | None) -> tuple[tuple[float | str, float | None], ...]:
    """The multipliers to try: what a recipe would say, and the number that this means.

    `auto` is what `auto` means in the whole training, None without position parameters.
    """
    if spec.lr_mult != "auto":
        return ((spec.lr_mult, None if auto is None else float(spec.lr_mult)),)
    return (("auto", auto),) if auto in (None, 1.0) else ((1.0, 1.0), ("auto", auto))


def choose(trials: list[dict[str, Any]], own_lr: float | None = None) -> dict[str, Any]:
    """The trial of one encoding with the lowest loss, and what a reader has to know of it (`said`).

    `own_lr`: the rate that the recipe gives to this encoding alone, around which others were tried.
    Of equal losses the one nearest to the recipe's own rate is taken. UsageError where none is finite.
    """
    finite = [trial for trial in trials if trial["val_loss"] is not None]
    if not finite:
        raise UsageError(f"{trials[0]['label']}: no learning rate gave a finite loss; lower train.lr")
    best = min(
        finite, key=lambda trial: (trial["val_loss"], trial["factor"] != 1, trial["lr_mult"] != "auto")
    )
    factors = sorted(trial["factor"] for trial in trials)
    close = [
        _name(trial)
        for trial in finite
        if trial is not best and _differs_little(trial["val_loss"], best["val_loss"])
    ]
    said = [] if own_lr is None else [f"x1 is its own rate, {own_lr:g}"]
    said += [f"a tie: {', '.join(close)} within {100 * TIE:g} %"] if close else []
    if best["factor"] in (factors[0], factors[-1]) and factors[0] != factors[-1]:
        end = "lowest" if best["factor"] == factors[0] else "highest"
        said.append(f"at the edge: the {end} rate tried, the optimum may lie beyond")
    lost = [_name(trial) for trial in trials if trial["val_loss"] is None]
    said += [f"without a finite loss: {', '.join(lost)}"] if lost else []
    kept = {key: best[key] for key in ("encoding", "factor", "lr", "lr_mult", "multiplier", "val_loss")}
    return {**kept, "said": said}


def markdown(tuning: Mapping[str, Any]) -> str:
    """The table with what it was measured on and the command."""
    rows = table(tuning)
    lines = [
        f"# Learning rates of {tuning['study']}",
        "",
        f"`{tuning['command']}`",
        "",
        f"Validation loss (nats a token) at the training length, {tuning['length']}, and at no other, after "
        f"{tuning['steps']} updates of {tuning['full_steps']}, seed {tuning['seed']}. x1 is the common rate, "
        f"{tuning['lr']:g}; where two multipliers of position parameters were tried, the losses are those of "
        "1 and auto.",
        "",
        f"| {' | '.join(rows[0])} |",
        f"|{'---|' * len(rows[0])}",
        *(f"| {' | '.join(row.values())} |" for row in rows),
        "",
        f"{order_change(tuning)} One seed, and no interval.",
        "",
        "Short trials choose rates for short trainings: with five times the updates another may be better.",
    ]
    return "\n".join(lines) + "\n"


def _name(trial: Mapping[str, Any]) -> str:
    return f"x{trial['factor']:g}" + (" with lr_mult 1" if trial["lr_mult"] == 1.0 else "")


def _differs_little(loss: float, best: float) -> bool:
    return loss - best <= TIE * best


def _at_rate(spec: EncodingSpec, chosen: Mapping[str, Any]) -> EncodingSpec:
    """The encoding at the chosen rate, its multiplier the chosen number; `auto` stays where that is 1."""
    return spec.model_copy(update={"lr": chosen["lr"], "lr_mult": trained_multiplier(chosen)})


def _command(recipe: Recipe, study: str, runs_root: Path | str) -> str:
    """The command line of `tune` that a recipe needs, with what was laid over it on its own command line."""
    kept = [each for each in recipe._overrides if each.partition("=")[0] not in ("train.lr", "name")]
    given = dict(each.partition("=")[::2] for each in recipe._overrides)
    name = [f"name={study}"] if "name" in given or study != recipe.name else []
    root = ["--runs", str(runs_root)] if Path(runs_root) != DEFAULT_ROOT else []
    return shlex.join(
        ["pe-study", "tune", str(recipe.path or "RECIPE"), *kept, "train.lr=NUMBER", *name, *root]
    )


def _check(where: str, tuning: Mapping[str, Any], recipe: Recipe, folder: Path, command: str) -> None:
    """RecipeError where a result is not for this recipe, naming what to do about it."""
    anew = f"delete {folder} or choose another name= (train.lr=tuned:NAME takes it), then run: {command}"
    changes = training_differences(tuning["conditions"], conditions(recipe))
    if changes:
        raise RecipeError(f"{where} was tuned under other conditions ({few(changes)})\n{anew}")
    for spec in recipe.encodings:
        chosen = tuning["chosen"].get(spec.label)
        if chosen is None:
            raise RecipeError(f"{where} does not hold {spec.label}\nrun: {command}")
        if chosen["encoding"] != encoding_of(spec):
            raise RecipeError(f"{where} holds {spec.label} with other options\n{anew}")
        if "multiplier" not in chosen:
            raise RecipeError(
                f"{where} of an older version holds no number for lr_mult of {spec.label}\nrun: {command}"
            )
        if spec.lr_mult not in ("auto", chosen["lr_mult"]):
            raise RecipeError(f"{where} holds {spec.label} with another lr_mult\nrun: {command}")


def few(changes: Sequence[str]) -> str:
    """The first five, and how many more there are."""
    return "; ".join(changes[:5]) + f"; {len(changes) - 5} more" * (len(changes) > 5)
