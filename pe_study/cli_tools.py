"""The commands beside the main path: what turns, measures or hands on a study."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from pe_study import options, terminal

app = typer.Typer()


@app.command(epilog="Example: pe-study export runs/demo/rope-s0 --format llama")
def export(
    run: Annotated[str, typer.Argument(metavar="RUN", help="a finished run, for example runs/demo/rope-s0")],
    layout: Annotated[str, typer.Option("--format", metavar="FORMAT", help="what to write: llama")] = "llama",
    output: Annotated[Path | None, options.output("where it goes [default: RUN/FORMAT]")] = None,
) -> None:
    """Write a run as a model that other tools load.

    A rope run becomes a plain LlamaForCausalLM with its tokenizer.
    """
    from pe_study.export import export as write

    terminal.say(str(write(run, output, format=layout)))
