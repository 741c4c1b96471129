"""What an 8-bit cache costs: the loss of a cell read through it, less that of the same cell without."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from pe_study.evaluators.cells import CellStore
from pe_study.evaluators.evaluation import Cell, Evaluation
from pe_study.evaluators.reading import CACHES
from pe_study.evaluators.summary import summarise
from pe_study.evaluators.truncation import TRUNCATION


def cache_costs(evaluations: Iterable[Evaluation], store: CellStore) -> list[dict[str, Any]]:
    """A mapping for each cell of the evaluations that the store holds with both caches: nats a token, and the
    tokens of its longest window, which say whether a quantised key was read at all."""
    found = []
    for evaluation in evaluations:
        for cell in evaluation.cells():
            frames = [store.read(evaluation.key(cell, cache)) for cache in CACHES]
            full, eighth = (None if frame is None else summarise(frame)["nll"] for frame in frames)
            if full is not None and eighth is not None:
                costs = {"nll": full, "nll_fp8": eighth, "difference": eighth - full}
                found.append(evaluation.names(cell) | {"window": _window(evaluation, cell)} | costs)
    return found


def _window(evaluation: Evaluation, cell: Cell) -> int:
    """Inputs of a cell's longest window: its length, which `truncation` cuts to the training length, or to
    the targets of a block where those are more."""
    trained = evaluation.subject.train_length
    if cell.rescale != TRUNCATION or trained is None:
        return cell.length
    scored = cell.protocol.num_targets if cell.protocol.name == "fixed-target" else None
    return min(cell.length, max(trained, scored or 1))
