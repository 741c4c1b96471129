"""Training: every encoding and seed of a recipe in turn, one loop, on Accelerate.

What decides a run's numbers is a function of (recipe, seed, step) and nothing else: batch, dropout, learning
rate. The loss of a step is the mean over all its target tokens, on however many processes and micro-batches.
"""

from __future__ import annotations

import contextlib
import shutil
import time
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from accelerate import Accelerator

from pe_study import runs, snapshots, state
from pe_study.data import (
    Corpus,
    TokenizedSplit,
    Tokenizer,
    TrainBatches,
    load_corpus,
    load_tokenizer,
    tokenize,
)
from pe_study.engine import (
    device_name,
    make_accelerator,
    no_progress_bars,
    on_main,
    peak_memory_bytes,
    release,
)
from pe_study.errors import Interrupted
from pe_study.files import sync, write_text
from pe_study.model import PEStudyConfig, PEStudyForCausalLM
from pe_study.recipe import Recipe, RunSpec, narrow, resolved_yaml, training_hash, training_values
from pe_study.run_log import RunLog, check_trackers
from pe_study.selection import check_folder, select_runs
from pe_study.stopping import StopRequest
from pe_study.updates import Updater
from pe_study.validation import Validator


@dataclass(frozen=True)
class RunResult:
    """What became of one run: `status` is trained or skipped (it was finished before)."""

    run_id: str
    folder: Path
    status: str
    facts: Mapping[str, Any]


@dataclass(frozen=True)
class StudyData:
    """What all runs of a study train on."""

    corpus: Corpus
    tokenizer: Tokenizer
    train: TokenizedSplit
    validation: TokenizedSplit


def train_study(
    recipe: Recipe,
    runs_root: Path | str = "runs",
    only: Mapping[str, str] | None = None,
    *,
    progress: bool = False,
) -> list[RunResult]:
    """Train every run of the recipe that `only` selects, in order, skipping those that are finished.

    Before any work: UsageError for a selection that matches nothing, a run directory that is not ours or that
    holds a run of another recipe. Interrupted when a signal asked to stop; the same call goes on from there.
    """
    selected = select_runs(recipe, only or {})
    folders = {run.run_id: runs.run_dir(runs_root, recipe, run) for run in selected}
    for run in selected:
        check_folder(folders[run.run_id], recipe, run)
    if all(runs.is_done(folder) for folder in folders.values()):
        return [_finished(run, folders[run.run_id]) for run in selected]
    check_trackers(recipe)
    accelerator = make_accelerator(recipe)
    data = load_data(recipe, accelerator)
    results = []
    with StopRequest() as stop:
        for run in selected:
            folder = folders[run.run_id]
            if runs.is_done(folder):
                results.append(_finished(run, folder))
                continue
            results.append(
                train_run(recipe, run, folder, accelerator, data=data, stop=stop, progress=progress)
            )
            release(accelerator)
    return results


def load_data(recipe: Recipe, accelerator: Accelerator) -> StudyData:
    """Corpus, tokenizer and token ids; the first process of a machine fills the cache, the others read it."""
    with accelerator.local_main_process_first():
        corpus = load_corpus(recipe.data)
        tokenizer = load_tokenizer(recipe.data, corpus)
        splits = [tokenize(corpus, split, tokenizer) for split in ("train", "validation")]
    return StudyData(corpus, tokenizer, splits[0], splits[1])


def _finished(run: RunSpec, folder: Path) -> RunResult:
    return RunResult(run.run_id, folder, "skipped", runs.read_json(folder / runs.DONE))


def train_run(
    recipe: Recipe,
    run: RunSpec,
    folder: Path,
    accelerator: Accelerator,
    *,
    data: StudyData,
    stop: StopRequest,
    progress: bool = False,
) -> RunResult:
    """Train one run in `folder` from its newest snapshot or from the start, and write `final/` and `DONE`."""
    with contextlib.ExitStack() as held:
        runs.claim_folder(folder, ours=(runs.PROVENANCE,))
        on_main(accelerator, lambda: held.enter_context(runs.locked(folder)))
        training = Training(recipe, run, folder, accelerator, data)
        start = training.resume()
        on_main(accelerator, training.write_beginning)
        log = RunLog(recipe, run, folder, accelerator, start=start, progress=progress)
        with log:
            training.train(start, log, stop)
        facts = training.finish()
    return RunResult(run.run_id, folder, "trained", facts)


class Training:
    """One run: its model and batches, and how it starts, goes on, saves and ends."""

    def __init__(
        self, recipe: Recipe, run: RunSpec, folder: Path, accelerator: Accelerator, data: StudyData
    ) -> None:
        self.recipe, self.run, self.folder = recipe, run, folder
        self.accelerator, self.data = accelerator, data
        train = recipe.train
        model = build_model(recipe, run, data.tokenizer)
        batches = TrainBatches(
            data.train,
            length=train.length,
            batch_tokens=train.batch_tokens,
            seed=run.seed,
            packing=recipe.data.packing,
        )
        self.updater = Updater(recipe, run, accelerator, model, batches)
        self.validator = Validator(recipe, data.validation, accelerator)
        self.last: dict[str, Any] = {}  # the last logged line
        self.began = time.perf_counter()

    @property
    def model(self) -> PEStudyForCausalLM:
        """The bare model, without what engines wrap around it."""
        return self.accelerator.unwrap_model(self.updater.model, keep_torch_compile=False)

    def train(self, start: int, log: RunLog, stop: StopRequest) -> None:
        """Make the updates from `start` on; Interrupted, after saving, when a stop was requested."""
        train = self.recipe.train
        self.updater.model.train()
        for step in range(start + 1, train.steps + 1):
            began = time.perf_counter()
            update = self.updater.update(step - 1, stop=stop.requested is not None)
            log.tick(time.perf_counter() - began)
            last = step == train.steps
            validating = last or is_due(train.eval_every, step)
            validation = self.validator.evaluate(self.updater.model) if validating else {}
            if validating or step == 1 or step % train.log_every == 0:
                self.last = log.log(step, update, validation)
            if update.stop and not last:
                self.save(step)
                raise Interrupted(f"{self.folder}: stopped after step {step}; the same command goes on")
            if is_due(train.snapshot_every, step) and not last:
                self.save(step)

    def resume(self) -> int:
        """Load the newest whole snapshot; the number of updates it had made, 0 without one."""
        found = snapshots.newest(self.folder / runs.SNAPSHOTS)
        if found is None:
            return 0
        state.load_weights(self.model, found.tensors("model"))
        state.load_optimizer_state(self.model, self.updater.optimizer, found.tensors("optimizer"))
        return found.step

    def save(self, step: int) -> None:
        """Write the snapshot of `step` (all processes gather, one writes)."""
        parts = {
            "model": state.weights(self.model),
            "optimizer": state.optimizer_state(self.model, self.updater.optimizer),
        }
        facts = {
            "step": step,
            "tokens": step * self.recipe.train.batch_tokens,
            "training": training_values(self.recipe, self.run),
            "world_size": self.accelerator.num_processes,
            **self.hashes(),
        }
        root, keep = self.folder / runs.SNAPSHOTS, self.recipe.train.keep_snapshots
        on_main(self.accelerator, lambda: snapshots.save(root, facts, parts, keep=keep))

    def hashes(self) -> dict[str, str]:
        """What the run is a function of."""
        return {
            "recipe_hash": self.recipe.hash,
            "training_hash": training_hash(self.recipe, self.run),
            "corpus_hash": self.data.corpus.hash,
            "tokenizer_hash": self.data.tokenizer.hash,
        }

    def write_beginning(self) -> None:
        """Write `recipe.yaml` and `provenance.json`."""
        model, recipe = self.model, self.recipe
        write_text(self.folder / runs.RECIPE, resolved_yaml(narrow(recipe, self.run)))
        total = sum(weight.numel() for weight in model.parameters())
        position = sum(weight.numel() for _, weight in model.position_parameters())
        facts = runs.provenance(
            **self.hashes(),
            training=training_values(recipe, self.run),
            steps=recipe.train.steps,
            device=device_name(self.accelerator),
            num_processes=self.accelerator.num_processes,
            kernel=model.resolved_kernel(self.accelerator.device),
            parameters={"total": total, "position": position},
        )
        runs.write_json(self.folder / runs.PROVENANCE, facts)

    def finish(self) -> dict[str, Any]:
        """Write `final/`, then `DONE`; returns what `DONE` says."""
        final = state.weights(self.model)
        facts = {
            **self.last,
            **self.hashes(),
            "weights_sha256": state.sha256(final),
            "wall_seconds": round(time.perf_counter() - self.began, 2),
            "peak_memory_bytes": peak_memory_bytes(self.accelerator.device),
            "finished": datetime.now(UTC).isoformat(timespec="seconds"),
        }

        def write() -> None:
            beside = self.folder / f".{runs.FINAL}.tmp"
            for folder in (beside, self.folder / runs.FINAL):
                shutil.rmtree(folder, ignore_errors=True)
            with no_progress_bars():
                self.model.save_pretrained(beside, state_dict=final)
            self.data.tokenizer.save(beside)
            for path in beside.iterdir():
                path.chmod(0o644)  # safetensors makes weights private to the user
                sync(path)
            beside.rename(self.folder / runs.FINAL)
            runs.write_json(self.folder / runs.DONE, facts)

        on_main(self.accelerator, write)
        return facts


def is_due(every: int | None, step: int) -> bool:
    """Whether something done `every` so many steps (None: never) is done at `step`."""
    return every is not None and step % every == 0


def build_model(recipe: Recipe, run: RunSpec, tokenizer: Tokenizer) -> PEStudyForCausalLM:
    """The decoder of one run, initialised from its seed."""
    train = recipe.train
    config = PEStudyConfig(
        vocab_size=tokenizer.vocab_size,
        **recipe.model.model_dump(),
        encoding={"name": run.encoding.name, **run.encoding.options},
        train_length=train.length,
        kernel=train.kernel,
        seed=run.seed,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=tokenizer.bos_token_id,
    )
    model = PEStudyForCausalLM(config)
    if train.gradient_checkpointing:
        model.gradient_checkpointing_enable()
    return model
