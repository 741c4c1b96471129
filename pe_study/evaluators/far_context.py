"""The control `far_context`: what lies farther back than the training length is replaced, targets are not.

Before a window's first scored target its last L inputs, L the training length, are its own; those farther
back come from another document, or are its own in a drawn order. Protocols whose targets end their windows
allow that: under `exact-context` every target keeps exactly L inputs, under `fixed-target` the first of a
block does, and each further one keeps one more. BOS stays in its place.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np

from pe_study.errors import PlanError
from pe_study.evaluators import windows
from pe_study.evaluators.jobs import DocumentSequence, Job
from pe_study.plan import Plan

NAME, OTHER, SHUFFLED = "far_context", "other-document", "shuffled"
PROTOCOLS = ("exact-context", "fixed-target")


def asked(plan: Plan) -> tuple[str, ...]:
    """The controls of a plan, as the column `control` names them; `own` is what plain rows measure."""
    return tuple(f"{NAME}={kind}" for kind in plan.far_context if kind != "own")


def measures(control: str, protocol: windows.Protocol, length: int, train_length: int | None) -> bool:
    """Whether a cell exists under a control: any cell without this one, those with far inputs under it."""
    if not control.startswith(f"{NAME}="):
        return True
    return train_length is not None and num_far(protocol, length, train_length) > 0


def num_far(protocol: windows.Protocol, length: int, train_length: int) -> int:
    """Inputs of a window that are farther back than the training length from its first target."""
    if protocol.name not in PROTOCOLS:
        return 0
    scored = protocol.num_targets if protocol.name == "fixed-target" else 1
    return max(length - train_length - (scored or 1) + 1, 0)


def check(plan: Plan, name: str, train_length: int | None) -> None:
    """PlanError where a resolved plan asks for the control and nothing is far: unknown training length, no
    length past it, no protocol that allows it."""
    if not asked(plan):
        return
    if train_length is None:
        raise PlanError(f"{NAME}: {name}: its training length is unknown; accepted: own")
    lengths, found = plan.resolve_lengths(None), [spec.name for spec in plan.protocols]
    chosen = [spec for spec in plan.protocols if spec.name in PROTOCOLS]
    if not chosen:
        accepted = f"{' or '.join(PROTOCOLS)}, whose targets end their windows"
        raise PlanError(f"{NAME}: found protocols {', '.join(found)}; accepted: {accepted}")
    shortest = min(
        train_length + (spec.num_targets or 1 if spec.name == "fixed-target" else 1) for spec in chosen
    )
    if lengths[-1] < shortest:
        accepted = f"{shortest} or more, past the training length ({train_length}) of every target"
        raise PlanError(f"{NAME}: found lengths up to {lengths[-1]}; accepted: {accepted}")


def check_documents(plan: Plan, sequences: Sequence[DocumentSequence]) -> None:
    """PlanError where another document is asked for and there is none of other content."""
    if f"{NAME}={OTHER}" in asked(plan) and len({sequence.ids.tobytes() for sequence in sequences}) < 2:
        raise PlanError(f"{NAME}: found one document; accepted for {OTHER}: two or more, of unit document")


def replaced(job: Job, control: str, train_length: int) -> Job:
    """The job with other inputs where they are far."""
    own = {field.name: getattr(job, field.name) for field in fields(Job)}
    return _Replaced(**own, kind=control.partition("=")[2], train_length=train_length)


@dataclass(frozen=True)
class _Replaced(Job):
    kind: str
    train_length: int

    def inputs(self, indices: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        ids_BT, targets_BK = super().inputs(indices)
        begin = int(self.sequences[0].bos_token_id is not None)
        end = int(self.first[indices[0]]) + 1 - self.train_length
        if end > begin:
            for row, index in enumerate(indices):
                far = ids_BT[row, begin:end]
                far[:] = self._shuffled(far) if self.kind == SHUFFLED else self._others(int(index), len(far))
        return ids_BT, targets_BK

    def _shuffled(self, far: np.ndarray) -> np.ndarray:
        return np.random.default_rng(zlib.crc32(far.tobytes())).permutation(far)

    def _others(self, index: int, count: int) -> np.ndarray:
        """`count` tokens on end of another document, about as far into it as the window's own."""
        own = self.sequences[self.document[index]]
        others = [sequence for sequence in self.sequences if not np.array_equal(sequence.ids, own.ids)]
        other = others[np.random.default_rng(zlib.crc32(own.ids.tobytes())).integers(len(others))]
        begin = int(other.bos_token_id is not None)
        start = begin + int(self.start[index]) % (len(other.ids) - begin - count + 1)
        return other.ids[start : start + count]
