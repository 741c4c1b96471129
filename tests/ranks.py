"""What the two processes of test_distributed.py do: `python ranks.py TASK FOLDER`."""

import contextlib
import math
import os
import signal
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils.fsdp_utils import fsdp2_prepare_model
from safetensors.torch import save_file
from tiny import ENCODINGS, llama_overrides, make_updater, shipped_fsdp
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from pe_study import runs
from pe_study.data import TrainBatches
from pe_study.errors import Interrupted, PEStudyError
from pe_study.recipe import load
from pe_study.train import train_study
from pe_study.training import state
from pe_study.training.foreign import ForeignDecoder
from pe_study.training.micro_batching import PADDING
from pe_study.training.updates import Updater
from pe_study.training.validation import Validator

UNEVEN = ("data.packing=isolate", "train.micro_batch_tokens=48")  # micro-batches of 3 and 1 sequences
RANK = int(os.environ["RANK"])


def gradients(folder: Path) -> None:
    """Gradients, slots and dropout of every encoding, with and without gradient checkpointing."""
    for encoding in ENCODINGS:
        for checkpointing in ("false", "true"):
            overrides = (*UNEVEN, f"encodings=[{encoding}]", f"train.gradient_checkpointing={checkpointing}")
            updater = make_updater(load(folder / "tiny.yaml", overrides))
            updater.backward(0)
            named = updater.accelerator.unwrap_model(updater.model).named_parameters()
            found = {name: weight.grad.contiguous() for name, weight in named}
            save_file(found, folder / f"{encoding}-{checkpointing}-{RANK}.safetensors")
    slots = [slot for part in updater.micro_batches() for slot in part if slot != PADDING]
    torch.manual_seed(torch.initial_seed())  # as the dropout of this step
    drawn = torch.rand(4).tolist()
    runs.write_json(folder / f"share-{RANK}.json", {"slots": slots, "dropout": drawn})


def record_samples(folder: Path) -> None:
    """Append the chunks that this process trains on to a file."""
    plain = TrainBatches.batch

    def batch(self: TrainBatches, step: int, slots: Any = None) -> Any:
        with (folder / f"samples-{RANK}.txt").open("a") as file:
            for slot, chunk in zip(slots, self.indices(step, slots), strict=True):
                file.write(f"{step} {slot} {chunk}\n")
        return plain(self, step, slots)

    TrainBatches.batch = batch  # type: ignore[method-assign]


def stop_at(step: int, rank: int) -> None:
    """Send process `rank` a SIGTERM while it makes update `step` (from 1)."""
    plain = Updater.backward

    def backward(self: Updater, index: int) -> tuple[Tensor, bool]:
        if index + 1 == step and rank == RANK:
            os.kill(os.getpid(), signal.SIGTERM)
        return plain(self, index)

    Updater.backward = backward  # type: ignore[method-assign]


def resume(folder: Path) -> None:
    """Go on, and be stopped at step 6 through the second process alone."""
    record_samples(folder)
    stop_at(6, rank=1)
    train_study(load(folder / "tiny.yaml"), folder / "runs")


def stop_and_go_on(folder: Path) -> None:
    """Train without a stop, then with one at step 5, each session with an engine of its own."""
    recipe = load(folder / "tiny.yaml")
    train_study(recipe, folder / "whole")
    plain = Updater.backward
    stop_at(5, rank=1)
    with contextlib.suppress(Interrupted):
        train_study(recipe, folder / "parts")
    Updater.backward = plain  # type: ignore[method-assign]
    train_study(recipe, folder / "parts")


def bad_loss(folder: Path) -> None:
    """A NaN in the loss of one process at step 3."""
    plain = Updater._backward_part
    calls = iter(range(100))  # one a step

    def backward_part(self: Updater, *args: Any) -> Tensor:
        loss = plain(self, *args)
        return loss * math.nan if next(calls) == 2 and RANK == 1 else loss

    Updater._backward_part = backward_part  # type: ignore[method-assign]
    train_study(load(folder / "tiny.yaml"), folder / "runs")


def bad_gradient(folder: Path) -> None:
    """A NaN in one gradient of one process at step 3, after gradients were exchanged."""
    plain = Updater.backward

    def backward(self: Updater, index: int) -> tuple[Tensor, bool]:
        outcome = plain(self, index)
        if index == 2 and RANK == 1:
            self.accelerator.unwrap_model(self.model).norm.weight.grad[0] = math.nan
        return outcome

    Updater.backward = backward  # type: ignore[method-assign]
    train_study(load(folder / "tiny.yaml"), folder / "runs")


def shard(accelerator: Accelerator, model: Any, optimizer: torch.optim.Optimizer) -> tuple[Any, Any]:
    """What Accelerate does with the shipped FSDP2 configuration on GPUs; by itself it shards on no CPU."""
    names = {id(weight): name for name, weight in model.named_parameters()}
    state = SimpleNamespace(fsdp_plugin=shipped_fsdp())
    engine: Any = SimpleNamespace(state=state, torch_device_mesh=None, mixed_precision="no")
    model = fsdp2_prepare_model(engine, model)
    sharded = dict(model.named_parameters())
    for group in optimizer.param_groups:
        group["params"] = [sharded[names[id(weight)]] for weight in group["params"]]
    return model, optimizer


def sharded(folder: Path) -> None:
    """Three updates and a snapshot of a sharded model, and what they leave."""
    Accelerator.prepare = shard  # type: ignore[method-assign,assignment]
    Accelerator.is_fsdp2 = property(lambda self: True)  # type: ignore[method-assign,assignment]
    studies = {encoding: (*UNEVEN, f"encodings=[{encoding}]") for encoding in ENCODINGS}
    for name, overrides in {**studies, "llama": llama_overrides(folder)}.items():
        updater = make_updater(load(folder / "tiny.yaml", overrides))
        assert count_units(updater.model) >= 3, "two layers and the root"
        updates = [updater.update(step) for step in range(2)]
        kept = state.weights(updater.model), state.optimizer_state(updater.model, updater.optimizer)
        updates.append(updater.update(2))
        weights = state.weights(updater.model)
        state.load_weights(updater.model, kept[0])
        state.load_optimizer_state(updater.model, updater.optimizer, kept[1])
        assert updater.update(2) == updates[2]
        assert all(
            torch.equal(weights[name], weight) for name, weight in state.weights(updater.model).items()
        )
        save_file(weights, folder / f"{name}-sharded-{RANK}.safetensors")
        facts = [[update.loss, update.grad_norm] for update in updates]
        runs.write_json(folder / f"{name}-sharded-{RANK}.json", facts)


def forget_how_to_hold(num_sequences: int) -> None:
    """From step 2 on and in validation, the second process runs out of memory within the forward pass of
    more sequences than these."""
    make = Updater.__init__

    def init(self: Updater, *args: Any) -> None:
        make(self, *args)
        optimizer = getattr(self.optimizer, "optimizer", self.optimizer)  # shard wraps none around it
        model = self.accelerator.unwrap_model(self.model)
        layers = model.decoder.model.layers if isinstance(model, ForeignDecoder) else model.layers

        def fail(layer: torch.nn.Module, inputs: tuple[Tensor, ...]) -> None:
            late = optimizer.state or not torch.is_grad_enabled()
            if RANK == 1 and len(inputs[0]) > num_sequences and late:
                raise torch.OutOfMemoryError("CUDA out of memory.")

        layers[-1].register_forward_pre_hook(fail)

    Updater.__init__ = init  # type: ignore[method-assign]


def count_units(model: torch.nn.Module) -> int:
    """Modules that are sharded for themselves."""
    return sum(isinstance(module, FSDPModule) for module in model.modules())


def out_of_memory(folder: Path) -> None:
    """One process cannot hold more than two sequences: of our decoder, and of a Llama, which has buffers."""
    forget_how_to_hold(2)
    for overrides in ((), llama_overrides(folder)):
        train_study(load(folder / "tiny.yaml", overrides), folder / "runs")


def validation(folder: Path) -> None:
    """One process cannot validate more than two sequences, and is asked to stop in its last try at step 4."""
    plain = Validator._sums

    def sums(self: Validator, model: Any, batch: Any) -> Tensor:
        if RANK == 1 and len(batch.ids_BT) > 2:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        if RANK == 1:
            os.kill(os.getpid(), signal.SIGTERM)
        return plain(self, model, batch)

    Validator._sums = sums  # type: ignore[method-assign]
    train_study(load(folder / "tiny.yaml"), folder / "runs")


def out_of_memory_while_exchanging(folder: Path) -> None:
    """One process runs out of memory in its last backward pass, when the first gradients are there."""
    make = Updater.__init__

    def fail(grad: Tensor) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB.")

    def init(self: Updater, *args: Any) -> None:
        make(self, *args)
        if RANK == 1:
            self.accelerator.unwrap_model(self.model).layers[0].attention.out.weight.register_hook(fail)

    Updater.__init__ = init  # type: ignore[method-assign]
    train_study(load(folder / "tiny.yaml"), folder / "runs")


def out_of_memory_while_sharded(folder: Path) -> None:
    """One process of a sharded training runs out of memory."""
    Accelerator.prepare = shard  # type: ignore[method-assign,assignment]
    Accelerator.is_fsdp2 = property(lambda self: True)  # type: ignore[method-assign,assignment]
    forget_how_to_hold(2)
    train_study(load(folder / "tiny.yaml"), folder / "runs")


if __name__ == "__main__":
    torch.set_num_threads(1)
    try:
        globals()[sys.argv[1]](Path(sys.argv[2]))
    except PEStudyError as error:
        print(error, file=sys.stderr)
        sys.exit(error.exit_code)
