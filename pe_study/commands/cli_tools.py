"""The commands beside the main path: what turns, measures or hands on a study."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from pe_study import shipped, terminal
from pe_study.commands import flags, options

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


@app.command(epilog="Example: pe-study card runs/demo/rope-s0 --push me/rope-64")
def card(
    run: Annotated[str, typer.Argument(metavar="RUN", help="a finished run, for example runs/demo/rope-s0")],
    push: Annotated[
        str | None,
        typer.Option(metavar="OWNER/NAME", help="also upload the model there", show_default=False),
    ] = None,
    private: Annotated[bool, typer.Option("--private", help="a new repository is private")] = False,
) -> None:
    """Write the model card of a run, with its evaluation results.

    It goes into the run's final/; --push uploads that folder to the Hugging Face Hub.
    """
    from pe_study import card as cards

    terminal.say(cards.push(run, push, private=private) if push else str(cards.write_card(run)))


@app.command(epilog="Example: pe-study sweep recipes/small.yaml --executor slurm --jobs 8")
def sweep(
    recipe: options.RecipePath,
    overrides: options.Overrides = None,
    runs: options.Runs = Path("runs"),
    only: options.Only = None,
    executor: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="run them: local, slurm or debug", show_default=False),
    ] = None,
    jobs: Annotated[int, typer.Option(min=1, metavar="N", help="how many at a time")] = 1,
    slurm: Annotated[
        str | None, typer.Option(metavar="KEY=VALUE,…", help="submitit's options", show_default=False)
    ] = None,
) -> None:
    """Print a command line for each run of a recipe.

    One JSON object a line, run_id and argv, for a scheduler; --executor hands them to submitit instead.
    """
    from pe_study import sweep as sweeps

    path = shipped.find(recipe)
    lines = sweeps.sweep(path, overrides or [], runs_root=runs, only=flags.only(only))
    if executor:
        given = flags.pairs(slurm, "--slurm", "slurm_partition=gpu,timeout_min=600").items()
        settings = {key: int(value) if value.isdecimal() else value for key, value in given}
        folder = runs / ".jobs" / Path(recipe).stem
        lines = sweeps.submit(lines, folder, executor=executor, jobs=jobs, options=settings)
    for line in lines:
        terminal.say(json.dumps(line))


@app.command(epilog="Example: pe-study bench rope alibi --lengths 128,2k --peers")
def bench(
    encodings: Annotated[
        list[str] | None,
        typer.Argument(metavar="ENCODING", help="encodings to measure [default: all]", show_default=False),
    ] = None,
    lengths: Annotated[str, typer.Option(metavar="A,B,…", help="tokens in a sequence")] = "128,512",
    kernels: Annotated[str, typer.Option(metavar="A,B,…", help="attention: see ls kernels")] = "auto",
    phases: Annotated[str, typer.Option(metavar="A,B", help="train, eval or both")] = "train,eval",
    peers: Annotated[
        bool, typer.Option("--peers", help="also LlamaForCausalLM and, where installed, x-transformers")
    ] = False,
    compiled: Annotated[
        bool, typer.Option("--compile", help="also measure each under torch.compile")
    ] = False,
    sizes: Annotated[
        str | None,
        typer.Option(metavar="KEY=N,…", help="the decoder: num_layers=8,d_model=512", show_default=False),
    ] = None,
    batch_tokens: Annotated[str, typer.Option(metavar="N", help="tokens in a step")] = "4k",
    rounds: Annotated[int, typer.Option(min=1, metavar="N", help="turns that each takes")] = 7,
    memory: Annotated[bool, typer.Option(help="measure peak memory, in a process each")] = True,
    device: Annotated[str, typer.Option(metavar="DEVICE", help="cpu or cuda")] = "cpu",
    dtype: Annotated[str, typer.Option(metavar="DTYPE", help="float32 or bfloat16")] = "float32",
    output: Annotated[Path | None, options.output("also write bench.json and bench.md there")] = None,
) -> None:
    """Measure speed and memory, encoding by encoding.

    Everything takes turns in one run, so that ratios hold on a busy machine. Prints a Markdown table.
    """
    from pe_study import bench as benches
    from pe_study import encodings as known
    from pe_study.commands.listing import KERNELS
    from pe_study.files import write_json, write_text
    from pe_study.runs import check_output, claim_folder
    from pe_study.workloads import PEERS, Sizes, is_installed

    workloads = benches.plan(
        encodings or known.available(),
        lengths=[flags.tokens("--lengths", length) for length in flags.items(lengths)],
        kernels=flags.words("--kernels", kernels, tuple(KERNELS)),
        phases=flags.words("--phases", phases, benches.PHASES),
        peers=peers,
        compiled=compiled,
        sizes=Sizes(**flags.counts("--sizes", sizes, Sizes.__dataclass_fields__)),
        batch_tokens=flags.tokens("--batch-tokens", batch_tokens),
        device=device,
        dtype=dtype,
    )
    if peers and (absent := [peer for peer in PEERS if not is_installed(peer)]):
        terminal.note(f"without {', '.join(absent)}: pip install 'pe-study[bench]'")
    if output:
        check_output(output, ours=("bench.json",))
    result = benches.run(workloads, rounds=rounds, memory=memory, progress=terminal.note)
    table = benches.markdown(result)
    if output:
        claim_folder(output, ours=("bench.json",))
        write_json(output / "bench.json", result)
        write_text(output / "bench.md", table)
    terminal.say(table.rstrip())


@app.command(epilog="Example: pe-study tune recipes/demo.yaml --jobs auto")
def tune(
    recipe: options.RecipePath,
    overrides: options.Overrides = None,
    runs: options.Runs = Path("runs"),
    jobs: options.Jobs = "1",
) -> None:
    """Choose a learning rate for each encoding, at the training length.

    Tries half, once and twice train.lr, and lr_mult 1 and auto, with a fifth of the updates. What it chose
    lies in runs/NAME/tune; recipes take it with train.lr=tuned, or tuned:NAME from another study.
    """
    from pe_study import chosen_rates
    from pe_study import recipe as recipes
    from pe_study.commands import rates_table
    from pe_study.training.stopping import StopRequest

    at_once = flags.jobs(jobs)
    loaded = recipes.load(shipped.find(recipe), overrides or [])
    with StopRequest() as stop:
        from pe_study.tune import tune as choose

        result = choose(loaded, runs, jobs=at_once, progress=terminal.shows_progress(), stop=stop)
    terminal.say(rates_table.text(result))
    terminal.say(str(runs / loaded.name / chosen_rates.FOLDER / chosen_rates.RESULT))
