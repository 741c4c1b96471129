"""One look per encoding, the same in every figure: colour (light and dark), dash and marker.

Colours keep apart for the three kinds of colour blindness and in grey (a test simulates both), reach 3:1
against the page, and never carry a difference alone: dash and marker repeat it.
"""

from __future__ import annotations

import colorsys
from collections.abc import Iterable
from dataclasses import dataclass, replace

# Encoding -> (colour on white, colour on dark).
COLOURS = {
    "nope": ("#2b2b2b", "#e6e6e6"),
    "sinusoidal": ("#7a2d81", "#a85ca3"),
    "learned": ("#a77f00", "#efb053"),
    "shaw": ("#0099dc", "#4fd9fb"),
    "t5": ("#008155", "#08a97d"),
    "rope": ("#3955be", "#87a5ff"),
    "alibi": ("#7d1d00", "#d0623e"),
}
DASHES = (
    "solid",
    (0, (5, 1.6)),
    (0, (1.2, 1.2)),
    (0, (6, 1.5, 1.2, 1.5)),
    (0, (3, 1)),
    (0, (8, 2, 1, 2, 1, 2)),
)
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "<", ">", "p", "h", "*")
CONTROL = "nope"
_ORDER = list(COLOURS)


@dataclass(frozen=True)
class Look:
    """How one label is drawn."""

    light: str
    dark: str
    dash: str | tuple[int, tuple[float, ...]]
    marker: str

    def colour(self, dark: bool) -> str:
        return self.dark if dark else self.light


def looks(series: Iterable[tuple[str, str]]) -> dict[str, Look]:
    """Label -> look, for (label, encoding) pairs. Those of one encoding share its colour only.

    The look of a known encoding never depends on what else is shown; others take free hues in order of name.
    """
    pairs = sorted(set(series), key=lambda pair: (order(pair[1]), pair[0] != pair[1], pair[0]))
    unknown = sorted({encoding for _, encoding in pairs if encoding not in COLOURS})
    found: dict[str, Look] = {}
    seen: dict[str, int] = {}
    for label, encoding in pairs:
        variant = seen.get(encoding, 0)
        seen[encoding] = variant + 1
        found[label] = _look(encoding, variant, unknown)
    return found


def dashed(look: Look, place: int) -> Look:
    """The look of a label in the `place`-th of several studies: its colour and marker, another dash."""
    dash = DASHES[(DASHES.index(look.dash) + place) % len(DASHES)] if place else look.dash
    return replace(look, dash=dash)


def order(encoding: str) -> tuple[int, str]:
    """Sort key: the control first, then the known encodings, then the others by name."""
    return (_ORDER.index(encoding) if encoding in COLOURS else len(_ORDER), encoding)


def _look(encoding: str, variant: int, unknown: list[str]) -> Look:
    if encoding in COLOURS:
        place = _ORDER.index(encoding)
        light, dark = COLOURS[encoding]
    else:
        place = len(_ORDER) + unknown.index(encoding)
        light, dark = _generated(unknown.index(encoding))
    dash = DASHES[variant % len(DASHES)] if encoding != CONTROL else DASHES[2]
    if encoding not in COLOURS:
        dash = DASHES[(variant + unknown.index(encoding) // len(MARKERS)) % len(DASHES)]
    return Look(light, dark, dash, MARKERS[(place + 5 * variant) % len(MARKERS)])


def _generated(place: int) -> tuple[str, str]:
    """The `place`-th further hue: golden-ratio steps around the wheel, in three lightnesses."""
    hue = (0.12 + place * 0.618034) % 1.0
    shade = (0.32, 0.42, 0.25)[place % 3]
    return _hex(hue, shade, 0.62), _hex(hue, 0.95 - 0.75 * shade, 0.6)


def _hex(hue: float, lightness: float, saturation: float) -> str:
    return "#" + "".join(
        f"{round(255 * part):02x}" for part in colorsys.hls_to_rgb(hue, lightness, saturation)
    )


# Rescales are lines of one encoding, so they have looks of their own; a kind has one whatever its factor.
_RESCALES = ("none", "linear", "ntk", "yarn", "dynamic", "ntk-by-parts", "llama3", "longrope")
_RESCALE_COLOURS = [COLOURS[name] for name in ("rope", "learned", "shaw", "t5", "sinusoidal", "alibi")]


def control_look() -> Look:
    """How the control is drawn, in figures of other things too."""
    return looks([(CONTROL, CONTROL)])[CONTROL]


def ordered_looks(names: Iterable[str]) -> dict[str, Look]:
    """A look a name, in the order given: for lines that are neither encodings nor rescales."""
    return {
        name: Look(
            *_RESCALE_COLOURS[place % len(_RESCALE_COLOURS)],
            DASHES[(place + place // len(_RESCALE_COLOURS)) % len(DASHES)],
            MARKERS[place % len(MARKERS)],
        )
        for place, name in enumerate(names)
    }


def rescale_looks(rescales: Iterable[str]) -> dict[str, Look]:
    """Rescale -> look; two of a kind (yarn:2, yarn:4) differ in dash and marker."""
    found: dict[str, Look] = {}
    seen: dict[str, int] = {}
    for rescale in rescales:
        kind = rescale.split(":")[0]
        variant = seen.get(kind, 0)
        seen[kind] = variant + 1
        place = _RESCALES.index(kind) if kind in _RESCALES else len(_RESCALES)
        light, dark = _RESCALE_COLOURS[place % len(_RESCALE_COLOURS)]
        dash = DASHES[(variant + place // len(_RESCALE_COLOURS)) % len(DASHES)]
        found[rescale] = Look(light, dark, dash, MARKERS[(place + 5 * variant) % len(MARKERS)])
    return found
