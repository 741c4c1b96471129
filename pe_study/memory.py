"""The most memory that a process held: on its GPU, or resident.

On Linux the figure is that of /proc, not of getrusage, which a process inherits from the one that started it.
"""

from __future__ import annotations

import contextlib
import ctypes
import re
import resource
import sys
from pathlib import Path

import psutil
import torch

PROCESS = Path("/proc/self")


def reset_peak_memory(device: torch.device) -> None:
    """Let `peak_memory_bytes` begin anew. Off Linux it cannot: there it is the peak of the whole process."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    with contextlib.suppress(OSError):
        # proc(5): the peak is what is resident now
        (PROCESS / "clear_refs").write_text("5", encoding="utf-8")


def peak_memory_bytes(device: torch.device) -> int:
    """The most memory this process held since `reset_peak_memory`: on its GPU, else resident."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    with contextlib.suppress(OSError):
        found = re.search(
            r"^VmHWM:\s*(\d+) kB", (PROCESS / "status").read_text(encoding="utf-8"), re.MULTILINE
        )
        if found:
            return int(found[1]) * 1024
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def held_bytes() -> int:
    """What this process holds now, without what its allocator keeps for later."""
    with contextlib.suppress(AttributeError, OSError):  # glibc's
        ctypes.CDLL(None).malloc_trim(0)
    return psutil.Process().memory_info().rss
