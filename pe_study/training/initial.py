"""What a run starts from: the text of its study, and the model before its first update.

Weights are drawn from the seed, or taken from a run or a checkpoint (`init`), which then goes on at another
length with a RoPE rescale built in: the way contexts are extended (Peng et al. 2023, arXiv:2309.00071).
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from accelerate import Accelerator

from pe_study.checkpoints import Checkpoint, loading, open_checkpoint
from pe_study.data import (
    Corpus,
    TokenizedSplit,
    Tokenizer,
    load_corpus,
    load_tokenizer,
    tokenize,
    tokenize_documents,
)
from pe_study.errors import CheckpointError, DataError, UsageError
from pe_study.loading import trained_rescale
from pe_study.model import PEStudyConfig, PEStudyForCausalLM
from pe_study.sections import CHECKPOINT_TOKENIZER, DataSpec
from pe_study.text.evaluation_sets import Unit, evaluation_documents
from pe_study.training import bases, foreign
from pe_study.training.foreign import ForeignDecoder

if TYPE_CHECKING:
    from pe_study.recipe import Recipe, RunSpec

logger = logging.getLogger(__name__)

Decoder = PEStudyForCausalLM | ForeignDecoder

# What of `model` has to be the checkpoint's own.
SIZES = ("num_layers", "d_model", "num_heads", "num_kv_heads", "d_ff", "max_positions")
SHAPE = (*SIZES, "qk_norm", "initializer_range")


@dataclass(frozen=True)
class StudyData:
    """What all runs of a study train on."""

    corpus: Corpus
    tokenizer: Tokenizer
    train: TokenizedSplit
    validation: TokenizedSplit
    base: Checkpoint | None = None  # the weights that training goes on from

    @property
    def hashes(self) -> dict[str, Any]:
        """Of text, tokenizer and, once they are on this machine, the weights to go on from, whose
        configuration stands there as it is."""
        hashes = {"corpus_hash": self.corpus.hash, "tokenizer_hash": self.tokenizer.hash}
        return hashes | _base_facts(self.base)


def load_data(recipe: Recipe, accelerator: Accelerator, runs_root: Path | str = "runs") -> StudyData:
    """Corpus, tokenizer and token ids; the first process of a machine fills the cache, the others read it."""
    base = initial_checkpoint(recipe, runs_root)
    spec = _data_spec(recipe, base)
    with accelerator.local_main_process_first():
        corpus = load_corpus(spec)
        tokenizer = load_tokenizer(spec, corpus)
        splits = [tokenize(corpus, split, tokenizer) for split in ("train", "validation")]
    return StudyData(corpus, tokenizer, splits[0], splits[1], base)


def read_hashes(recipe: Recipe, accelerator: Accelerator, runs_root: Path | str) -> dict[str, Any]:
    """`StudyData.hashes` of what can still be read, for runs that are finished; a warning names the rest."""
    hashes: dict[str, Any] = {}
    try:
        base = initial_checkpoint(recipe, runs_root)
        hashes |= _base_facts(base)
        with accelerator.local_main_process_first():
            spec = _data_spec(recipe, base)
            corpus = load_corpus(spec)
            hashes["corpus_hash"] = corpus.hash
            hashes["tokenizer_hash"] = load_tokenizer(spec, corpus).hash
    except (DataError, CheckpointError) as error:
        said = str(error).partition("\n")[0]
        logger.warning(
            "%s: finished runs were not compared with what they were trained on: %s", recipe.name, said
        )
    return hashes


def _data_spec(recipe: Recipe, base: Checkpoint | None) -> DataSpec:
    if recipe.data.tokenizer != CHECKPOINT_TOKENIZER or base is None:
        return recipe.data
    return recipe.data.model_copy(update={"tokenizer": base.name})


def _base_facts(base: Checkpoint | None) -> dict[str, Any]:
    if base is None:
        return {}
    weights = bases.weights_sha256(base.name, base.options)
    facts = {bases.WEIGHTS: weights, bases.CONFIG: bases.configuration(base.name, base.options)}
    return {key: fact for key, fact in facts.items() if fact is not None}


def check_plan(recipe: Recipe, data: StudyData) -> None:
    """DataError when the recipe's own evaluation plan has no text, or none that is long enough."""
    plan = recipe.eval
    longest = max(plan.resolve_lengths(recipe.train.length))
    split = data.validation
    if plan.corpus is not None:
        split = tokenize_documents(plan.corpus, data.tokenizer, plan.text_field)
    evaluation_documents(split, longest_length=longest, num_documents=1, unit=cast(Unit, plan.unit))


def check_initial(recipe: Recipe, selected: Sequence[RunSpec], runs_root: Path | str = "runs") -> None:
    """CheckpointError when `init` names nothing, UsageError when its weights do not fit the recipe; for
    before any work."""
    checkpoint = initial_checkpoint(recipe, runs_root)
    if checkpoint is not None:
        _check_base(recipe, selected, checkpoint)


def _check_base(recipe: Recipe, selected: Sequence[RunSpec], checkpoint: Checkpoint) -> None:
    for run in selected:
        if checkpoint.is_ours:
            _check_ours(recipe, run, checkpoint)
        else:
            foreign.check(recipe, run, checkpoint)


def build_model(
    recipe: Recipe, run: RunSpec, tokenizer: Tokenizer, base: Checkpoint | None = None
) -> Decoder:
    """The decoder of one run; `base` holds the weights that `init` names (None: as `initial_checkpoint` finds
    them). UsageError when they do not fit the recipe."""
    model: Decoder
    checkpoint = base or initial_checkpoint(recipe)
    if recipe.init is None or checkpoint is None:
        model = _draw(recipe, run, tokenizer)
    else:
        _check_base(recipe, [run], checkpoint)
        model = _continue_ours(recipe, checkpoint) if checkpoint.is_ours else _foreign(recipe, checkpoint)
        if tokenizer.vocab_size > model.config.vocab_size:
            raise UsageError(
                f"{recipe.path}: data.tokenizer: {tokenizer.vocab_size} tokens, the vocabulary of "
                f"{recipe.init.source} has {model.config.vocab_size}; use tokenizer: {CHECKPOINT_TOKENIZER}"
            )
    if recipe.train.gradient_checkpointing:
        model.gradient_checkpointing_enable()
    return model


def _draw(recipe: Recipe, run: RunSpec, tokenizer: Tokenizer) -> PEStudyForCausalLM:
    config = PEStudyConfig(
        vocab_size=tokenizer.vocab_size,
        **recipe.model.model_dump(),
        encoding={"name": run.encoding.name, **run.encoding.options},
        train_length=recipe.train.length,
        kernel=recipe.train.kernel,
        seed=run.seed,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=tokenizer.bos_token_id,
    )
    return PEStudyForCausalLM(config)


def initial_checkpoint(recipe: Recipe, runs_root: Path | str = "runs") -> Checkpoint | None:
    """The weights that `init` names, None without it. CheckpointError when there are none."""
    if recipe.init is None:
        return None
    absent = bases.absence(recipe, runs_root)
    if absent is not None:
        raise CheckpointError(absent)
    source = bases.locate(recipe.init.source, runs_root)
    try:
        checkpoint = open_checkpoint(source, revision=recipe.init.revision)
        assert checkpoint.config is not None  # read it here: one error before any work
    except CheckpointError as error:
        raise CheckpointError(f"{recipe.path or recipe.name}: init.from: {error}") from None
    return checkpoint


def _check_ours(recipe: Recipe, run: RunSpec, checkpoint: Checkpoint) -> None:
    config, length = checkpoint.config, recipe.train.length
    wanted = {key: getattr(recipe.model, key) for key in SHAPE}
    wanted["encoding"] = {"name": run.encoding.name, **run.encoding.options}
    differing = {key: getattr(config, key) for key in wanted if getattr(config, key) != wanted[key]}
    if differing:
        said = "; ".join(f"{key} is {value} there" for key, value in differing.items())
        raise UsageError(
            f"{recipe.path}: model and encodings have to be those of {checkpoint.source}: {said}"
        )
    if config.build_encoding().max_length is not None and length != config.train_length:
        raise UsageError(f"{recipe.path}: train.length: a learned table cannot go on at another length")


def _continue_ours(recipe: Recipe, checkpoint: Checkpoint) -> PEStudyForCausalLM:
    """Our decoder at another length. Its config keeps the length that its rotary base was trained at."""
    assert recipe.init is not None
    config, length = checkpoint.config, recipe.train.length
    rescale = trained_rescale.in_force(config, recipe.init.rescale, length)
    with loading(checkpoint.source):
        return PEStudyForCausalLM.from_pretrained(
            checkpoint.name,
            length=length,
            rescale=trained_rescale.fixed(rescale, config.train_length, length),
            kernel=recipe.train.kernel,
            dropout=recipe.model.dropout,
        )


def _foreign(recipe: Recipe, checkpoint: Checkpoint) -> ForeignDecoder:
    assert recipe.init is not None
    foreign.set_dropout(checkpoint.config, recipe.model.dropout)
    model: Any = checkpoint.load(recipe.init.rescale, recipe.train.length, recipe.train.kernel)
    return ForeignDecoder(model)
