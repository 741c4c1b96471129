"""Looks stay apart for the colour-blind, in grey and on the page, whatever else is shown."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from pe_study.reporting import drawing, palette

# Machado, Oliveira, Fernandes 2009, severity 1, on linear RGB.
BLINDNESS = {
    "none": np.eye(3),
    "protan": [
        [0.152286, 1.052583, -0.204868],
        [0.114503, 0.786281, 0.099216],
        [-0.003882, -0.048116, 1.051998],
    ],
    "deutan": [
        [0.367322, 0.860646, -0.227968],
        [0.280085, 0.672501, 0.047413],
        [-0.01182, 0.04294, 0.968881],
    ],
    "tritan": [
        [1.255528, -0.076749, -0.178779],
        [-0.078411, 0.930809, 0.147602],
        [0.004733, 0.691367, 0.3039],
    ],
}
TO_XYZ = np.array(
    [[0.4124564, 0.3575761, 0.1804375], [0.2126729, 0.7151522, 0.072175], [0.0193339, 0.119192, 0.9503041]]
)


def linear(colour: str) -> np.ndarray:
    part = np.array([int(colour[i : i + 2], 16) for i in (1, 3, 5)]) / 255
    return np.where(part <= 0.04045, part / 12.92, ((part + 0.055) / 1.055) ** 2.4)


def lab(rgb: np.ndarray) -> np.ndarray:
    """CIELAB of linear RGB."""
    xyz = TO_XYZ @ np.clip(rgb, 0, 1) / np.array([0.95047, 1, 1.08883])
    f = np.where(xyz > 0.008856, np.cbrt(xyz), 7.787 * xyz + 16 / 116)
    return np.array([116 * f[1] - 16, 500 * (f[0] - f[1]), 200 * (f[1] - f[2])])


def contrast(colour: str, page: str) -> float:
    light, dark = sorted((float(TO_XYZ[1] @ linear(c)) for c in (colour, page)), reverse=True)
    return (light + 0.05) / (dark + 0.05)


@pytest.mark.parametrize("theme", [0, 1])
@pytest.mark.parametrize("blindness", BLINDNESS)
def test_colours_stay_apart(theme: int, blindness: str) -> None:
    matrix = np.array(BLINDNESS[blindness])
    seen = [lab(matrix @ linear(pair[theme])) for pair in palette.COLOURS.values()]
    assert min(np.linalg.norm(a - b) for a, b in itertools.combinations(seen, 2)) > 18


@pytest.mark.parametrize("theme", [0, 1])
def test_colours_stay_apart_in_grey(theme: int) -> None:
    grey = sorted(lab(linear(pair[theme]))[0] for pair in palette.COLOURS.values())
    assert np.diff(grey).min() > 4


@pytest.mark.parametrize(("theme", "page"), [(0, drawing.PAPER), (1, drawing.DARK[drawing.PAPER])])
def test_colours_can_be_seen_on_the_page(theme: int, page: str) -> None:
    assert min(contrast(pair[theme], page) for pair in palette.COLOURS.values()) >= 3
    ink, muted = ((role, drawing.DARK[role])[theme] for role in (drawing.INK, drawing.MUTED))
    assert min(contrast(ink, page), contrast(muted, page)) >= 4.5


def test_a_label_looks_the_same_beside_others() -> None:
    alone = palette.looks([("rope", "rope")])["rope"]
    among = palette.looks([(name, name) for name in ("alibi", "zeta", "rope", "nope")])["rope"]
    assert alone == among


def test_labels_of_one_encoding_share_the_colour_and_differ_otherwise() -> None:
    looks = palette.looks([("rope-1m", "rope"), ("rope", "rope"), ("rope-half", "rope")])
    assert len({look.light for look in looks.values()}) == 1
    assert len({(look.dash, look.marker) for look in looks.values()}) == 3
    assert looks["rope"] == palette.looks([("rope", "rope")])["rope"]


def test_thirty_encodings_have_thirty_looks() -> None:
    looks = palette.looks([(f"mine-{n}", f"mine-{n}") for n in range(30)])
    assert len({(look.light, look.dash, look.marker) for look in looks.values()}) == 30
