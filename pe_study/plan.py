"""Evaluation plans: which lengths, protocols and rescales are measured, on which text."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, field_validator
from pydantic_core import PydanticCustomError

from pe_study.errors import PEStudyError, PlanError
from pe_study.settings import leaves, overlays, schema
from pe_study.settings.leaves import Accepts, parse_length, problem
from pe_study.settings.protocols import PROTOCOLS, ProtocolSpec, resolved_length
from pe_study.settings.schema import Section
from pe_study.settings.yaml_strict import Document, Place

__all__ = ["PROTOCOLS", "RESCALE", "TASKS", "Plan", "ProtocolSpec", "bytes_of", "load_plan", "read_plan"]

TASKS = ("passkey", "needle", "distractors", "uuid", "copy")


def _rescale(value: Any) -> str:
    from pe_study import rope_scaling

    if not isinstance(value, str):
        raise ValueError
    try:
        rope_scaling.parse(value)
    except PEStudyError as refusal:
        raise problem(str(refusal)) from None
    return value


RESCALE = Accepts('a rescale such as none, "linear:4" or "yarn:auto"', _rescale)


class Plan(Section):
    """What is measured. Lengths and strides may be multiples of the training length until `resolve`."""

    name: Annotated[str, leaves.file_name("a name")] = Field(
        "default", description="names the folder of the results"
    )
    lengths: tuple[Annotated[int | str, leaves.length(in_bytes=True)], ...] = Field(
        ("1x", "1.25x", "1.5x", "2x", "3x", "4x", "6x", "8x", "16x"),
        min_length=1,
        description="window lengths, ascending: 512, 2k, 4x; or all in bytes of text: 4kB",
    )
    protocols: tuple[ProtocolSpec, ...] = Field(
        (ProtocolSpec(name="nonoverlapping"),), min_length=1, description="protocols, by name or with options"
    )
    rescales: tuple[Annotated[str, RESCALE], ...] = Field(
        ("none",), min_length=1, description="rescales; a model runs none and those that it knows"
    )
    rescale_all: Annotated[bool, leaves.flag()] = Field(
        True, description="rescale every encoding that knows the kind; false: RoPE alone"
    )
    far_context: tuple[Annotated[str, leaves.choice("own", "other-document", "shuffled")], ...] = Field(
        ("own",), min_length=1, description="controls: also replace inputs past the training length"
    )
    attention_window: Annotated[int | str | None, leaves.optional(leaves.length())] = Field(
        None, description="control, beside the plain rows: each query sees its last so many keys"
    )
    shuffle_positions: Annotated[bool, leaves.flag()] = Field(
        False, description="control, beside the plain rows: positions of a window permuted, its tokens kept"
    )
    diagnostics: Annotated[bool, leaves.flag()] = Field(
        False, description="also measure attention by position: entropy, largest score, mass by distance"
    )
    diagnostics_documents: Annotated[int, leaves.whole(1)] = Field(
        2, description="diagnostics: documents, each from its start"
    )
    diagnostics_step: Annotated[int | str, leaves.either(leaves.whole(1), "auto")] = Field(
        "auto", description="diagnostics: every so manieth query past 128; auto: about 2,048 a document"
    )
    over_training: Annotated[bool, leaves.flag()] = Field(
        False, description="also measure weights kept on the way (train.keep_at), at 1x, 2x and 8x"
    )
    corpus: Annotated[str | None, leaves.optional(leaves.text("a corpus"))] = Field(
        None, description="text to measure on; null: the validation documents"
    )
    corpus_date: Annotated[str | None, leaves.optional(leaves.date())] = Field(
        None, description="when its text was published; a checkpoint released later may have seen it"
    )
    text_field: Annotated[str, leaves.text()] = Field(
        "text", description="column or JSON key that holds the text"
    )
    unit: Annotated[str, leaves.choice("document", "stream")] = Field(
        "document", description="whole documents, or the split joined into one stream"
    )
    num_documents: Annotated[int | None, leaves.optional(leaves.whole(1))] = Field(
        24, description="how many documents; null: all that are long enough"
    )
    tokens_per_document: Annotated[int | str | None, leaves.optional(leaves.length())] = Field(
        None, description="tokens read of each document, at most (never under the longest length)"
    )
    bos: Annotated[bool | str, leaves.either(leaves.flag(), "auto")] = Field(
        "auto", description="begin each window with BOS; auto: as in training"
    )
    aggregation: Annotated[str, leaves.choice("token", "yarn")] = Field(
        "token", description="mean over targets, or of window means as YaRN does"
    )
    batch_tokens: Annotated[int, leaves.whole(1, tokens=True)] = Field(
        16384, description="tokens in one forward pass, at most"
    )
    cache: Annotated[str, leaves.choice("full", "fp8")] = Field(
        "full", description="keys and values of long contexts: as computed, or in 8 bits"
    )
    tasks: tuple[Annotated[str, leaves.choice(*TASKS)], ...] = Field(
        (), description="retrieval tasks: what is hidden in prompts of each length"
    )
    depths: tuple[Annotated[float, leaves.number(least=0, most=1)], ...] = Field(
        (0.0, 0.25, 0.5, 0.75, 1.0), min_length=1, description="where it is hidden: 0 is the beginning"
    )
    num_samples: Annotated[int, leaves.whole(1)] = Field(
        5, description="retrieval: prompts a task, length and depth"
    )
    truncation: Annotated[bool, leaves.flag()] = Field(
        True, description="also score the same targets with training-length context"
    )

    @field_validator("lengths", mode="after")
    @classmethod
    def _ascending(cls, lengths: tuple[int | str, ...]) -> tuple[int | str, ...]:
        in_bytes = [length for length in lengths if str(length).endswith("B")]
        if in_bytes:
            if len(in_bytes) < len(lengths):
                raise problem(f"found {in_bytes[0]} beside lengths in tokens; accepted: all of one kind")
            _check_ascending(bytes_of(lengths), lengths)
            return lengths
        for kind in (int, str):  # the two can only be compared once the training length is known
            same = [length for length in lengths if isinstance(length, kind)]
            _check_ascending([parse_length(length, 1_000_000) for length in same], same)
        return lengths

    @field_validator("protocols", mode="after")
    @classmethod
    def _distinct_protocols(cls, protocols: tuple[ProtocolSpec, ...]) -> tuple[ProtocolSpec, ...]:
        keys = [(protocol.name, protocol.stride) for protocol in protocols]
        _refuse_repeats(
            keys, [name if stride is None else f"{name} with stride {stride}" for name, stride in keys]
        )
        return protocols

    @field_validator("rescales", mode="after")
    @classmethod
    def _distinct_rescales(cls, rescales: tuple[str, ...]) -> tuple[str, ...]:
        from pe_study import rope_scaling

        _refuse_repeats([rope_scaling.parse(rescale) for rescale in rescales], rescales)
        return rescales

    @field_validator("far_context", mode="before")
    @classmethod
    def _one_or_more(cls, value: Any) -> Any:
        return (value,) if isinstance(value, str) else value

    @field_validator("tasks", "depths", "far_context", mode="after")
    @classmethod
    def _distinct(cls, values: tuple[Any, ...]) -> tuple[Any, ...]:
        _refuse_repeats(values, [str(value) for value in values])
        return values

    @field_validator("depths", mode="after")
    @classmethod
    def _ascending_depths(cls, depths: tuple[float, ...]) -> tuple[float, ...]:
        if list(depths) != sorted(depths):
            raise problem("found depths out of order; accepted: ascending depths")
        return depths

    @property
    def in_bytes(self) -> bool:
        """Whether its lengths are bytes of text, which become tokens when a text is read."""
        return str(self.lengths[0]).endswith("B")

    def resolve_lengths(self, train_length: int | None) -> tuple[int, ...]:
        """The lengths in tokens, ascending. PlanError where two coincide or one needs a training length."""
        if self.in_bytes:
            raise PlanError(f"lengths: found {self.lengths[0]}; accepted here: lengths in tokens")
        try:
            lengths = tuple(parse_length(length, train_length) for length in self.lengths)
            _check_ascending(lengths, self.lengths)
        except (ValueError, PydanticCustomError) as refusal:
            raise PlanError(f"lengths: {refusal}") from None
        return lengths

    def resolve(self, train_length: int | None) -> Plan:
        """The plan with every length and stride in tokens; PlanError where they do not fit each other."""
        lengths = self.resolve_lengths(train_length)
        resolved = [protocol.resolve(lengths[0], train_length) for protocol in self.protocols]
        protocols = tuple(dict.fromkeys(resolved))  # two strides may be cut to one
        tokens = resolved_length("tokens_per_document", self.tokens_per_document, train_length)
        window = resolved_length("attention_window", self.attention_window, train_length)
        if tokens is not None:
            tokens = max(tokens, lengths[-1])
        return self.model_copy(
            update={
                "lengths": lengths,
                "protocols": protocols,
                "tokens_per_document": tokens,
                "attention_window": window,
            }
        )

    def check_window(self) -> None:
        """PlanError where a resolved plan has an attention_window that holds every key at every length."""
        window, longest = self.attention_window, self.resolve_lengths(None)[-1]
        if window is not None and int(window) >= longest:
            raise PlanError(
                f"attention_window: found {window} with lengths up to {longest}, where it hides no key; "
                f"accepted: less than {longest}"
            )

    def cut_strides(self, train_length: int | None) -> list[str]:
        """What to say of strides that `resolve` cuts to the shortest length."""
        shortest = self.resolve_lengths(train_length)[0]
        said = [spec.cut_to(spec.resolve(shortest, train_length), train_length) for spec in self.protocols]
        return [line for line in said if line is not None]

    def with_overrides(self, overrides: Sequence[str]) -> Plan:
        """This plan with `key=value` overrides laid over it."""
        return load_plan(self.model_dump(mode="json"), overrides)


def load_plan(source: str | Path | Mapping[str, Any], overrides: Sequence[str] = ()) -> Plan:
    """A plan from a YAML file or a mapping, with `key=value` overrides; PlanError names file and key."""
    if isinstance(source, Mapping):
        document = Document(dict(source), {(): Place("plan")})
    else:
        document = read_plan(source, PlanError)
    for text in overrides:
        document = overlays.override(document, text, PlanError)
    return schema.validate(Plan, document, PlanError)


def read_plan(path: str | Path, error: type[PEStudyError], asked_by: str = "") -> Document:
    """A plan file and what it includes, unvalidated; its name is the file's unless it says so itself."""
    document = overlays.read(path, error, asked_by=asked_by)
    name = {"name": Path(path).stem}
    return overlays.merge(Document(name, {(): Place(str(path), 1)}), document)


def bytes_of(lengths: Sequence[int | str]) -> tuple[int, ...]:
    """`4096B` as 4096."""
    return tuple(int(str(length).removesuffix("B")) for length in lengths)


def _check_ascending(sizes: Sequence[int], names: Sequence[int | str]) -> None:
    for before, size, name in zip(sizes, sizes[1:], names[1:], strict=False):
        if size <= before:
            raise problem(
                f"found {name} at or below the length before it; accepted: ascending lengths, each once"
            )


def _refuse_repeats(keys: Sequence[Hashable], names: Sequence[str]) -> None:
    for position, key in enumerate(keys):
        if key in keys[:position]:
            raise problem(f"found {names[position]} twice; accepted: each once")
