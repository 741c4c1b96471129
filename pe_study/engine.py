"""What Accelerate runs on: the engine of a study, agreement between its processes, memory."""

from __future__ import annotations

import contextlib
import gc
import resource
import sys
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from accelerate.utils import TorchDynamoPlugin, broadcast_object_list
from transformers.utils import logging as transformers_logging

from pe_study.errors import PEStudyError, RecipeError

if TYPE_CHECKING:
    from pe_study.recipe import Recipe

Result = TypeVar("Result")


def make_accelerator(recipe: Recipe) -> Accelerator:
    """The engine: device, processes and sharding come from `accelerate launch`, precision from the recipe."""
    train = recipe.train
    if train.mixed_precision == "fp16" and not torch.cuda.is_available():
        raise RecipeError(f"{recipe.path}: train.mixed_precision: fp16 needs a GPU; use bf16 or no")
    AcceleratorState._reset_state()  # an earlier study of this process may have had another precision
    return Accelerator(
        mixed_precision=train.mixed_precision,
        log_with=list(train.log_with) if train.log_with else None,
        dynamo_plugin=TorchDynamoPlugin(backend="inductor") if train.compile else None,
        step_scheduler_with_optimizer=False,
    )


def on_main(accelerator: Accelerator, function: Callable[[], Result]) -> Result:
    """Call `function` on the main process; every process gets what it returns, or raises what it raises."""
    outcome: list[Any] = [None, None]
    if accelerator.is_main_process:
        try:
            outcome[0] = function()
        except (PEStudyError, OSError) as error:
            outcome[1] = error
    if accelerator.num_processes > 1:
        broadcast_object_list(outcome)
    if outcome[1] is not None:
        raise outcome[1]
    return outcome[0]


@contextlib.contextmanager
def no_progress_bars() -> Iterator[None]:
    """Keep Hugging Face's own progress bars off, which ignore whether stderr is a terminal."""
    shown = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            transformers_logging.enable_progress_bar()


def release(accelerator: Accelerator) -> None:
    """Forget the last run: its tensors, and what was compiled for it."""
    accelerator.free_memory()
    torch._dynamo.reset()
    gc.collect()


def peak_memory_bytes(device: torch.device) -> int:
    """The most memory this process held: on its GPU, else resident."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def device_name(accelerator: Accelerator) -> str:
    """The name of the GPU, or "cpu"."""
    device = accelerator.device
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
