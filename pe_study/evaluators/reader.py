"""A prompt read once, and what a model expects after it: for continuations that share a long prompt."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from pe_study.checkpoints import exact_cache_name
from pe_study.evaluators.reading import no_quantised_cache
from pe_study.evaluators.scoring import model_device
from pe_study.rows import QUANTISED_CHUNK

CHUNK = 8192


class Reader:
    """The logits after a prompt (T,) and after each token of a continuation.

    The prompt is read through the model's cache, `CHUNK` tokens at a time, its logits never held, or through
    that of `new_cache`. A model without an exact cache reads prompt and continuation anew each time.
    """

    def __init__(self, model: Any, prompt_ids: np.ndarray, new_cache: Callable[[Any], Any] | None = None):
        self.model, self.device = model, model_device(model)
        self.prompt_1T = torch.from_numpy(prompt_ids)[None].to(self.device)
        self._cache_name = exact_cache_name(model)
        if new_cache is not None and self._cache_name is None:
            raise no_quantised_cache(model.config, "it is not read through a cache")
        self._cache: Any = None if new_cache is None else new_cache(model.config)
        self._chunk = CHUNK if new_cache is None else QUANTISED_CHUNK
        self._after_prompt_V = self._read_prompt() if self._cache_name else None

    def logits(self, ids: np.ndarray) -> torch.Tensor:
        """(K + 1, V) float32: after the prompt, and after each of the K ids."""
        ids_1K = torch.from_numpy(ids)[None].to(self.device)
        with torch.inference_mode():
            if self._cache_name is None:
                whole = torch.cat([self.prompt_1T, ids_1K], dim=1)
                output = self.model(whole, use_cache=False, logits_to_keep=len(ids) + 1)
                return output.logits[0].float()
            assert self._after_prompt_V is not None
            if not len(ids):
                return self._after_prompt_V
            past = {self._cache_name: copy.deepcopy(self._cache)}
            output = self.model(ids_1K, use_cache=True, **past)
            return torch.cat([self._after_prompt_V, output.logits[0].float()])

    def logprob(self, ids: np.ndarray) -> float:
        """ln p(continuation | prompt), in nats, summed in float64."""
        logprobs_KV = torch.log_softmax(self.logits(ids[:-1]).double(), dim=-1)
        return float(logprobs_KV[torch.arange(len(ids)), torch.from_numpy(ids)].sum())

    def greedy(self, num_tokens: int) -> np.ndarray:
        """The most likely token, then the most likely after it, and so on (num_tokens,)."""
        ids = np.empty(0, dtype=np.int64)
        while len(ids) < num_tokens:
            ids = np.append(ids, int(self.logits(ids)[-1].argmax()))
        return ids

    def _read_prompt(self) -> torch.Tensor:
        assert self._cache_name is not None
        with torch.inference_mode():
            for ids_1T in self.prompt_1T.split(self._chunk, dim=1):
                past = {} if self._cache is None else {self._cache_name: self._cache}
                output = self.model(ids_1T, use_cache=True, logits_to_keep=1, **past)
                self._cache = getattr(output, self._cache_name)
        return output.logits[0].float()
