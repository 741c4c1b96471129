"""What a loaded checkpoint must pass before a number of it is believed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from pe_study.errors import CheckpointError


def check_weights(source: str, loading: Mapping[str, Any]) -> None:
    """CheckpointError where the files lack weights, which would be drawn at random instead."""
    missing = sorted(loading["missing_keys"])
    if missing:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise CheckpointError(f"{source}: its files hold no weights for {missing[0]}{more}")


@torch.inference_mode()
def check_causal(source: str, model: Any) -> None:
    """CheckpointError where a token's logits depend on the token after it."""
    first, second = (torch.tensor([[1, 2, last]], device=model.device) for last in (3, 0))
    logits, others = (model(ids, use_cache=False).logits[0, :2].float() for ids in (first, second))
    if not torch.allclose(logits, others, rtol=1e-2, atol=1e-2):
        raise CheckpointError(
            f"{source}: not a causal language model ({model.config.model_type} looks at the tokens to come)"
        )
