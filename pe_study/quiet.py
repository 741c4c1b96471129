"""Hugging Face's own progress bars, off where ours or none are shown."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from transformers.utils import logging


@contextlib.contextmanager
def no_progress_bars() -> Iterator[None]:
    """Keep the bars off, which ignore whether stderr is a terminal."""
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()
