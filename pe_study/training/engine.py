"""What Accelerate runs on: the engine of a study, agreement between its processes, memory."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from accelerate.utils import TorchDynamoPlugin, broadcast_object_list
from accelerate.utils.memory import clear_device_cache, should_reduce_batch_size
from torch.nn.parallel import DistributedDataParallel

from pe_study import attention
from pe_study.encodings.base import Encoding
from pe_study.errors import (
    Interrupted,
    NonFiniteLossError,
    PEStudyError,
    RecipeError,
    UsageError,
    mark_own,
)
from pe_study.kernels.fused import reset_compilations
from pe_study.model import PEStudyForCausalLM
from pe_study.recipe import build_encoding

if TYPE_CHECKING:
    from pe_study.recipe import Recipe, RunSpec
    from pe_study.training.initial import Decoder

Result = TypeVar("Result")

AGREED = "agreed"  # of an error: every process raises it


def check_engine(recipe: Recipe, selected: Sequence[RunSpec]) -> None:
    """RecipeError for what this machine cannot do, in any of the selected runs."""
    if recipe.train.mixed_precision == "fp16" and not torch.cuda.is_available():
        raise RecipeError(f"{recipe.path}: train.mixed_precision: fp16 needs a GPU; use bf16 or no")
    for encoding in {run.encoding.label: run.encoding for run in selected}.values():
        try:
            _check_kernel(recipe, build_encoding(recipe, encoding, encoding.label))
        except UsageError as error:
            raise RecipeError(f"{recipe.path}: train.kernel: {error}") from None


def _check_kernel(recipe: Recipe, encoding: Encoding) -> None:
    """UsageError where the kernel of the recipe cannot train the encoding on this machine."""
    kernel = recipe.train.kernel
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if kernel in ("flex", "flash") and device.type == "cpu":
        raise UsageError(f"kernel {kernel} cannot train on cpu; these can: eager, sdpa")
    dtype = autocast_dtype(recipe) or torch.float32
    attention.resolve(kernel, device, dtype, encoding, mask_kind(recipe))


def mask_kind(recipe: Recipe) -> str:
    """What attention may not see beside the tokens to come: nothing (`causal`), or other documents."""
    return "segments" if recipe.data.packing == "isolate" else "causal"


def make_accelerator(recipe: Recipe, folder: Path | None = None) -> Accelerator:
    """The engine: device, processes and sharding come from `accelerate launch`, precision from the recipe.
    `folder` is that of the run, where trackers write; without one there are none."""
    train = recipe.train
    AcceleratorState._reset_state()  # an earlier run of this process may have had another precision
    return Accelerator(
        cpu=not torch.accelerator.is_available(),  # else the processes of a plain torchrun do not meet
        mixed_precision=train.mixed_precision,
        project_dir=folder,
        log_with=list(train.log_with) if train.log_with and folder else None,
        dynamo_plugin=TorchDynamoPlugin(backend="inductor") if train.compile else None,
        step_scheduler_with_optimizer=False,
    )


def prepare(
    accelerator: Accelerator, model: Decoder, optimizer: torch.optim.Optimizer
) -> tuple[Any, torch.optim.Optimizer]:
    """Model and optimizer as the engine runs them. Data-parallel processes exchange gradients and nothing
    else: buffers are equal anyway, and where one process runs out of memory in a forward pass, its next pass
    would exchange them again while the others are at their gradients."""
    prepared, wrapped = accelerator.prepare(model, optimizer)
    engine = getattr(prepared, "_orig_mod", prepared)
    if isinstance(engine, DistributedDataParallel):
        engine.broadcast_buffers = False
    return prepared, wrapped


def autocast_dtype(recipe: Recipe) -> torch.dtype | None:
    """The dtype that mixed precision computes in; None without it."""
    return {"bf16": torch.bfloat16, "fp16": torch.float16}.get(recipe.train.mixed_precision)


def learns_biases(model: Decoder) -> bool:
    """Whether attention scores of the model have a learned bias."""
    if not isinstance(model, PEStudyForCausalLM):
        return False
    encoding = model.first_encoding
    biased = encoding.has_distance_bias or encoding.has_query_bias
    return biased and any(True for _ in encoding.parameters())


@contextlib.contextmanager
def determinism(recipe: Recipe, model: Decoder, device: torch.device) -> Iterator[None]:
    """Hold torch to deterministic kernels where the recipe asks for it. RecipeError when one that the model
    needs has none."""
    if not recipe.train.deterministic:
        yield
        return
    if model.resolved_kernel(device, dtype=autocast_dtype(recipe)) == "flex" and learns_biases(model):
        raise RecipeError(
            f"{recipe.path}: train.deterministic: FlexAttention sums the gradient of a learned bias in no "
            "fixed order; set train.kernel to eager or sdpa"
        )
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)


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
        outcome[1].__dict__[AGREED] = True
        raise outcome[1]
    return outcome[0]


@contextlib.contextmanager
def losing_others(accelerator: Accelerator, folder: Path) -> Iterator[None]:
    """Within the block, a meeting that fails because another process of the run is gone is Interrupted;
    what one process meets alone is marked as its own."""
    try:
        yield
    except (Interrupted, NonFiniteLossError):  # agreed on by all
        raise
    except Exception as error:
        if accelerator.num_processes > 1 and not error.__dict__.get(AGREED):
            mark_own(error)
        if not isinstance(error, RuntimeError):
            raise
        gone = isinstance(error, torch.distributed.DistError) or "gloo" in str(error)
        if not gone or accelerator.num_processes == 1:
            raise
        rank = accelerator.process_index
        raise Interrupted(
            f"{folder}: process {rank} lost another of this run, whose own message says why; "
            "the same command goes on"
        ) from None


@contextlib.contextmanager
def fitting(what: str) -> Iterator[None]:
    """Within the block, running out of memory is a UsageError that names `what` did not fit."""
    try:
        yield
    except RuntimeError as error:
        if not should_reduce_batch_size(error):
            raise
        raise UsageError(
            f"{what} did not fit memory, and smaller micro-batches are no help: make the model smaller, or "
            "share it out over several GPUs (accelerate launch --config_file recipes/accelerate/fsdp2.yaml)"
        ) from None


def release() -> None:
    """Forget the last run: what was compiled for it, and its memory on the GPU."""
    reset_compilations()
    if torch.cuda.is_available():
        clear_device_cache(garbage_collection=True)


def device_name(accelerator: Accelerator) -> str:
    """The name of the GPU, or "cpu"."""
    device = accelerator.device
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
