"""The protocols of a plan: which targets are scored, with which inputs, and the options of each."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import Field, model_serializer, model_validator

from pe_study.errors import PlanError
from pe_study.settings import leaves
from pe_study.settings.leaves import parse_length, problem
from pe_study.settings.schema import Section

PROTOCOLS = {
    "nonoverlapping": "consecutive windows of L inputs; every target once, with 1 to L inputs before it",
    "sliding": "windows in steps of `stride`; only new targets, each with more than L - stride inputs",
    "prefix": "the first L inputs of each document and nothing else (YaRN's tables)",
    "exact-context": "`num_targets` drawn targets, each alone with exactly L inputs before it",
    "fixed-target": "`anchors` blocks of the same `num_targets` targets at every L (Kazemnejad et al. 2023)",
}
_REQUIRED = object()
_PROTOCOL_OPTIONS: dict[str, dict[str, Any]] = {
    "nonoverlapping": {},
    "sliding": {"stride": _REQUIRED},
    "prefix": {},
    "exact-context": {"num_targets": 64},
    "fixed-target": {"num_targets": 200, "anchors": 1},
}


class ProtocolSpec(Section):
    """One protocol and its own options; those of other protocols stay None."""

    name: Annotated[str, leaves.choice(*PROTOCOLS)] = Field(description="which targets, with which inputs")
    stride: Annotated[int | str | None, leaves.optional(leaves.length())] = Field(
        None, description="sliding: step between windows"
    )
    num_targets: Annotated[int | None, leaves.optional(leaves.whole(1))] = Field(
        None, description="exact-context, fixed-target: targets a document or block"
    )
    anchors: Annotated[int | None, leaves.optional(leaves.whole(1))] = Field(
        None, description="fixed-target: blocks of targets a document"
    )

    @model_validator(mode="before")
    @classmethod
    def _complete(cls, value: Any) -> Any:
        """A bare name is a mapping; options that were left out get the protocol's defaults."""
        given = {"name": value} if isinstance(value, str) else value
        if not isinstance(given, Mapping) or given.get("name") not in PROTOCOLS:
            return given
        name, options = given["name"], _PROTOCOL_OPTIONS[given["name"]]
        for key in given:
            if key in cls.model_fields and key not in ("name", *options) and given[key] is not None:
                owners = [owner for owner, theirs in _PROTOCOL_OPTIONS.items() if key in theirs]
                raise problem(f"found {key} with {name}; accepted: {key} with {' or '.join(owners)}")
        for key, default in options.items():
            if default is _REQUIRED and given.get(key) is None:
                raise problem(f"{name} needs a {key}; accepted: such as {{name: {name}, {key}: 256}}")
        defaults = {key: value for key, value in options.items() if value is not _REQUIRED}
        return defaults | {key: value for key, value in given.items() if value is not None}

    def resolve(self, shortest: int, train_length: int | None) -> ProtocolSpec:
        """With the stride in tokens; PlanError where an option does not fit the shortest length.

        A stride of so many training lengths is cut to the shortest length where it is above it.
        """
        stride = resolved_length(f"protocols: {self.name}: stride", self.stride, train_length)
        if stride is not None and isinstance(self.stride, str):
            stride = min(stride, shortest)
        if stride is not None and stride > shortest:
            raise PlanError(
                f"protocols: {self.name}: found stride {stride}; "
                f"accepted: at most {shortest}, the shortest length"
            )
        if self.name == "fixed-target" and (self.num_targets or 0) >= shortest:
            raise PlanError(
                f"protocols: {self.name}: found num_targets {self.num_targets}; "
                f"accepted: fewer than {shortest}, the shortest length"
            )
        return self.model_copy(update={"stride": stride})

    def cut_to(self, resolved: ProtocolSpec, train_length: int | None) -> str | None:
        """What to say of a stride that `resolve` cut; None where it did not."""
        stride = resolved_length("stride", self.stride, train_length)
        if stride == resolved.stride:
            return None
        return (
            f"protocols: {self.name}: stride {self.stride} is {stride} tokens, cut to {resolved.stride}, the "
            "shortest length (there it is nonoverlapping)"
        )

    @model_serializer
    def _serialize(self) -> Any:
        options = {key: getattr(self, key) for key in _PROTOCOL_OPTIONS[self.name]}
        return {"name": self.name, **options} if options else self.name


def resolved_length(key: str, length: int | str | None, train_length: int | None) -> int | None:
    try:
        return None if length is None else parse_length(length, train_length)
    except ValueError as refusal:
        raise PlanError(f"{key}: {refusal}") from None
