"""A study across machines: one command line a run, and submitit to run them locally or as a Slurm array.

A command line is idempotent: it trains its run from where it stands under the run's lock, does nothing when
the run is finished, and exits 75 when it was stopped and wants to be started again.
"""

from __future__ import annotations

import os
import queue
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pe_study import tuning
from pe_study.devices import VISIBLE, share_out, visible_gpus
from pe_study.errors import Interrupted, PEStudyError, UsageError, did_you_mean
from pe_study.recipe import load
from pe_study.selection import select_runs
from pe_study.stopping import describe_exit, wants_restart

if TYPE_CHECKING:
    from submitit import Executor

EXECUTORS = ("local", "slurm", "debug")


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

    from submitit.core.utils import FailedJobError, UncompletedJobError

    jobs = 1 if executor == "debug" else jobs
    gpus: queue.SimpleQueue[str | None] = queue.SimpleQueue()
    for gpu in share_out(visible_gpus(), jobs):
        gpus.put(gpu)

    def run(line: Mapping[str, Any]) -> dict[str, Any]:
        gpu = gpus.get()
        submitted = engine.submit(TrainJob(line["argv"], gpu))
        try:
            code = submitted.result()
        except UncompletedJobError as error:  # what stands around the training failed, or was ended
            code = 1 if isinstance(error, FailedJobError) else -signal.SIGKILL
        finally:
            gpus.put(gpu)
        return {"run_id": line["run_id"], "job_id": submitted.job_id, "exit_code": code}

    with ThreadPoolExecutor(jobs) as pool:
        done = list(pool.map(run, lines))
    _raise_failures(done, folder)
    return done


def _executor(folder: Path, executor: str, jobs: int, options: Mapping[str, Any]) -> Executor:
    try:
        import submitit
    except ImportError:
        raise UsageError("sweep --executor needs submitit: pip install 'pe-study[slurm]'") from None
    engine = submitit.AutoExecutor(folder=folder, cluster=executor)
    settings = {"timeout_min": 24 * 60, **options}
    if executor == "slurm":
        settings = {"slurm_array_parallelism": jobs, **settings}
    try:
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

    `gpu`, where one is given, is all that the run sees; submitit's local executor would hide all of them.
    """

    def __init__(self, argv: Sequence[str], gpu: str | None = None) -> None:
        self.argv, self.gpu = list(argv), gpu
        self._process: subprocess.Popen[bytes] | None = None

    def __call__(self) -> int:
        seen = {} if self.gpu is None else {VISIBLE: self.gpu}
        self._process = subprocess.Popen(self.argv, env={**os.environ, **seen})
        code = self._process.wait()
        if code == Interrupted.exit_code and "SLURM_JOB_ID" in os.environ:
            subprocess.check_call(["scontrol", "requeue", slurm_job_id()])
        return code

    def checkpoint(self) -> Any:
        """Called by submitit on pre-emption: let the run finish its step and save, then queue it again."""
        import submitit

        if self._process is not None:
            self._process.terminate()
            self._process.wait()
        return submitit.helpers.DelayedSubmission(TrainJob(self.argv, self.gpu))


def slurm_job_id() -> str:
    """The id of this Slurm job, as `scontrol` knows it."""
    if "SLURM_ARRAY_TASK_ID" in os.environ:
        return f"{os.environ['SLURM_ARRAY_JOB_ID']}_{os.environ['SLURM_ARRAY_TASK_ID']}"
    return os.environ["SLURM_JOB_ID"]
