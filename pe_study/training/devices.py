"""The GPUs of this machine, and which of them each of several processes gets."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

VISIBLE = "CUDA_VISIBLE_DEVICES"


def visible_gpus(environment: Mapping[str, str] = os.environ) -> list[str]:
    """The GPUs that this process may use, by the names that CUDA_VISIBLE_DEVICES takes; none on a CPU."""
    import torch

    if not torch.cuda.is_available():
        return []
    named = [name.strip() for name in environment.get(VISIBLE, "").split(",")]
    return [name for name in named if name] or [str(index) for index in range(torch.cuda.device_count())]


def share_out(gpus: Sequence[str], jobs: int) -> list[str | None]:
    """The GPU of each of `jobs` processes: one each in turn, several on one where there are fewer; None
    without GPUs."""
    return [gpus[job % len(gpus)] if gpus else None for job in range(jobs)]
