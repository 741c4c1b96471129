"""Errors that a user can cause. Each carries the exit code of the command that met it."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from typing import Any


class PEStudyError(Exception):
    """One or two lines: file, key path, what was found, what would be accepted."""

    exit_code = 1


def mark_own(error: BaseException) -> None:
    """Say that an error is met by one process of several alone, so that nobody else can tell of it."""
    error.__dict__["is_own"] = True


def is_own(error: BaseException | None) -> bool:
    """Whether `mark_own` said so."""
    return error is not None and error.__dict__.get("is_own", False)


class UsageError(PEStudyError):
    """A flag, an argument or an output folder that cannot be used."""

    exit_code = 2


class RecipeError(PEStudyError):
    """A recipe that cannot be read or does not make sense."""

    exit_code = 2


class PlanError(PEStudyError):
    """An evaluation plan that cannot be read or does not fit the model."""

    exit_code = 2


class RescaleError(PlanError):
    """A rescale that cannot be parsed, or that the model cannot take."""


class DataError(PEStudyError):
    """A corpus or tokenizer that is missing, unreadable, empty or too short."""

    exit_code = 3


class DamagedError(DataError, ValueError):
    """A file of ours that is no longer what was written."""


class CheckpointError(PEStudyError):
    """A checkpoint that is missing, damaged, gated or of the wrong kind."""

    exit_code = 4


class NonFiniteLossError(PEStudyError):
    """A loss or gradient norm that is NaN or infinite; `report` says at which step, documents, parameters."""

    exit_code = 5

    def __init__(self, message: str, report: Mapping[str, Any] | None = None) -> None:
        super().__init__(message)
        self.report = dict(report or {})


class Interrupted(PEStudyError):
    """Stopped early on request; the same command resumes."""

    exit_code = 75


def did_you_mean(word: str, options: Iterable[str]) -> str:
    """'; did you mean "rope"? (available: alibi, …)', or only the available names when none is close."""
    names = list(options)
    close = difflib.get_close_matches(word, names, n=1, cutoff=0.6)
    hint = f'did you mean "{close[0]}"? ' if close else ""
    return f"{hint}(available: {', '.join(names)})"


class LengthError(PlanError, ValueError):
    """More tokens than the declared length, or than the encoding has positions for."""
