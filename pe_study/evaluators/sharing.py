"""Windows shared among the processes that Accelerate (or torchrun) started; sums added up in float64.

Each process reads every n-th batch, and all end with the same sums: how many there were shows at most in the
last bits of a float64. Without a process group everything here is the identity.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist

from pe_study.evaluators.scoring import is_out_of_memory

Item = TypeVar("Item")


def start() -> None:
    """Join the other processes, if this one was launched as one of several."""
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        from accelerate import PartialState

        PartialState()


def num_processes() -> int:
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def is_main() -> bool:
    return num_processes() == 1 or dist.get_rank() == 0


def device() -> torch.device | None:
    """Where this process's model goes: to its GPU; None: it stays on the CPU, where it was loaded."""
    if not torch.cuda.is_available():
        return None
    return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))


def wait() -> None:
    """Until every process is here."""
    if num_processes() > 1:
        dist.barrier()


def mine(items: Iterable[Item]) -> Iterator[Item]:
    """This process's share: every n-th item."""
    count = num_processes()
    rank = dist.get_rank() if count > 1 else 0
    return (item for number, item in enumerate(items) if number % count == rank)


def gathered(item: Item) -> list[Item]:
    """What every process gives here, by rank."""
    if num_processes() == 1:
        return [item]
    found: list[Any] = [None] * num_processes()
    dist.all_gather_object(found, item)
    return found


def added(arrays: list[np.ndarray], read: Callable[[], Any]) -> None:
    """Run `read`, which fills `arrays` with this process's share, then make them the sums over all processes.

    What `read` raises is raised everywhere: as it is where it happened, repeated elsewhere.
    """
    if num_processes() == 1:
        read()
        return
    failure: Exception | None = None
    try:
        read()
    except Exception as error:
        failure = error
    mine_is = None if failure is None else (is_out_of_memory(failure), f"{type(failure).__name__}: {failure}")
    reasons = gathered(mine_is)
    if failure is not None:
        raise failure
    for out_of_memory, text in filter(None, reasons):
        raise (MemoryError if out_of_memory else RuntimeError)(text)
    where = device() if dist.get_backend() == "nccl" else None
    for array in arrays:
        total = torch.from_numpy(array).to(where or "cpu", copy=True)
        dist.all_reduce(total)
        array[...] = total.cpu().numpy()
