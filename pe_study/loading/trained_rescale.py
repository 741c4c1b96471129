"""The rescale that a decoder of ours was trained under: kept where another changes nothing, as a scaling that
a Hugging Face checkpoint brings."""

from __future__ import annotations

from dataclasses import replace

from pe_study.configuration import PEStudyConfig
from pe_study.rescales import Rescale, parse

NONE = Rescale("none")


def in_force(config: PEStudyConfig, spec: str, length: int | None) -> str:
    """What a model of `config` is built under when `spec` is asked for at a declared length (None: its own):
    `spec`, or the trained rescale where that is `none` or S = 1."""
    asked, trained = parse(spec), parse(config.rescale)
    length = length or config.length or config.train_length
    if trained == NONE or not asked.keeps_frequencies(config.train_length, length):
        return asked.label
    return replace(trained, logn=trained.logn or asked.logn).label


def kept(config: PEStudyConfig, spec: str, length: int) -> tuple[str, float | None] | None:
    """Kind and factor of the trained rescale, where there is one and `spec` leaves it in place."""
    trained = parse(config.rescale)
    if trained == NONE or not parse(spec).keeps_frequencies(config.train_length, length):
        return None
    return trained.kind, trained.resolved_factor(config.train_length, length)


def fixed(spec: str, train_length: int, length: int) -> str:
    """`auto` as the number it is at a length: what was trained at one factor stays at it."""
    rescale = parse(spec)
    if rescale.factor == "auto":
        rescale = replace(rescale, factor=rescale.resolved_factor(train_length, length))
    return rescale.label
