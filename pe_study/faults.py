"""What is known of a step whose loss or gradient is not finite."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from accelerate.utils import gather_object

from pe_study.errors import NonFiniteLossError
from pe_study.state import whole

if TYPE_CHECKING:
    from pe_study.updates import Updater


def non_finite_error(updater: Updater, step: int, loss: float, grad_norm: float) -> NonFiniteLossError:
    """The error of update `step` (from 0), with documents and parameters found on all processes: a meeting of
    all, gradients still in place."""
    parameters = [
        name
        for name, weight in updater.accelerator.unwrap_model(updater.model).named_parameters()
        if weight.grad is not None and not bool(whole(weight.grad).isfinite().all())
    ]
    found = gather_object([(suspects(updater, step), parameters)])
    report = {
        "step": step + 1,
        "loss": str(loss),
        "grad_norm": str(grad_norm),
        "documents": sorted({name for names, _ in found for name in names}),
        "parameters": sorted({name for _, names in found for name in names}),
    }
    return NonFiniteLossError(describe(report), report)


@torch.no_grad()
def suspects(updater: Updater, step: int) -> list[str]:
    """Documents of this process's sequences whose own loss is not finite; of all of them when none is."""
    slots = [slot for part in updater.micro_batches() for slot in part]
    bad = [slot for slot in slots if not math.isfinite(updater.loss(updater.load(step, [slot]), 1))]
    real = [slot for slot in bad or slots if slot >= 0]
    return updater.batches.documents(step, real) if real else []


def describe(report: Mapping[str, Any]) -> str:
    """The two lines of the error."""

    def few(names: Sequence[str]) -> str:
        shown = ", ".join(names[:3]) or "none"
        return shown + (f" and {len(names) - 3} more" if len(names) > 3 else "")

    return (
        f"step {report['step']}: loss {report['loss']}, gradient norm {report['grad_norm']}; the weights are "
        f"those of the step before\ndocuments: {few(report['documents'])}; "
        f"parameters with a bad gradient: {few(report['parameters'])}"
    )
