"""Several runs of a recipe at once: small models leave cores, or a GPU, idle.

Each of a few processes trains one run after another through `train_study`, under the run's own lock and,
where there are GPUs, on one of them. A process that dies takes down the run it was at and no other.
"""

from __future__ import annotations

import contextlib
import logging
import math
import multiprocessing
import os
import queue
import signal
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnContext, SpawnProcess
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import TYPE_CHECKING, Generic, TypeVar

import torch
from tqdm import tqdm

from pe_study import runs
from pe_study.errors import Interrupted, PEStudyError, UsageError
from pe_study.terminal import prepare_streams
from pe_study.training.devices import VISIBLE, share_out, visible_gpus
from pe_study.training.stopping import SIGNALS, StopRequest, describe_exit, wants_restart

if TYPE_CHECKING:
    from pe_study.recipe import Recipe, RunSpec

Result = TypeVar("Result")

GRACE = 10.0  # seconds that an idle process has to end
SMALL = 5_000_000  # parameters; below it one core trains nearly as fast as several

logger = logging.getLogger(__name__)
_starting = threading.Lock()  # the environment of this process is that of the next child


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
    """The number of runs to train at once; `auto` is one a GPU, without GPUs one a core where the model is
    small, else 1."""
    if jobs == "auto":
        model = recipe.model
        weights = model.num_layers * (4 * model.d_model**2 + 3 * model.d_model * model.d_ff)
        jobs = len(visible_gpus()) or (num_cores() if weights < SMALL else 1)
    if not isinstance(jobs, int) or jobs < 1:
        raise UsageError(f"--jobs: found {jobs}; accepted: a whole number of at least 1, or auto")
    if jobs > 1 and int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise UsageError("--jobs: runs at once and several processes a run exclude each other; leave one out")
    return max(min(jobs, num_runs), 1)


def num_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@dataclass(frozen=True)
class Work(Generic[Result]):
    """What the processes share: `train` is `train_study`, `event` asks them to stop."""

    train: Callable[..., list[Result]]
    recipe: Recipe
    runs_root: Path
    resume: str
    event: Event
    threads: int

    def do(self, run_id: str) -> Result:
        """Train one run, in a process of the pool."""
        stop = SharedStop(self.event)
        return self.train(self.recipe, self.runs_root, {"run": run_id}, resume=self.resume, stop=stop)[0]


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
    work = Work(train, recipe, runs_root, resume, context.Event(), max(num_cores() // jobs, 1))
    workers = [Worker(work, context, gpu) for gpu in share_out(visible_gpus(), jobs)]
    free: queue.SimpleQueue[Worker] = queue.SimpleQueue()
    for worker in workers:
        free.put(worker)

    def train_one(run_id: str) -> Result:
        worker = free.get()
        try:
            return worker.train(run_id)
        finally:
            free.put(worker)

    with ThreadPoolExecutor(jobs) as pool:
        futures = {run.run_id: pool.submit(train_one, run.run_id) for run in selected}
        try:
            _watch(recipe, runs_root, futures, progress=progress, stop=stop, event=work.event)
        finally:  # a second Ctrl-C comes here at once
            pool.shutdown(wait=False, cancel_futures=True)
            for worker in workers:
                worker.end()
    return _collect(futures)


class Worker(Generic[Result]):
    """A process that trains runs one after another; another is started in its place when it dies."""

    def __init__(self, work: Work[Result], context: SpawnContext, gpu: str | None) -> None:
        self._work, self._context, self._gpu = work, context, gpu
        self._process: SpawnProcess | None = None
        self._connection: Connection | None = None
        self._busy = False

    def train(self, run_id: str) -> Result:
        """Train one run and return or raise what it does; PEStudyError naming it when its process dies."""
        if self._process is None:
            self._start()
        assert self._connection is not None
        self._busy = True
        try:
            self._connection.send(run_id)
            outcome = self._connection.recv()
        except (EOFError, OSError):
            raise self._death(run_id) from None
        self._busy = False
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    def _start(self) -> None:
        self._connection, theirs = self._context.Pipe()
        self._process = self._context.Process(target=_serve, args=(theirs, self._work))
        with _starting, _environment(VISIBLE, self._gpu), _held_back(SIGNALS):
            self._process.start()
        theirs.close()

    def _death(self, run_id: str) -> PEStudyError:
        assert self._process is not None
        self._process.join()
        code, self._process, self._busy = self._process.exitcode or 0, None, False
        said = f"{run_id}: its process ended with {describe_exit(code)}; the same command goes on"
        return (Interrupted if wants_restart(code) else PEStudyError)(said)

    def end(self) -> None:
        """End the process: at once if it is at a run, else as it ends by itself, which leaks nothing."""
        if self._process is None or self._connection is None:
            return
        if not self._busy:
            with contextlib.suppress(OSError):
                self._connection.send(None)
            self._process.join(GRACE)
        self._process.kill()
        self._process.join()


@contextlib.contextmanager
def _environment(name: str, value: str | None) -> Iterator[None]:
    """Within the block, the environment variable has a value; None leaves it as it is."""
    before = os.environ.get(name)
    if value is not None:
        os.environ[name] = value
    try:
        yield
    finally:
        if before is not None:
            os.environ[name] = before
        elif value is not None:
            del os.environ[name]


@contextlib.contextmanager
def _held_back(signals: Iterable[signal.Signals]) -> Iterator[None]:
    """Within the block, processes start with these signals held back, until they can answer them."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _serve(connection: Connection, work: Work) -> None:
    """In a process of the pool: train the runs that are asked for; it ends with its parent."""
    for number in SIGNALS:  # they may reach every process of a job; the parent answers them
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
    prepare_streams()
    torch.set_num_threads(work.threads)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    while (run_id := connection.recv()) is not None:
        try:
            outcome = work.do(run_id)
        except Exception as error:  # raised again in the parent
            outcome = error
        connection.send(outcome)


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(Interrupted.exit_code)


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
        try:
            rows = runs.read_metrics(runs_root / recipe.name / run_id)
        except (PEStudyError, OSError):  # damaged: its own training says so, the bar does without
            continue
        steps += rows[-1]["step"] if rows else 0
        if rows and future.running():
            said.append(f"{run_id} {rows[-1].get('loss') or math.nan:.3f}")
    bar.set_postfix_str(", ".join(said), refresh=False)
    bar.update(steps - bar.n)


def _collect(futures: Mapping[str, Future[Result]]) -> list[Result]:
    results: list[Result] = []
    failures: list[PEStudyError] = []
    for run_id, future in futures.items():
        if future.cancelled():
            failures.append(Interrupted(f"{run_id}: not started; the same command goes on"))
            continue
        try:
            results.append(future.result())
        except PEStudyError as error:
            failures.append(error)
    failures.sort(key=lambda error: isinstance(error, Interrupted))  # a fault says more than a stop
    for other in failures[1:]:
        logger.warning("%s", other)
    if failures:
        raise failures[0]
    return results
