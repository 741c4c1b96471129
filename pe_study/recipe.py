"""Recipes: one YAML file, with includes and overrides, decides all that a study trains and measures."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field, PrivateAttr, field_validator

from pe_study.errors import PEStudyError, PlanError, RecipeError
from pe_study.plan import Plan, read_plan
from pe_study.sections import CHECKPOINT_TOKENIZER, DataSpec, EncodingSpec, InitSpec, ModelSpec, TrainSpec
from pe_study.settings import overlays, schema, yaml_strict
from pe_study.settings.leaves import file_name, parse_length, problem, whole
from pe_study.settings.schema import Section
from pe_study.settings.yaml_strict import Document, describe

if TYPE_CHECKING:
    from pe_study.encodings.base import Encoding

__all__ = [
    "DataSpec",
    "EncodingSpec",
    "InitSpec",
    "ModelSpec",
    "Recipe",
    "RecipeError",
    "RunSpec",
    "TrainSpec",
    "build_encoding",
    "load",
    "narrow",
    "parse_length",
    "reference",
    "resolved_yaml",
    "training_differences",
    "training_hash",
    "training_values",
]

# Keys of `train` that decide what is written down, not what is learned.
BOOKKEEPING = ("log_every", "eval_every", "snapshot_every", "keep_snapshots", "keep_at", "log_with")


@dataclass(frozen=True)
class RunSpec:
    """One training: an encoding and a seed."""

    encoding: EncodingSpec
    seed: int

    @property
    def run_id(self) -> str:
        """The name of the run's folder."""
        return f"{self.encoding.label}-s{self.seed}"


class Recipe(Section):
    """A study. Equal where its content is equal, wherever it was read from."""

    name: Annotated[str, file_name("a name")] = Field(description="names the folder of the study")
    seeds: tuple[Annotated[int, whole(0)], ...] = Field(
        (0,), min_length=1, description="one run each, of every encoding"
    )
    encodings: tuple[EncodingSpec, ...] = Field(min_length=1, description="names, or mappings with options")
    model: ModelSpec
    data: DataSpec = DataSpec()
    train: TrainSpec
    init: InitSpec | None = Field(None, description="weights to go on from; null: drawn from the seed")
    eval: Plan = Field(default_factory=Plan, description="a plan, or the file that holds it")

    _path: Path | None = PrivateAttr(default=None)
    _overrides: tuple[str, ...] = PrivateAttr(default=())

    @field_validator("name", mode="after")
    @classmethod
    def _not_a_results_folder(cls, name: str) -> str:
        if name.lower() == "eval":  # runs/eval holds the results of checkpoints
            raise problem('found the text "eval", the folder of checkpoint results; accepted: another name')
        return name

    @field_validator("seeds", mode="after")
    @classmethod
    def _distinct_seeds(cls, seeds: tuple[int, ...]) -> tuple[int, ...]:
        for seed in seeds:
            if seeds.count(seed) > 1:
                raise problem(f"found {seed} twice; accepted: each seed once")
        return seeds

    @property
    def path(self) -> Path | None:
        """The file it was read from."""
        return self._path

    @property
    def content(self) -> dict[str, Any]:
        """Everything it says, as plain data."""
        return self.model_dump(mode="json")

    @property
    def hash(self) -> str:
        """sha256 of the content: the same whatever the order of keys, the file, or the machine."""
        return _digest(self.content)

    def runs(self) -> tuple[RunSpec, ...]:
        """Every training, all seeds of one encoding before the next encoding."""
        return tuple(RunSpec(encoding, seed) for encoding in self.encodings for seed in self.seeds)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Recipe) and self.content == other.content

    def __hash__(self) -> int:
        return hash(self.hash)


def load(path: str | Path, overrides: Sequence[str] = ()) -> Recipe:
    """Read a recipe with what it includes, lay `key=value` overrides over it and check all of it.

    Raises RecipeError naming file, line, key path, what was found and what would be accepted.
    """
    document = overlays.read(path, RecipeError, _inline_plan)
    for override in overrides:
        document = overlays.override(document, override, RecipeError)
        document = _inline_plan(document, Path("override"))
    recipe = schema.validate(Recipe, document, RecipeError)
    _check(recipe, document)
    recipe = recipe.model_copy(update={"encodings": _resolve_encodings(recipe, document)})
    recipe._path, recipe._overrides = Path(path), tuple(overrides)
    return recipe


def resolved_yaml(recipe: Recipe) -> str:
    """The recipe with every default written out, without includes; it reloads to an equal recipe."""
    return yaml_strict.dump(recipe.content)


def narrow(recipe: Recipe, run: RunSpec) -> Recipe:
    """The recipe of one run alone: its encoding and its seed."""
    alone = {"encodings": (run.encoding.model_copy(update={"lr": None}),), "seeds": (run.seed,)}
    return recipe.model_copy(update={**alone, "train": recipe.train.at(run.encoding)})


def training_values(recipe: Recipe, run: RunSpec) -> dict[str, Any]:
    """Everything that decides the weights of a run, by dotted key: not the plan, names, logs or snapshots."""
    content = recipe.content
    train = recipe.train.at(run.encoding).model_dump(mode="json", exclude=set(BOOKKEEPING))
    own = run.encoding.model_dump(mode="json")
    encoding = {key: value for key, value in own.items() if key not in ("label", "lr")}
    sections = {key: content[key] for key in ("model", "data", "init") if content[key] is not None}
    return _flatten({"encoding": encoding, "seed": run.seed, **sections, "train": train})


def training_hash(recipe: Recipe, run: RunSpec) -> str:
    """sha256 of `training_values`."""
    return _digest(training_values(recipe, run))


def training_differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """How two `training_values` differ, a line a key: `train.lr: 0.002 -> 0.003`."""
    keys = [*old, *(key for key in new if key not in old)]
    changed = [key for key in keys if old.get(key) != new.get(key) or (key in old) != (key in new)]
    return [f"{key}: {_shown(old, key)} -> {_shown(new, key)}" for key in changed]


def reference() -> str:
    """Every key of a recipe and of a plan, as a Markdown table."""
    rows = ["| key | accepted | default | meaning |", "|---|---|---|---|"]
    rows += [
        f"| `{key}` | {accepted} | {default} | {text} |"
        for key, accepted, default, text in schema.reference(Recipe)
    ]
    return "\n".join(rows) + "\n"


def _inline_plan(document: Document, path: Path) -> Document:
    """Put the plan that `eval: FILE` names in the place of its name, replacing any included plan."""
    name = document.value.get("eval")
    if not isinstance(name, str):
        return document
    place = document.place(("eval",))
    plan = read_plan(overlays.find(name, path), RecipeError, f"{place}: eval: ")
    places = {known: at for known, at in document.places.items() if known[:1] != ("eval",)}
    places |= {("eval", *known): at for known, at in plan.places.items()}
    return Document({**document.value, "eval": plan.value}, places, document.replaced | {("eval",)})


def _resolve_encodings(recipe: Recipe, document: Document) -> tuple[EncodingSpec, ...]:
    """The encodings with every option written out; unknown names and options are refused."""
    from pe_study import encodings

    resolved = []
    for index, spec in enumerate(recipe.encodings):
        where = f"{document.latest(('encodings', index))}: encodings.{index}"
        given = encodings.validate_options(spec.name, spec.options, where)
        defaults = {key: default for key, (_, default) in encodings.options(spec.name).items()}
        resolved.append(spec.model_copy(update={"options": defaults | given}))
        build_encoding(recipe, resolved[-1], where)
    return tuple(resolved)


def build_encoding(recipe: Recipe, spec: EncodingSpec, where: str) -> Encoding:
    """The encoding without memory; RecipeError for options which do not fit the model."""
    import torch

    from pe_study import encodings

    model = recipe.model
    try:
        with torch.device("meta"):
            return encodings.build(
                spec.name,
                d_model=model.d_model,
                num_heads=model.num_heads,
                head_dim=model.d_model // model.num_heads,
                max_positions=model.max_positions,
                train_length=recipe.train.length,
                initializer_range=model.initializer_range,
                rescale=recipe.init.rescale if recipe.init else "none",
                **spec.options,
            )
    except (PEStudyError, ValueError) as refusal:
        raise RecipeError(f"{where}: {refusal}") from None


def _check(recipe: Recipe, document: Document) -> None:
    """What no key can know alone."""
    for key, holds, found, accepted in _relations(recipe):
        if not holds:
            place = document.place(tuple(int(part) if part.isdigit() else part for part in key.split(".")))
            raise RecipeError(f"{place}: {key}: found {found}; accepted: {accepted}")
    try:
        recipe.eval.resolve(recipe.train.length)
    except PlanError as refusal:
        key = str(refusal).partition(":")[0]
        raise RecipeError(f"{document.place(('eval', key))}: eval.{refusal}") from None


def _relations(recipe: Recipe) -> Iterator[tuple[str, bool, object, str]]:
    """(key, whether it fits the others, what was found, what would be accepted)."""
    model, train = recipe.model, recipe.train
    d_model, num_heads, length, batch = model.d_model, model.num_heads, train.length, train.batch_tokens
    yield "model.num_heads", d_model % num_heads == 0, num_heads, f"a divisor of d_model ({d_model})"
    kv_heads = model.num_kv_heads
    yield "model.num_kv_heads", num_heads % kv_heads == 0, kv_heads, f"a divisor of num_heads ({num_heads})"
    positions = model.max_positions
    yield "model.max_positions", positions >= length, positions, f"at least train.length ({length})"
    yield "train.batch_tokens", batch % length == 0, batch, f"a multiple of train.length ({length})"
    micro = train.micro_batch_tokens or length
    accepted = f"a multiple of train.length ({length}), at most batch_tokens ({batch})"
    yield "train.micro_batch_tokens", micro % length == 0 and micro <= batch, micro, accepted
    warmup, steps = train.warmup_steps, train.steps
    yield "train.warmup_steps", warmup <= steps, warmup, f"at most steps ({steps})"
    count, tokenizer = len(recipe.encodings), recipe.data.tokenizer
    accepted = "one encoding, that of the weights which init.from names"
    yield "encodings", recipe.init is None or count == 1, count, accepted
    accepted = "byte, bpe:N or a Hugging Face tokenizer; this word needs init.from"
    needs_init = tokenizer == CHECKPOINT_TOKENIZER
    yield "data.tokenizer", recipe.init is not None or not needs_init, describe(tokenizer), accepted
    defaults = DataSpec().model_dump()
    for key in ("text_field", "config", "split", "validation_split", "revision"):
        value = getattr(recipe.data, key)
        accepted = "the default, since corpus stdlib has no columns, configurations or splits"
        yield (
            f"data.{key}",
            recipe.data.corpus != "stdlib" or value == defaults[key],
            describe(value),
            accepted,
        )
    labels = [spec.label.casefold() for spec in recipe.encodings]
    for index, (spec, label) in enumerate(zip(recipe.encodings, labels, strict=True)):
        accepted = "a label of its own, such as {name: rope, label: rope-2}"
        yield f"encodings.{index}.label", label not in labels[:index], f'"{label}" again', accepted
        accepted = f"null, the rate that tune chose, since train.lr is {train.lr}"
        yield f"encodings.{index}.lr", spec.lr is None or not isinstance(train.lr, str), spec.lr, accepted


def _flatten(value: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, item in value.items():
        flat |= _flatten(item, f"{prefix}{key}.") if isinstance(item, Mapping) else {f"{prefix}{key}": item}
    return flat


def _digest(content: Mapping[str, Any]) -> str:
    canonical = json.dumps(content, sort_keys=True, ensure_ascii=True, allow_nan=False, separators=(",", ":"))
    return hashlib.sha256(canonical.encode()).hexdigest()


def _shown(values: Mapping[str, Any], key: str) -> str:
    return json.dumps(values[key]) if key in values else "(absent)"
