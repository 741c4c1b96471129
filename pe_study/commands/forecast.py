"""What a recipe will cost before anything runs: sizes, tokens, operations, memory, and what is finished."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from pe_study import costs, finished, runs
from pe_study.commands import layout
from pe_study.recipe import Recipe, RunSpec, build_encoding
from pe_study.sections import DataSpec, EncodingSpec, ModelSpec
from pe_study.training import bases, tuning
from pe_study.training.selection import check_folder, select_runs

BYTE_SYMBOLS = 257  # 256 bytes and the end of a document
KIBI, GIBI = 1024, 1024**3


def describe(recipe: Recipe, runs_root: Path, only: Mapping[str, str]) -> str:
    """The plan of work of `train RECIPE`, for a person to read before starting it.

    Raises UsageError where training would be refused: nothing selected, or a folder that is not ours to use.
    """
    recipe = tuning.resolve(recipe, runs_root)
    selected = select_runs(recipe, only)
    folders = {run.run_id: runs.run_dir(runs_root, recipe, run) for run in selected}
    for run in selected:
        check_folder(folders[run.run_id], recipe, run)
    states = {run_id: _state(folder) for run_id, folder in folders.items()}
    facts = {
        "model": _model(recipe.model),
        "data": f"{recipe.data.corpus}, tokenizer {recipe.data.tokenizer}, packing {recipe.data.packing}",
        "train": _training(recipe),
        "cost": _cost(recipe, len(selected)),
        "cache": _cache(recipe.model),
        "scores": _scores(recipe),
        "eval": _evaluation(recipe),
    }
    absent = bases.absence(recipe, runs_root)
    facts |= {"init": absent} if absent else {}
    lines = [f"{recipe.name}: {len(selected)} runs in {runs.study_dir(runs_root, recipe)}"]
    lines += [layout.hanging(f"  {name:9}", text) for name, text in facts.items()]
    return "\n".join([*lines, "", *_table(recipe, selected, states)])


def vocabulary(data: DataSpec) -> int | None:
    """Symbols of a tokenizer whose name says it (byte, bpe:N); None for one that must be loaded first."""
    kind, _, size = data.tokenizer.partition(":")
    return BYTE_SYMBOLS if kind == "byte" else int(size) if kind == "bpe" else None


def decoder_parameters(model: ModelSpec, vocab_size: int | None) -> int:
    """Parameters without the encoding's own, nor the embedding where `vocab_size` is None."""
    return costs.decoder_parameters(
        vocab_size=vocab_size or 0,
        num_layers=model.num_layers,
        d_model=model.d_model,
        num_heads=model.num_heads,
        num_kv_heads=model.num_kv_heads,
        d_ff=model.d_ff,
        qk_norm=model.qk_norm,
    )


def position_parameters(recipe: Recipe, spec: EncodingSpec) -> int:
    """Parameters that an encoding adds to the decoder, counted on a copy that holds no memory."""
    built = build_encoding(recipe, spec, spec.label)
    copies = recipe.model.num_layers if built.per_layer else 1
    return copies * sum(parameter.numel() for parameter in built.parameters())


def _model(model: ModelSpec) -> str:
    heads = f"{model.num_heads} heads of {model.d_model // model.num_heads}"
    return (
        f"{model.num_layers} layers x {model.d_model}, {heads} ({model.num_kv_heads} for keys and values), "
        f"feed-forward {model.d_ff}"
    )


def _training(recipe: Recipe) -> str:
    train = recipe.train
    return (
        f"{train.steps:,} steps of {train.batch_tokens:,} tokens at length {train.length:,}: "
        f"{_short(train.steps * train.batch_tokens)} tokens a run{_rates(recipe)}"
    )


def _rates(recipe: Recipe) -> str:
    """The learning rates of encodings that have their own."""
    own = [f"{spec.label} {spec.lr:g}" for spec in recipe.encodings if spec.lr is not None]
    return f"; learning rates: {', '.join(own)}" if own else ""


def _cost(recipe: Recipe, num_runs: int) -> str:
    model, vocab_size = recipe.model, vocabulary(recipe.data)
    count = decoder_parameters(model, vocab_size)
    operations = costs.training_operations(
        num_parameters=count,
        num_layers=model.num_layers,
        d_model=model.d_model,
        length=recipe.train.length,
        num_tokens=recipe.train.steps * recipe.train.batch_tokens,
    )
    beside = "" if vocab_size else f" and {model.d_model:,} for each symbol of the tokenizer"
    rate, device = _matrix_rate()
    return (
        f"{_short(count)} parameters{beside}; {operations:.2g} operations a run, {operations * num_runs:.2g} "
        f"in all: at least {_duration(operations * num_runs / rate)} at the {rate / 1e9:,.0f} billion a "
        f"second at which this {device} multiplies float32 matrices"
    )


def _matrix_rate() -> tuple[float, str]:
    """Operations a second of a large float32 product on the device that would train, and its name."""
    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"
    size = 8192 if device == "cuda" else 1024
    matrix = torch.ones(size, size, device=device)
    (matrix @ matrix).sum().item()
    seconds = []
    for _ in range(5):
        start = time.perf_counter()
        (matrix @ matrix).sum().item()
        seconds.append(time.perf_counter() - start)
    return 2 * size**3 / min(seconds), "CPU" if device == "cpu" else "GPU"


def _cache(model: ModelSpec) -> str:
    sizes = {
        name: costs.kv_cache_bytes(
            num_kv_heads=model.num_kv_heads,
            head_dim=model.d_model // model.num_heads,
            num_layers=model.num_layers,
            bytes_per_element=width,
        )
        for name, width in {"float32": 4, "bfloat16": 2}.items()
    }
    return ", ".join(f"{size:,} bytes a token in {name}" for name, size in sizes.items())


def _scores(recipe: Recipe) -> str:
    longest = recipe.eval.resolve_lengths(recipe.train.length)[-1]
    heads = recipe.model.num_heads
    row = costs.attention_bytes(num_heads=heads, num_queries=1, length=longest)
    whole = costs.attention_bytes(num_heads=heads, num_queries=longest, length=longest)
    return (
        f"{row / KIBI:,.4g} KiB a query and layer at length {longest:,}, in float32, a chunk of queries at "
        f"a time (held whole, as kernel eager does: {whole / GIBI:,.2g} GiB)"
    )


def _evaluation(recipe: Recipe) -> str:
    plan = recipe.eval
    lengths = ", ".join(f"{length:,}" for length in plan.resolve_lengths(recipe.train.length))
    protocols = ", ".join(protocol.name for protocol in plan.protocols)
    return f"lengths {lengths}; protocols {protocols}; rescales {', '.join(plan.rescales)}"


def _table(recipe: Recipe, selected: Sequence[RunSpec], states: Mapping[str, str]) -> list[str]:
    added = {run.encoding.label: f"+{position_parameters(recipe, run.encoding):,}" for run in selected}
    rows = [("run", "position parameters", "state")]
    rows += [(run.run_id, added[run.encoding.label], states[run.run_id]) for run in selected]
    width = max(len(name) for name, _, _ in rows)
    return [f"  {name:{width}}  {number:>19}  {state}" for name, number, state in rows]


def _state(folder: Path) -> str:
    if not (folder / runs.PROVENANCE).is_file():
        return "to do"
    state = runs.run_state(folder)
    if state.status == "done" and not finished.is_intact(folder):
        return "done, but final/ is damaged: will be trained again"
    return "done, will be skipped" if state.status == "done" else f"{state.status} at step {state.step}"


def _short(number: float) -> str:
    """1234567 as 1.23M."""
    for size, sign in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if number >= size:
            return f"{number / size:.3g}{sign}"
    return f"{number:g}"


def _duration(seconds: float) -> str:
    """7300 as 2 h; the largest unit of which there are at least two."""
    for size, sign in ((86400, "days"), (3600, "h"), (60, "min")):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {sign}"
    return f"{seconds:.0f} s"
