"""A study across machines: one command line a run, and submitit to run them locally or as a Slurm array.

A command line is idempotent: it trains its run from where it stands under the run's lock, does nothing when
the run is finished, and exits 75 when it was stopped and wants to be started again.
"""

from __future__ import annotations

import contextlib
import os
import queue
import shlex
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

from pe_study.errors import Interrupted, PEStudyError, UsageError, did_you_mean
from pe_study.recipe import load
from pe_study.training import tuning
from pe_study.training.devices import VISIBLE, share_out, visible_gpus
from pe_study.training.selection import select_runs
from pe_study.training.stopping import StopRequest, describe_exit, wants_restart

if TYPE_CHECKING:
    from submitit import Executor

EXECUTORS = ("local", "slurm", "debug")
UNLIMITED = 10**6  # times that a job may run out of time: each one ends with a snapshot and goes on from it


def sweep(
    path: Path | str,
    overrides: Sequence[str] = (),
    *,
    runs_root: Path | str = "runs",
    only: Mapping[str, str] | None = None,
) -> list[dict[str, Any]]:
    """`{"run_id": …, "argv": […]}` for every run of the recipe that `only` selects.

    RecipeError for what each of them would refuse: a tuned rate that is not there.
    """
    recipe = tuning.resolve(load(path, overrides), runs_root)
    common = [sys.executable, "-m", "pe_study", "train", str(path), *overrides, "--runs", str(runs_root)]
    return [
        {"run_id": run.run_id, "argv": [*common, "--only", f"run={run.run_id}"]}
        for run in select_runs(recipe, only)
    ]


def submit(
    lines: Sequence[Mapping[str, Any]],
    folder: Path | str,
    *,
    executor: str = "local",
    jobs: int = 1,
    options: Mapping[str, Any] | None = None,
) -> list[dict[str, Any]]:
    """Run what `sweep` returned, at most `jobs` at a time, logs in `folder`; `{"run_id", "job_id"}` a run.

    `local` and `debug` (in this process) wait for the runs; PEStudyError names those that failed, Interrupted
    those that were stopped. `slurm` submits an array and returns; `options` are submitit's
    (`slurm_partition`, `timeout_min`, …). A job that is pre-empted or out of time finishes its step, saves
    and is requeued.
    """
    if executor not in EXECUTORS:
        raise UsageError(f'--executor: found "{executor}"; {did_you_mean(executor, EXECUTORS)}')
    engine = _executor(Path(folder), executor, jobs, options or {})
    if executor == "slurm":
        submitted = engine.submit_array([TrainJob(line["argv"]) for line in lines])
        return [
            {"run_id": line["run_id"], "job_id": job.job_id}
            for line, job in zip(lines, submitted, strict=True)
        ]

    done = Waiting(engine, 1 if executor == "debug" else jobs).run(lines)
    _raise_failures(done, folder)
    return done


class Waiting:
    """Runs that this process waits for, as many at once as `jobs` says: what asks it to stop, asks them."""

    def __init__(self, engine: Executor, jobs: int) -> None:
        self._engine, self._jobs = engine, jobs
        self._gpus: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        for gpu in share_out(visible_gpus(), jobs):
            self._gpus.put(gpu)
        self._running: dict[str, TrainJob | psutil.Process] = {}  # job id: what takes a stop

    def run(self, lines: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """`{"run_id", "job_id", "exit_code"}` a line, when all have ended. A stop is passed on until then,
        and what had not started does not; a second Ctrl-C ends everything at once."""
        # Ctrl-C reaches every process of a terminal: theirs come from here, or submitit would kill them.
        blocked = (signal.SIG_BLOCK, {signal.SIGINT})
        with StopRequest() as stop:
            pool = ThreadPoolExecutor(self._jobs, initializer=signal.pthread_sigmask, initargs=blocked)
            futures = [pool.submit(self._run_one, line) for line in lines]
            waiting = set(futures)
            try:
                while waiting:
                    _, waiting = wait(waiting, timeout=0.5)
                    if stop.requested:
                        for future in waiting:
                            future.cancel()
                        self._pass_on()  # again and again: a process that just starts does not hear it
            except KeyboardInterrupt:
                pool.shutdown(wait=False, cancel_futures=True)
                self._kill()
                raise
            pool.shutdown()
        stopped = {"job_id": None, "exit_code": Interrupted.exit_code}
        return [
            {"run_id": line["run_id"], **stopped} if future.cancelled() else future.result()
            for line, future in zip(lines, futures, strict=True)
        ]

    def _run_one(self, line: Mapping[str, Any]) -> dict[str, Any]:
        from submitit.core.utils import FailedJobError, UncompletedJobError

        gpu = self._gpus.get()
        job = TrainJob(line["argv"], gpu)
        submitted = self._engine.submit(job)
        local = submitted.job_id.isdecimal()  # the id of a process; a debug job runs in this one
        self._running[submitted.job_id] = psutil.Process(int(submitted.job_id)) if local else job
        try:
            code = submitted.result()
        except UncompletedJobError as error:  # what stands around the training failed, or was ended
            code = 1 if isinstance(error, FailedJobError) else -signal.SIGKILL
        finally:
            del self._running[submitted.job_id]
            self._gpus.put(gpu)
        return {"run_id": line["run_id"], "job_id": submitted.job_id, "exit_code": code}

    def _pass_on(self) -> None:
        for job in list(self._running.values()):
            with contextlib.suppress(psutil.NoSuchProcess):
                job.terminate()

    def _kill(self) -> None:
        for process in psutil.Process().children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()


def _executor(folder: Path, executor: str, jobs: int, options: Mapping[str, Any]) -> Executor:
    try:
        import submitit
    except ImportError:
        raise UsageError("sweep --executor needs submitit: pip install 'pe-study[slurm]'") from None
    settings = {"timeout_min": 24 * 60, **options}
    if executor == "slurm":
        settings = {"slurm_array_parallelism": jobs, **settings}
    timeouts = settings.pop("slurm_max_num_timeout", UNLIMITED)
    limits = {f"{name}_max_num_timeout": timeouts for name in ("slurm", "local")}
    try:
        engine = submitit.AutoExecutor(folder=folder, cluster=executor, **limits)
        engine.update_parameters(**settings)
    except (TypeError, NameError, ValueError) as error:
        raise UsageError(f"sweep: submitit refuses an option ({str(error).splitlines()[0]})") from None
    return engine


def _raise_failures(done: Sequence[Mapping[str, Any]], folder: Path | str) -> None:
    failed = [line for line in done if line["exit_code"]]
    if not failed:
        return
    said = ", ".join(f"{line['run_id']} ({describe_exit(line['exit_code'])})" for line in failed)
    stopped = all(wants_restart(line["exit_code"]) for line in failed)
    raise (Interrupted if stopped else PEStudyError)(f"unfinished: {said}; logs in {folder}")


class TrainJob:
    """What submitit pickles and runs: the command line of one run in a process of its own; its exit code.
    Under Slurm PEStudyError where the run failed, which fails the job.

    `gpu`, where one is given, is all that the run sees; submitit's local executor would hide all of them.
    """

    def __init__(self, argv: Sequence[str], gpu: str | None = None) -> None:
        self.argv, self.gpu = list(argv), gpu
        self._process: subprocess.Popen[bytes] | None = None

    def __call__(self) -> int:
        seen = {} if self.gpu is None else {VISIBLE: self.gpu}
        slurm = os.environ.get("SUBMITIT_EXECUTOR") == "slurm"
        if not slurm and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, lambda *_: self.terminate())  # Slurm's is followed by SIGUSR2
        self._process = subprocess.Popen(self.argv, env={**os.environ, **seen})
        wait_for(self._process)
        code = self._process.wait()
        if code == Interrupted.exit_code and slurm:
            subprocess.check_call(["scontrol", "requeue", slurm_job_id()])
        elif code and slurm:  # else the job is COMPLETED to Slurm, and what depends on it starts
            raise PEStudyError(f"{describe_exit(code)}: {shlex.join(self.argv)}")
        return code

    def terminate(self) -> None:
        """Ask the run to finish its step and save."""
        if self._process is not None:
            self._process.terminate()

    def checkpoint(self) -> Any:
        """Called by submitit on pre-emption, in a signal handler while `__call__` waits: let the run finish
        its step and save, then queue it again."""
        import submitit

        self.terminate()
        if self._process is not None:
            wait_for(self._process)
        return submitit.helpers.DelayedSubmission(TrainJob(self.argv, self.gpu))


def wait_for(process: subprocess.Popen[bytes]) -> None:
    """Wait for a process to end without taking the lock that `Popen.wait` holds while it waits: a signal
    handler may wait for the process that the code which it interrupts is waiting for."""
    with contextlib.suppress(ChildProcessError):  # reaped in between
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)


def slurm_job_id() -> str:
    """The id of this Slurm job, as `scontrol` knows it."""
    if "SLURM_ARRAY_TASK_ID" in os.environ:
        return f"{os.environ['SLURM_ARRAY_JOB_ID']}_{os.environ['SLURM_ARRAY_TASK_ID']}"
    return os.environ["SLURM_JOB_ID"]
