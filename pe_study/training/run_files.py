"""The files of a run that is being trained: written by the main process, agreed on by all."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from accelerate import Accelerator
from safetensors import SafetensorError
from torch import Tensor

from pe_study import finished, kept, metrics, runs, snapshots
from pe_study import recipe as recipes
from pe_study.errors import CheckpointError, UsageError
from pe_study.files import sync, write_text
from pe_study.hub import no_progress_bars
from pe_study.kernels.fused import compilations
from pe_study.recipe import Recipe, RunSpec, narrow, resolved_yaml, training_hash, training_values
from pe_study.text.contexts import context_sizes
from pe_study.training import state
from pe_study.training.engine import autocast_dtype, device_name, mask_kind, on_main
from pe_study.training.foreign import ForeignDecoder
from pe_study.training.selection import refuse_changes, say_rounding
from pe_study.training.spent import Spent

if TYPE_CHECKING:
    from pe_study.data import TrainBatches
    from pe_study.plan import Plan
    from pe_study.training.initial import Decoder, StudyData
    from pe_study.training.updates import Updater

NON_FINITE = "non_finite.json"

logger = logging.getLogger(__name__)


def withdraw(folder: Path) -> None:
    """Take back the `DONE` of a run that is to be trained again, since it or the trained model is damaged."""
    if not (folder / runs.DONE).exists():
        return
    what = f"{runs.FINAL}/ is gone or damaged" if runs.is_done(folder) else f"{runs.DONE} is damaged"
    logger.warning("%s: finished before, but %s; trained again from its newest snapshot", folder, what)
    (folder / runs.DONE).unlink()


def adopt_plan(folder: Path, plan: Plan) -> None:
    """Put another evaluation plan into the `recipe.yaml` of a finished run: it decides no weight."""
    path = folder / runs.RECIPE
    written = recipes.load(path)
    if written.eval == plan:
        return
    try:
        write_text(path, resolved_yaml(written.model_copy(update={"eval": plan})))
    except OSError as error:
        logger.warning("%s: keeps its older evaluation plan (%s)", path, error.strerror)


class RunFiles:
    """What a run reads from and writes to its folder. Every method is a meeting of all processes."""

    def __init__(
        self, recipe: Recipe, run: RunSpec, folder: Path, accelerator: Accelerator, data: StudyData
    ) -> None:
        self.recipe, self.run, self.folder = recipe, run, folder
        self.accelerator, self.data = accelerator, data
        self.snapshots = folder / runs.SNAPSHOTS
        self.training = training_values(recipe, run)
        self.spent = Spent(accelerator)

    @property
    def hashes(self) -> dict[str, Any]:
        """Of all that the run is trained with; a base may have been downloaded with the model just now."""
        own = {"recipe_hash": self.recipe.hash, "training_hash": training_hash(self.recipe, self.run)}
        return {**own, **self.data.hashes}

    def find_snapshot(self, resume: str) -> snapshots.Snapshot | None:
        """The snapshot to go on from: `auto` the newest whole one, `never` none (and those there are go),
        else the folder named. UsageError when recipe or corpus changed, CheckpointError for a damaged one."""
        found = on_main(self.accelerator, lambda: self._find(resume))
        now = self.accelerator.num_processes
        if found is not None and found.facts["world_size"] != now:
            before = found.facts["world_size"]
            logger.warning("%s: %d processes, %d before: losses equal to rounding", self.folder, now, before)
        if found is not None and "spent" in found.facts:
            self.spent.go_on_from(found.facts["spent"])
        return found

    def _find(self, resume: str) -> snapshots.Snapshot | None:
        if resume == "never":
            shutil.rmtree(self.snapshots, ignore_errors=True)
            return None
        found = snapshots.newest(self.snapshots) if resume == "auto" else _named(resume)
        if found is not None:
            trained = {**found.facts["training"], **found.facts}
            refuse_changes(found.folder, trained, {**self.training, **self.data.hashes})
            say_rounding(self.folder, trained, self.training)
            if resume != "auto":
                found = self._go_back(found)
            self._check_log(found)
        return found

    def _go_back(self, found: snapshots.Snapshot) -> snapshots.Snapshot:
        """Make a snapshot that was named the newest one here, under the log that led to it."""
        if found.folder.resolve().parent != self.snapshots.resolve():
            source = found.folder.resolve().parent.parent
            adopted = snapshots.adopt(found, self.snapshots)
            if (source / runs.METRICS).is_file():  # else a copy of a snapshot alone: what is here stays
                metrics.adopt(source, self.folder)
                kept.adopt(source, self.folder, found.step)
            return adopted
        newer = snapshots.drop_newer(self.snapshots, found.step)
        if newer:
            said = f"step {found.step}; newer snapshots ({metrics.ranges(newer)}) are removed and made again"
            logger.warning("%s: goes back to %s", self.folder, said)
        return found

    def _check_log(self, found: snapshots.Snapshot) -> None:
        """Warn where the log lacks lines that were written before the snapshot."""
        logged = {row["step"] for row in runs.read_metrics(self.folder) if row["step"] <= found.step}
        if len(logged) >= found.facts.get("num_logged", 1):
            return
        train = self.recipe.train
        every = [train.log_every, train.eval_every or train.log_every]
        due = [step for step in range(1, found.step + 1) if step == 1 or any(step % n == 0 for n in every)]
        logger.warning(
            "%s: %s lacks lines from before the snapshot of step %d (steps %s); --resume never writes all",
            self.folder,
            runs.METRICS,
            found.step,
            metrics.ranges(step for step in due if step not in logged) or "unknown",
        )

    def write_beginning(self, model: Decoder, batches: TrainBatches) -> None:
        """Write `recipe.yaml` and `provenance.json`; warn of chunks that hold little context."""
        text = resolved_yaml(narrow(self.recipe, self.run))
        position = sum(weight.numel() for _, weight in model.position_parameters())
        total = sum(weight.numel() for weight in model.parameters())
        context = context_sizes(batches.chunks)
        if context.is_short and self.accelerator.is_main_process:
            logger.warning(
                "%s: half of the targets have at most %d tokens of their own document before them, of %d",
                self.folder,
                context.p50,
                context.length,
            )
        facts = runs.provenance(
            **self.hashes,
            context={"p10": context.p10, "p50": context.p50, "p90": context.p90},
            num_threads=torch.get_num_threads(),
            training=self.training,
            steps=self.recipe.train.steps,
            device=device_name(self.accelerator),
            num_processes=self.accelerator.num_processes,
            kernel=self._kernel(model),
            parameters={"total": total, "position": position},
        )

        def write() -> None:
            write_text(self.folder / runs.RECIPE, text)
            runs.write_json(self.folder / runs.PROVENANCE, facts)

        self._write(write)

    def _kernel(self, model: Decoder) -> str:
        dtype = autocast_dtype(self.recipe)
        return model.resolved_kernel(self.accelerator.device, mask_kind(self.recipe), dtype)

    def save(
        self, step: int, model: Decoder, updater: Updater, more: Mapping[str, Any], *, extra: bool = False
    ) -> None:
        """Write the snapshot of `step`, `more` facts in its manifest; an `extra` one replaces none."""
        parts = {
            "model": state.weights(model),
            "optimizer": state.optimizer_state(model, updater.optimizer),
        }
        facts = {
            "step": step,
            "tokens": step * self.recipe.train.batch_tokens,
            "world_size": self.accelerator.num_processes,
            "updater": updater.facts(),
            "training": self.training,
            "spent": self.spent.facts(),
            **more,
            "num_logged": metrics.count_lines(self.folder),
            **self.hashes,
        }
        keep = self.recipe.train.keep_snapshots + extra
        self._write(lambda: snapshots.save(self.snapshots, facts, parts, keep=keep))

    def keep(self, step: int, model: Decoder) -> None:
        """Keep the weights of `step` for good, as a model that can be loaded."""
        weights = state.weights(model)
        facts = {"step": step, "weights_sha256": state.sha256(weights), **self.hashes}
        folder = kept.folder_of(self.folder, step)
        self._write(lambda: self._write_model(folder, model, weights, facts))

    def forget(self, step: int) -> None:
        """Remove the snapshots from `step` on, if there are any."""
        self._write(lambda: snapshots.drop_newer(self.snapshots, step - 1))

    def forget_kept(self) -> None:
        """Remove weights that an earlier attempt kept: this one starts over."""
        self._write(lambda: shutil.rmtree(self.folder / kept.FOLDER, ignore_errors=True))

    def write_non_finite(self, report: Mapping[str, Any]) -> None:
        """Write what is known of a non-finite step."""
        self._write(lambda: runs.write_json(self.folder / NON_FINITE, report))

    def finish(self, model: Decoder, last: Mapping[str, Any]) -> dict[str, Any]:
        """Write `final/`, then `DONE` with the `last` logged line; returns what `DONE` says."""
        weights = state.weights(model)
        facts = {
            **last,
            **self.hashes,
            "weights_sha256": state.sha256(weights),
            "compilations": compilations(),
            **self.spent.facts(),
            "finished": datetime.now(UTC).isoformat(timespec="seconds"),
        }

        def write() -> None:
            final = self.folder / runs.FINAL
            self._write_model(final, model, weights)
            if not isinstance(model, ForeignDecoder):  # whose weights may be stored under other names
                finished.check_written(final, str(facts["weights_sha256"]))
            hashes = finished.file_hashes(final)
            (self.folder / NON_FINITE).unlink(missing_ok=True)  # of an earlier session
            runs.write_json(self.folder / runs.DONE, {**facts, finished.FILES: hashes})

        self._write(write)
        return facts

    def _write_model(
        self,
        folder: Path,
        model: Decoder,
        weights: Mapping[str, Tensor],
        facts: Mapping[str, Any] | None = None,
    ) -> None:
        beside = folder.with_name(f".{folder.name}.tmp")
        for old in (beside, folder):
            shutil.rmtree(old, ignore_errors=True)
        beside.parent.mkdir(exist_ok=True)
        with no_progress_bars(), _full_disks(beside):
            model.save_pretrained(beside, state_dict=dict(weights))
        self.data.tokenizer.save(beside)
        if facts is not None:
            runs.write_json(beside / kept.FACTS, {**facts, finished.FILES: finished.file_hashes(beside)})
        for path in beside.iterdir():
            path.chmod(0o644)  # safetensors makes weights private to the user
            sync(path)
        beside.rename(folder)

    def _write(self, function: Callable[[], Any]) -> None:
        """Write on the main process. UsageError on all when the disk is full or may not be written."""

        def write() -> None:
            try:
                function()
            except OSError as error:
                kept = snapshots.newest(self.snapshots)
                saved = f"the snapshot of step {kept.step} is whole" if kept else "nothing was saved yet"
                raise UsageError(
                    f"{error.filename or self.folder}: cannot be written ({error.strerror})\n"
                    f"{saved}; make room, and the same command goes on from there"
                ) from None

        on_main(self.accelerator, write)


def _named(resume: str) -> snapshots.Snapshot:
    try:
        return snapshots.verify(resume)
    except CheckpointError as error:
        raise CheckpointError(f"--resume: {error}; accepted: a whole snapshot, or auto") from None


@contextlib.contextmanager
def _full_disks(folder: Path) -> Iterator[None]:
    """Within the block, safetensors' own error of a full disk is the system's."""
    try:
        yield
    except SafetensorError as error:
        if os.strerror(errno.ENOSPC) not in str(error):
            raise
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(folder)) from None
