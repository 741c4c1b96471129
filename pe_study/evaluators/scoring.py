"""From a model and windows of ids to the NLL of each scored target.

A long window is read in chunks through the model's cache, so that logits are never held for a whole context:
exact for any causal model whose positions do not follow the running length and that keeps no recurrent state.
Where the head is a matrix, its logits are taken a slice at a time from one pass instead (`sliced_head`).
Shapes: B windows, T inputs, K of them scored (the last), V vocabulary.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from pe_study.checkpoints import exact_cache_name, vocabulary_size
from pe_study.evaluators import controls, sliced_head
from pe_study.evaluators.reading import no_quantised_cache
from pe_study.rows import QUANTISED_CHUNK

MAX_LOGITS = {"cpu": 1 << 26, "cuda": 1 << 28}  # numbers held at once: 256 MiB, 1 GiB in float32
SMALLEST_CHUNK = 64
_NLL_AT_ONCE = 1 << 23


def token_nll(logits_BKV: torch.Tensor, targets_BK: torch.Tensor) -> torch.Tensor:
    """-log softmax(logits)[target], float64 (B, K): float32 exponentials of any logits, summed in float64."""
    step = max(1, _NLL_AT_ONCE // (logits_BKV.shape[0] * logits_BKV.shape[2]))
    parts = zip(logits_BKV.split(step, dim=1), targets_BK.split(step, dim=1), strict=True)
    return torch.cat([_token_nll(logits.float(), targets) for logits, targets in parts], dim=1)


def _token_nll(logits_BKV: torch.Tensor, targets_BK: torch.Tensor) -> torch.Tensor:
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

    A `PreTrainedModel` is asked for the scored logits only, at most `max_logits` numbers at a time; anything
    else is called on plain ids (B, T). `new_cache` builds the cache that chunks are read through.
    """

    def __init__(
        self,
        model: Callable[..., Any],
        *,
        max_logits: int | None = None,
        new_cache: Callable[[Any], Any] | None = None,
    ):
        self.model, self.device = model, model_device(model)
        self.max_logits = max_logits or MAX_LOGITS.get(self.device.type, MAX_LOGITS["cpu"])
        self.new_cache = new_cache
        self.is_pretrained = isinstance(model, PreTrainedModel)
        parameters = inspect.signature(model.forward).parameters if self.is_pretrained else {}  # type: ignore[attr-defined]
        self._keeps_logits = "logits_to_keep" in parameters
        self._cache_name = exact_cache_name(model) if self.is_pretrained else None
        self._vocabulary = vocabulary_size(model) or 1
        self._slices = self._reads_chunks and new_cache is None
        if new_cache is not None and not self._reads_chunks:
            raise no_quantised_cache(model.config, "it is not read through a cache")  # type: ignore[attr-defined]

    def nll(self, ids_BT: np.ndarray, targets_BK: np.ndarray) -> np.ndarray:
        """NLL in nats, float64 (B, K), of the last K targets of each window.

        When memory runs out, fewer windows are read at a time, then smaller chunks; then the error is raised.
        """
        rows = self._rows_at_once(targets_BK.shape[1])
        parts = [
            self._read(torch.from_numpy(ids_BT[at : at + rows]), torch.from_numpy(targets_BK[at : at + rows]))
            for at in range(0, len(ids_BT), rows)
        ]
        return np.concatenate(parts)

    def _rows_at_once(self, num_scored: int) -> int:
        if not self.is_pretrained:
            return 1 << 30
        if self.new_cache is not None:
            return 1  # its scales are those of all windows that are read together
        return max(1, self.max_logits // (num_scored * self._vocabulary))

    def _read(self, ids_BT: torch.Tensor, targets_BK: torch.Tensor) -> np.ndarray:
        ids_BT, targets_BK = ids_BT.to(self.device), targets_BK.to(self.device)
        chunk = self._chunk(len(ids_BT), ids_BT.shape[1], targets_BK.shape[1])
        while True:
            try:
                with torch.inference_mode():
                    if chunk < ids_BT.shape[1]:
                        return self._in_parts(ids_BT, targets_BK, chunk).cpu().numpy()
                    return self._whole(ids_BT, targets_BK).cpu().numpy()
            except (RuntimeError, MemoryError) as error:
                if not is_out_of_memory(error):
                    raise
                smallest = not self._reads_chunks or chunk <= SMALLEST_CHUNK or self.new_cache is not None
                if len(ids_BT) == 1 and smallest:  # other chunks of an 8-bit cache are other numbers
                    raise
            if self.device.type == "cuda":
                torch.cuda.empty_cache()
            if len(ids_BT) > 1:
                half = len(ids_BT) // 2
                return np.concatenate(
                    [
                        self._read(ids_BT[:half], targets_BK[:half]),
                        self._read(ids_BT[half:], targets_BK[half:]),
                    ]
                )
            chunk = max(SMALLEST_CHUNK, min(chunk, ids_BT.shape[1]) // 2)

    @property
    def _reads_chunks(self) -> bool:
        return self._keeps_logits and self._cache_name is not None

    def _chunk(self, batch: int, length: int, num_scored: int) -> int:
        """Inputs a forward pass: the whole window where its logits fit and no own cache is asked for."""
        limit = self.max_logits // (batch * self._vocabulary)
        if not self._reads_chunks or (num_scored <= limit and self.new_cache is None):
            return length
        chunk = max(SMALLEST_CHUNK, limit if self.new_cache is None else min(limit, QUANTISED_CHUNK))
        return 1 << (chunk.bit_length() - 1)

    def _whole(self, ids_BT: torch.Tensor, targets_BK: torch.Tensor) -> torch.Tensor:
        num_scored = targets_BK.shape[1]
        options: dict[str, Any] = {"use_cache": False} if self.is_pretrained else {}
        options |= controls.placed(self.model, controls.positions(self.model, ids_BT), 0, ids_BT.shape[1])
        if self._keeps_logits and num_scored < ids_BT.shape[1]:
            options["logits_to_keep"] = num_scored
        logits = self.model(ids_BT, **options).logits
        return token_nll(logits[:, -num_scored:], targets_BK.to(logits.device))

    def _in_parts(self, ids_BT: torch.Tensor, targets_BK: torch.Tensor, chunk: int) -> torch.Tensor:
        batch, length = ids_BT.shape
        plain = chunk == self._chunk(batch, length, targets_BK.shape[1])  # else memory ran out
        plain = plain and controls.positions(self.model, ids_BT) is None
        if self._slices and plain and sliced_head.fits(self.model, batch, length):
            found = sliced_head.whole_nll(self.model, ids_BT, targets_BK, chunk, token_nll)
            if found is not None:
                return found
            self._slices = False
        return self._chunked(ids_BT, targets_BK, chunk)

    def _chunked(self, ids_BT: torch.Tensor, targets_BK: torch.Tensor, chunk: int) -> torch.Tensor:
        assert self._cache_name is not None
        first = ids_BT.shape[1] - targets_BK.shape[1]
        positions_BT = controls.positions(self.model, ids_BT)
        cache = None if self.new_cache is None else self.new_cache(self.model.config)  # type: ignore[attr-defined]
        parts = []
        for start in range(0, ids_BT.shape[1], chunk):
            stop = min(start + chunk, ids_BT.shape[1])
            scored = max(0, stop - max(start, first))
            past = {} if cache is None else {self._cache_name: cache}
            past |= controls.placed(self.model, positions_BT, start, stop)
            output = self.model(ids_BT[:, start:stop], use_cache=True, logits_to_keep=scored or 1, **past)
            cache = getattr(output, self._cache_name)
            if scored:
                targets = targets_BK[:, stop - scored - first : stop - first]
                parts.append(token_nll(output.logits, targets.to(output.logits.device)))
            del output
        return torch.cat(parts, dim=1)


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
