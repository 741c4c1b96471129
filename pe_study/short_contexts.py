"""When "trained at length L" says too much. No torch here."""

from __future__ import annotations

SHARE = 0.95
"""Of L / 2, the median context that packing gives where no document ends. Documents of eight training lengths
on average, their sizes exponential, come to 0.949 of it, those of eighty to 0.996."""


def is_short(median: float, length: int) -> bool:
    """Whether the median context of training targets is under half the training length, beyond what the
    borders between long documents take from it."""
    return median < SHARE * length / 2
