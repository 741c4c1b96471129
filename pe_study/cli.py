"""The commands: parse, call, print. Everything heavy is imported inside the command that needs it."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pe_study import __version__, shipped, terminal
from pe_study.commands import cli_tools, flags, layout, options
from pe_study.errors import Interrupted, PEStudyError
from pe_study.training.stopping import StopRequest

if TYPE_CHECKING:
    from pe_study.recipe import Recipe

app = typer.Typer(
    name=terminal.PROGRAM,
    help="Trained at length L, what happens past L? Train small decoders that differ only in their position "
    "encoding, evaluate them and any Hugging Face checkpoint beyond the training length, report the answer.",
    epilog="A first look, no GPU and no network: pe-study run recipes/demo.yaml",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

LISTS = (
    "encodings, rescales, protocols, kernels, corpora, tokenizers, recipes, plans, keys, runs; or a recipe"
)


@app.callback(invoke_without_command=True)
def root(version: Annotated[bool, typer.Option("--version", help="print the version")] = False) -> None:
    if version:
        terminal.say(f"{terminal.PROGRAM} {__version__}")


@app.command(epilog="Example: pe-study train recipes/demo.yaml train.steps=100 --only seed=0")
def train(
    recipe: options.RecipePath,
    overrides: options.Overrides = None,
    runs: options.Runs = Path("runs"),
    only: options.Only = None,
    resume: options.Resume = "auto",
    jobs: options.Jobs = "1",
    dry_run: options.DryRun = False,
) -> None:
    """Train every encoding and seed of a recipe.

    Finished runs are skipped. Several processes: accelerate launch -m pe_study train RECIPE
    """
    from pe_study import recipe as recipes

    loaded = recipes.load(shipped.find(recipe), overrides or [])
    _train(loaded, runs, flags.only(only), dry_run, resume=resume, jobs=flags.jobs(jobs))


def _train(loaded: Recipe, runs: Path, only: dict[str, str], dry_run: bool, **choices: Any) -> None:
    if dry_run:
        from pe_study.commands.forecast import describe

        terminal.say(describe(loaded, runs, only))
    else:
        with StopRequest() as stop:  # before torch is loaded, so that no signal is missed
            from pe_study.train import train_study

            progress = terminal.shows_progress()
            for result in train_study(loaded, runs, only, progress=progress, stop=stop, **choices):
                terminal.say(f"{result.status:7}  {result.folder}")


@app.command("eval", epilog="Example: pe-study eval runs/demo --lengths 1x,2x,4x --rescale none,yarn:auto")
@flags.with_plan_flags
def evaluate(
    targets: Annotated[
        list[str], typer.Argument(metavar="TARGET", help="a run, study, Hugging Face id or folder, GGUF")
    ],
    plan: Annotated[
        str | None, typer.Option("--plan", metavar="PLAN", help="a plan, for example evals/length.yaml")
    ] = None,
    runs: options.Runs = Path("runs"),
    output: Annotated[Path | None, options.output("where results go [default: beside the study]")] = None,
    only: options.Only = None,
    dry_run: options.DryRun = False,
    kernel: Annotated[str, typer.Option(metavar="KERNEL", help="attention: see ls kernels")] = "auto",
    dtype: Annotated[str, typer.Option(metavar="DTYPE", help="float32, bfloat16 or float16")] = "float32",
    revision: Annotated[str | None, typer.Option(metavar="REV", help="commit of a Hugging Face id")] = None,
    gguf_file: Annotated[str | None, typer.Option(metavar="FILE", help="GGUF file inside the target")] = None,
    trust_remote_code: Annotated[
        bool, typer.Option("--trust-remote-code", help="run code that comes with a checkpoint")
    ] = False,
    **plan_flags: str | None,
) -> None:
    """Evaluate runs and checkpoints at several lengths.

    Without --plan a study uses the plan of its recipe. The flags from --name on change single keys of it.
    """
    names, overrides = flags.split_overrides(targets)
    overrides += flags.plan_overrides(plan_flags)
    loading = {
        "kernel": kernel,
        "dtype": dtype,
        "revision": revision,
        "gguf_file": gguf_file,
        "trust_remote_code": trust_remote_code,
    }
    _evaluate(names, plan, overrides, runs, output=output, only=flags.only(only), dry_run=dry_run, **loading)


def _evaluate(
    targets: Sequence[str],
    plan_path: str | None,
    overrides: Sequence[str],
    runs: Path,
    output: Path | None = None,
    **choices: Any,
) -> None:
    """Every target, whatever happens to the others; then the first failure is raised.

    Several targets get a folder each below `output`.
    """
    failures: list[PEStudyError] = []
    for target in targets:
        folder = output / _folder_name(target, targets) if output and len(targets) > 1 else output
        try:
            _evaluate_one(target, plan_path, overrides, runs, output=folder, **choices)
        except PEStudyError as error:
            failures.append(error)
            if len(targets) > 1:
                terminal.complain(str(error) if target in str(error) else f"{target}: {error}")
    if len(targets) > 1 and failures:
        raise type(failures[0])(f"{len(failures)} of {len(targets)} targets failed")
    if failures:
        raise failures[0]


def _folder_name(target: str, targets: Sequence[str]) -> str:
    """The last part of a target's name, the whole of it where another target ends alike."""
    from pe_study.evaluators.subjects import slug

    alike = {other for other in targets if Path(other).name == Path(target).name}
    return Path(target).name if len(alike) == 1 else slug(target)


def _evaluate_one(
    target: str, plan_path: str | None, overrides: Sequence[str], runs: Path, **choices: Any
) -> None:
    from pe_study.evaluators import study
    from pe_study.plan import load_plan

    if plan_path:
        plan = load_plan(shipped.find(plan_path), overrides)
    else:
        plan = study.default_plan(target, runs).with_overrides(overrides)
    done = study.evaluate(target, plan, runs_root=runs, **choices)
    _say_results(done)


def _say_results(done: Any) -> None:
    """The cells of a dry run, or what the folder of an evaluation holds."""
    if isinstance(done, list):
        terminal.say(layout.table(done))
    else:
        from pe_study.commands.listing import results

        terminal.say(f"{results(done)}\n{done}")


@app.command(epilog="Example: pe-study report runs/demo --output reports/demo")
def report(
    studies: Annotated[
        list[str], typer.Argument(metavar="STUDY", help="studies (runs/demo, or demo) and files of bench")
    ],
    runs: options.Runs = Path("runs"),
    output: Annotated[Path | None, options.output("where the page goes [default: reports/NAME]")] = None,
    view: Annotated[
        str | None, typer.Option("--view", metavar="FILE", help="what to show, a reports/*.yaml")
    ] = None,
    title: Annotated[
        str | None, typer.Option(metavar="TEXT", help="title of the page", show_default=False)
    ] = None,
    formats: Annotated[str, typer.Option("--format", metavar="A,B,…", help="svg, png, latex")] = "svg,png",
    published: Annotated[bool, typer.Option("--published", help=options.PUBLISHED)] = False,
    watch: Annotated[bool, typer.Option("--watch", help="write it again while the study runs")] = False,
    interval: Annotated[float, typer.Option(min=1, metavar="SECONDS", help="how often to look")] = 30.0,
) -> None:
    """Write the page of a study, or of several beside each other, and print its path.

    The folder holds index.html, report.md, figures and tables.
    """
    chosen: dict[str, Any] = {
        "view": shipped.find(view) if view else None,
        "title": title,
        "formats": flags.words("--format", formats, ("svg", "png", "latex")),
        "published": published,
    }
    from pe_study import report as reports

    folders = _folders(studies, runs)
    if not watch:
        terminal.say(str(reports.build(folders, output, **chosen)))
        return
    for page, line in reports.watch(folders, output, interval=interval, **chosen):
        terminal.say(f"{page}  {line}")


def _folders(studies: Sequence[str], runs: Path) -> list[Path]:
    """Studies as typed, or by their names below the folder of runs."""
    return [path if (path := Path(name)).exists() else runs / name for name in studies]


@app.command(epilog="Example: pe-study run recipes/demo.yaml")
def run(
    recipe: options.RecipePath,
    overrides: options.Overrides = None,
    runs: options.Runs = Path("runs"),
    output: Annotated[Path | None, options.output("where the page goes [default: reports/NAME]")] = None,
    only: options.Only = None,
    jobs: options.Jobs = "1",
    dry_run: options.DryRun = False,
) -> None:
    """Train, evaluate and report a recipe.

    What is finished is not done again.
    """
    from pe_study import recipe as recipes
    from pe_study import report as reports

    picked, at_once = flags.only(only), flags.jobs(jobs)
    loaded = recipes.load(shipped.find(recipe), overrides or [])
    study = runs / loaded.name
    page = reports.output_folder([loaded.name], output)  # refused now, not when training is over
    _train(loaded, runs, picked, dry_run, jobs=at_once)
    if not dry_run:
        from pe_study.evaluators import study as evaluation

        _say_results(evaluation.evaluate(str(study), loaded.eval, runs_root=runs, only=picked))
        terminal.say(str(reports.build([study], page)))


@app.command(epilog="Example: pe-study validate recipes/*.yaml evals/*.yaml")
def validate(
    paths: Annotated[list[str], typer.Argument(metavar="FILE", help="recipes and plans")],
) -> None:
    """Check recipes and plans without running them.

    Overrides (key=value) apply to each recipe.
    """
    from pe_study.commands.listing import validated

    names, overrides = flags.split_overrides(paths)
    for name in names:
        terminal.say(validated(shipped.find(name), overrides))


@app.command("ls", epilog="Example: pe-study ls encodings rescales")
def ls(
    what: Annotated[
        list[str] | None,
        typer.Argument(metavar="WHAT", help=LISTS, show_default=False),
    ] = None,
    runs: options.Runs = Path("runs"),
) -> None:
    """List what can be chosen, and the runs.

    The name of a recipe lists its size and cost.
    """
    from pe_study.commands.listing import SHORT, listed

    terminal.say("\n\n".join(listed(name, runs) for name in what or SHORT))


app.add_typer(cli_tools.app)


def _command(argv: Sequence[str] | None) -> int:
    try:
        code = app(flags.filled(argv or ["--help"]), prog_name=terminal.PROGRAM, standalone_mode=False)
    except typer.TyperException as error:
        terminal.complain(error.format_message())
        return error.exit_code
    if code == 130:  # typer's reading of Ctrl-C
        raise Interrupted(terminal.STOPPED)
    return code or 0


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command line and return its exit code."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    if not terminal.shows_progress():
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
        os.environ.setdefault("HF_DATASETS_DISABLE_PROGRESS_BARS", "1")
    return terminal.guarded(_command, sys.argv[1:] if argv is None else argv)
