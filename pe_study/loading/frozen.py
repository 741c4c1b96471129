"""Models of transformers whose frequencies follow the running length (dynamic, longrope), frozen at a
declared one while something is measured.

Left alone, such a model keeps the frequencies of the longest window that it read for windows that come
after, and no cache of it is exact. Frozen, it has those that transformers builds for a declared length.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from pe_study.errors import CheckpointError
from pe_study.loading import hf_rope


def follows_running_length(model: Any) -> bool:
    """Whether a model's frequencies change with the tokens it has seen, so that no cache is exact."""
    config = getattr(model, "config", None)
    if config is None or not hf_rope.follows_running_length(config):
        return False
    tables = _tables(model)
    return not tables or any(map(_running, tables))


@contextmanager
def frozen(model: Any, length: int) -> Iterator[None]:
    """Static frequencies of a window of `length` tokens while the block runs; then the model as it was.

    Nothing for any other model or callable. CheckpointError where its tables of angles are not transformers'.
    """
    tables = [module for module in _tables(model) if _running(module)]
    if not tables and follows_running_length(model):
        raise CheckpointError(
            f"{type(model).__name__}: its frequencies follow the running length by code of its own and "
            "cannot be frozen at a declared one; accepted: load=, from a length to a model of it"
        )
    kept = [(module, dict(vars(module)), dict(module._buffers)) for module in tables]
    try:
        for module in tables:
            _freeze(module, length)
        yield
    finally:
        for module, attributes, buffers in kept:
            vars(module).clear()
            vars(module).update(attributes)
            module._buffers.clear()
            module._buffers.update(buffers)


def _tables(model: Any) -> list[Any]:
    """The modules that hold inverse frequencies and the kind that transformers updates them by."""
    modules = getattr(model, "modules", None)
    return [
        module
        for module in (modules() if callable(modules) else ())
        if hasattr(module, "rope_type") and any("inv_freq" in name for name, _ in module.named_buffers())
    ]


def _running(module: Any) -> dict[str | None, str]:
    """Kinds of a module, by layer type (None: the only one), that follow the running length."""
    kinds = hf_rope.running_kinds(module.config)
    now = module.rope_type if isinstance(module.rope_type, dict) else {None: module.rope_type}
    return {layer_type: kind for layer_type, kind in kinds.items() if now.get(layer_type) == kind}


def _freeze(module: Any, length: int) -> None:
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    config = module.config.get_text_config()
    for layer_type, kind in _running(module).items():
        prefix = "" if layer_type is None else f"{layer_type}_"
        inv_freq, attention_factor = ROPE_INIT_FUNCTIONS[kind](
            config, "cpu", seq_len=length, layer_type=layer_type
        )
        setattr(module, f"{prefix}inv_freq", inv_freq.to(getattr(module, f"{prefix}inv_freq").device))
        setattr(module, f"{prefix}attention_scaling", attention_factor)
        if layer_type is None:
            module.rope_type = "default"
        else:
            module.rope_type = {**module.rope_type, layer_type: "default"}
