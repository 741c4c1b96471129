"""What is known of a step whose loss or gradient is not finite."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from accelerate.utils import gather_object
from torch import nn

from pe_study.errors import NonFiniteLossError
from pe_study.training.state import whole


def non_finite_error(
    model: nn.Module, step: int, loss: float, grad_norm: float, documents: Sequence[str]
) -> NonFiniteLossError:
    """The error of `step` (from 1): a meeting of all processes, gradients still in place. `documents` are
    those that this process suspects."""
    parameters = [
        name
        for name, weight in model.named_parameters()
        if weight.grad is not None and not bool(whole(weight.grad).isfinite().all())
    ]
    found = gather_object([(documents, parameters)])
    report = {
        "step": step,
        "loss": str(loss),
        "grad_norm": str(grad_norm),
        "documents": sorted({name for names, _ in found for name in names}),
        "parameters": sorted({name for _, names in found for name in names}),
    }
    return NonFiniteLossError(describe(report), report)


def validation_error(model: nn.Module, step: int, loss: float) -> NonFiniteLossError:
    """The error of a validation loss that is not finite though the loss of its step was; as above."""
    weights = [name for name, weight in model.named_parameters() if not bool(whole(weight).isfinite().all())]
    report = {"step": step, "validation_loss": str(loss), "documents": [], "parameters": weights}
    said = f"{len(weights)} weights are not finite" if weights else "all weights are finite"
    return NonFiniteLossError(
        f"step {step}: validation loss {loss} after the update; {said}\n"
        "nothing of this step was saved; lower train.lr, or warm up longer (train.warmup_steps)",
        report,
    )


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
