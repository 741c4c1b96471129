"""Position encodings: one file each, the file's name is the recipe's name."""

from __future__ import annotations

import importlib.util
import inspect
import pkgutil
from collections.abc import Mapping
from pathlib import Path
from traceback import walk_tb
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


def source(name: str) -> Path:
    """The file of the encoding of that name, found without importing it."""
    spec = importlib.util.find_spec(f"{__name__}.{name}")
    return Path(spec.origin if spec and spec.origin else f"{__path__[0]}/{name}.py")


def find(name: str) -> type[Encoding]:
    """The encoding class of that name: the one of its file that no other class there is derived from.

    ValueError with a suggestion where there is no such file, RecipeError naming the file where it cannot be
    imported or does not define one encoding.
    """
    if name not in available():
        raise ValueError(f"unknown encoding {name!r}: {did_you_mean(name, available())}")
    from pe_study.encodings.base import Encoding

    file = source(name)
    try:
        module = importlib.import_module(f"{__name__}.{name}")
    except (Exception, SystemExit) as error:
        raise RecipeError(fault(file, error)) from error
    own = dict.fromkeys(
        value
        for value in vars(module).values()
        if inspect.isclass(value) and issubclass(value, Encoding) and value.__module__ == module.__name__
    )
    last = [each for each in own if not any(issubclass(other, each) for other in own if other is not each)]
    if not last:
        raise RecipeError(
            f"{file}: found no encoding; accepted: one class derived from {Encoding.__module__}.Encoding"
        )
    if len(last) > 1:
        names = " and ".join(each.__name__ for each in last)
        raise RecipeError(
            f"{file}: found the encodings {names}; accepted: one a file, move the others to their own"
        )
    return last[0]


def fault(file: Path, error: BaseException) -> str:
    """One line on a file that cannot be read or imported: where in it, what went wrong, the remedy."""
    lines = [line for frame, line in walk_tb(error.__traceback__) if frame.f_code.co_filename == str(file)]
    said, remedy = _said(error), "mend the file"
    if isinstance(error, SyntaxError) and error.filename == str(file):
        lines, said = [error.lineno or 0], f"{type(error).__name__}: {error.msg}"
    if isinstance(error, ModuleNotFoundError) and not str(error.name).startswith("pe_study"):
        remedy = "install it or do without it"
    place = f"{file}:{lines[-1]}" if lines and lines[-1] else str(file)
    return f"{place}: {said}; {remedy}"


def _said(error: BaseException) -> str:
    text = " ".join(str(error).split())[:300]
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def options(name: str) -> dict[str, tuple[Any, Any]]:
    """The options an encoding takes: name -> (type, default), read from its constructor.

    RecipeError naming file and option where one has no type, or none that a recipe can give.
    """
    found = find(name)
    scope = getattr(inspect.unwrap(found.__init__), "__globals__", {})
    return {
        key: (_type(parameter, scope, f"{source(name)}: option {key} of {found.__name__}"), parameter.default)
        for key, parameter in inspect.signature(found.__init__).parameters.items()
        if parameter.kind is inspect.Parameter.KEYWORD_ONLY
    }


def _type(parameter: inspect.Parameter, scope: dict[str, Any], which: str) -> Any:
    """The annotation of an option; RecipeError about `which` where there is none or pydantic cannot take it.

    One that is text, as `from __future__ import annotations` leaves it, is looked up in `scope`.
    """
    from pydantic import PydanticUserError, TypeAdapter

    given = parameter.annotation
    remedy = f"give it a type such as `{_example(parameter)}`"
    if given is inspect.Parameter.empty:
        raise RecipeError(f"{which} has no type; {remedy}")
    try:
        wanted = eval(given, scope) if isinstance(given, str) else given
        TypeAdapter(wanted)
    except Exception as error:
        shown = given if isinstance(given, str) else inspect.formatannotation(given)
        is_other = isinstance(error, PydanticUserError)
        why = "no recipe can give" if is_other else f"cannot be read ({_said(error)})"
        raise RecipeError(f"{which} has the type {shown}, which {why}; {remedy}") from error
    return wanted


def _example(parameter: inspect.Parameter) -> str:
    """How an option is written: with its own default where that shows its type."""
    plain = type(parameter.default) in (bool, int, float, str)
    default = parameter.default if plain else 2.0
    return f"{parameter.name}: {type(default).__name__} = {default!r}"


def validate_options(name: str, given: Mapping[str, Any], where: str = "encoding") -> dict[str, Any]:
    """The given options, checked and coerced; RecipeError naming `where`.key otherwise."""
    from pydantic import TypeAdapter, ValidationError

    try:
        known = options(name)
    except (ValueError, RecipeError) as error:
        raise RecipeError(f"{where}: {error}") from error
    for key in given:
        if key not in known:
            raise RecipeError(f"{where}.{key}: {name} has no such option; {did_you_mean(key, known)}")
    for key, (_, default) in known.items():
        if default is inspect.Parameter.empty and key not in given:
            raise RecipeError(f"{where}.{key}: {name} needs it; give it here, or a default in {source(name)}")
    checked = {}
    for key, value in given.items():
        wanted = known[key][0]
        try:
            checked[key] = TypeAdapter(wanted).validate_python(_widen(value, wanted), strict=True)
        except ValidationError as error:
            first = error.errors()[0]
            raise RecipeError(f"{where}.{key}: {first['msg']}, found {first['input']!r}") from None
    return checked


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
