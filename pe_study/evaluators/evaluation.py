"""One subject under a plan: its cells, a cell being one (rescale, length, protocol), and their rows."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from itertools import groupby, product
from typing import Any

import pandas as pd

from pe_study import longrope, rope_scaling
from pe_study.evaluators import controls, diagnostics, far_context, sharing, windows
from pe_study.evaluators.cells import CellStore
from pe_study.evaluators.jobs import DocumentSequence, Job
from pe_study.evaluators.perplexity import Measured, guarded, measure_together
from pe_study.evaluators.reading import Reading
from pe_study.evaluators.subjects import Subject
from pe_study.evaluators.texts import Text, Texts
from pe_study.evaluators.truncation import TRUNCATION, Truncation
from pe_study.plan import Plan, ProtocolSpec
from pe_study.rows import NO_CONTROL, make_rows

logger = logging.getLogger(__name__)

CELL_VERSION = 2  # raised when a cell's numbers would come out differently


@dataclass(frozen=True)
class Cell:
    """One measurement: a rescale at a length, by a protocol, under a control. `rescale` may be the truncation
    line."""

    rescale: str
    length: int
    protocol: windows.Protocol
    control: str = NO_CONTROL


@dataclass(frozen=True)
class Evaluation:
    """One subject under a plan, and the text it reads, chosen once for the longest length."""

    subject: Subject
    plan: Plan
    kernel: str
    text: Text

    @classmethod
    def prepare(cls, subject: Subject, plan: Plan, kernel: str, texts: Texts) -> Evaluation:
        """Everything that can be refused is refused here, before anything is measured."""
        plan = plan.resolve(subject.train_length)
        subject.checkpoint.check_kernel(kernel, sharing.device(), plan.rescales)
        if subject.checkpoint.rotary is not None:
            for rescale in plan.rescales:
                subject.checkpoint.frequencies(rescale, max(plan.resolve_lengths(None)))
        far_context.check(plan, subject.name, subject.train_length)
        plan.check_window()
        for control in controls.asked(plan):
            controls.check(subject, control, kernel, sharing.device())
        if plan.diagnostics:
            diagnostics.check(subject, kernel)
        text = texts.of(subject, plan)
        far_context.check_documents(plan, text.sequences)
        return cls(subject, plan, kernel, text)

    @property
    def lengths(self) -> tuple[int, ...]:
        return self.plan.resolve_lengths(None)

    @property
    def rescales(self) -> tuple[str, ...]:
        """The plan's rescales that the model knows, `none` where it knows none of them."""
        if not self.plan.rescale_all and self.subject.checkpoint.rotary is None:
            return ("none",)
        return tuple(filter(self.subject.checkpoint.takes, self.plan.rescales)) or ("none",)

    def cells(self) -> Iterator[Cell]:
        """Cells that share a model, or one pass for all their lengths, follow one another."""
        for cell in self._all_cells():
            if far_context.measures(cell.control, cell.protocol, cell.length, self.subject.train_length):
                yield cell

    def _all_cells(self) -> Iterator[Cell]:
        protocols = [_protocol(spec) for spec in self.plan.protocols]
        for rescale, control in product(self.rescales, self._controls):
            every = [(p, length) for length in self.lengths for p in protocols]
            shared = self._sharing(rescale)
            together = [(p, length) for p, length in every if p.name == "prefix" and length in shared]
            together.sort(key=lambda pair: protocols.index(pair[0]))
            alone = [pair for pair in every if pair not in together]
            yield from (Cell(rescale, length, p, control) for p, length in together + alone)
            if rescale == "none" and control == NO_CONTROL:
                yield from (
                    Cell(rescale, length, windows.protocol(windows.LATE)) for length in self._decomposed
                )
        if self.plan.truncation and self.subject.train_length is not None:
            longer = [length for length in self.lengths if length > self.subject.train_length]
            yield from (Cell(TRUNCATION, length, p) for p in protocols for length in longer)

    @property
    def _controls(self) -> tuple[str, ...]:
        return (NO_CONTROL, *controls.asked(self.plan), *far_context.asked(self.plan))

    @property
    def _decomposed(self) -> list[int]:
        """Lengths at which a change of nonoverlapping is split into its parts, where the plan has both."""
        trained, names = self.subject.train_length, {spec.name for spec in self.plan.protocols}
        if trained not in self.lengths or not {"nonoverlapping", "exact-context"} <= names:
            return []
        return [length for length in self.lengths if length >= trained]

    def describe(self) -> list[dict[str, Any]]:
        """What would be measured, a mapping a cell."""
        return [self.names(cell) for cell in self.cells()]

    def names(self, cell: Cell) -> dict[str, Any]:
        """The words by which a person knows a cell."""
        return {
            "run": self.subject.name,
            "rescale": cell.rescale,
            "length": cell.length,
            "protocol": cell.protocol.name,
            "stride": cell.protocol.stride,
            **({"control": cell.control} if len(self._controls) > 1 else {}),
        }

    def key(self, cell: Cell, cache: str | None = None) -> dict[str, Any]:
        """What decides a cell's numbers, under the plan's cache or another."""
        return {
            "version": CELL_VERSION,
            "fingerprint": self.subject.fingerprint,
            "text": self.text.hash,
            "longest": max(self.lengths) if cell.protocol.past_longest else None,
            "kernel": self.kernel,
            "dtype": self.dtype(cache or self.plan.cache),
            "identity": dict(self.subject.identity),
            "rescale": cell.rescale,
            "length": cell.length,
            "protocol": asdict(cell.protocol),
            **({} if cell.control == NO_CONTROL else {"control": cell.control}),
            **self.decides(cell.rescale),
        }

    def decides(self, rescale: str) -> dict[str, Any]:
        """What decides the frequencies of a model beside its weights and the words of a rescale."""
        return {**factors_of(rescale), **self.subject.checkpoint.trained_in}

    def run(self, store: CellStore, on_cell: Callable[[pd.DataFrame], None]) -> list[pd.DataFrame]:
        """The rows of every cell, measured where the store does not hold it."""
        found: dict[Cell, pd.DataFrame] = {}
        models = Models(self.subject, self.kernel)
        truncation = self._truncation(models)
        self._try(models, store)
        for _, group in groupby(self.cells(), key=self._pass):
            missing = []
            for cell in group:
                kept = store.read(self.key(cell))
                if kept is None:
                    missing.append(cell)
                else:
                    found[cell] = kept
            for cell, measured in zip(missing, self._measure(missing, models, truncation), strict=True):
                found[cell] = self._frame(cell, measured, models)
                if sharing.is_main():
                    store.write(self.key(cell), found[cell])
                    on_cell(found[cell])
        return [found[cell] for cell in self.cells()]

    def _try(self, models: Models, store: CellStore) -> None:
        """PlanError for a control that leaves the model as it is, before anything is measured."""
        tried = [cell for cell in self.cells() if cell.control in controls.OF_A_WINDOW]
        if any(store.read(self.key(cell)) is None for cell in tried):
            first = next(self.cells())
            controls.check_effect(self.subject, models.get(first.rescale, first.length))

    @property
    def reading(self) -> Reading:
        """How windows are read, and through which cache."""
        return Reading(self.plan.batch_tokens, self.plan.cache)

    def dtype(self, cache: str) -> str:
        """Of the weights, and of the cached keys and values where they have another."""
        dtype = self.subject.checkpoint.dtype
        return dtype if cache == "full" else f"{dtype}, {cache} cache"

    def _sharing(self, rescale: str) -> list[int]:
        """Lengths of one and the same model: all, or those where a rescale by the length changes nothing."""
        checkpoint = self.subject.checkpoint
        if not checkpoint.depends_on_length(rescale):
            return list(self.lengths)
        anchored = rope_scaling.parse(rescale).file is None  # longrope's file may state a length of its own
        if checkpoint.rotary is None or checkpoint.depends_on_length("none") or not anchored:
            return []
        return [length for length in self.lengths if length <= checkpoint.rotary.original_length]

    def _pass(self, cell: Cell) -> tuple[Any, ...]:
        """Cells of one pass are measured together."""
        own = cell.protocol.name != "prefix" or cell.rescale == TRUNCATION
        own = own or cell.control in controls.OF_A_WINDOW
        if not own and cell.length in self._sharing(cell.rescale):
            return cell.rescale, cell.protocol, cell.control
        return cell.rescale, cell.protocol, cell.control, cell.length

    def _measure(self, missing: Sequence[Cell], models: Models, truncation: Truncation) -> list[Measured]:
        jobs = [self._job(cell) for cell in missing]
        if not missing:
            return []
        rescale, control = missing[0].rescale, missing[0].control
        if rescale == TRUNCATION:
            return [guarded(job, partial(truncation.measure, job)) for job in jobs]
        if control in far_context.asked(self.plan):
            jobs = [far_context.replaced(job, control, self.subject.train_length or 0) for job in jobs]
        return measure_together(jobs, lambda length: models.get(rescale, length, control), self.reading)

    def _job(self, cell: Cell) -> Job:
        return Job.build(self._sequences(cell), cell.protocol, cell.length, longest=max(self.lengths))

    def _sequences(self, cell: Cell) -> list[DocumentSequence]:
        """What a cell reads: windows fill documents without a tail, samples are drawn from all of them."""
        return self.text.sequences if cell.protocol.past_longest else self._filled()

    def _filled(self) -> list[DocumentSequence]:
        return self.text.without_tails(max(self.lengths))

    def _truncation(self, models: Models) -> Truncation:
        limit = self.subject.train_length or 1
        return Truncation(
            self._filled(),
            limit,
            lambda: models.get("none", limit),
            self.reading,
        )

    def _frame(self, cell: Cell, measured: Measured, models: Models) -> pd.DataFrame:
        rows, reason = measured
        if reason is not None:
            logger.warning("%s, %s, length %d: %s", self.subject.name, cell.rescale, cell.length, reason)
        shared = {
            **self.subject.identity,
            **self.text.columns,
            "train_length": self.subject.train_length,
            "dtype": self.dtype(self.plan.cache),
            "mask_kind": controls.mask_kind(cell.control),
            "rescale": cell.rescale,
            "factor": self.factor(cell.rescale, cell.length),
            "control": cell.control,
            "kernel": models.kernel,
        }
        return make_rows([{**shared, **row} for row in rows])

    def factor(self, rescale: str, length: int) -> float | None:
        """S of a rescale; None where nothing is rescaled by a number."""
        if rescale == TRUNCATION:
            return None
        rotary, spec = self.subject.checkpoint.rotary, rope_scaling.parse(rescale)
        if rotary is not None:
            return spec.resolved_factor(rotary.original_length, length)
        original = self.subject.train_length
        return spec.resolved_factor(original, length) if spec.factor is not None and original else None


def factors_of(rescale: str) -> dict[str, Any]:
    """What decides a rescale's frequencies beside its spec: the content of longrope's file, and how options
    of YaRN are read (until 2 one scaled at S = 1, the other did nothing in models of several layer types)."""
    if rescale == TRUNCATION:
        return {}
    spec = rope_scaling.parse(rescale)
    if {"attention_factor", "truncate"} & dict(spec.options).keys() and spec.kind == "yarn":
        return {"options": 2}
    return {} if spec.file is None else {"factors": longrope.read(spec.file)}


def _protocol(spec: ProtocolSpec) -> windows.Protocol:
    assert not isinstance(spec.stride, str), "the plan is resolved"
    return windows.protocol(spec.name, stride=spec.stride, num_targets=spec.num_targets, anchors=spec.anchors)


@dataclass
class Models:
    """Builds the model of a (rescale, length) and keeps the last one: cells that share it are neighbours."""

    subject: Subject
    asked: str
    kernel: str | None = None
    _model: Any = None
    _of: tuple[str, int] | None = field(default=None)

    def get(self, rescale: str, length: int, control: str = NO_CONTROL) -> Any:
        if self._of != (rescale, length):
            self._model = self._of = None
            self._model = self.subject.checkpoint.load(rescale, length, self.asked, sharing.device())
            self._of = (rescale, length)
        controls.put(self._model, control)
        self.kernel = controls.resolved_kernel(self._model, control)
        return self._model
