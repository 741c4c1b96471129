"""Which runs a study is to have: runs/<study>/study.json, written as its training starts. No torch here.

`runs` are those of its recipe, `asked` those that a call has picked so far (all, without --only).
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from pe_study.errors import DamagedError
from pe_study.files import LOCK, alone, read_json, write_json

if TYPE_CHECKING:
    from pe_study.recipe import Recipe

STUDY = "study.json"


def write_planned(folder: Path, recipe: Recipe, asked: Iterable[str]) -> None:
    """Note the runs of a recipe in the folder of its study, and which of them this call picks.

    The `recipe.yaml` that a run of the study keeps is that run's alone, and leaves the list as it is.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with alone(folder / LOCK):  # lines of `sweep` may start together
        names = tuple(run.run_id for run in recipe.runs())
        try:
            noted, before = read_planned(folder), read_asked(folder)
        except DamagedError:
            noted, before = (), ()
        if _is_kept_by_a_run(recipe, folder) and set(names) <= set(noted):
            names = noted
        picked = {*asked, *(before if noted == names else ())}
        now = tuple(name for name in names if name in picked)
        if (noted, before) != (names, now):
            write_json(folder / STUDY, {"recipe_hash": recipe.hash, "runs": names, "asked": now})


def _is_kept_by_a_run(recipe: Recipe, folder: Path) -> bool:
    return recipe.path is not None and recipe.path.resolve().parent.parent == folder.resolve()


def read_planned(folder: Path) -> tuple[str, ...]:
    """The runs that a study is to have, in order; none where nobody wrote them down. DamagedError for a file
    that says something else."""
    return _names(folder, "runs")


def read_asked(folder: Path) -> tuple[str, ...]:
    """Those of them that were picked for training so far; all where nobody wrote that down."""
    return _names(folder, "asked")


def _names(folder: Path, key: str) -> tuple[str, ...]:
    path = folder / STUDY
    if not path.is_file():
        return ()
    facts = read_json(path)
    names = facts.get(key, facts.get("runs")) if isinstance(facts, dict) else None
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise DamagedError(f"{path}: damaged, no list of {key}; delete it, pe-study train makes it anew")
    return tuple(names)
