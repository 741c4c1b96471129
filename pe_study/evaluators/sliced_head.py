"""One pass over a whole window, its logits a slice at a time: no cache is filled and no mask is built.

For models whose attention is causal and nothing else, where one pass costs less than the same tokens in
chunks. A model's head may do more than a matrix (caps, scales): that shows in the last position, of which
both are known, and then the window is read in chunks.
Shapes: B windows, T inputs, K of them scored (the last), D width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

SHORTEST = 2048  # inputs from which one pass is worth it
WIDEST = {"cpu": 1 << 26, "cuda": 1 << 28}  # numbers in the widest layer's activations of a pass


def fits(model: Any, batch: int, length: int) -> bool:
    """Whether a window is long enough to gain by one pass, and short enough for its activations."""
    config = getattr(model, "config", None)
    if length < SHORTEST or config is None or not _is_plain(model, config.get_text_config()):
        return False
    text = config.get_text_config()
    width = max(text.hidden_size, text.intermediate_size)
    return batch * length * width <= WIDEST.get(model.device.type, WIDEST["cpu"])


def _is_plain(model: Any, text: Any) -> bool:
    """Attention by SDPA's `is_causal` in every layer, behind a head of its own."""
    flat = {"rope_theta", "rope_type"} & set(getattr(text, "rope_parameters", None) or ())
    window = getattr(text, "sliding_window", None) if getattr(text, "use_sliding_window", True) else None
    sizes = all(isinstance(getattr(text, name, None), int) for name in ("hidden_size", "intermediate_size"))
    apart = model.base_model is not model and model.get_output_embeddings() is not None
    return bool(flat) and window is None and sizes and apart and text._attn_implementation == "sdpa"


def whole_nll(
    model: Any,
    ids_BT: torch.Tensor,
    targets_BK: torch.Tensor,
    step: int,
    token_nll: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
) -> torch.Tensor | None:
    """NLL (B, K) of the last targets, logits (B, `step`, V) at a time; None where the head is no matrix."""
    states: list[torch.Tensor] = []

    def keep(module: Any, arguments: Any, output: Any) -> None:
        states.append(output[0] if isinstance(output, tuple) else output.last_hidden_state)

    handle = model.base_model.register_forward_hook(keep)
    try:
        last_B1V = model(ids_BT, use_cache=False, logits_to_keep=1).logits
    finally:
        handle.remove()
    head = model.get_output_embeddings()
    hidden_BKD = states[0][:, -targets_BK.shape[1] :]
    if not torch.equal(head(hidden_BKD[:, -1:]).to(last_B1V.device), last_B1V):
        return None
    parts = []
    for hidden, targets in zip(hidden_BKD.split(step, dim=1), targets_BK.split(step, dim=1), strict=True):
        logits = head(hidden)
        parts.append(token_nll(logits, targets.to(logits.device)))
    return torch.cat(parts, dim=1)
