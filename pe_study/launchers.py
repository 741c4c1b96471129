"""Launchers that may end without telling the process they started: `accelerate launch` passes no signal on to
a single process, and neither it nor `torchrun` can when it is killed. No torch here."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

import psutil

SET = ("ACCELERATE_MIXED_PRECISION", "TORCHELASTIC_RUN_ID")  # of the environment of what they start
PROGRAMS = ("accelerate", "accelerate-launch", "torchrun")
MODULES = ("accelerate.commands.", "torch.distributed.")
INTERVAL = 0.5  # seconds between two looks


@contextlib.contextmanager
def outlived() -> Iterator[None]:
    """Within the block, the end of the launcher that started this process is a SIGTERM to it. Parents of
    other kinds may end: a shell does, at logout."""
    parent = os.getppid()
    if not any(name in os.environ for name in SET) or not is_launcher(_command(parent)):
        yield
        return
    done = threading.Event()
    watch = threading.Thread(target=_watch, args=(parent, done), daemon=True)
    watch.start()
    try:
        yield
    finally:
        done.set()
        watch.join()


def is_launcher(command: Sequence[str]) -> bool:
    """Whether a command line is that of a launcher: Python, and its program or module."""
    python, words = Path(command[0]).name if command else "", command[1:]
    return python.startswith("python") and any(
        Path(word).name in PROGRAMS or word.startswith(MODULES) for word in words
    )


def _command(process: int) -> list[str]:
    try:
        return psutil.Process(process).cmdline()
    except psutil.Error:
        return []


def _watch(parent: int, done: threading.Event) -> None:
    while not done.wait(INTERVAL):
        if os.getppid() != parent:
            os.kill(os.getpid(), signal.SIGTERM)
            return
