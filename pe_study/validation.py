"""Validation loss on a fixed subset: the same chunks at every step, for every encoding and seed."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from accelerate import Accelerator
from torch import nn

from pe_study.data import IGNORED, Batch, Chunks, TokenizedSplit
from pe_study.updates import PADDING, micro_batches, to_device

if TYPE_CHECKING:
    from pe_study.recipe import Recipe

NUM_TOKENS = 32768  # 512 chunks of the demo, 64 of length 512: a standard error near 0.01 nats


class Validator:
    """Chunks spread evenly over the validation split, and a model's loss on them."""

    def __init__(self, recipe: Recipe, split: TokenizedSplit, accelerator: Accelerator) -> None:
        train = recipe.train
        self.accelerator = accelerator
        self.chunks = Chunks(split, length=train.length, packing=recipe.data.packing)
        count = min(self.chunks.num_chunks, max(NUM_TOKENS // train.length, 1))
        self.indices = np.arange(count) * self.chunks.num_chunks // count
        self.micro_sequences = max((train.micro_batch_tokens or train.batch_tokens) // train.length, 1)

    @torch.no_grad()
    def evaluate(self, model: nn.Module) -> dict[str, float | None]:
        """`val_loss` (nats a target) and `val_bits_per_byte` (None where bytes are unknown): sums over all
        processes in float64, divided once."""
        sums = torch.zeros(3, dtype=torch.float64)  # nats, targets, bytes
        model.eval()
        for slots in self._micro_batches():
            sums += self._sums(model, self._load(slots))
        model.train()
        if self.accelerator.num_processes > 1:
            sums = self.accelerator.reduce(sums.to(self.accelerator.device))
        nats, targets, num_bytes = sums.tolist()
        known = math.isfinite(num_bytes)
        return {
            "val_loss": nats / targets,
            "val_bits_per_byte": nats / math.log(2) / num_bytes if known else None,
        }

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

    def _sums(self, model: nn.Module, batch: Batch) -> torch.Tensor:
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
