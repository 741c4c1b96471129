"""What a loaded checkpoint must pass before a number of it is believed."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch

from pe_study.errors import CheckpointError, RescaleError


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


@torch.inference_mode()
def follows_positions(model: Any) -> bool:
    """Whether other `position_ids` change a bit of what a model says of eight tokens; also where it takes
    them in a form of its own."""
    order = torch.tensor([[3, 6, 1, 0, 7, 2, 5, 4]], device=model.device)
    given = {"attention_mask": torch.ones_like(order), "use_cache": False}
    ids, plain = torch.full_like(order, 1) + (order % 2), torch.arange(8, device=model.device)[None]
    try:
        logits, others = (model(ids, position_ids=at, **given).logits for at in (plain, order))
    except (IndexError, RuntimeError, TypeError, ValueError):
        return True
    return not torch.equal(logits, others)


def check_rescaled(source: str, rescale: str, model: Any) -> None:
    """RescaleError where a model was built under a rescale of RoPE, takes positions and ignores them."""
    takes = "position_ids" in inspect.signature(model.forward).parameters
    if takes and not follows_positions(model):
        kind = model.config.model_type
        raise RescaleError(f"rescale {rescale}: {source}: no position changes what {kind} says (use none)")
