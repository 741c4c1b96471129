"""What is measured: one trained run or one checkpoint, with its identity, its tokenizer and its documents."""

from __future__ import annotations

import hashlib
import json
import logging
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pe_study import data, recipe, runs, shipped
from pe_study.checkpoints import Checkpoint, open_checkpoint
from pe_study.errors import CheckpointError, UsageError, did_you_mean
from pe_study.plan import Plan, load_plan

logger = logging.getLogger(__name__)

CHECKPOINT_PLAN = "evals/length.yaml"
PICKED_BY = {"encoding": ("label", "encoding"), "seed": ("seed",), "run": ("run",)}  # as train's --only


@dataclass(frozen=True)
class Subject:
    """One model to measure. `identity` holds the columns of its rows that name it.

    `train_length` is the length its training saw (None: unknown); `recipe` the one that trained it (None: a
    checkpoint); `fingerprint` changes when its weights do.
    """

    name: str
    checkpoint: Checkpoint
    identity: Mapping[str, Any]
    fingerprint: str
    train_length: int | None
    recipe: recipe.Recipe | None = None

    def tokenizer(self) -> data.Tokenizer:
        return data.Tokenizer(self.checkpoint.tokenizer(), self._tokenizer_name)

    @property
    def _tokenizer_name(self) -> str:
        return self.recipe.data.tokenizer if self.recipe is not None else self.name

    def split(self, plan: Plan, tokenizer: data.Tokenizer) -> data.TokenizedSplit:
        """The tokenized text a plan asks for: its corpus, or the documents held out of training."""
        if plan.corpus is not None:
            return data.tokenize_documents(plan.corpus, tokenizer, plan.text_field)
        if self.recipe is None:
            raise UsageError(
                f"{self.name}: no validation documents of its own; name a text, such as --corpus stdlib"
            )
        return data.tokenize(data.load_corpus(self.recipe.data), "validation", tokenizer)


def find_study(target: str, runs_root: Path) -> Path | None:
    """The folder of a study or of one run that `target` names; None for a checkpoint."""
    for path in (Path(target), runs_root / target):
        if (path / runs.RECIPE).is_file() or any(path.glob(f"*/{runs.RECIPE}")):
            return path
    return None


def find_subjects(
    target: str, runs_root: Path, only: Mapping[str, str], checkpoint_options: Mapping[str, Any]
) -> list[Subject]:
    """The finished runs of a study (or the one run) that `only` picks, or the checkpoint `target`."""
    folder = find_study(target, runs_root)
    if folder is None:
        if only:
            raise UsageError(f"--only picks runs of a study; {target} is a checkpoint")
        refuse_misspelt(target)
        return [checkpoint_subject(target, checkpoint_options)]
    if (folder / runs.RECIPE).is_file():
        return selection_of([run_subject(folder, checkpoint_options)], only)
    states = [state for state in runs.list_runs(folder) if state.folder.parent == folder]
    for state in states:
        if state.status != "done":
            logger.warning(
                "%s: not finished (step %d of %d), left out", state.folder, state.step, state.steps
            )
    found = [run_subject(state.folder, checkpoint_options) for state in states if state.status == "done"]
    if not found:
        raise CheckpointError(f"{folder}: no finished run there; train it first (pe-study train)")
    return selection_of(found, only)


def refuse_misspelt(target: str) -> None:
    """CheckpointError for a folder of studies, and for a name beside studies or runs that is not there."""
    path = Path(target)
    around = path if path.is_dir() else path.parent
    if path.exists() != path.is_dir() or (path.parent == Path() and not path.exists()):
        return  # a file, or a word that may be the name of a checkpoint
    names = sorted({recipe.relative_to(around).parts[0] for recipe in around.glob(f"*/*/{runs.RECIPE}")})
    names += sorted(recipe.parent.name for recipe in around.glob(f"*/{runs.RECIPE}"))
    if names and path.is_dir():
        raise CheckpointError(f"{target}: a folder of studies; name one of them ({', '.join(names)})")
    if names:
        raise CheckpointError(f"{target}: no such study or run; {did_you_mean(path.name, names)}")


def selection_of(subjects: list[Subject], only: Mapping[str, str]) -> list[Subject]:
    """The subjects whose encoding (label or name), seed and run `only` names. UsageError when none is."""
    picked = [subject for subject in subjects if all(_matches(subject, key, only[key]) for key in only)]
    if not picked:
        known = ", ".join(subject.name for subject in subjects)
        wanted = ",".join(f"{key}={value}" for key, value in only.items())
        raise UsageError(f"--only {wanted}: no such run (finished: {known})")
    return picked


def _matches(subject: Subject, key: str, value: str) -> bool:
    if key not in PICKED_BY:
        raise UsageError(f'--only: unknown key "{key}"; {did_you_mean(key, PICKED_BY)}')
    return value in [str(subject.identity[column]) for column in PICKED_BY[key]]


def run_subject(folder: Path, options: Mapping[str, Any]) -> Subject:
    """A run directory as a subject."""
    narrowed = recipe.load(folder / runs.RECIPE)
    run = narrowed.runs()[0]
    identity = {
        "study": folder.resolve().parent.name,
        "run": folder.resolve().name,
        "model": folder.resolve().name,
        "encoding": run.encoding.name,
        "label": run.encoding.label,
        "seed": run.seed,
    }
    local = {key: value for key, value in options.items() if key == "dtype"}
    return Subject(
        name=run.run_id,
        checkpoint=open_checkpoint(folder, **local),
        identity=identity,
        fingerprint=_fingerprint(folder),
        train_length=narrowed.train.length,
        recipe=narrowed,
    )


def fingerprints(study: Path | None) -> set[str]:
    """Those of all finished runs of a study."""
    folders = [] if study is None else [path.parent for path in study.glob(f"*/{runs.DONE}")]
    return {_fingerprint(folder) for folder in folders}


def _fingerprint(folder: Path) -> str:
    done = runs.read_json(folder / runs.DONE) if runs.is_done(folder) else {}
    return str(done.get("weights_sha256", folder))


def checkpoint_subject(source: str, options: Mapping[str, Any]) -> Subject:
    """A checkpoint (Hugging Face id or folder, GGUF) as a subject."""
    checkpoint = open_checkpoint(source, **options)
    identity = {
        "study": slug(source),
        "run": slug(source),
        "model": source,
        "encoding": checkpoint.config.model_type,
        "label": slug(source),
    }
    return Subject(
        name=source,
        checkpoint=checkpoint,
        identity=identity,
        fingerprint=_files_hash(checkpoint),
        train_length=checkpoint.original_length,
    )


def slug(source: str) -> str:
    """A file name for a checkpoint."""
    return re.sub(r"[^\w.+-]+", "--", source.strip("/."))


def _files_hash(checkpoint: Checkpoint) -> str:
    """Names, sizes and times of a checkpoint's local files, or the commit of a downloaded one."""
    path, gguf_file = Path(checkpoint.name), checkpoint.options.get("gguf_file")
    files = [path / gguf_file] if gguf_file else sorted(path.glob("*"))  # not what lies beside a GGUF
    facts: list[Any] = [
        [file.name, file.stat().st_size, file.stat().st_mtime_ns] for file in files if file.is_file()
    ]
    facts.append([checkpoint.name, getattr(checkpoint.config, "_commit_hash", None), checkpoint.options])
    return hashlib.sha256(json.dumps(facts, default=str).encode()).hexdigest()


def default_plan(target: str, runs_root: Path) -> Plan:
    """The plan of a target that none was named for: the recipe's own, or the shipped one for checkpoints."""
    folder = find_study(target, runs_root)
    if folder is None:
        return load_plan(shipped.find(CHECKPOINT_PLAN), ["corpus=stdlib"])
    own = folder / runs.RECIPE
    return recipe.load(own if own.is_file() else min(folder.glob(f"*/{runs.RECIPE}"))).eval
