"""How a command meets the terminal: UTF-8 streams, one-line errors and warnings, exit codes, a quiet pipe."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import signal
import sys
import threading
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from types import FrameType
from typing import TextIO

from pe_study.errors import Interrupted, PEStudyError, UsageError, is_own
from pe_study.launchers import outlived

PROGRAM = "pe-study"
DEBUG = "PE_STUDY_DEBUG"
STOPPED = "stopped; the same command continues with what is unfinished"
FULL = os.strerror(errno.ENOSPC)
_ENDING = (signal.SIGTERM, signal.SIGUSR2)
OUTPUT_ERRNOS = {errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM, errno.EFBIG}


def is_main_process() -> bool:
    """Whether this is the process that speaks: the only one, or rank 0 under `accelerate launch`."""
    return int(os.environ.get("RANK", "0")) == 0


def shows_progress() -> bool:
    """Progress is for a person who watches: a terminal on stderr, rank 0."""
    return is_main_process() and sys.stderr.isatty()


def say(line: str = "") -> None:
    """A line of a command's result on stdout, from rank 0 alone."""
    if is_main_process():
        print(line, flush=True)


def note(line: str) -> None:
    """What is being done, for a person who watches."""
    if shows_progress():
        print(line, file=sys.stderr, flush=True)


def complain(message: str, of: BaseException | None = None) -> None:
    """An error on stderr, from one process of each machine, so that a fault of one machine is seen; from
    every process, by its number, where the error `of` it is its own."""
    first = int(os.environ.get("LOCAL_RANK", "0")) == 0
    if first or is_own(of):
        which = "" if first else f"process {os.environ.get('RANK')}: "
        print(f"{PROGRAM}: {which}{message}", file=sys.stderr, flush=True)


def guarded(command: Callable[[Sequence[str] | None], int], argv: Sequence[str] | None) -> int:
    """Run `command(argv)` and return its exit code; whatever goes wrong becomes a line or two on stderr."""
    prepare_streams()
    try:
        with _stopped_by_signals(), outlived():
            code = command(argv)
        sys.stdout.flush()
    except PEStudyError as error:
        complain(str(error), error)
        return error.exit_code
    except KeyboardInterrupt:
        complain(STOPPED)
        return Interrupted.exit_code
    except BrokenPipeError:
        _discard(sys.stdout)
        return 0
    except Exception as error:
        return _cannot_write(error) if _is_about_output(error) else _our_fault(error)
    return code


@contextlib.contextmanager
def _stopped_by_signals() -> Iterator[None]:
    """SIGTERM and SIGUSR2 end a command as Ctrl-C does; training, which finishes its step, has its own."""
    in_main = threading.current_thread() is threading.main_thread()
    before = {number: signal.signal(number, _interrupt) for number in _ENDING if in_main}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def _is_about_output(error: Exception) -> bool:
    """A full disk or a folder that may not be written, also where a library wraps the system's words."""
    return FULL in str(error) or (isinstance(error, OSError) and error.errno in OUTPUT_ERRNOS)


def _cannot_write(error: Exception) -> int:
    file = getattr(error, "filename", None)
    reason = FULL if FULL in str(error) else getattr(error, "strerror", None)
    said = f"{f'{file}: ' if file else ''}cannot be written ({reason}); what was finished before is kept"
    complain(said, error)
    return UsageError.exit_code


def _our_fault(error: Exception) -> int:
    """What no check foresaw: one line for the reader, the traceback for whoever asks for it."""
    if os.environ.get(DEBUG):
        traceback.print_exception(error)
    text = " ".join(str(error).split())
    complain(f"unexpected {type(error).__name__}: {text[:300]}", error)
    complain(f"this is a fault of {PROGRAM}; {DEBUG}=1 shows where, please report it")
    return 1


def prepare_streams() -> None:
    """UTF-8 in any locale, bytes of file names as they are; a warning is one line without source code."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(encoding="utf-8", errors="surrogateescape")
    warnings.showwarning = _show_warning
    ours = logging.getLogger("pe_study")
    ours.handlers = [_Complaints(logging.WARNING)]
    ours.propagate = False


class _Complaints(logging.Handler):
    """Our modules' log records as lines on stderr."""

    def emit(self, record: logging.LogRecord) -> None:
        complain(f"{record.levelname.lower()}: {record.getMessage()}")


def _show_warning(
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    file: TextIO | None = None,
    line: str | None = None,
) -> None:
    complain(f"warning: {message}")


def _discard(stream: TextIO) -> None:
    """Nobody reads any more (`| head`): let the flush at exit go nowhere instead of failing."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
