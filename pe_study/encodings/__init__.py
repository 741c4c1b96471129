"""Position encodings: one file each, the file's name is the recipe's name."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from pe_study.errors import RecipeError, did_you_mean

if TYPE_CHECKING:
    from pe_study.encodings.base import Encoding

_NOT_ENCODINGS = {"base"}

CONTROL = "nope"
"""The encoding that encodes nothing: what the others must beat."""


def available() -> tuple[str, ...]:
    """The names of all encodings: every module of this package but `base`."""
    return tuple(sorted(m.name for m in pkgutil.iter_modules(__path__) if m.name not in _NOT_ENCODINGS))


def find(name: str) -> type[Encoding]:
    """The encoding class of that name; ValueError with a suggestion where there is none."""
    if name not in available():
        raise ValueError(f"unknown encoding {name!r}: {did_you_mean(name, available())}")
    from pe_study.encodings.base import Encoding

    module = importlib.import_module(f"{__name__}.{name}")
    classes = [
        value
        for value in vars(module).values()
        if inspect.isclass(value) and issubclass(value, Encoding) and value.__module__ == module.__name__
    ]
    assert len(classes) == 1, f"{module.__name__} must define exactly one Encoding"
    return classes[0]


def options(name: str) -> dict[str, tuple[Any, Any]]:
    """The options an encoding takes: name -> (type, default), read from its constructor."""
    signature = inspect.signature(find(name).__init__, eval_str=True)
    return {
        key: (parameter.annotation, parameter.default)
        for key, parameter in signature.parameters.items()
        if parameter.kind is inspect.Parameter.KEYWORD_ONLY
    }


def validate_options(name: str, given: Mapping[str, Any], where: str = "encoding") -> dict[str, Any]:
    """The given options, checked and coerced; RecipeError naming `where`.key otherwise."""
    from pydantic import ConfigDict, ValidationError, create_model

    try:
        known = options(name)
    except ValueError as error:
        raise RecipeError(f"{where}: {error}") from None
    for key in given:
        if key not in known:
            raise RecipeError(f"{where}.{key}: {name} has no such option; {did_you_mean(key, known)}")
    schema = create_model("Options", __config__=ConfigDict(extra="forbid", strict=True), **known)  # type: ignore[call-overload]
    try:
        checked = schema(**{key: _widen(value, known[key][0]) for key, value in given.items()})
    except ValidationError as error:
        first = error.errors()[0]
        raise RecipeError(f"{where}.{first['loc'][0]}: {first['msg']}, found {first['input']!r}") from None
    return {key: getattr(checked, key) for key in given}


def _widen(value: Any, wanted: Any) -> Any:
    """An integer where a float is wanted is that float; strict validation would refuse it."""
    return (
        float(value) if wanted is float and isinstance(value, int) and not isinstance(value, bool) else value
    )


def build(
    name: str,
    *,
    d_model: int,
    num_heads: int,
    head_dim: int,
    max_positions: int,
    train_length: int,
    initializer_range: float = 0.02,
    length: int | None = None,
    rescale: str = "none",
    **encoding_options: Any,
) -> Encoding:
    """One encoding for a model of these sizes, built for the declared `length` and `rescale`.

    Raises RecipeError for an unknown name or option, RescaleError for a rescale it cannot take.
    """
    from pe_study.encodings.base import Dimensions

    dims = Dimensions(
        d_model, num_heads, head_dim, max_positions, train_length, initializer_range, length, rescale
    )
    return find(name)(dims, **validate_options(name, encoding_options, where=name))
