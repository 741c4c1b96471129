"""What a loaded checkpoint must pass before a number of it is believed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from pe_study.errors import CheckpointError, LengthError


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


def refuse_past(model: Any, length: int, cache_names: Sequence[str]) -> None:
    """Makes the model refuse (LengthError) more tokens, cached ones counted, than it was declared for."""

    def check(module: Any, arguments: tuple[Any, ...], options: dict[str, Any]) -> None:
        ids = arguments[0] if arguments else options.get("input_ids")
        caches = (options.get(name) for name in cache_names)
        past = max((int(cache.get_seq_length()) for cache in caches if cache is not None), default=0)
        if ids is not None and past + ids.shape[-1] > length:
            raise LengthError(
                f"{past + ids.shape[-1]} tokens cross the declared length {length}; "
                "load the checkpoint with a longer one"
            )

    model.register_forward_pre_hook(check, with_kwargs=True)
