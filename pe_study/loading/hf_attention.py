"""What evaluations change, or look at, in the attention of a Hugging Face model, through its own interface.

A model whose attention goes through transformers' AttentionInterface gets hooks that change queries and
masks, or look at them, and leave the output to the implementation that the model has.

Shape legend: B batch, H query heads, G key heads, T queries, S keys, K head width.
"""

from __future__ import annotations

import functools
import inspect
import re
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from pe_study.errors import RescaleError, UsageError
from pe_study.kernels.statistics import Collector
from pe_study.rescales import logn_factor, parse

ATTRIBUTE = "_pe_study_hooks"
PROBE = 3  # tokens that `install` reads
WINDOWED = ("eager", "sdpa")  # implementations whose mask is a matrix that more can be hidden in
ROWS = 512  # queries at a time under a window
_SUPPORT = {"sdpa": "_supports_sdpa", "flex": "_supports_flex_attn", "flash": "_supports_flash_attn"}
_UNKNOWN = ("s_aux", "position_bias", "head_mask")  # arguments that change scores in ways not told here


@dataclass
class Hooks:
    """Of one model. train_length: that of logn (None: off). window: the keys each query sees (None: all).
    collector: what its layers are measured by. layers: those that came by since `install`. cut: whether some
    of them read fewer queries where fewer logits are asked for (Gemma 4's layers that share keys)."""

    train_length: int | None = None
    window: int | None = None
    collector: Collector | None = None
    layers: set[int] = field(default_factory=set)
    cut: bool = False


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


def check_kernel(config: Any, kernel: str, dtype: torch.dtype, rescales: Iterable[str]) -> None:
    """UsageError for a kernel that cannot run a checkpoint here, naming those that can; `auto` always can.
    RescaleError where it cannot take logn."""
    can = _kernels(config, dtype)
    if kernel not in ("auto", *can):
        needs = " without flash-attn and a CUDA GPU" if kernel == "flash" and not _has_flash() else ""
        raise UsageError(
            f"kernel {kernel} cannot run {config.model_type} in {str(dtype).removeprefix('torch.')}{needs}; "
            f"these can: {', '.join(can)}"
        )
    multiplied = [rescale for rescale in rescales if parse(rescale).logn]
    if kernel == "flex" and multiplied:
        raise RescaleError(f"rescale {multiplied[0]}: {no_matrix(kernel)}")


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
    found = getattr(model, ATTRIBUTE, None)
    return found if isinstance(found, Hooks) else None


def last_logits(model: Any) -> dict[str, int]:
    """What makes a model return the last position's logits alone; nothing where it cannot."""
    return {"logits_to_keep": 1} if "logits_to_keep" in inspect.signature(model.forward).parameters else {}


def install(model: Any) -> Hooks:
    """Puts the hooks of a loaded model in place, the same ones at every call. UsageError where its attention
    does not go through the interface, or its kernel takes masks that are no matrices."""
    there = installed(model)
    if there is not None:
        return there
    if "flex" in str(model.config._attn_implementation):
        raise UsageError(no_matrix("flex"))
    hooks = Hooks()
    _hook_interface()
    for module in model.modules():
        setattr(module, ATTRIBUTE, hooks)
    with torch.inference_mode():
        model(torch.tensor([[0] * PROBE], device=model.device), use_cache=False, **last_logits(model))
    if not hooks.layers:
        for module in model.modules():
            delattr(module, ATTRIBUTE)
        raise UsageError(refusal(model.config.model_type))
    return hooks


def no_matrix(kernel: str) -> str:
    """Why nothing can be changed or measured in the attention of a kernel."""
    return f"kernel {kernel}: its masks are no matrices that more can be told from; accepted: sdpa, eager"


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


def _hook_interface() -> None:
    """Once a process: every attention that transformers hands out looks for hooks in its module.

    The implementation keeps its name, by which some models decide on masks (DeepSeek V3.2, Gemma 4); without
    hooks, and with hooks that ask for nothing, it gets what it was called with.
    """
    from transformers.modeling_utils import AttentionInterface

    find = AttentionInterface.get_interface
    if getattr(find, ATTRIBUTE, False):
        return

    @functools.wraps(find)
    def get_interface(self: Any, attn_implementation: str, default: Callable[..., Any]) -> Callable[..., Any]:
        run = find(self, attn_implementation, default)

        def attend(module: Any, *given: Any, **options: Any) -> Any:
            if not isinstance(getattr(module, ATTRIBUTE, None), Hooks):
                return run(module, *given, **options)
            named = dict(zip(("query", "key", "value", "attention_mask"), given[:4], strict=False))
            called = _Call(run, str(attn_implementation), module, given[4:])
            return _hooked(called, **named, **options)

        return attend

    setattr(get_interface, ATTRIBUTE, True)
    AttentionInterface.get_interface = get_interface


@dataclass(frozen=True)
class _Call:
    """One call of an implementation: what runs, its name, for which module, what came behind the mask."""

    run: Callable[..., Any]
    name: str
    module: Any
    more: tuple[Any, ...]

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, options: dict[str, Any]) -> Any:
        return self.run(self.module, q, k, v, mask, *self.more, **options)


def _hooked(
    call: _Call,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None = None,
    **options: Any,
) -> Any:
    hooks: Hooks = getattr(call.module, ATTRIBUTE)
    q_BHTK, k_BGSK, v_BGSK, mask = query, key, value, attention_mask
    hooks.layers.add(layer := int(getattr(call.module, "layer_idx", len(hooks.layers))))
    hooks.cut = hooks.cut or q_BHTK.shape[2] < k_BGSK.shape[2] == PROBE
    if hooks.train_length is not None:
        q_BHTK = q_BHTK * _logn(q_BHTK, k_BGSK, mask, hooks).to(q_BHTK.dtype)
    if hooks.collector is not None:
        _collect(hooks, layer, q_BHTK, k_BGSK, mask, options)
    if hooks.window is None or k_BGSK.shape[2] <= hooks.window:
        return call(q_BHTK, k_BGSK, v_BGSK, mask, options)
    if call.name not in WINDOWED:
        raise UsageError(f"attention_window needs kernel sdpa or eager, found {call.name}")
    parts = []
    for start in range(0, q_BHTK.shape[2], ROWS):
        rows = slice(start, start + ROWS)
        q_part, first, seen = _windowed(q_BHTK, k_BGSK, mask, rows, hooks.window)
        if call.name == "eager" and seen.dtype == torch.bool:
            hidden = torch.finfo(q_part.dtype).min
            seen = torch.zeros_like(seen, dtype=q_part.dtype).masked_fill(~seen, hidden)
        keys = slice(first, first + seen.shape[-1])
        parts.append(call(q_part, k_BGSK[:, :, keys], v_BGSK[:, :, keys], seen, options)[0])
    return torch.cat(parts, dim=1), None


def _windowed(
    q_BHTK: Tensor, k_BGSK: Tensor, mask: Tensor | None, rows: slice, window: int
) -> tuple[Tensor, int, Tensor]:
    """Queries of a block, the first key that one of them sees, and the mask between them (…, T', S'): which
    keys each sees, or what is added to its scores where the model's own mask adds."""
    offset = k_BGSK.shape[2] - q_BHTK.shape[2]
    t = torch.arange(q_BHTK.shape[2], device=q_BHTK.device)[rows, None] + offset
    first = max(0, int(t[0]) - window + 1)
    s = torch.arange(first, int(t[-1]) + 1, device=q_BHTK.device)
    seen = ((s <= t) & (s > t - window))[None, None]
    if mask is not None:
        own = mask[:, :, rows, first : int(t[-1]) + 1]
        seen = seen & own if own.dtype == torch.bool else own.masked_fill(~seen, torch.finfo(own.dtype).min)
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
            own = mask[:, :, queries_C, : scores_BHCS.shape[-1]]
            seen = seen & _shown(own)
            scores_BHCS = scores_BHCS if own.dtype == torch.bool else scores_BHCS + own
        return scores_BHCS if softcap is None else softcap * torch.tanh(scores_BHCS / softcap), seen

    hooks.collector.add(layer, q_BHTK, k_BGSK, scale, modify=modify)


def _is_causal(mask: Tensor) -> bool:
    """Whether each query sees every key up to its own and nothing else is hidden."""
    num_queries, num_keys = mask.shape[-2:]
    seen, shown = torch.arange(num_keys - num_queries, num_keys, device=mask.device) + 1, _shown(mask)
    adds = mask.dtype != torch.bool and bool((mask.masked_fill(~shown, 0) != 0).any())
    return not adds and bool((shown.sum(-1) == seen).all())
