"""Speed and memory of training and evaluation: encoding x kernel x length, beside peers doing the same work.

Every workload is warmed up, then all of them take turns, so that a noisy machine is noisy to each alike;
ratios are taken within a turn. Memory is the peak of a fresh process that does one workload and nothing else,
less what it held after importing (on CUDA: the allocator's peak).
"""

from __future__ import annotations

import multiprocessing
import platform
import statistics
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, replace
from typing import Any

import torch

from pe_study import costs
from pe_study.attention import KERNELS
from pe_study.errors import PEStudyError, UsageError, did_you_mean
from pe_study.memory import held_bytes, peak_memory_bytes, reset_peak_memory
from pe_study.workloads import PEERS, Sizes, Workload, build, is_installed, step_of

PHASES = ("train", "eval")
DTYPES = ("float32", "bfloat16", "float16")


def plan(
    encodings: Iterable[str],
    *,
    lengths: Iterable[int],
    kernels: Iterable[str] = ("auto",),
    phases: Iterable[str] = PHASES,
    peers: bool = False,
    compiled: bool = False,
    sizes: Sizes | None = None,
    batch_tokens: int = 4096,
    device: str = "cpu",
    dtype: str = "float32",
) -> list[Workload]:
    """All workloads of a benchmark, each under torch.compile too where `compiled`.

    UsageError for a name that does not exist or sizes that do not fit.
    """
    from pe_study import encodings as known

    sizes = sizes or Sizes()
    names, kernels, phases, lengths = list(encodings), list(kernels), list(phases), list(lengths)
    _refuse_unknown("encoding", names, known.available())
    _refuse_unknown("kernel", kernels, (*KERNELS, "auto"))
    _refuse_unknown("phase", phases, PHASES)
    _refuse_unknown("dtype", [dtype], DTYPES)
    _refuse_unknown("device", [device], ("cpu", "cuda"))
    if sizes.d_model % sizes.num_heads or sizes.num_heads % sizes.num_kv_heads:
        raise UsageError(
            f"bench: {sizes.num_heads} heads must divide the width {sizes.d_model} and be a multiple of "
            f"{sizes.num_kv_heads} key heads"
        )
    if device == "cuda" and not torch.cuda.is_available():
        raise UsageError("bench: no CUDA device here; use --device cpu")
    workloads = []
    for phase in phases:
        for length in lengths:
            base = Workload("", phase, length, "auto", batch_tokens, sizes, device, dtype)
            group = [replace(base, name=name, kernel=kernel) for name in names for kernel in kernels]
            group += [replace(base, name=peer) for peer in PEERS if peers and is_installed(peer)]
            workloads += group + [replace(workload, compiled=True) for workload in group if compiled]
    _refuse_misfits(workloads)
    return workloads


def _refuse_misfits(workloads: Iterable[Workload]) -> None:
    """UsageError where an encoding does not take these sizes; nothing is allocated."""
    for workload in {workload.name: workload for workload in workloads if not workload.is_peer}.values():
        try:
            with torch.device("meta"):
                build(replace(workload, sizes=replace(workload.sizes, num_layers=1), device="meta"))
        except (PEStudyError, ValueError) as refusal:
            raise UsageError(f"bench: {workload.name} in these --sizes: {refusal}") from None


def _refuse_unknown(kind: str, names: Iterable[str], accepted: Iterable[str]) -> None:
    for name in names:
        if name not in accepted:
            raise UsageError(f"bench: unknown {kind} {name!r}; {did_you_mean(name, accepted)}")


def run(
    workloads: list[Workload],
    *,
    rounds: int = 7,
    memory: bool = True,
    progress: Callable[[str], None] = lambda line: None,
) -> dict[str, Any]:
    """Measures every workload; returns machine, matmul ceiling and one row a workload (strict JSON)."""
    rows: list[dict[str, Any]] = []
    ceiling = 0.0
    for group in _groups(workloads):
        progress(f"{group[0].phase} at length {group[0].length}: {'; '.join(w.title for w in group)}")
        measured, reached = _measure(group, rounds)
        rows, ceiling = rows + measured, max(ceiling, reached)
    if memory:
        for row, workload in zip(rows, workloads, strict=True):
            if workload.compiled:  # the peak would be the compiler's
                continue
            progress(f"memory of {workload.name} ({workload.phase}, length {workload.length})")
            row["peak_memory_bytes"] = peak_memory(workload)
    for row, workload in zip(rows, workloads, strict=True):
        row["matmul_share"] = row["tokens_per_second"] * _operations(workload) / ceiling
    return {"machine": machine(workloads[0].device), "matmul_ceiling_flops": ceiling, "rows": rows}


def _groups(workloads: list[Workload]) -> list[list[Workload]]:
    """Workloads that take turns with each other: the same phase and length, in the order given."""
    groups: dict[tuple[str, int], list[Workload]] = {}
    for workload in workloads:
        groups.setdefault((workload.phase, workload.length), []).append(workload)
    assert [w for group in groups.values() for w in group] == workloads
    return list(groups.values())


def _measure(group: list[Workload], rounds: int) -> tuple[list[dict[str, Any]], float]:
    """A row a workload, and the best matrix multiplication between the rounds: a busy machine slows both."""
    from pe_study.model import PEStudyForCausalLM

    models = [build(workload) for workload in group]
    steps = [step_of(workload, model) for workload, model in zip(group, models, strict=True)]
    with _compiling(len(group)) if any(workload.compiled for workload in group) else nullcontext():
        for step in steps:
            step()
    seconds: list[list[float]] = [[] for _ in group]
    ceiling = 0.0
    for _ in range(rounds):
        ceiling = max(ceiling, matmul_ceiling(group[0].device, group[0].dtype))
        for taken, step in zip(seconds, steps, strict=True):
            start = time.perf_counter()
            step()
            taken.append(time.perf_counter() - start)
    rows = []
    for workload, model, taken in zip(group, models, seconds, strict=True):
        row: dict[str, Any] = {
            "encoding": workload.name,
            "compiled": workload.compiled,
            "peer": workload.is_peer,
            "phase": workload.phase,
            "length": workload.length,
            "kernel": model.resolved_kernel() if isinstance(model, PEStudyForCausalLM) else workload.kernel,
            "dtype": workload.dtype,
            "device": workload.device,
            "num_tokens": workload.num_tokens,
            **asdict(workload.sizes),
            "num_parameters": sum(parameter.numel() for parameter in model.parameters()),
            "tokens_per_second": workload.num_tokens / statistics.median(taken),
            "rounds": rounds,
        }
        for reference in ("rope", *PEERS):
            found = _reference(reference, workload, group)
            if found is not None:
                ratios = sorted(b / a for a, b in zip(taken, seconds[found], strict=True))
                row[f"ratio_to_{reference}"] = _spread(ratios)
        rows.append(row)
    return rows, ceiling


def _reference(name: str, workload: Workload, group: list[Workload]) -> int | None:
    """Where in the group the uncompiled workload `name` stands: of the workload's own kernel, where several
    were measured; None where there is none."""
    places = [i for i, other in enumerate(group) if other.name == name and not other.compiled]
    own = [i for i in places if group[i].kernel == workload.kernel]
    return next(iter(own or places), None)


@contextmanager
def _compiling(models: int) -> Iterator[None]:
    """Room for one compilation of each of several models of one class; UsageError where none can be made.

    torch.compile counts recompilations by class, and past its limit it runs the rest uncompiled.
    """
    torch.compiler.reset()
    limit = max(2 * models, torch._dynamo.config.recompile_limit)
    with torch._dynamo.config.patch(recompile_limit=limit, fail_on_recompile_limit_hit=True):
        try:
            yield
        except torch._dynamo.exc.BackendCompilerFailed as error:
            reason = str(error).splitlines()[0]
            remedy = "install g++ or leave out --compile" if "C++" in str(error) else "leave out --compile"
            raise UsageError(f"bench: torch.compile failed ({reason}); {remedy}") from None


def _spread(ratios: list[float]) -> dict[str, float]:
    return {"median": statistics.median(ratios), "low": ratios[0], "high": ratios[-1]}


def _operations(workload: Workload) -> float:
    """Arithmetic of the decoder a token; half of three for a forward pass alone is a third."""
    sizes = asdict(workload.sizes)
    total = costs.training_operations(
        num_parameters=costs.decoder_parameters(**sizes),
        num_layers=workload.sizes.num_layers,
        d_model=workload.sizes.d_model,
        length=workload.length,
        num_tokens=1,
    )
    return total if workload.phase == "train" else total / 3


def matmul_ceiling(device: str, dtype: str, *, size: int = 1536, seconds: float = 0.3) -> float:
    """Operations a second of the best square matrix multiplication: what the machine can do at all."""
    a = torch.randn(size, size, device=device, dtype=getattr(torch, dtype))
    best, end = 0.0, time.perf_counter() + seconds
    while time.perf_counter() < end:
        start = time.perf_counter()
        (a @ a)[0, 0].item()  # waits for the device
        best = max(best, 2 * size**3 / (time.perf_counter() - start))
    return best


def machine(device: str) -> dict[str, Any]:
    """What the figures were taken on."""
    name = torch.cuda.get_device_name() if device == "cuda" else platform.processor() or platform.machine()
    return {"device": name, "threads": torch.get_num_threads(), "torch": torch.__version__}


def peak_memory(workload: Workload) -> int:
    """Peak bytes of two steps of one workload in a process of its own, above what importing took."""
    fresh = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=fresh) as pool:
        return pool.submit(_peak_memory_here, workload, torch.get_num_threads()).result()


def _peak_memory_here(workload: Workload, threads: int) -> int:
    torch.set_num_threads(threads)
    build(replace(workload, sizes=Sizes(1, 8, 1, 1, 8, 8)))  # imports what building imports
    device = torch.device(workload.device)
    before = 0 if workload.device == "cuda" else held_bytes()
    reset_peak_memory(device)
    step = step_of(workload, build(workload))
    step()
    step()
    return peak_memory_bytes(device) - before


def markdown(result: dict[str, Any]) -> str:
    """The result as a Markdown table, after the ALiBi paper's table of speed and memory."""
    lines = [
        f"{result['machine']['device']}, {result['machine']['threads']} threads, torch "
        f"{result['machine']['torch']}; matrix multiplication reaches "
        f"{result['matmul_ceiling_flops'] / 1e9:.0f} GFLOP/s. Ratios are medians of turns (lowest-highest).",
        "",
        "| phase | length | model | kernel | tokens/s | to rope | to Llama | share of matmul | peak MB |",
        "|---|---:|---|---|---:|---:|---:|---:|---:|",
    ]
    for row in result["rows"]:
        memory = row.get("peak_memory_bytes")
        lines.append(
            f"| {row['phase']} | {row['length']} | {row['encoding']}{', compiled' * row['compiled']} "
            f"| {row['kernel']} "
            f"| {row['tokens_per_second']:,.0f} | {_ratio(row, 'rope')} | {_ratio(row, PEERS[0])} "
            f"| {row['matmul_share']:.0%} | {'' if memory is None else f'{memory / 2**20:,.0f}'} |"
        )
    return "\n".join(lines) + "\n"


def _ratio(row: dict[str, Any], reference: str) -> str:
    spread = row.get(f"ratio_to_{reference}")
    return "" if spread is None else f"{spread['median']:.2f} ({spread['low']:.2f}-{spread['high']:.2f})"
