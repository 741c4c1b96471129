"""What a run starts from: the text of its study and the model before its first update."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from accelerate import Accelerator

from pe_study.data import Corpus, TokenizedSplit, Tokenizer, load_corpus, load_tokenizer, tokenize
from pe_study.model import PEStudyConfig, PEStudyForCausalLM

if TYPE_CHECKING:
    from pe_study.recipe import Recipe, RunSpec


@dataclass(frozen=True)
class StudyData:
    """What all runs of a study train on."""

    corpus: Corpus
    tokenizer: Tokenizer
    train: TokenizedSplit
    validation: TokenizedSplit

    @property
    def hashes(self) -> dict[str, str]:
        return {"corpus_hash": self.corpus.hash, "tokenizer_hash": self.tokenizer.hash}


def load_data(recipe: Recipe, accelerator: Accelerator) -> StudyData:
    """Corpus, tokenizer and token ids; the first process of a machine fills the cache, the others read it."""
    with accelerator.local_main_process_first():
        corpus = load_corpus(recipe.data)
        tokenizer = load_tokenizer(recipe.data, corpus)
        splits = [tokenize(corpus, split, tokenizer) for split in ("train", "validation")]
    return StudyData(corpus, tokenizer, splits[0], splits[1])


def build_model(recipe: Recipe, run: RunSpec, tokenizer: Tokenizer) -> PEStudyForCausalLM:
    """The decoder of one run, drawn from its seed."""
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
