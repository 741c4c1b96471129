"""Draws many figures, on two cores where that is safe."""

from __future__ import annotations

import gc
import multiprocessing
import os
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass

from pe_study.reporting.drawing import Figure, render

WORKERS = 2
FEW = 8  # fewer drawings are not worth a process


@dataclass(frozen=True)
class Drawing:
    """One figure at one size: the arguments of `drawing.render`."""

    figure: Figure
    size: str
    forms: Sequence[str]
    colours: Mapping[str, str] | None


_waiting: list[Drawing] = []  # what workers find after the fork: drawings are closures, which no pipe takes


def render_all(drawings: Sequence[Drawing]) -> Iterator[dict[str, bytes]]:
    """The files of each drawing, in order; the same bytes in one process or two."""
    if len(drawings) < FEW or not _may_fork():
        yield from map(_render, drawings)
        return
    _waiting[:] = drawings
    try:
        forking = multiprocessing.get_context("fork")
        with ProcessPoolExecutor(WORKERS, mp_context=forking, initializer=gc.freeze) as pool:
            yield from pool.map(_render_waiting, range(len(drawings)))
    finally:
        _waiting.clear()


def _may_fork() -> bool:
    """Only from a process without threads: those of torch do not survive a fork, nor do macOS's own."""
    alone = threading.active_count() == 1 and "torch" not in sys.modules
    return sys.platform == "linux" and alone and len(os.sched_getaffinity(0)) > 1


def _render_waiting(place: int) -> dict[str, bytes]:
    return _render(_waiting[place])


def _render(one: Drawing) -> dict[str, bytes]:
    return render(one.figure, one.size, one.forms, one.colours)
