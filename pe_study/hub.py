"""The Hugging Face Hub, reached once and quickly, or not at all.

The Hub's client retries for minutes when there is no network. Here one short request decides; without an
answer, downloads run in the client's own offline mode, so that what is cached still loads.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from typing import Any

SECONDS = 5.0


@functools.cache
def reachable() -> bool:
    """Whether the Hub answers within a few seconds; asked once a process. False where offline mode is set."""
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        return False
    try:
        urllib.request.urlopen(
            urllib.request.Request(constants.ENDPOINT, method="HEAD"), timeout=SECONDS
        ).close()
    except urllib.error.HTTPError:
        return True
    except OSError:
        return False
    return True


@contextlib.contextmanager
def no_retries() -> Iterator[None]:
    """Within the block, Hub downloads use the local cache alone if the Hub cannot be reached."""
    if reachable():
        yield
        return
    import datasets.config
    from huggingface_hub import constants

    switches: tuple[Any, Any] = (constants, datasets.config)
    before = [switch.HF_HUB_OFFLINE for switch in switches]
    for switch in switches:
        switch.HF_HUB_OFFLINE = True
    try:
        yield
    finally:
        for switch, value in zip(switches, before, strict=True):
            switch.HF_HUB_OFFLINE = value


def why() -> str:
    """A clause for an error message: why nothing came from the Hub."""
    return "" if reachable() else "; the Hugging Face Hub cannot be reached from here"


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Within the block, `datasets` draws progress bars on a terminal only."""
    import datasets

    if sys.stderr.isatty() or datasets.are_progress_bars_disabled():
        yield
        return
    datasets.disable_progress_bars()
    try:
        yield
    finally:
        datasets.enable_progress_bars()


@contextlib.contextmanager
def no_progress_bars() -> Iterator[None]:
    """Within the block, transformers draws none (its own ignore whether stderr is a terminal)."""
    from transformers import modeling_gguf_pytorch_utils as gguf
    from transformers.utils import logging

    shown, of_gguf = logging.is_progress_bar_enabled(), gguf.tqdm
    logging.disable_progress_bar()
    gguf.tqdm = functools.partial(of_gguf, disable=True)
    try:
        yield
    finally:
        gguf.tqdm = of_gguf
        if shown:
            logging.enable_progress_bar()
