"""Words of the command line as overrides: `--only`, `key=value`, and a flag for every key of a plan."""

from __future__ import annotations

import inspect
import json
import re
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Annotated, Any

import typer

from pe_study.errors import UsageError, did_you_mean
from pe_study.plan import Plan
from pe_study.settings import schema
from pe_study.settings.leaves import parse_length

_OVERRIDE = re.compile(r"[A-Za-z_][\w.]*=")
_PLAIN = re.compile(r"[\w.+-]+")
_SINGULAR = {"rescales": "rescale", "protocols": "protocol"}


def only(text: str | None) -> dict[str, str]:
    """`encoding=rope,seed=0` -> {"encoding": "rope", "seed": "0"}; UsageError for what is not key=value."""
    return pairs(text, "--only", "encoding=rope,seed=0")


def pairs(text: str | None, flag: str, example: str) -> dict[str, str]:
    """The value of a flag of the form `key=value,…`; UsageError naming the flag otherwise."""
    found: dict[str, str] = {}
    for item in text.split(",") if text else []:
        key, _, value = (part.strip() for part in item.partition("="))
        if not key or not value:
            raise UsageError(f'{flag}: "{item}" is not key=value, for example {example}')
        found[key] = value
    return found


def items(text: str) -> list[str]:
    """`a, b` -> ["a", "b"]."""
    return [item.strip() for item in text.split(",")]


def words(flag: str, text: str, known: Sequence[str]) -> list[str]:
    """`svg,png` -> ["svg", "png"]; UsageError for one that is not known."""
    for word in items(text):
        if word not in known:
            raise UsageError(f'{flag}: unknown "{word}"; {did_you_mean(word, known)}')
    return items(text)


def tokens(flag: str, text: str) -> int:
    """A number of tokens, `512` or `2k`; UsageError naming the flag otherwise."""
    try:
        return parse_length(int(text) if text.isdecimal() else text)
    except ValueError as problem:
        raise UsageError(f"{flag}: {problem}") from None


def counts(flag: str, text: str | None, known: Iterable[str]) -> dict[str, int]:
    """`num_layers=8,d_model=512` -> numbers by name; UsageError for a name or number that is none."""
    found: dict[str, int] = {}
    for key, value in pairs(text, flag, "num_layers=8,d_model=512").items():
        if key not in known:
            raise UsageError(f'{flag}: unknown key "{key}"; {did_you_mean(key, known)}')
        if not value.isdecimal() or int(value) < 1:
            raise UsageError(f'{flag}: {key}: found "{value}"; accepted: a whole number of at least 1')
        found[key] = int(value)
    return found


def jobs(text: str) -> int | str:
    """How many runs at once: a whole number of at least 1, or `auto`."""
    if text == "auto":
        return text
    if not text.isdecimal() or int(text) < 1:
        raise UsageError(f'--jobs: found "{text}"; accepted: a whole number of at least 1, or auto')
    return int(text)


def split_overrides(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """(targets, overrides): an override is a word that starts with `key=`."""
    overrides = [word for word in words if _OVERRIDE.match(word)]
    return [word for word in words if word not in overrides], overrides


def plan_overrides(flags: Mapping[str, str | None]) -> list[str]:
    """The given flags of `eval` as `key=YAML` overrides: `--lengths 1x,2k` -> `lengths=[1x, 2k]`."""
    return [f"{key}={_yaml(key, text)}" for key, text in flags.items() if text is not None]


def _yaml(key: str, text: str) -> str:
    if not _is_list(key):
        return text
    write = _protocol if key == "protocols" else _scalar
    return f"[{', '.join(map(write, items(text)))}]"


def _protocol(text: str) -> str:
    """`sliding:stride=256` -> `{name: sliding, stride: 256}`; a bare name stays one."""
    name, *options = text.split(":")
    pairs = (option.partition("=") for option in options)
    settings = "".join(f", {key}: {_scalar(value)}" for key, _, value in pairs)
    return f"{{name: {_scalar(name)}{settings}}}" if options else _scalar(name)


def filled(words: Sequence[str]) -> list[str]:
    """A command line whose bare switches of a plan (`--diagnostics`) say `=true` as well."""
    switches = {
        f"--{key.replace('_', '-')}" for key, info in Plan.model_fields.items() if info.annotation is bool
    }
    after = [*words[1:], ""]
    return [
        f"{word}=true" if word in switches and following not in ("true", "false") else word
        for word, following in zip(words, after, strict=True)
    ]


def _scalar(text: str) -> str:
    return text if _PLAIN.fullmatch(text) else json.dumps(text, ensure_ascii=False)


def _is_list(key: str) -> bool:
    return typing.get_origin(Plan.model_fields[key].annotation) in (tuple, list)


def with_plan_flags(command: Callable[..., None]) -> Callable[..., None]:
    """`command(..., **flags)` as a typer command with one option for every field of Plan."""
    signature = inspect.signature(command, eval_str=True)
    fixed = [item for item in signature.parameters.values() if item.kind is not item.VAR_KEYWORD]
    flags = [
        inspect.Parameter(key, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=_option(key))
        for key in Plan.model_fields
    ]

    def run(**values: Any) -> None:
        command(**values)

    run.__doc__ = command.__doc__
    run.__signature__ = signature.replace(parameters=[*fixed, *flags])  # type: ignore[attr-defined]
    run.__annotations__ = {}
    return run


def _option(key: str) -> Any:
    names = [f"--{name.replace('_', '-')}" for name in (_SINGULAR.get(key, key), key)]
    info = typer.Option(
        *dict.fromkeys(names),
        metavar="A,B,…" if _is_list(key) else "VALUE",
        help=_help(key),
        rich_help_panel="Plan",
        show_default=False,
    )
    return Annotated[str | None, info]


def _help(key: str) -> str:
    """What the key means, and the words it takes where they are few."""
    accepted = {name: phrase for name, phrase, _, _ in schema.reference(Plan)}[key]
    words = f" [{accepted}]" if accepted.startswith(("one of", "true")) else ""
    return f"{Plan.model_fields[key].description}{words}"
