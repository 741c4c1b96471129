"""What the two processes of test_distributed.py do: `python ranks.py TASK FOLDER`."""

import math
import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tiny import ENCODINGS, make_updater
from torch import Tensor

from pe_study import runs
from pe_study.data import TrainBatches
from pe_study.errors import PEStudyError
from pe_study.recipe import load
from pe_study.train import train_study
from pe_study.updates import PADDING, Updater

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


def bad_loss(folder: Path) -> None:
    """A NaN in the loss of one process at step 3."""
    plain = Updater._backward_part

    def backward_part(self: Updater, *args: Any) -> Tensor:
        loss = plain(self, *args)
        bad = RANK == 1 and self.optimizer.optimizer.state_dict()["state"][0]["step"] == 2
        return loss * math.nan if bad else loss

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


def out_of_memory(folder: Path) -> None:
    """One process cannot hold more than two sequences at step 2."""
    plain = Updater._backward_part

    def backward_part(self: Updater, batch: Any, num_targets: int) -> Tensor:
        if RANK == 1 and len(batch.ids_BT) > 2 and self.optimizer.optimizer.state:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return plain(self, batch, num_targets)

    Updater._backward_part = backward_part  # type: ignore[method-assign]
    train_study(load(folder / "tiny.yaml"), folder / "runs")


if __name__ == "__main__":
    torch.set_num_threads(1)
    try:
        globals()[sys.argv[1]](Path(sys.argv[2]))
    except PEStudyError as error:
        print(error, file=sys.stderr)
        sys.exit(error.exit_code)
