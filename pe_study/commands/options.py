"""Arguments and flags that several commands share, spelled once."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

RecipePath = Annotated[str, typer.Argument(metavar="RECIPE", help="a recipe, for example recipes/demo.yaml")]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(metavar="KEY=VALUE", help="change a key: train.lr=3e-4", show_default=False),
]
Runs = Annotated[Path, typer.Option("--runs", metavar="DIR", help="where the runs lie")]
Only = Annotated[
    str | None,
    typer.Option(
        "--only", metavar="KEY=VALUE,…", help="runs to pick: encoding=rope,seed=0", show_default=False
    ),
]
Resume = Annotated[str, typer.Option("--resume", metavar="auto|never|PATH", help="snapshot to go on from")]
Jobs = Annotated[str, typer.Option("--jobs", metavar="N|auto", help="runs to train at once")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="show the work and its cost, do nothing")]
PUBLISHED = "also printed tables of other corpora; why each cannot be held against yours"


def output(what: str) -> Any:
    """`--output DIR`, with what goes there."""
    return typer.Option("--output", metavar="DIR", help=what, show_default=False)
