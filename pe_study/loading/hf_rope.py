"""A rescale written into a Hugging Face config, before the model is built from it.

Every kind becomes a type that transformers computes itself: `ntk` and `dynamic` a larger base,
`ntk-by-parts` and `longrope` one list of factors for every position, so that nothing changes while a context
is read. Base, rotated fraction and original length stay the checkpoint's own; layer types that see a sliding
window keep theirs.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from pe_study import rope_scaling
from pe_study.errors import RescaleError
from pe_study.rope_scaling import Rescale

if TYPE_CHECKING:
    from torch import Tensor

_LOCAL_LAYERS = ("sliding_attention", "chunked_attention")
_TYPES = ("default", "linear", "dynamic", "yarn", "llama3", "longrope")
_SWITCHED_OFF: Mapping[str, Callable[[Any], bool]] = {
    "falcon": lambda text: bool(text.alibi),
    "granitemoehybrid": lambda text: text.position_embedding_type != "rope",
    "zamba2": lambda text: not text.use_mem_rope,
}
_OWN_BASES = ("granite_swa", "granitemoe_swa")
_SIZES = ("n_positions", "max_seq_len", "max_position_embeddings", "seq_length")


@dataclass(frozen=True)
class Rotary:
    """How a checkpoint turns: rotated width, base, and the length that its frequencies were trained at."""

    rotary_dim: int
    base: float
    original_length: int


def rotary(config: Any) -> Rotary | None:
    """The (global) rotary geometry of a config; None for a model without RoPE."""
    text = config.get_text_config()
    for layer_type, parameters in _parameters(text):
        if layer_type not in _LOCAL_LAYERS:
            return _rotary(text, parameters)
    return None


def original_length(config: Any) -> int | None:
    """The context length that training saw, as far as the config knows; None where it does not."""
    found = rotary(config)
    if found is not None:
        return found.original_length
    text = config.get_text_config()
    sizes = [getattr(text, name, None) for name in _SIZES]
    return next((size for size in sizes if isinstance(size, int)), None)


def follows_running_length(config: Any) -> bool:
    """Whether transformers would change the frequencies while a context grows."""
    return bool(running_kinds(config))


def running_kinds(config: Any) -> dict[str | None, str]:
    """Kinds that follow the running length, by layer type (None: all layers have one)."""
    found = {}
    for layer_type, parameters in _parameters(config.get_text_config()):
        kind = parameters.get("rope_type", "default")
        if "dynamic" in kind or (
            kind == "longrope" and parameters["short_factor"] != parameters["long_factor"]
        ):
            found[layer_type] = kind
    return found


def apply(config: Any, spec: str | Rescale, length: int) -> None:
    """Set the rope parameters of `config` for a declared length, in place.

    RescaleError on a model without RoPE, or for a rescale that its geometry cannot take.
    """
    rescale = rope_scaling.parse(spec)
    text = config.get_text_config()
    found = [(name, parameters) for name, parameters in _parameters(text) if name not in _LOCAL_LAYERS]
    if not found:
        if rescale.kind == "none":
            return
        raise RescaleError(f"rescale {rescale.label}: {text.model_type} {why_not(config)} (use none)")
    for layer_type, parameters in found:
        geometry = _rotary(text, parameters)
        if not rescale.keeps_frequencies(geometry.original_length, length):
            _refuse_own_bases(rescale, text)
            _refuse_unanchored(rescale, text, parameters)
        changed = rope_parameters(rescale, parameters, geometry, length, nested=layer_type is not None)
        if layer_type is None:
            text.rope_parameters = changed
        else:
            text.rope_parameters = {**text.rope_parameters, layer_type: changed}


def is_switched_off(config: Any) -> bool:
    """Whether no layer turns, though there are rope parameters: ALiBi (Falcon), no positions (Granite 4,
    Zamba 2), or a list of layers that names none."""
    text = config.get_text_config()
    switched = _SWITCHED_OFF.get(text.model_type, lambda _: False)(text)
    lists = [getattr(text, name, None) for name in ("no_rope_layers", "layer_rope_theta")]
    return switched or any(isinstance(layers, list | tuple) and not any(layers) for layers in lists)


def why_not(config: Any) -> str:
    """Why no rescale applies to a model without rope parameters, as the end of a sentence on it."""
    if getattr(config, "rotary_dim", None):  # GPT-J, CodeGen: angles of a fixed base in a table of their own
        return "turns by a table of its own, which takes no rescale"
    return "has no rotary positions to rescale"


def kept_scaling(config: Any, spec: str | Rescale, length: int) -> tuple[str, float | None] | None:
    """Kind and factor (None: not stated) of the scaling that a checkpoint brings and a rescale leaves in
    place; None where it brings none, or another takes its place."""
    text = config.get_text_config()
    for layer_type, parameters in _parameters(text):
        kind = parameters.get("rope_type", "default")
        if layer_type in _LOCAL_LAYERS:
            continue
        original = _rotary(text, parameters).original_length
        if kind == "default" or not rope_scaling.parse(spec).keeps_frequencies(original, length):
            return None
        factor = parameters.get("factor")
        return kind, None if factor is None else float(factor)
    return None


def mismatch(config: Any) -> str | None:
    """What is wrong with a checkpoint whose YaRN factor is not the ratio of its lengths: the factor is used.

    Llama 3's factor is none by design; where no original length is given, there is no ratio.
    """
    text = config.get_text_config()
    for _, parameters in _parameters(text):
        if parameters.get("rope_type") == "yarn" and parameters.get("factor"):
            ratio = text.max_position_embeddings / _rotary(text, parameters).original_length
            if ratio not in (1.0, float(parameters["factor"])):
                return (
                    f"its YaRN factor is {parameters['factor']:g}, its lengths make it {ratio:g} "
                    "(max_position_embeddings / original_max_position_embeddings); the factor is used"
                )
    return None


def frequencies(config: Any, spec: str | Rescale, length: int) -> tuple[Tensor, float] | None:
    """Inverse frequencies and attention factor of the (global) layers under a rescale, whatever scaling the
    checkpoint brings; None for a kind that transformers computes inside the model.

    Raises RescaleError as `apply` does.
    """
    import torch
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    changed = copy.deepcopy(config)
    apply(changed, spec, length)
    text = changed.get_text_config()
    for layer_type, parameters in _parameters(text):
        if layer_type in _LOCAL_LAYERS:
            continue
        kind = parameters.get("rope_type", "default")
        if kind == "default":
            own = asdict(_rotary(text, parameters))
            return rope_scaling.frequencies("none", **own, length=length)
        if kind not in ROPE_INIT_FUNCTIONS or kind not in _TYPES:
            return None
        with torch.device("cpu"):
            inv_freq, attention_factor = ROPE_INIT_FUNCTIONS[kind](
                text, "cpu", seq_len=length, layer_type=layer_type
            )
        return inv_freq, float(attention_factor)
    return None


def _refuse_own_bases(rescale: Rescale, text: Any) -> None:
    """RescaleError where each layer turns by a base of its own, so that a changed one would reach none."""
    if text.model_type in _OWN_BASES:
        raise RescaleError(
            f"rescale {rescale.label}: {text.model_type} turns each layer by a base of its own "
            "(layer_rope_theta), which takes no rescale (use none)"
        )


def _refuse_unanchored(rescale: Rescale, text: Any, own: dict[str, Any]) -> None:
    """RescaleError on frequencies that are divided already, nobody says from which length on.

    Gemma 3 states the length after such a scaling, Vicuna the one before: neither can be told from the other.
    """
    stated = own.get("original_max_position_embeddings") or getattr(
        text, "original_max_position_embeddings", None
    )
    if own.get("rope_type") == "linear" and float(own["factor"]) != 1.0 and not stated:
        raise RescaleError(
            f"rescale {rescale.label}: this checkpoint is scaled already (linear:{own['factor']:g}) and its "
            "config.json does not say from which length; accepted: none, or that length written there beside "
            "the factor, as original_max_position_embeddings"
        )


def rope_parameters(
    rescale: Rescale, own: dict[str, Any], geometry: Rotary, length: int, *, nested: bool = False
) -> dict[str, Any]:
    """transformers' `rope_parameters` for a rescale, from the checkpoint's own ones; `nested`: of one layer
    type among several, where transformers does not find `truncate`.

    A scaling that the checkpoint has itself is replaced, and stays where the rescale changes nothing.
    """
    if rescale.keeps_frequencies(geometry.original_length, length):
        return _frozen(own, geometry, length)
    if own.get("rope_type", "default") not in _TYPES:
        raise RescaleError(
            f"rescale {rescale.label}: this checkpoint turns by {own['rope_type']} frequencies (use none)"
        )
    kept: dict[str, Any] = {key: own[key] for key in ("rope_theta", "partial_rotary_factor") if key in own}
    default = {**kept, "rope_type": "default"}
    factor = rescale.resolved_factor(geometry.original_length, length)
    options = dict(rescale.options)
    if rescale.kind == "dynamic":
        return {**default, "rope_theta": _dynamic_base(geometry, factor, length)}
    if rescale.kind == "ntk":
        return {**default, "rope_theta": rope_scaling.ntk_base(geometry.base, factor, geometry.rotary_dim)}
    if rescale.kind in ("ntk-by-parts", "longrope") or (nested and options.get("truncate") is False):
        return _listed(rescale, default, geometry, length)
    anchored = {"original_max_position_embeddings": geometry.original_length}
    extra: dict[str, Any] = {} if rescale.kind == "linear" else anchored
    if rescale.kind == "llama3":
        extra = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, **anchored}
    return {**kept, "rope_type": rescale.kind, "factor": factor, **extra, **options}


def _listed(rescale: Rescale, default: dict[str, Any], geometry: Rotary, length: int) -> dict[str, Any]:
    """Frequencies as divisors of the unscaled ones, the same below and above the original length."""
    scaled, attention_factor = rope_scaling.frequencies(
        rescale,
        rotary_dim=geometry.rotary_dim,
        base=geometry.base,
        original_length=geometry.original_length,
        length=length,
    )
    unscaled = rope_scaling.unscaled(geometry.rotary_dim, geometry.base)
    if bool((scaled == unscaled).all()) and attention_factor == 1.0:
        return default
    divisors = (unscaled.double() / scaled.double()).tolist()
    return {
        **default,
        "rope_type": "longrope",
        "short_factor": divisors,
        "long_factor": divisors,
        "factor": 1.0,
        "attention_factor": attention_factor,
        "original_max_position_embeddings": geometry.original_length,
    }


def _frozen(own: dict[str, Any], geometry: Rotary, length: int) -> dict[str, Any]:
    """The checkpoint's own scaling; where it follows the running length, made that of the declared one."""
    kind = own.get("rope_type", "default")
    if kind == "dynamic":
        kept = {key: value for key, value in own.items() if key not in ("factor", "type")}
        base = _dynamic_base(geometry, float(own["factor"]), length)
        return {**kept, "rope_type": "default", "rope_theta": base}
    if kind == "longrope":
        divisors = own["long_factor" if length > geometry.original_length else "short_factor"]
        return {**own, "short_factor": divisors, "long_factor": divisors}
    return own


def _dynamic_base(geometry: Rotary, factor: float, length: int) -> float:
    """b' = b (s L / L0 - s + 1)^(d / (d - 2)), L the declared length, L0 the original one; b up to L0."""
    stretch = factor * max(length, geometry.original_length) / geometry.original_length - (factor - 1)
    return rope_scaling.ntk_base(geometry.base, stretch, geometry.rotary_dim)


def _parameters(text: Any) -> Iterator[tuple[str | None, dict[str, Any]]]:
    """(layer type or None, rope parameters) of a text config, one pair a nested entry."""
    parameters = getattr(text, "rope_parameters", None)
    if not parameters or is_switched_off(text):
        return
    if "rope_theta" in parameters or "rope_type" in parameters:
        yield None, parameters
        return
    for layer_type, nested in parameters.items():
        if isinstance(nested, dict):
            yield layer_type, nested


def _rotary(text: Any, parameters: dict[str, Any]) -> Rotary:
    head_dim = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    fraction = parameters.get("partial_rotary_factor", getattr(text, "partial_rotary_factor", None)) or 1.0
    base = float(parameters.get("rope_theta") or text.default_theta)
    original = parameters.get("original_max_position_embeddings") or getattr(
        text, "original_max_position_embeddings", None
    )
    return Rotary(int(head_dim * fraction), base, int(original or text.max_position_embeddings))
