"""Validation loss on a fixed subset: the same chunks at every step, for every encoding and seed."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.utils.memory import clear_device_cache, should_reduce_batch_size
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from pe_study.data import IGNORED, Batch, Chunks, TokenizedSplit
from pe_study.errors import UsageError
from pe_study.training.micro_batching import PADDING, MicroBatching, micro_batches
from pe_study.training.updates import to_device

if TYPE_CHECKING:
    from pe_study.recipe import Recipe
    from pe_study.training.stopping import StopRequest

NUM_TOKENS = 32768  # 512 chunks of the demo, 64 of length 512: a standard error near 0.01 nats


class Validator(MicroBatching):
    """Chunks spread evenly over the validation split, and a model's loss on them."""

    def __init__(self, recipe: Recipe, split: TokenizedSplit, accelerator: Accelerator) -> None:
        train = recipe.train
        self.accelerator, self.length = accelerator, train.length
        self.chunks = Chunks(split, length=train.length, packing=recipe.data.packing)
        count = min(self.chunks.num_chunks, max(NUM_TOKENS // train.length, 1))
        self.indices = np.arange(count) * self.chunks.num_chunks // count
        self.micro_sequences = max((train.micro_batch_tokens or train.batch_tokens) // train.length, 1)

    @torch.no_grad()
    def evaluate(self, model: nn.Module, stop: StopRequest | None = None) -> dict[str, float | None] | None:
        """`val_loss` (nats a target) and `val_bits_per_byte` (None where bytes are unknown): sums over all
        processes in float64, divided once. None when a process was asked to stop, within a micro-batch;
        UsageError when one sequence does not fit memory."""
        model.eval()
        try:
            sums, stopped = self._pass(model, stop)
            while sums is None and not stopped:
                self.halve("validation", self.length, "make the model smaller")
                sums, stopped = self._pass(model, stop)
        finally:
            model.train()
        if sums is None:
            return None
        nats, targets, num_bytes = sums.tolist()
        known = math.isfinite(num_bytes)
        return {
            "val_loss": nats / targets,
            "val_bits_per_byte": nats / math.log(2) / num_bytes if known else None,
        }

    def _pass(self, model: nn.Module, stop: StopRequest | None) -> tuple[Tensor | None, bool]:
        """The sums over all chunks and processes, None when one of them ran out of memory or was asked to
        stop; and whether it was that."""
        sums = torch.zeros(3, dtype=torch.float64)  # nats, targets, bytes
        for slots in self._micro_batches():
            part = self._sums_if_fitting(model, slots)
            stopping = stop is not None and stop.requested is not None
            misfits, stops = self._reduce(
                torch.tensor([part is None, stopping], dtype=torch.float64)
            ).tolist()
            if part is None or misfits or stops:
                return None, stops > 0
            sums += part
        return self._reduce(sums), False

    def _reduce(self, counts: Tensor) -> Tensor:
        if self.accelerator.num_processes == 1:
            return counts
        return self.accelerator.reduce(counts.to(self.accelerator.device))

    def _sums_if_fitting(self, model: nn.Module, slots: Sequence[int]) -> Tensor | None:
        """The sums of one micro-batch; None when memory ran out. UsageError where the others wait in the
        model: sharded ones exchange weights in every layer."""
        try:
            return self._sums(model, self._load(slots))
        except RuntimeError as error:
            if not should_reduce_batch_size(error):
                raise
        clear_device_cache(garbage_collection=True)
        if self.accelerator.num_processes > 1 and any(isinstance(w, DTensor) for w in model.parameters()):
            tokens = max(self.micro_sequences // 2, 1) * self.length
            raise UsageError(
                f"validation: out of memory on process {self.accelerator.process_index} while weights were "
                f"exchanged\nset train.micro_batch_tokens to {tokens}: the run goes on"
            )
        return None

    def _micro_batches(self) -> list[list[int]]:
        return micro_batches(
            len(self.indices),
            rank=self.accelerator.process_index,
            num_processes=self.accelerator.num_processes,
            size=self.micro_sequences,
        )

    def _load(self, slots: Sequence[int]) -> Batch:
        real = [slot for slot in slots if slot != PADDING]
        batch = self.chunks.gather(self.indices[real or [0]])
        if not real:  # a process with nothing left still meets the others in the forward
            batch = dataclasses.replace(batch, targets_BT=batch.targets_BT.fill_(IGNORED), num_bytes=0)
        return to_device(batch, self.accelerator.device)

    def _sums(self, model: nn.Module, batch: Batch) -> Tensor:
        nats = model(
            input_ids=batch.ids_BT[:, :-1],
            shift_labels=batch.targets_BT,
            segment_ids=batch.segments_BT,
            num_items_in_batch=1,  # a sum, not a mean
            use_cache=False,
        ).loss
        targets = int((batch.targets_BT != IGNORED).sum())
        num_bytes = math.nan if batch.num_bytes is None else batch.num_bytes
        return torch.tensor([float(nats), targets, num_bytes], dtype=torch.float64)
