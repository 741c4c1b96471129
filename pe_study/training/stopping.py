"""Stop requests: a signal asks for a stop, the training loop answers at the end of a step."""

from __future__ import annotations

import signal
import threading
from types import FrameType, TracebackType
from typing import Self

from pe_study.errors import Interrupted

# SIGUSR2 is what submitit's Slurm jobs get before their time is up.
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR2)
FROM_OUTSIDE = (signal.SIGKILL, signal.SIGTERM)  # how systems end processes: for memory, time or a reboot


def wants_restart(exit_code: int) -> bool:
    """Whether a process that ended so was stopped early and resumes when it is started again."""
    return exit_code == Interrupted.exit_code or -exit_code in FROM_OUTSIDE


def describe_exit(exit_code: int) -> str:
    """How a process ended: a negative exit code is the signal that ended it."""
    if exit_code >= 0:
        return f"exit code {exit_code}"
    hint = " (out of memory, or stopped from outside)" if -exit_code in FROM_OUTSIDE else ""
    return f"{signal.Signals(-exit_code).name}{hint}"


class StopRequest:
    """While entered, SIGTERM, SIGUSR2 and the first Ctrl-C only set `requested`; a second Ctrl-C raises
    KeyboardInterrupt at once. Handlers are put back on leaving. Outside the main thread it does nothing."""

    def __init__(self) -> None:
        self.requested: str | None = None
        self._interrupts = 0

    def __enter__(self) -> Self:
        in_main = threading.current_thread() is threading.main_thread()
        self._previous = {number: signal.signal(number, self._receive) for number in SIGNALS if in_main}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        self._interrupts += number == signal.SIGINT  # torchrun sends a SIGTERM after each of them
        if number == signal.SIGINT and self._interrupts > 1:
            raise KeyboardInterrupt
        self.requested = signal.Signals(number).name
