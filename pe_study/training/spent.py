"""What a run spent, over all its sessions: time, devices, memory."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from accelerate import Accelerator

from pe_study.memory import peak_memory_bytes, reset_peak_memory


class Spent:
    """Counts from here on, on top of what earlier sessions had spent at the snapshot that this one goes on
    from: what was lost with a crash led to no weight and is not in it."""

    def __init__(self, accelerator: Accelerator) -> None:
        self._accelerator = accelerator
        self._before: Mapping[str, Any] = {"wall_seconds": 0.0, "device_seconds": 0.0, "peak_memory_bytes": 0}
        self._began = time.perf_counter()
        reset_peak_memory(accelerator.device)

    def go_on_from(self, facts: Mapping[str, Any]) -> None:
        """Add what `facts`, of an earlier session, say."""
        self._before = facts

    def facts(self) -> dict[str, Any]:
        """`wall_seconds`, `device_seconds` (each session times its number of processes) and
        `peak_memory_bytes` (of the main process)."""
        seconds, before = time.perf_counter() - self._began, self._before
        devices = seconds * self._accelerator.num_processes
        return {
            "wall_seconds": round(before["wall_seconds"] + seconds, 2),
            "device_seconds": round(before["device_seconds"] + devices, 2),
            "peak_memory_bytes": max(
                before["peak_memory_bytes"], peak_memory_bytes(self._accelerator.device)
            ),
        }
