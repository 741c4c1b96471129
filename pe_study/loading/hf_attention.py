"""What evaluations change, or look at, in the attention of a Hugging Face model, through its own interface.

A model whose attention goes through transformers' AttentionInterface gets an implementation that changes
queries and masks, or looks at them, and leaves the output to the implementation that the model had.

Shape legend: B batch, H query heads, G key heads, T queries, S keys, K head width.
"""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from pe_study.errors import RescaleError, UsageError
from pe_study.kernels.statistics import Collector
from pe_study.rescales import logn_factor, parse

PREFIX = "pe_study+"
WINDOWED = ("eager", "sdpa")  # implementations whose mask is a matrix that more can be hidden in
ROWS = 512  # queries at a time under a window
_SUPPORT = {"sdpa": "_supports_sdpa", "flex": "_supports_flex_attn", "flash": "_supports_flash_attn"}
_UNKNOWN = ("s_aux", "position_bias", "head_mask")  # arguments that change scores in ways not told here


@dataclass
class Hooks:
    """Of one model. train_length: that of logn (None: off). window: the keys each query sees (None: all).
    collector: what its layers are measured by. layers: those that came by since `install`."""

    train_length: int | None = None
    window: int | None = None
    collector: Collector | None = None
    layers: set[int] = field(default_factory=set)


def goes_through_interface(config: Any) -> bool:
    """Whether a checkpoint's decoder calls its attention through transformers' AttentionInterface."""
    own = model_class(config)
    return own is not None and "ALL_ATTENTION_FUNCTIONS" in inspect.getsource(sys.modules[own.__module__])


def unmeasured(config: Any) -> list[str]:
    """What changes the scores of a checkpoint's attention in ways that diagnostics do not tell."""
    own = model_class(config)
    source = inspect.getsource(sys.modules[own.__module__]) if own is not None else ""
    return [name for name in _UNKNOWN if re.search(rf"\b{name}=(?!None)", source)]


def unmeasured_says(model_type: str, names: list[str]) -> str:
    """The end of a line that refuses to measure such an attention."""
    return (
        f"the attention of {model_type} uses {', '.join(names)}, which is not measured; leave diagnostics out"
    )


def model_class(config: Any) -> Any:
    """transformers' own class of causal language models for a config; None where it has none."""
    from transformers import AutoModelForCausalLM

    own = AutoModelForCausalLM._model_mapping.get(type(config), None)
    return own[0] if isinstance(own, tuple) else own


def check_kernel(config: Any, kernel: str, dtype: torch.dtype) -> None:
    """UsageError for a kernel that cannot run a checkpoint here, naming those that can; `auto` always can."""
    can = _kernels(config, dtype)
    if kernel not in ("auto", *can):
        needs = " without flash-attn and a CUDA GPU" if kernel == "flash" and not _has_flash() else ""
        raise UsageError(
            f"kernel {kernel} cannot run {config.model_type} in {str(dtype).removeprefix('torch.')}{needs}; "
            f"these can: {', '.join(can)}"
        )


def _kernels(config: Any, dtype: torch.dtype) -> list[str]:
    own = model_class(config)
    can = ["eager", *(name for name, flag in _SUPPORT.items() if getattr(own, flag, True))]
    fits = _has_flash() and dtype in (torch.float16, torch.bfloat16)
    return can if fits else [name for name in can if name != "flash"]


def _has_flash() -> bool:
    from transformers.utils import is_flash_attn_2_available, is_kernels_available

    return is_flash_attn_2_available() or (is_kernels_available() and torch.cuda.is_available())


def installed(model: Any) -> Hooks | None:
    """The hooks of a model, if it has any."""
    found = getattr(model, "_pe_study_hooks", None)
    return found if isinstance(found, Hooks) else None


def install(model: Any) -> Hooks:
    """Puts the hooks of a loaded model in place, the same ones at every call. UsageError where its attention
    does not go through the interface."""
    there = installed(model)
    if there is not None:
        return there
    own = str(model.config._attn_implementation)
    hooks = Hooks()
    if model._can_set_attn_implementation():
        _register(own)
        for module in model.modules():
            module._pe_study_hooks = hooks
        model.set_attn_implementation(PREFIX + own)
        with torch.inference_mode():
            model(torch.tensor([[0, 0, 0]], device=model.device), use_cache=False)
    if not hooks.layers:
        raise UsageError(refusal(model.config.model_type))
    return hooks


def refusal(model_type: str) -> str:
    """Why nothing can be changed or measured in a model's attention."""
    return f"the attention of {model_type} does not go through transformers' AttentionInterface"


def add_logn(model: Any, rescale: str, train_length: int | None) -> None:
    """Multiplies the scores of a loaded model where its rescale says logn. RescaleError where none can."""
    if not parse(rescale).logn:
        return
    if train_length is None:
        raise RescaleError(
            f"rescale {rescale}: the config does not say at which length the model was trained"
        )
    try:
        install(model).train_length = train_length
    except UsageError as refused:
        raise RescaleError(f"rescale {rescale}: {refused}") from None


def own_kernel(implementation: str) -> str:
    """The name of the implementation that computes the output."""
    return implementation.removeprefix(PREFIX)


def _register(own: str) -> None:
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, AttentionMaskInterface
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, AttentionInterface

    if PREFIX + own in ALL_ATTENTION_FUNCTIONS:
        return

    def hooked(module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, **options: Any) -> Any:
        run = ALL_ATTENTION_FUNCTIONS.get(own) or sys.modules[type(module).__module__].eager_attention_forward
        return _hooked(run, own, module, (q, k, v, mask), options)

    AttentionInterface.register(PREFIX + own, hooked)
    AttentionMaskInterface.register(PREFIX + own, ALL_MASK_ATTENTION_FUNCTIONS[own])


def _hooked(
    run: Callable[..., Any],
    own: str,
    module: Any,
    given: tuple[Tensor, Tensor, Tensor, Tensor | None],
    options: dict[str, Any],
) -> Any:
    hooks: Hooks = module._pe_study_hooks
    q_BHTK, k_BGSK, v_BGSK, mask = given
    hooks.layers.add(layer := int(getattr(module, "layer_idx", len(hooks.layers))))
    if hooks.train_length is not None:
        q_BHTK = q_BHTK * _logn(q_BHTK, k_BGSK, mask, hooks).to(q_BHTK.dtype)
    if hooks.collector is not None:
        _collect(hooks, layer, q_BHTK, k_BGSK, mask, options)
    if hooks.window is None or k_BGSK.shape[2] <= hooks.window:
        return run(module, q_BHTK, k_BGSK, v_BGSK, mask, **options)
    if own not in WINDOWED:
        raise UsageError(f"attention_window needs kernel sdpa or eager, found {own}")
    parts = []
    for start in range(0, q_BHTK.shape[2], ROWS):
        rows = slice(start, start + ROWS)
        q_part, first, seen = _windowed(q_BHTK, k_BGSK, mask, rows, hooks.window)
        if own == "eager":
            hidden = torch.finfo(q_part.dtype).min
            seen = torch.zeros_like(seen, dtype=q_part.dtype).masked_fill(~seen, hidden)
        keys = slice(first, first + seen.shape[-1])
        parts.append(run(module, q_part, k_BGSK[:, :, keys], v_BGSK[:, :, keys], seen, **options)[0])
    return torch.cat(parts, dim=1), None


def _windowed(
    q_BHTK: Tensor, k_BGSK: Tensor, mask: Tensor | None, rows: slice, window: int
) -> tuple[Tensor, int, Tensor]:
    """Queries of a block, the first key that one of them sees, and which keys each does (… T', S')."""
    offset = k_BGSK.shape[2] - q_BHTK.shape[2]
    t = torch.arange(q_BHTK.shape[2], device=q_BHTK.device)[rows, None] + offset
    first = max(0, int(t[0]) - window + 1)
    s = torch.arange(first, int(t[-1]) + 1, device=q_BHTK.device)
    seen = ((s <= t) & (s > t - window))[None, None]
    if mask is not None:
        seen = seen & _shown(mask[:, :, rows, first : int(t[-1]) + 1])
    return q_BHTK[:, :, rows], first, seen


def _shown(mask: Tensor) -> Tensor:
    """Which keys a mask shows, boolean or added to the scores."""
    return mask if mask.dtype == torch.bool else mask > torch.finfo(mask.dtype).min / 2


def _logn(q_BHTK: Tensor, k_BGSK: Tensor, mask: Tensor | None, hooks: Hooks) -> Tensor:
    """max(1, ln n / ln L) of each query, n the keys it sees, broadcast to the queries (B or 1, 1, T, 1)."""
    num_queries, num_keys = q_BHTK.shape[2], k_BGSK.shape[2]
    seen = torch.arange(num_keys - num_queries, num_keys, device=q_BHTK.device)[None, None] + 1
    if mask is not None:
        seen = _shown(mask[..., :num_keys]).sum(-1)
    assert hooks.train_length is not None
    return logn_factor(seen.clamp(max=hooks.window or num_keys), hooks.train_length)[..., None]


def _collect(
    hooks: Hooks, layer: int, q_BHTK: Tensor, k_BGSK: Tensor, mask: Tensor | None, options: dict[str, Any]
) -> None:
    assert hooks.collector is not None
    found = [name for name in _UNKNOWN if options.get(name) is not None]
    if found:
        raise UsageError(f"diagnostics: {unmeasured_says('this model', found)}")
    scale = options.get("scaling") or q_BHTK.shape[-1] ** -0.5
    softcap, window = options.get("softcap"), hooks.window
    if softcap is None and (mask is None or _is_causal(mask)):
        hooks.collector.add(layer, q_BHTK, k_BGSK, scale, window=window)
        return
    offset = k_BGSK.shape[2] - q_BHTK.shape[2]

    def modify(scores_BHCS: Tensor, queries_C: Tensor) -> tuple[Tensor, Tensor]:
        s, t = torch.arange(scores_BHCS.shape[-1], device=q_BHTK.device), queries_C[:, None] + offset
        seen = ((s <= t) & (s > t - (window or k_BGSK.shape[2])))[None, None]
        if mask is not None:
            seen = seen & _shown(mask[:, :, queries_C, : scores_BHCS.shape[-1]])
        return scores_BHCS if softcap is None else softcap * torch.tanh(scores_BHCS / softcap), seen

    hooks.collector.add(layer, q_BHTK, k_BGSK, scale, modify=modify)


def _is_causal(mask: Tensor) -> bool:
    """Whether each query sees every key up to its own and nothing else is hidden."""
    num_queries, num_keys = mask.shape[-2:]
    seen = torch.arange(num_keys - num_queries, num_keys, device=mask.device) + 1
    return bool((_shown(mask).sum(-1) == seen).all())
