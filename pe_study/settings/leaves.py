"""What a key accepts: one phrase for error messages and the reference table, one function that reads it.

Text is never a number, true is never 1, 1e4 is a whole number, and 2k is 2048.
"""

from __future__ import annotations

import datetime
import difflib
import math
import re
import unicodedata
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from pydantic import GetCoreSchemaHandler
from pydantic_core import CoreSchema, PydanticCustomError, core_schema

from pe_study.settings.yaml_strict import describe

THOUSAND = 1024  # the k of 2k
LARGEST = 2**30  # of a size or count: a table of two such sizes still has its bytes counted in 64 bits

_LENGTH = re.compile(r"([0-9]+(?:\.[0-9]+)?)([kKx])")
_FILE_NAME = re.compile(r"\w[\w.+@-]*")


@dataclass(frozen=True)
class Accepts:
    """Marks a leaf: `phrase` says what is accepted, `parse` returns the value or raises ValueError.

    A ValueError with a message replaces the phrase.
    """

    phrase: str
    parse: Callable[[Any], Any]

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_plain_validator_function(self._validate)

    def _validate(self, value: Any) -> Any:
        try:
            return self.parse(value)
        except PydanticCustomError:  # a `problem`; pydantic makes it a ValueError
            raise
        except ValueError as refusal:
            accepted = str(refusal) or self.phrase
            raise PydanticCustomError("refused", "{accepted}", {"accepted": accepted}) from None


def problem(message: str) -> PydanticCustomError:
    """The error of a validator whose message already says what was found."""
    return PydanticCustomError("problem", "{message}", {"message": message})


def whole(least: int = 0, tokens: bool = False) -> Accepts:
    """A whole number of at least `least`; with `tokens` also as `2k`, which is 2048."""
    suffix = ", or such as 2k (2048)" if tokens else ""
    return Accepts(f"a whole number of at least {least}{suffix}", lambda value: _whole(value, least, tokens))


def number(
    *,
    above: float | None = None,
    least: float | None = None,
    below: float | None = None,
    most: float | None = None,
) -> Accepts:
    """A finite number within bounds; a bound that is None does not bind."""
    bounds = {"above": above, "of at least": least, "below": below, "of at most": most}
    words = " and ".join(f"{word} {bound:g}" for word, bound in bounds.items() if bound is not None)

    def parse(value: Any) -> float:
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise ValueError
        outside = (
            (above is not None and value <= above)
            or (least is not None and value < least)
            or (below is not None and value >= below)
            or (most is not None and value > most)
        )
        if outside:
            raise ValueError
        return float(value)

    return Accepts(f"a number {words}".rstrip(), parse)


def choice(*options: str) -> Accepts:
    """One of a few words."""
    phrase = f"one of {', '.join(options)}"

    def parse(value: Any) -> str:
        if isinstance(value, str) and value in options:
            return value
        close = difflib.get_close_matches(str(value), options, n=1)
        raise ValueError(f'{phrase} (did you mean "{close[0]}"?)' if close else "")

    return Accepts(phrase, parse)


def text(what: str = "text") -> Accepts:
    """Text that is not empty; a number or true would need quotes."""

    def parse(value: Any) -> str:
        if isinstance(value, str) and value.strip():
            return value
        raise ValueError(f"{what}, in quotes" if isinstance(value, int | float) else "")

    return Accepts(what, parse)


def file_name(what: str) -> Accepts:
    """Text that can name a folder: letters, digits and . _ + @ -, in Unicode's composed form."""
    phrase = f"{what} of letters, digits and . _ + @ - that starts with a letter or digit"

    def parse(value: Any) -> str:
        name = unicodedata.normalize("NFC", value) if isinstance(value, str) else ""
        if not _FILE_NAME.fullmatch(name) or name.endswith(".") or len(name.encode()) > 100:
            raise ValueError(f"{phrase}, in quotes" if isinstance(value, int | float) else "")
        return name

    return Accepts(phrase, parse)


def date() -> Accepts:
    """A day, YYYY-MM-DD."""

    def parse(value: Any) -> str:
        try:
            return datetime.datetime.strptime(str(value), "%Y-%m-%d").date().isoformat()
        except ValueError:
            raise ValueError from None

    return Accepts("a date such as 2023-07-18", parse)


def flag() -> Accepts:
    """true or false, and nothing that YAML 1.1 took for them."""

    def parse(value: Any) -> bool:
        if isinstance(value, bool):
            return value
        raise ValueError

    return Accepts("true or false", parse)


def either(first: Accepts, *words: str) -> Accepts:
    """What `first` takes, or one of `words` as it stands."""

    def parse(value: Any) -> Any:
        return value if isinstance(value, str) and value in words else first.parse(value)

    return Accepts(f"{first.phrase}, or {' or '.join(words)}", parse)


def optional(inner: Accepts) -> Accepts:
    """What `inner` takes, or null."""
    return Accepts(f"{inner.phrase}, or null", lambda value: None if value is None else inner.parse(value))


def length(in_bytes: bool = False) -> Accepts:
    """A length: `512`, `2k` (2048) or `4x` (four training lengths), in one spelling each (an int or `4x`).

    With `in_bytes` also `4kB`, bytes of text, which becomes `4096B`.
    """
    phrase = "a length such as 512, 2k (2048) or 4x (four training lengths)"

    def parse(value: Any) -> int | str:
        if in_bytes and isinstance(value, str) and value.endswith("B"):
            size = value[:-1]
            return f"{_whole(int(size) if size.isdecimal() else size, 1, tokens=True)}B"
        if isinstance(value, str) and (match := _LENGTH.fullmatch(value)) and match[2] == "x":
            if not (times := Fraction(match[1])):
                raise ValueError
            return f"{float(times):.12g}x"
        return _whole(value, 1, tokens=True)

    return Accepts(f"{phrase}, or 4kB (bytes of text)" if in_bytes else phrase, parse)


def bytes_text(num_bytes: int) -> str:
    """A length in bytes as a person writes it: 256 as `256B`, 1024 as `1kB`."""
    whole, rest = divmod(num_bytes, THOUSAND)
    return f"{num_bytes}B" if rest else f"{whole}kB"


def parse_length(value: int | str, train_length: int | None = None) -> int:
    """A length in tokens: 512, `2k` = 2048, `4x` = four training lengths, rounded half up to a whole token.

    Raises ValueError saying what would be accepted.
    """
    accepts = length()
    try:
        parsed = accepts.parse(value)
    except ValueError:
        raise ValueError(f"found {describe(value)}; accepted: {accepts.phrase}") from None
    if isinstance(parsed, int):
        return parsed
    if train_length is None:
        raise ValueError(f"{parsed} needs a training length; accepted: lengths in tokens, such as 2k")
    tokens = max(1, math.floor(Fraction(parsed[:-1]) * train_length + Fraction(1, 2)))
    if tokens > LARGEST:
        raise ValueError(f"found {parsed}, {tokens} tokens; accepted: at most {LARGEST}")
    return tokens


def _whole(value: Any, least: int, tokens: bool) -> int:
    if tokens and isinstance(value, str) and (match := _LENGTH.fullmatch(value)) and match[2] in "kK":
        size = Fraction(match[1]) * THOUSAND
    elif isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ValueError
    else:
        size = Fraction(value)
    if size.denominator != 1 or size < least:
        raise ValueError
    if size > LARGEST:
        raise ValueError(f"at most {LARGEST}")
    return int(size)
