"""Long names in figures: how wide a text is, about, and the same in lines that fit."""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence

CHARACTER = 0.62  # of the size of the text: the width of a character of DejaVu Sans, on average
WIDE = 2.0  # the width of a Chinese, Japanese or Korean character, in those of others
MOST_LINES = 3


def width_of(text: str) -> float:
    """The width of a text in characters."""
    return sum(WIDE if unicodedata.east_asian_width(one) in "WF" else 1.0 for one in text)


def inches_of(texts: Sequence[str], points: float) -> float:
    """The width of the widest line of several texts."""
    lines = [line for text in texts for line in text.split("\n")]
    return CHARACTER * points * max(map(width_of, lines), default=0) / 72


def fitted(text: str, inches: float, points: float, lines: int = MOST_LINES) -> str:
    """The text in at most `lines` lines of that width, broken where words or names end where it can be; what
    does not fit is left out in the middle."""
    most = max(inches * 72 / (CHARACTER * points), 4.0)
    found: list[str] = []
    rest = text
    while width_of(rest) > most and len(found) < lines - 1:
        place = _break(rest, most)
        found.append(rest[:place].rstrip())
        rest = rest[place:].lstrip()
    return "\n".join([*found, _shortened(rest, most)])


def _break(text: str, most: float) -> int:
    """Where to break: behind the last space, hyphen, slash or underscore of the second half that fits."""
    fits = next(n for n in range(len(text), 0, -1) if width_of(text[:n]) <= most)
    ends = [n + 1 for n in range(fits // 2, fits) if text[n] in " -/_,"]
    return ends[-1] if ends else fits


def _shortened(text: str, most: float) -> str:
    if width_of(text) <= most:
        return text
    left, right = text[: len(text) // 2], text[len(text) // 2 :]
    while width_of(left) + 1 + width_of(right) > most:
        left, right = (left[:-1], right) if len(left) > len(right) else (left, right[1:])
    return f"{left}\u2026{right}"
