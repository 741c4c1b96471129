"""What a loaded checkpoint must pass before a number of it is believed."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch

from pe_study.errors import CheckpointError, RescaleError
from pe_study.loading import hf_attention


def check_weights(source: str, loading: Mapping[str, Any]) -> None:
    """CheckpointError where the files lack weights, which would be drawn at random instead."""
    missing = sorted(loading["missing_keys"])
    if missing:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise CheckpointError(f"{source}: its files hold no weights for {missing[0]}{more}")


def check_kind(source: str, config: Any) -> None:
    """CheckpointError for an architecture without a causal language model, before anything is built of it."""
    remote = getattr(config, "auto_map", None) or {}
    if hf_attention.model_class(config) is None and "AutoModelForCausalLM" not in remote:
        found = ", ".join(getattr(config, "architectures", None) or [f"model_type {config.model_type}"])
        encodes = ", an encoder with a decoder" if getattr(config, "is_encoder_decoder", False) else ""
        raise CheckpointError(f"{source}: not a causal language model (found {found}{encodes})")


@torch.inference_mode()
def check_causal(source: str, model: Any) -> None:
    """CheckpointError where a token's logits depend on the token after it.

    Another last token changes the logits at its own place; those before it may change by rounding alone (of
    experts, by how many tokens they get): in the last half of the dtype's digits, beside that change.
    """
    unmasked = [each for each in model.modules() if getattr(each, "is_decoder", None) is False]
    if unmasked and not getattr(model.config, "is_decoder", True):
        raise CheckpointError(
            f"{source}: not a causal language model (found {type(model).__name__}, an encoder: "
            "is_decoder is not set in its config.json)"
        )
    first, second = (torch.tensor([[1, 2, last]], device=model.device) for last in (3, 0))
    logits, others = (model(ids, use_cache=False).logits[0] for ids in (first, second))
    changed = (logits.double() - others.double()).abs().amax(-1)
    eps = max(torch.finfo(dtype).eps for dtype in (logits.dtype, model.dtype))
    if changed[:2].max() > eps**0.5 * changed[2]:
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
