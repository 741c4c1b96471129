"""One update of the weights: micro-batches, the mean over all targets, faults, clipping, AdamW.

Shapes: B sequences, T tokens. A sequence of a step has a slot, 0 … S-1; processes share the slots out.
"""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.utils.memory import clear_device_cache, should_reduce_batch_size
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from pe_study.data import IGNORED, Batch, TrainBatches
from pe_study.errors import UsageError
from pe_study.training.engine import fitting, prepare
from pe_study.training.faults import non_finite_error
from pe_study.training.micro_batching import PADDING, MicroBatching, micro_batches
from pe_study.training.schedules import learning_rate, total_learning_rate
from pe_study.training.state import whole

if TYPE_CHECKING:
    from pe_study.recipe import Recipe, RunSpec
    from pe_study.training.initial import Decoder
    from pe_study.training.stopping import StopRequest

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Update:
    """What one update did: mean loss (nats a target), gradient norm before clipping, learning rate, and
    whether any process was asked to stop."""

    loss: float
    grad_norm: float
    lr: float
    stop: bool


class Updater(MicroBatching):
    """The model and its optimizer on this process, prepared by Accelerate, and the update at a step."""

    def __init__(
        self,
        recipe: Recipe,
        run: RunSpec,
        accelerator: Accelerator,
        model: Decoder,
        batches: TrainBatches,
    ) -> None:
        self.train = recipe.train.at(run.encoding)
        self.seed = run.seed
        self.accelerator = accelerator
        self.batches = batches
        with fitting("the weights and their optimizer"):
            optimizer = make_optimizer(recipe, run, model, accelerator.device)
            self.model, self.optimizer = prepare(accelerator, model, optimizer)
        tokens = self.train.micro_batch_tokens or self.train.batch_tokens
        share = -(-batches.sequences_per_batch // accelerator.num_processes)
        self.micro_sequences = min(tokens // self.train.length, share)
        self.num_skipped = 0  # steps that were not finite

    def warm_up(self) -> None:
        """Settle the order in which three or more processes add gradients, before the first update.

        DDP adds them as one bucket in its first exchange and in buckets of the order found there in all
        later ones: without an exchange that counts for nothing, the first update after a resume would be
        rounded otherwise than in the session that was not stopped. Two terms have one order.
        """
        if self.accelerator.num_processes < 3 or not self._is_data_parallel():
            return
        try:
            self._backward_part(self.load(0, [PADDING] * len(self.micro_batches()[-1])), 1)
        except RuntimeError as error:  # it will run out of memory in the update, too, which knows what to do
            if not should_reduce_batch_size(error):
                raise
            clear_device_cache(garbage_collection=True)
            self._meet(0, 1)
        self.optimizer.zero_grad()

    def facts(self) -> dict[str, Any]:
        """What of this object later steps depend on, as JSON."""
        scaler = self.accelerator.scaler
        return {
            "micro_sequences": self.reduced,
            "num_skipped": self.num_skipped,
            "scaler": None if scaler is None else scaler.state_dict(),
        }

    def load_facts(self, facts: Mapping[str, Any]) -> None:
        """Put back what `facts` returned."""
        self.reduce_to(facts["micro_sequences"])
        self.num_skipped = facts["num_skipped"]
        if facts["scaler"]:
            self.accelerator.scaler.load_state_dict(facts["scaler"])

    def update(self, step: int, stop: StopRequest | None = None) -> Update:
        """Make update `step` (0, 1, …). When the loss or the gradient norm is not finite on any process, the
        weights stay as they are: NonFiniteLossError on every process, or, while `skip_nonfinite` lasts, no
        update. UsageError when one sequence does not fit memory."""
        lr = learning_rate(self.train, step)
        for group in self.optimizer.param_groups:
            group["lr"] = lr * group["lr_mult"]
        loss, grad_norm, stops, misfits = self._agree(*self.backward(step), stop)
        while misfits:
            self._halve(step)
            loss, grad_norm, stops, misfits = self._agree(*self.backward(step), stop)
        if not self._is_finite(loss, grad_norm):
            self._leave_out(step, loss, grad_norm)
            return Update(loss, grad_norm, lr, stops > 0)
        if self.train.grad_clip and grad_norm > self.train.grad_clip:
            torch._foreach_mul_(self._gradients(), self.train.grad_clip / (grad_norm + 1e-6))
        with fitting(f"step {step + 1}: the optimizer, which holds two numbers more for each weight,"):
            self.optimizer.step()
        self.optimizer.zero_grad()
        return Update(loss, grad_norm, lr, stops > 0)

    def backward(self, step: int) -> tuple[Tensor, bool]:
        """Leave the gradient of the step's mean loss in `.grad`. Returns this process's part of that loss,
        and whether it ran out of memory (then neither means anything)."""
        seed_dropout(dropout_seed(self.seed, self.accelerator.process_index, step), self.accelerator.device)
        parts = [self.load(step, slots) for slots in self.micro_batches()]
        num_targets = self._count_targets(parts)
        loss = torch.zeros((), device=self.accelerator.device)
        try:
            for part in parts[:-1]:
                with self.accelerator.no_sync(self.model):
                    loss += self._backward_part(part, num_targets)
            return loss + self._backward_part(parts[-1], num_targets), False
        except RuntimeError as error:
            if not should_reduce_batch_size(error):
                raise
        clear_device_cache(garbage_collection=True)
        if self.accelerator.num_processes > 1:
            self._meet(step, num_targets)
        return loss, True

    def _meet(self, step: int, num_targets: int) -> None:
        """After memory ran out here: meet the others in their exchange of gradients with the least that fits.
        UsageError where that cannot be: of sharded models, or when DDP had begun to exchange before."""
        if self._is_data_parallel():
            with contextlib.suppress(RuntimeError):
                self._backward_part(self.load(step, [PADDING]), num_targets)
                return
        rank, half = self.accelerator.process_index, max(self.micro_sequences // 2, 1) * self.train.length
        raise UsageError(
            f"step {step + 1}: out of memory on process {rank} while gradients were exchanged\n"
            f"set train.micro_batch_tokens to {half}: the batch stays what it is, and the run goes on"
        )

    def _is_data_parallel(self) -> bool:
        return isinstance(getattr(self.model, "_orig_mod", self.model), DistributedDataParallel)

    def loss(self, batch: Batch, num_targets: int) -> Tensor:
        """The sum of nats over the batch's targets, divided by `num_targets`."""
        return self.model(
            input_ids=batch.ids_BT[:, :-1],
            shift_labels=batch.targets_BT,
            segment_ids=batch.segments_BT,
            num_items_in_batch=num_targets,
            use_cache=False,
        ).loss

    def _backward_part(self, batch: Batch, num_targets: int) -> Tensor:
        loss = self.loss(batch, num_targets)
        # Data-parallel engines average gradients over processes; ours are parts of one sum.
        self.accelerator.backward(loss * self.accelerator.num_processes)
        return loss.detach()

    def micro_batches(self) -> list[list[int]]:
        """The slots of this process, by micro-batch."""
        return micro_batches(
            self.batches.sequences_per_batch,
            rank=self.accelerator.process_index,
            num_processes=self.accelerator.num_processes,
            size=self.micro_sequences,
        )

    def load(self, step: int, slots: Sequence[int]) -> Batch:
        """The sequences of some slots, on the device; padding has no target."""
        batch = self.batches.batch(step, [max(slot, 0) for slot in slots])
        for row, slot in enumerate(slots):
            if slot == PADDING:
                batch.targets_BT[row] = IGNORED
        return to_device(batch, self.accelerator.device)

    def _count_targets(self, parts: Sequence[Batch]) -> int:
        """Targets of the step over all micro-batches and processes (case 14)."""
        count = sum(int((part.targets_BT != IGNORED).sum()) for part in parts)
        if self.accelerator.num_processes == 1:
            return count
        return int(self.accelerator.reduce(torch.tensor(count, device=self.accelerator.device)))

    def _agree(self, loss: Tensor, misfit: bool, stop: StopRequest | None) -> list[float]:
        """Loss summed, gradient norm averaged, stops and misfits counted over all processes, in one exchange.
        The norm is equal everywhere unless one process has a bad gradient; then all learn of it."""
        self.accelerator.unscale_gradients()
        norm = whole(nn.utils.get_total_norm(self._gradients())) / self.accelerator.num_processes
        stopping = stop is not None and stop.requested is not None
        facts = torch.stack([loss, norm, torch.full_like(loss, stopping), torch.full_like(loss, misfit)])
        if self.accelerator.num_processes > 1:
            facts = self.accelerator.reduce(facts)
        return facts.tolist()

    def _gradients(self) -> list[Tensor]:
        return [weight.grad for weight in self.model.parameters() if weight.grad is not None]

    def _halve(self, step: int) -> None:
        """Try again with half the micro-batch, the batch unchanged; every process at once."""
        self.halve(f"step {step + 1}", self.train.length, "set train.gradient_checkpointing")
        self.optimizer.zero_grad()

    def _leave_out(self, step: int, loss: float, grad_norm: float) -> None:
        """Make no update: raise, or go on while `skip_nonfinite` allows it."""
        model = self.accelerator.unwrap_model(self.model)
        error = non_finite_error(model, step + 1, loss, grad_norm, self._suspects(step))
        self.optimizer.zero_grad()
        self.num_skipped += 1
        if self.num_skipped > self.train.skip_nonfinite:
            raise error
        logger.warning("left out (%d of %d) %s", self.num_skipped, self.train.skip_nonfinite, error)

    @torch.no_grad()
    def _suspects(self, step: int) -> list[str]:
        """Documents of this process's sequences whose own loss is not finite; of all of them when none is."""
        slots = [slot for part in self.micro_batches() for slot in part]
        bad = [slot for slot in slots if not math.isfinite(self.loss(self.load(step, [slot]), 1))]
        real = [slot for slot in bad or slots if slot != PADDING]
        return self.batches.documents(step, real) if real else []

    def _is_finite(self, loss: float, grad_norm: float) -> bool:
        scaler = self.accelerator.scaler
        if scaler is not None:  # fp16: the scaler leaves out a step that overflows, and lowers its scale
            return math.isfinite(loss) and scaler.get_scale() >= 1.0
        return math.isfinite(loss) and math.isfinite(grad_norm)


def make_optimizer(recipe: Recipe, run: RunSpec, model: Decoder, device: torch.device) -> torch.optim.AdamW:
    """AdamW over the model's groups: decayed, not decayed, and position parameters with their `lr_mult`."""
    train = recipe.train.at(run.encoding)
    groups = model.parameter_groups(
        weight_decay=train.weight_decay,
        lr_total=total_learning_rate(train),
        lr_mult=run.encoding.lr_mult,
    )
    betas = (train.betas[0], train.betas[1])
    return torch.optim.AdamW(groups, lr=train.peak_lr, betas=betas, fused=device.type in ("cpu", "cuda"))


def to_device(batch: Batch, device: torch.device) -> Batch:
    """The batch with its tensors on `device`."""
    segments_BT = None if batch.segments_BT is None else batch.segments_BT.to(device)
    return replace(
        batch,
        ids_BT=batch.ids_BT.to(device),
        targets_BT=batch.targets_BT.to(device),
        segments_BT=segments_BT,
    )


def dropout_seed(seed: int, process: int, step: int) -> int:
    """A seed for the dropout of one process at one step: all distinct, none to save (case 48)."""
    return int(np.random.SeedSequence([seed, process, step]).generate_state(1, np.uint64)[0] >> 1)


def seed_dropout(seed: int, device: torch.device) -> None:
    """What `torch.manual_seed` does; on a CPU that takes milliseconds to note where it was called from, for
    GPUs that are not there."""
    if device.type == "cpu":
        torch.default_generator.manual_seed(seed)
    else:
        torch.manual_seed(seed)
