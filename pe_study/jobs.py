"""Several runs of a recipe at once, a process each: small models leave cores, or a GPU, idle.

The processes are a plain pool; each trains one run at a time through `train_study`, under the run's own lock.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import torch
from tqdm import tqdm

from pe_study import runs
from pe_study.errors import Interrupted, PEStudyError, UsageError
from pe_study.stopping import StopRequest

if TYPE_CHECKING:
    from pe_study.recipe import Recipe, RunSpec

Result = TypeVar("Result")

SMALL = 5_000_000  # parameters; below it one core trains nearly as fast as several

_stop: StopRequest  # of a worker process


class SharedStop(StopRequest):
    """A stop that the process which started the workers asks for."""

    def __init__(self, event: Event) -> None:
        super().__init__()
        self._event = event

    @property
    def requested(self) -> str | None:
        return "stop" if self._event.is_set() else None

    @requested.setter
    def requested(self, name: str | None) -> None:
        """Nothing: only the event counts."""


def resolve_jobs(jobs: int | str, recipe: Recipe, num_runs: int) -> int:
    """The number of runs to train at once; `auto` is one a core for small models without a GPU, else 1."""
    if jobs == "auto":
        model = recipe.model
        weights = model.num_layers * (4 * model.d_model**2 + 3 * model.d_model * model.d_ff)
        jobs = num_cores() if weights < SMALL and not torch.cuda.is_available() else 1
    if not isinstance(jobs, int) or jobs < 1:
        raise UsageError(f"--jobs: found {jobs}; accepted: a whole number of at least 1, or auto")
    if jobs > 1 and int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise UsageError("--jobs: runs at once and several processes a run exclude each other; leave one out")
    return max(min(jobs, num_runs), 1)


def num_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def train_at_once(
    train: Callable[..., list[Result]],
    recipe: Recipe,
    runs_root: Path,
    selected: Sequence[RunSpec],
    *,
    jobs: int,
    resume: str,
    progress: bool,
    stop: StopRequest,
) -> list[Result]:
    """Train the selected runs, `jobs` at a time; `train` is `train_study`. A run that fails does not stop
    the others; the first failure is raised when they are done."""
    context = multiprocessing.get_context("spawn")
    event = context.Event()
    threads = max(num_cores() // jobs, 1)
    with ProcessPoolExecutor(jobs, context, _begin, (event, threads)) as pool:
        futures = {
            run.run_id: pool.submit(_train, train, recipe, runs_root, run.run_id, resume) for run in selected
        }
        try:
            _watch(recipe, runs_root, futures, progress=progress, stop=stop, event=event)
        except BaseException:  # a second Ctrl-C
            for process in multiprocessing.active_children():
                process.kill()
            raise
    return _collect(futures, stopped=event.is_set())


def _begin(event: Event, threads: int) -> None:
    """Set a worker process up: its threads, and a stop that its parent asks for; it ends with its parent."""
    global _stop
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches every process; the parent answers it
    torch.set_num_threads(threads)
    _stop = SharedStop(event)
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(Interrupted.exit_code)


def _train(
    train: Callable[..., list[Result]], recipe: Recipe, runs_root: Path, run_id: str, resume: str
) -> Result:
    return train(recipe, runs_root, {"run": run_id}, resume=resume, stop=_stop)[0]


def _watch(
    recipe: Recipe,
    runs_root: Path,
    futures: Mapping[str, Future[Result]],
    *,
    progress: bool,
    stop: StopRequest,
    event: Event,
) -> None:
    """Wait for all runs, showing how far they are and passing a stop on."""
    total = len(futures) * recipe.train.steps
    bar = tqdm(total=total, unit="step", file=sys.stderr, disable=not progress, dynamic_ncols=True)
    waiting = set(futures.values())
    with bar:
        while waiting:
            _, waiting = wait(waiting, timeout=0.5, return_when=FIRST_COMPLETED)
            if stop.requested:
                event.set()
                for future in waiting:
                    future.cancel()
            if progress:
                _show(bar, recipe, runs_root, futures)


def _show(bar: tqdm, recipe: Recipe, runs_root: Path, futures: Mapping[str, Future[Result]]) -> None:
    steps, said = 0, []
    for run_id, future in futures.items():
        rows = runs.read_metrics(runs_root / recipe.name / run_id)
        steps += rows[-1]["step"] if rows else 0
        if rows and future.running():
            said.append(f"{run_id} {rows[-1]['loss']:.3f}")
    bar.set_postfix_str(", ".join(said), refresh=False)
    bar.update(steps - bar.n)


def _collect(futures: Mapping[str, Future[Result]], *, stopped: bool) -> list[Result]:
    results: list[Result] = []
    failures: list[PEStudyError] = []
    for run_id, future in futures.items():
        if future.cancelled():
            failures.append(Interrupted(f"{run_id}: not started; the same command goes on"))
            continue
        try:
            results.append(future.result())
        except BrokenProcessPool:
            said = f"{run_id}: its process was killed; the same command goes on"
            failures.append(Interrupted(said) if stopped else PEStudyError(said))
        except PEStudyError as error:
            failures.append(error)
    if failures:
        # A fault says more than a stop.
        raise sorted(failures, key=lambda error: isinstance(error, Interrupted))[0]
    return results
