"""Lengths in bytes of text: checkpoints with different tokenizers, measured on the same text.

Documents, and what is scored in them, are chosen by their bytes, so that every tokenizer gets the same. Under
`exact-context` a document past the longest length is laid out in spans of 64 bytes, and `num_targets` of them
are drawn; the targets of a span are the tokens that begin in it, and its context is the fewest tokens before
the first of them that cover at least the length. Under `prefix` the window is the fewest tokens from the
start that cover the length. The length in tokens, for which a model is declared, is that of the longest
window of the protocol: it differs from one protocol to the other, and no other protocol changes it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from pe_study.data import Document, TokenizedSplit
from pe_study.errors import DataError, PlanError
from pe_study.evaluators import seen, windows
from pe_study.evaluators.evaluation import Cell, Evaluation, Models
from pe_study.evaluators.jobs import DocumentSequence, Job, read_documents
from pe_study.evaluators.perplexity import Measured
from pe_study.evaluators.subjects import Subject
from pe_study.evaluators.texts import Text, Texts, bos_token_id, warned
from pe_study.plan import Plan, bytes_of
from pe_study.settings import leaves
from pe_study.text.contexts import tokens_covering
from pe_study.text.evaluation_sets import EvaluationSet

SPAN = 64  # bytes of text whose tokens are scored together
PROTOCOLS = ("exact-context", "prefix")
VERSION = 2  # of cells in bytes: raised when their numbers alone would come out differently


@dataclass(frozen=True)
class ByteEvaluation(Evaluation):
    """An evaluation whose lengths in tokens stand for bytes: `in_bytes` says for a protocol's name and a
    length which."""

    in_bytes: Mapping[tuple[str, int], int]

    @classmethod
    def prepare_bytes(cls, subject: Subject, plan: Plan, kernel: str) -> ByteEvaluation:
        """Everything that can be refused is refused here. DataError where no document is long enough."""
        check(plan)
        text = read_text(subject, plan)
        sizes = bytes_of(plan.lengths)
        specs = [windows.protocol(spec.name, num_targets=spec.num_targets) for spec in plan.protocols]
        in_bytes: dict[tuple[str, int], int] = {}
        for spec in specs:
            tokens = [_longest(text.sequences, spec, size, sizes[-1]) for size in sizes]
            if len(set(tokens)) < len(tokens):
                lengths = ", ".join(map(leaves.bytes_text, sizes))
                raise PlanError(f"lengths: {lengths} are not different numbers of tokens under {spec.name}")
            in_bytes |= {(spec.name, length): size for length, size in zip(tokens, sizes, strict=True)}
        lengths_in_tokens = tuple(sorted({length for _, length in in_bytes}))
        plan = plan.model_copy(update={"lengths": lengths_in_tokens, "tokens_per_document": None})
        prepared = Evaluation.prepare(subject, plan, kernel, _Read(text))
        return cls(subject, prepared.plan, kernel, text, in_bytes)

    def cells(self) -> Iterator[Cell]:
        """Those of each protocol at its own lengths."""
        return (cell for cell in super().cells() if (cell.protocol.name, cell.length) in self.in_bytes)

    def key(self, cell: Cell, cache: str | None = None) -> dict[str, Any]:
        return {
            **super().key(cell, cache),
            "longest": max(self.in_bytes.values()) if cell.protocol.past_longest else None,
            "length_bytes": self._bytes(cell),
            "span_bytes": SPAN,
            "bytes_version": VERSION,
        }

    def names(self, cell: Cell) -> dict[str, Any]:
        return {**super().names(cell), "bytes": self._bytes(cell)}

    def _bytes(self, cell: Cell) -> int:
        return self.in_bytes[cell.protocol.name, cell.length]

    def _job(self, cell: Cell) -> Job:
        size, longest = self._bytes(cell), max(self.in_bytes.values())
        plans = [windows_of(each, cell.protocol, size, longest) for each in self.text.sequences]
        document = np.repeat(np.arange(len(plans)), [len(each.start) for each in plans])
        joined = [np.concatenate(arrays) for arrays in zip(*plans, strict=True)]
        return Job(self.text.sequences, cell.protocol, cell.length, document, *joined)

    def _filled(self) -> list[DocumentSequence]:
        return self.text.sequences

    def _sharing(self, rescale: str) -> list[int]:
        """None: a shorter prefix is not the first so many tokens of each document."""
        return []

    def _frame(self, cell: Cell, measured: Measured, models: Models) -> pd.DataFrame:
        return super()._frame(cell, measured, models).assign(length_bytes=self._bytes(cell))


class _Read(Texts):
    """A text that was read, where `Texts` would read one."""

    def __init__(self, text: Text) -> None:
        super().__init__()
        self.text = text

    def of(self, subject: Subject, plan: Plan) -> Text:
        return self.text


def check(plan: Plan) -> None:
    """PlanError for what lengths in bytes do not go with."""
    others = [spec.name for spec in plan.protocols if spec.name not in PROTOCOLS]
    found: str | None = None
    length = plan.lengths[0]
    if others:
        accepted = f"accepted with bytes: {' or '.join(PROTOCOLS)}"
        raise PlanError(f"lengths: found {length} with protocol {others[0]}; {accepted}")
    if plan.unit != "document":
        found = f"unit {plan.unit}"
    elif plan.tasks:
        found = "tasks"
    elif plan.far_context != ("own",):
        found = "far_context"
    elif plan.over_training:
        found = "over_training"
    elif plan.diagnostics:
        found = "diagnostics"
    if found:
        raise PlanError(f"lengths: found {length} with {found}; accepted: lengths in tokens with {found}")


def read_text(subject: Subject, plan: Plan) -> Text:
    """Documents of enough bytes, chosen by what they say; whole, for spans are drawn from all of each."""
    tokenizer = subject.tokenizer()
    split = subject.split(plan, tokenizer)
    documents = choose(split, bytes_of(plan.lengths)[-1] + SPAN, plan.num_documents)
    return Text(
        documents,
        read_documents(documents.documents, bos_token_id(subject, plan, tokenizer)),
        split.corpus_name,
        split.corpus_hash,
        split.tokenizer_hash,
        overlap=seen.overlap(subject, split, documents),
        warning=warned(subject, plan),
    )


def choose(split: TokenizedSplit, num_bytes: int, count: int | None) -> EvaluationSet:
    """At most `count` documents of at least `num_bytes` bytes, by the hashes of their texts alone."""
    if not split.all_bytes_known:
        raise DataError(f"{split.label} in bytes: the bytes of its tokens are not known with this tokenizer")
    sums = np.concatenate([[0], np.cumsum(split.token_bytes, dtype=np.int64)])
    sizes = np.diff(sums[split.offsets])
    eligible = np.flatnonzero(sizes >= num_bytes)
    if not len(eligible):
        raise DataError(
            f"no document is long enough: the longest length needs {num_bytes} bytes, the longest of "
            f"{len(sizes)} documents has {sizes.max(initial=0)}"
        )
    chosen = sorted(eligible.tolist(), key=lambda index: (int(split.hashes[index]), split.names[index]))[
        :count
    ]
    return EvaluationSet(
        tuple(split.document(index) for index in chosen),
        "document",
        kept=len(chosen),
        eligible=len(eligible),
        total=len(sizes),
        median_length=float(np.median(split.lengths[chosen])),
        total_median_length=float(np.median(split.lengths)),
    )


def windows_of(
    sequence: DocumentSequence, protocol: windows.Protocol, num_bytes: int, longest: int
) -> windows.Windows:
    """The windows of one document at one length."""
    bos = int(sequence.bos_token_id is not None)
    assert sequence.token_bytes is not None
    if protocol.name == "prefix":
        stop = tokens_covering(Document(sequence.ids[bos:], sequence.token_bytes[bos:]), num_bytes) - 1 + bos
        places = np.array([0, stop, 0] if stop else [], dtype=np.int64).reshape(-1, 3)
        return windows.Windows(*places.T)
    assert protocol.num_targets is not None
    ends = np.cumsum(sequence.token_bytes[bos:])
    begins = ends - sequence.token_bytes[bos:]
    spans = longest + SPAN * draw(int(ends[-1]), longest, protocol.num_targets, protocol.seed)
    first, end = np.searchsorted(begins, spans), np.searchsorted(begins, spans + SPAN)
    first, end = first[end > first], end[end > first]  # a token may be longer than a span
    start = np.searchsorted(begins, begins[first] - num_bytes, side="right") - 1
    return windows.Windows(start, end - 1 + bos, first - 1 + bos - start)


def draw(num_bytes: int, longest: int, count: int, seed: int) -> np.ndarray:
    """The numbers of the drawn spans of a document, the same for every tokenizer and at every length."""
    spans = max((num_bytes - longest) // SPAN, 0)
    if spans <= count:
        return np.arange(spans)
    return np.sort(np.random.default_rng((seed, num_bytes)).choice(spans, size=count, replace=False))


def _longest(
    sequences: Sequence[DocumentSequence], protocol: windows.Protocol, num_bytes: int, longest: int
) -> int:
    found = [windows_of(sequence, protocol, num_bytes, longest) for sequence in sequences]
    return max(int((each.stop - each.start).max(initial=1)) for each in found)
