"""Which runs a study is to have: runs/<study>/study.json, written as its training starts. No torch here."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from pe_study.errors import DamagedError
from pe_study.files import read_json, write_json

if TYPE_CHECKING:
    from pe_study.recipe import Recipe

STUDY = "study.json"


def write_planned(folder: Path, recipe: Recipe) -> None:
    """Note the runs of a recipe in the folder of its study, where they are not noted yet."""
    names = [run.run_id for run in recipe.runs()]
    try:
        noted = list(read_planned(folder)) == names
    except DamagedError:
        noted = False
    if not noted:
        folder.mkdir(parents=True, exist_ok=True)
        write_json(folder / STUDY, {"recipe_hash": recipe.hash, "runs": names})


def read_planned(folder: Path) -> tuple[str, ...]:
    """The runs that a study is to have, in order; none where nobody wrote them down. DamagedError for a file
    that says something else."""
    path = folder / STUDY
    if not path.is_file():
        return ()
    facts = read_json(path)
    names = facts.get("runs") if isinstance(facts, dict) else None
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise DamagedError(f"{path}: damaged, no list of runs; delete it, pe-study train makes it anew")
    return tuple(names)
