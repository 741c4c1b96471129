"""The text of an evaluation: which documents, as which ids, begun by which BOS; one for all lengths."""

from __future__ import annotations

import hashlib
import json
import logging
from dataclasses import dataclass, replace
from functools import cached_property
from typing import cast

from pe_study import data
from pe_study.errors import UsageError
from pe_study.evaluators import seen
from pe_study.evaluators.jobs import DocumentSequence, read_documents
from pe_study.evaluators.subjects import Subject
from pe_study.plan import Plan
from pe_study.text.evaluation_sets import Unit

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Text:
    """The documents of one tokenizer under a plan, ready to be cut, and the columns that describe them."""

    documents: data.EvaluationSet
    sequences: list[DocumentSequence]
    corpus: str
    corpus_hash: str
    tokenizer_hash: str
    overlap: tuple[str, ...] | None = None  # documents that were trained on; None: not known
    warning: str | None = None  # why a checkpoint may have seen them

    @property
    def columns(self) -> dict[str, str]:
        return {
            "corpus": self.corpus,
            "corpus_hash": self.corpus_hash,
            "tokenizer_hash": self.tokenizer_hash,
            "unit": self.documents.unit,
        }

    @cached_property
    def hash(self) -> str:
        """sha256 of every id that is read, and of the BOS policy."""
        digest = hashlib.sha256(str(self.sequences[0].bos_token_id).encode())
        for sequence in self.sequences:
            digest.update(len(sequence.ids).to_bytes(8, "little") + sequence.ids.tobytes())
        return digest.hexdigest()

    def without_tails(self, longest: int) -> list[DocumentSequence]:
        """The sequences with a whole number of `longest` targets each; a stream as it is.

        A document is one token longer than that, for its first one is no target without BOS. With BOS it is,
        and the last token would be a window of its own with no context but BOS.
        """
        if self.documents.unit == "stream":
            return self.sequences
        return [sequence.cut((len(sequence.ids) - 1) // longest * longest) for sequence in self.sequences]


class Texts:
    """Reads texts, once for all runs of a study that share one."""

    def __init__(self) -> None:
        self._read: dict[str, Text] = {}

    def of(self, subject: Subject, plan: Plan) -> Text:
        """The text of a subject under a resolved plan. DataError where none is long enough."""
        shared = None if subject.recipe is None else subject.recipe.data.model_dump(mode="json")
        key = json.dumps([shared or subject.name, subject.train_length], sort_keys=True, default=str)
        if key not in self._read:
            self._read[key] = read_text(subject, plan)
        return self._read[key]


def read_text(subject: Subject, plan: Plan) -> Text:
    """Tokenizes the text that a plan asks for, and picks its documents for the longest length."""
    longest = max(plan.resolve_lengths(subject.train_length))
    tokenizer = subject.tokenizer()
    split = subject.split(plan, tokenizer)
    documents = data.evaluation_documents(
        split,
        longest_length=longest,
        num_documents=plan.num_documents or split.num_documents,
        unit=cast(Unit, plan.unit),
    )
    if plan.tokens_per_document is not None:
        documents = shortened(documents, int(plan.tokens_per_document), longest)
    sequences = read_documents(documents.documents, bos_token_id(subject, plan, tokenizer))
    return Text(
        documents,
        sequences,
        split.corpus_name,
        split.corpus_hash,
        split.tokenizer_hash,
        overlap=seen.overlap(subject, split, documents),
        warning=warned(subject, plan),
    )


def warned(subject: Subject, plan: Plan) -> str | None:
    """Why a checkpoint may have seen the text, said aloud too; None where nothing says so."""
    warning = seen.older_than_release(subject, plan)
    if warning is not None:
        logger.warning("%s", warning)
    return warning


def shortened(documents: data.EvaluationSet, tokens: int, longest: int) -> data.EvaluationSet:
    """Each document cut to at most `tokens`: a multiple of the longest length (at least one), and one."""
    end = max(tokens // longest, 1) * longest + 1
    cut = [
        replace(
            document,
            ids=document.ids[:end],
            token_bytes=None if document.token_bytes is None else document.token_bytes[:end],
        )
        for document in documents.documents
    ]
    return replace(documents, documents=tuple(cut))


def bos_token_id(subject: Subject, plan: Plan, tokenizer: data.Tokenizer) -> int | None:
    """BOS under the plan's policy; `auto`: none for our runs, what the tokenizer prepends for others."""
    wanted = plan.bos
    if wanted == "auto":
        wanted = subject.recipe is None and tokenizer.prepends_bos
    if wanted and tokenizer.bos_token_id is None:
        raise UsageError(f"{subject.name}: bos is on, but the tokenizer has no BOS token; set it off")
    return tokenizer.bos_token_id if wanted else None
