"""How windows are read: how many tokens a pass, and through which cache a long context goes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from pe_study.errors import PlanError

BATCH_TOKENS = 16384
CACHES = ("full", "fp8")


@dataclass(frozen=True)
class Reading:
    """`batch_tokens` inputs a forward pass (at least one window), `cache` one of CACHES.

    progress: called with the number of tokens read, after each batch.
    """

    batch_tokens: int = BATCH_TOKENS
    cache: str = "full"
    progress: Callable[[int], None] | None = None

    @property
    def new_cache(self) -> Callable[[Any], Any] | None:
        """Builds the cache of a model's config; None: the model builds its own."""
        return None if self.cache == "full" else quantised_cache


def quantised_cache(config: Any) -> Any:
    """Keys and values in 8 bits, a scale a layer for all windows that are read together.

    PlanError where transformers or the model has none.
    """
    from transformers import QuantizedCache

    try:
        return QuantizedCache("fp8", config)
    except (ValueError, TypeError, AttributeError) as error:
        raise no_quantised_cache(config, str(error).strip().splitlines()[0]) from None


def no_quantised_cache(config: Any, reason: str) -> PlanError:
    """The refusal of an 8-bit cache for a model."""
    return PlanError(f"cache: fp8 is not for {config.model_type} ({reason}); accepted: full")
