"""Fonts of figures: the house font, and an installed one for characters that it lacks."""

from __future__ import annotations

import functools
from collections.abc import Iterable

from matplotlib import font_manager
from matplotlib.ft2font import FT2Font

HOUSE = "DejaVu Sans"  # comes with matplotlib
BOXES = ("Last Resort", "Adobe Blank")  # fonts of placeholders
# Families that hold Chinese, Japanese or Korean on most machines; the first to be tried of those installed.
KNOWN = ("Noto Sans CJK", "Source Han Sans", "WenQuanYi", "Droid Sans Fallback", "PingFang", "Hiragino",
         "Microsoft YaHei", "SimHei", "Yu Gothic", "Malgun", "IPAGothic", "Unifont", "Noto Sans")  # fmt: skip


def families(text: str) -> list[str]:
    """The families to write `text` in, the house font first; others only for characters that it lacks."""
    found, lacking = [HOUSE], missing(text, HOUSE)
    for family in _others() if lacking else ():
        if len(left := missing("".join(lacking), family)) < len(lacking):
            found.append(family)
            lacking = left
        if not lacking:
            break
    return found


def unwritable(text: str) -> str:
    """The characters that no installed font has, each once, in order."""
    lacking = set(text)
    for family in families(text):
        lacking &= missing(text, family)
    return "".join(one for one in dict.fromkeys(text) if one in lacking)


def missing(text: Iterable[str], family: str) -> set[str]:
    """The characters of a text that a family has no glyph for."""
    return {
        one
        for one in set(text)
        if one.isprintable() and not one.isspace() and ord(one) not in _glyphs(family)
    }


@functools.cache
def _glyphs(family: str) -> frozenset[int]:
    """The characters of the first file of a family."""
    files = [entry.fname for entry in font_manager.fontManager.ttflist if entry.name == family]
    try:
        return frozenset(FT2Font(files[0]).get_charmap()) if files else frozenset()
    except (OSError, RuntimeError):  # a font that matplotlib listed and cannot read
        return frozenset()


@functools.cache
def _others() -> tuple[str, ...]:
    """Installed families but the house font, the known ones first; none that draws boxes for everything."""
    installed = {entry.name for entry in font_manager.fontManager.ttflist}
    names = sorted(name for name in installed - {HOUSE} if not name.startswith(BOXES))
    rank = [
        next((place for place, known in enumerate(KNOWN) if name.startswith(known)), len(KNOWN))
        for name in names
    ]
    return tuple(name for _, name in sorted(zip(rank, names, strict=True)))
