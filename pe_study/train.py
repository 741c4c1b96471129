"""Training: every encoding and seed of a recipe in turn, one loop, on Accelerate.

What decides a run's numbers is a function of (recipe, seed, step) and nothing else: batch, dropout, learning
rate. The loss of a step is the mean over all its target tokens, on however many processes and micro-batches.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pe_study import finished, kept, runs
from pe_study.data import TrainBatches
from pe_study.errors import Interrupted, NonFiniteLossError, UsageError
from pe_study.planned import write_planned
from pe_study.recipe import Recipe, RunSpec
from pe_study.training import state, tuning
from pe_study.training.engine import (
    check_engine,
    determinism,
    fitting,
    losing_others,
    make_accelerator,
    on_main,
    release,
)
from pe_study.training.faults import validation_error
from pe_study.training.initial import (
    Decoder,
    StudyData,
    build_model,
    check_initial,
    check_plan,
    load_data,
    read_hashes,
)
from pe_study.training.jobs import resolve_jobs, train_at_once
from pe_study.training.run_files import RunFiles, adopt_plan, withdraw
from pe_study.training.run_log import RunLog, check_trackers
from pe_study.training.selection import FREE, RESUME, check_folder, check_resume, refuse_changes, select_runs
from pe_study.training.stopping import StopRequest
from pe_study.training.updates import Update, Updater
from pe_study.training.validation import Validator


@dataclass(frozen=True)
class RunResult:
    """What became of one run: `status` trained, or skipped as finished before; `facts` as in `DONE`."""

    run_id: str
    folder: Path
    status: str
    facts: Mapping[str, Any]


def train_study(
    recipe: Recipe,
    runs_root: Path | str = "runs",
    only: Mapping[str, str] | None = None,
    *,
    jobs: int | str = 1,
    resume: str = "auto",
    progress: bool = False,
    stop: StopRequest | None = None,
) -> list[RunResult]:
    """Train every run of the recipe that `only` selects, in order, skipping those that are finished.

    `resume`: `auto` goes on from the newest whole snapshot, `never` starts unfinished runs over, anything
    else is the folder of a snapshot to go on from (of the one run selected). Before any work: UsageError for
    a selection that matches nothing, a run directory that is not ours or holds a run of another recipe or
    corpus. Interrupted when `stop` (default: signals, from here on) asks to; the same call then goes on.
    `jobs` runs train at once, a process each (`auto`: one a core where the model is small).
    """
    recipe = tuning.resolve(recipe, runs_root)
    selected = select_runs(recipe, only or {})
    folders = {run.run_id: runs.run_dir(runs_root, recipe, run) for run in selected}
    if resume not in RESUME and len(selected) > 1:
        raise UsageError(f"--resume {resume}: {len(selected)} runs are selected; pick one with --only")
    for run in selected:
        check_folder(folders[run.run_id], recipe, run, resume=resume)
        check_resume(resume, folders[run.run_id])
    unfinished = [run for run in selected if not finished.is_intact(folders[run.run_id])]
    if not unfinished:
        _refuse_changes(folders, read_hashes(recipe, make_accelerator(recipe), runs_root))
        return [_finished(recipe, run, folders[run.run_id]) for run in selected]
    check_engine(recipe, unfinished)
    check_trackers(recipe)
    check_initial(recipe, unfinished, runs_root)
    with contextlib.ExitStack() as held:
        stop = stop or held.enter_context(StopRequest())
        accelerator = make_accelerator(recipe)
        data = load_data(recipe, accelerator, runs_root)
        check_plan(recipe, data)
        _refuse_changes(folders, data.hashes)
        on_main(accelerator, lambda: write_planned(runs.study_dir(runs_root, recipe), recipe, folders))
        num_jobs = resolve_jobs(jobs, recipe, len(unfinished))
        if num_jobs > 1:
            return train_at_once(
                train_study,
                recipe,
                Path(runs_root),
                selected,
                jobs=num_jobs,
                resume=resume,
                progress=progress,
                stop=stop,
            )
        return [
            train_run(recipe, run, folders[run.run_id], data, stop, resume=resume, progress=progress)
            for run in selected
        ]


def train_run(
    recipe: Recipe,
    run: RunSpec,
    folder: Path,
    data: StudyData,
    stop: StopRequest,
    *,
    resume: str = "auto",
    progress: bool = False,
) -> RunResult:
    """Train one run in `folder` from where it stands to `final/` and `DONE`; a finished one is skipped."""
    accelerator = make_accelerator(recipe, folder)
    runs.claim_folder(folder, ours=(runs.RECIPE, runs.PROVENANCE))
    with contextlib.ExitStack() as held:
        on_main(accelerator, lambda: held.enter_context(runs.locked(folder)) and None)
        if finished.is_intact(folder):
            return _finished(recipe, run, folder)
        on_main(accelerator, lambda: withdraw(folder))
        if stop.requested and accelerator.num_processes == 1:  # several agree at their first step
            raise Interrupted(f"{folder}: stopped before its first step; the same command goes on")
        held.enter_context(losing_others(accelerator, folder))
        training = Training(recipe, run, RunFiles(recipe, run, folder, accelerator, data))
        held.enter_context(determinism(recipe, training.model, accelerator.device))
        start = training.resume(resume)
        training.files.write_beginning(training.model, training.updater.batches)
        due = training.due is not None
        with RunLog(recipe, run, folder, accelerator, start=start, due=due, progress=progress) as log:
            last = training.train(start, log, stop)
        facts = training.files.finish(training.model, last)
        release()
    return RunResult(run.run_id, folder, "trained", facts)


def _refuse_changes(folders: Mapping[str, Path], hashes: Mapping[str, str]) -> None:
    """UsageError where a finished run was trained on another text, tokenizer or base than `hashes` say."""
    for folder in folders.values():
        refuse_changes(folder, runs.read_done(folder) or hashes, hashes, may_change=FREE)


def _finished(recipe: Recipe, run: RunSpec, folder: Path) -> RunResult:
    """A run that is skipped; its `recipe.yaml` takes over the plan, which `pe-study eval` reads there."""
    adopt_plan(folder, recipe.eval)
    return RunResult(run.run_id, folder, "skipped", runs.read_json(folder / runs.DONE))


class Training:
    """The loop over the updates of one run."""

    def __init__(self, recipe: Recipe, run: RunSpec, files: RunFiles) -> None:
        self.recipe, self.files = recipe, files
        self.accelerator, data = files.accelerator, files.data
        batches = TrainBatches(
            data.train,
            length=recipe.train.length,
            batch_tokens=recipe.train.batch_tokens,
            seed=run.seed,
            packing=recipe.data.packing,
        )
        model = build_model(recipe, run, data.tokenizer, data.base)
        self.updater = Updater(recipe, run, self.accelerator, model, batches)
        self.validator = Validator(recipe, data.validation, self.accelerator)
        self.due: dict[str, Any] | None = None  # the line of the last step, where it is not written yet

    @property
    def model(self) -> Decoder:
        """The bare model, without what engines wrap around it."""
        return self.accelerator.unwrap_model(self.updater.model, keep_torch_compile=False)

    def resume(self, resume: str) -> int:
        """Load the snapshot that `resume` says; returns the number of updates it had made, 0 without one."""
        found = self.files.find_snapshot(resume)
        if found is None:
            self.files.forget_kept()
            return 0
        with fitting("the snapshot's weights and optimizer"):
            state.load_weights(self.model, found.tensors("model"))
            state.load_optimizer_state(self.model, self.updater.optimizer, found.tensors("optimizer"))
        self.updater.load_facts(found.facts["updater"])
        self.validator.reduce_to(found.facts.get("validation_sequences"))
        self.due = found.facts.get("due")
        return found.step

    def train(self, start: int, log: RunLog, stop: StopRequest) -> dict[str, Any]:
        """Make the updates from `start` on; returns the last line logged. Interrupted, after saving, when a
        stop was requested; a validation that it cut off is made first when the run goes on."""
        train = self.recipe.train
        row: dict[str, Any] = {}
        keeping = kept.steps_of(train.keep_at, train.steps)
        self.updater.model.train()
        self.updater.warm_up()
        if self.due is not None:
            row = self.write_line(log, stop)
            if self.due is not None:  # its snapshot is the one that was loaded
                raise self.stopped(start)
        for step in range(start + 1, train.steps + 1):
            began = time.perf_counter()
            update = self.update(step, stop)
            log.tick(time.perf_counter() - began)
            last = step == train.steps
            validating = last or is_due(train.eval_every, step)
            if validating or step == 1 or is_due(train.log_every, step):
                self.due = log.row(step, update)
                row = self.write_line(log, stop, validating=validating)
            if step in keeping:
                self.files.keep(step, self.model)
            stopping = self.due is not None or (update.stop and not last)
            if stopping or (not last and is_due(train.snapshot_every, step)):
                extra = self.due is not None  # not validated yet, and perhaps no good
                self.files.save(step, self.model, self.updater, self.facts(), extra=extra)
            if stopping:
                raise self.stopped(step)
        return row

    def facts(self) -> dict[str, Any]:
        """What of this object a later session needs, as JSON."""
        return {"due": self.due, "validation_sequences": self.validator.reduced}

    def stopped(self, step: int) -> Interrupted:
        """The error of a run that was asked to stop and was saved."""
        return Interrupted(f"{self.files.folder}: stopped after step {step}; the same command goes on")

    def write_line(self, log: RunLog, stop: StopRequest, *, validating: bool = True) -> dict[str, Any]:
        """Write the line that is due, with the validation of its step; it stays due where a stop was asked
        for meanwhile."""
        assert self.due is not None
        row = self.due
        found = self.validate(row["step"], stop) if validating else {}
        if found is not None:
            self.due, row = None, {**row, **found}
            log.write(row)
        return row

    def validate(self, step: int, stop: StopRequest) -> dict[str, float | None] | None:
        """What the validator finds after `step`; None where a stop was asked for meanwhile."""
        found = self.validator.evaluate(self.updater.model, stop)
        loss = None if found is None else found["val_loss"]
        if loss is not None and not math.isfinite(loss):
            self.files.forget(step)  # where a stop had saved it before it was validated
            raise self.non_finite(validation_error(self.model, step, loss))
        return found

    def update(self, step: int, stop: StopRequest) -> Update:
        """Update number `step` (from 1); a non-finite one leaves its report in the run directory."""
        try:
            return self.updater.update(step - 1, stop)
        except NonFiniteLossError as error:
            raise self.non_finite(error) from None

    def non_finite(self, error: NonFiniteLossError) -> NonFiniteLossError:
        """The error with the run's name, its report written."""
        self.files.write_non_finite(error.report)
        return NonFiniteLossError(f"{self.files.folder}: {error}", error.report)


def is_due(every: int | None, step: int) -> bool:
    """Whether something done `every` so many steps (None: never) is done at `step`."""
    return every is not None and step % every == 0
