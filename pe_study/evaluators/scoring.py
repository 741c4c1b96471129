"""From a model and windows of ids to the NLL of each scored target.

Shapes: B windows, T inputs, K of them scored, V vocabulary.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel


def token_nll(logits_BKV: torch.Tensor, targets_BK: torch.Tensor) -> torch.Tensor:
    """-log softmax(logits)[target], float64 (B, K): float32 exponentials of any logits, summed in float64."""
    logits_BKV = logits_BKV.float()
    target_BK = logits_BKV.gather(-1, targets_BK.unsqueeze(-1)).squeeze(-1)
    highest_BK = logits_BKV.amax(-1)
    total_BK = (logits_BKV - highest_BK.unsqueeze(-1)).exp_().sum(-1, dtype=torch.float64)
    return total_BK.log() + (highest_BK.double() - target_BK.double())


def model_device(model: Any) -> torch.device:
    """Where the ids of a call must lie: the model's first parameter, the CPU for a plain callable."""
    if isinstance(model, torch.nn.Module):
        for parameter in model.parameters():
            return parameter.device
    return torch.device("cpu")


class Scorer:
    """Calls a model on windows of equal length, so nothing is ever padded and no id means padding.

    A `PreTrainedModel` is asked for the scored logits only; anything else is called on plain ids (B, T).
    """

    def __init__(self, model: Callable[..., Any]):
        self.model = model
        self.device = model_device(model)
        self._options: dict[str, Any] = {}
        self._keeps_logits = False
        if isinstance(model, PreTrainedModel):
            self._options["use_cache"] = False
            self._keeps_logits = "logits_to_keep" in inspect.signature(model.forward).parameters

    def nll(self, ids_BT: np.ndarray, targets_BK: np.ndarray) -> np.ndarray:
        """NLL in nats, float64 (B, K), of the last K targets of each window."""
        num_scored = targets_BK.shape[1]
        options = dict(self._options)
        if self._keeps_logits and num_scored < ids_BT.shape[1]:
            options["logits_to_keep"] = num_scored
        with torch.inference_mode():
            logits = self.model(torch.from_numpy(ids_BT).to(self.device), **options).logits
            targets = torch.from_numpy(targets_BK).to(logits.device)
            return token_nll(logits[:, -num_scored:], targets).cpu().numpy()


@contextmanager
def evaluation_mode(model: Any) -> Iterator[None]:
    """Dropout off while the block runs; the model's own mode afterwards."""
    was_training = isinstance(model, torch.nn.Module) and model.training
    if was_training:
        model.eval()
    try:
        yield
    finally:
        if was_training:
            model.train()


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an allocation failed, on an accelerator or on the host."""
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return True
    return isinstance(error, RuntimeError) and "can't allocate memory" in str(error)
