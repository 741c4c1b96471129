"""Stop requests: a signal asks for a stop, the training loop answers at the end of a step."""

from __future__ import annotations

import signal
import threading
from types import FrameType, TracebackType
from typing import Self

# SIGUSR2 is what submitit's Slurm jobs get before their time is up.
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR2)


class StopRequest:
    """While entered, SIGTERM, SIGUSR2 and the first Ctrl-C only set `requested`; a second Ctrl-C raises
    KeyboardInterrupt at once. Handlers are put back on leaving. Outside the main thread it does nothing."""

    def __init__(self) -> None:
        self.requested: str | None = None

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
        if number == signal.SIGINT and self.requested == "SIGINT":
            raise KeyboardInterrupt
        self.requested = signal.Signals(number).name
