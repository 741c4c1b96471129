"""The sections of a recipe: encodings, model, data and training, with the phrase and default of every key."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field, model_serializer, model_validator

from pe_study.plan import RESCALE
from pe_study.settings.leaves import Accepts, choice, either, file_name, flag, number, optional, text, whole
from pe_study.settings.schema import Section

Packing = Literal["concatenate", "isolate", "within-document"]
CHECKPOINT_TOKENIZER = "checkpoint"  # the one that belongs to init.from
TUNED = "tuned"
RATE = "a number above 0, tuned, or tuned:STUDY for what another study chose"


def _tokenizer(value: Any) -> str:
    """`bpe:16k` is `bpe:16384`; other names stand for themselves."""
    name = text("a tokenizer").parse(value)
    kind, _, size = name.partition(":")
    if kind != "bpe":
        return name
    if not re.fullmatch(r"[1-9][0-9]*k?", size):
        raise ValueError("byte, bpe:N such as bpe:16k, or the name or folder of a Hugging Face tokenizer")
    return f"bpe:{whole(258, tokens=True).parse(int(size) if size.isdigit() else size)}"


def _betas(value: Any) -> tuple[float, float]:
    beta = number(least=0, below=1)
    if not isinstance(value, list | tuple) or len(value) != 2:
        raise ValueError
    return beta.parse(value[0]), beta.parse(value[1])


def _rate(value: Any) -> float | str:
    """A number, `tuned` (by this study) or `tuned:STUDY`."""
    if isinstance(value, str) and (value == TUNED or value.startswith(f"{TUNED}:")):
        return value if value == TUNED else f"{TUNED}:{file_name('a study').parse(value[len(TUNED) + 1 :])}"
    return number(above=0).parse(value)


class InitSpec(Section):
    """Weights to go on from, instead of a draw from the seed: a study of context extension."""

    source: Annotated[str, text("a run, a folder or a hub id")] = Field(
        alias="from", description="a run directory, a checkpoint folder or a hub id"
    )
    rescale: Annotated[str, RESCALE] = Field("none", description="RoPE rescale that is trained in")
    revision: Annotated[str | None, optional(text("a revision"))] = Field(
        None, description="hub: commit, tag or branch"
    )

    @model_serializer
    def _flatten(self) -> dict[str, Any]:
        return {"from": self.source, "rescale": self.rescale, "revision": self.revision}


class EncodingSpec(Section):
    """One position encoding: every key beside these four is an option of the encoding itself."""

    name: Annotated[str, text("the name of an encoding")] = Field(description="a file of pe_study/encodings")
    label: Annotated[str, file_name("a label")] = Field(description="names its runs; default: its name")
    lr_mult: Annotated[float | str, either(number(above=0), "auto")] = Field(
        "auto", description="learning rate of its own parameters, relative to train.lr"
    )
    lr: Annotated[float | None, optional(number(above=0))] = Field(
        None, description="peak learning rate of its runs; null: train.lr"
    )
    options: dict[str, Any] = Field(default={}, description="its options, complete")

    @model_validator(mode="before")
    @classmethod
    def _split_options(cls, value: Any) -> Any:
        """A bare name is a mapping; keys that are not ours are options; the label defaults to the name."""
        given = {"name": value} if isinstance(value, str) else value
        if not isinstance(given, Mapping):
            return given
        own = {key: given[key] for key in ("name", "label", "lr_mult", "lr") if key in given}
        options = {key: option for key, option in given.items() if key not in own}
        return {"label": given.get("name")} | own | {"options": options}

    @model_serializer
    def _flatten(self) -> dict[str, Any]:
        own_rate = {} if self.lr is None else {"lr": self.lr}
        return {"name": self.name, "label": self.label, "lr_mult": self.lr_mult, **own_rate, **self.options}


class ModelSpec(Section):
    """The decoder, whatever its position encoding."""

    num_layers: Annotated[int, whole(1)] = Field(description="decoder layers")
    d_model: Annotated[int, whole(1)] = Field(description="width of the residual stream")
    num_heads: Annotated[int, whole(1)] = Field(description="query heads; divides d_model")
    num_kv_heads: Annotated[int, whole(1)] = Field(
        description="key and value heads; divides num_heads; null: num_heads"
    )
    d_ff: Annotated[int, whole(1)] = Field(description="width of the SwiGLU feed-forward layer")
    max_positions: Annotated[int, whole(1, tokens=True)] = Field(
        description="rows of a learned table; at least train.length"
    )
    initializer_range: Annotated[float, number(above=0)] = Field(
        0.02, description="standard deviation of initial weights"
    )
    qk_norm: Annotated[bool, flag()] = Field(False, description="RMSNorm on queries and keys")
    dropout: Annotated[float, number(least=0, below=1)] = Field(
        0.0, description="dropout on residual branches"
    )

    @model_validator(mode="before")
    @classmethod
    def _default_kv_heads(cls, value: Any) -> Any:
        if isinstance(value, Mapping) and value.get("num_kv_heads") is None and "num_heads" in value:
            return {**value, "num_kv_heads": value["num_heads"]}
        return value


class DataSpec(Section):
    """What is trained on."""

    corpus: Annotated[str, text("a corpus: stdlib, a file, a folder, or a hub id")] = Field(
        "stdlib", description="stdlib, a file or folder of text, JSONL or Parquet, or a hub id"
    )
    tokenizer: Annotated[
        str, Accepts("a tokenizer: byte, bpe:N, or a Hugging Face name or folder", _tokenizer)
    ] = Field(
        "byte",
        description="byte, bpe:N (trained on the corpus), a Hugging Face one, or checkpoint (with init)",
    )
    packing: Annotated[Packing, choice("concatenate", "isolate", "within-document")] = Field(
        "concatenate", description="how documents fill the training chunks"
    )
    validation_fraction: Annotated[float, number(above=0, below=1)] = Field(
        0.05, description="share of documents held out, by hash, where no validation_split is named"
    )
    text_field: Annotated[str, text("a column name")] = Field(
        "text", description="column or JSON key that holds the text"
    )
    config: Annotated[str | None, optional(text("a configuration"))] = Field(
        None, description="hub: configuration"
    )
    split: Annotated[str, text("a split")] = Field("train", description="hub: split to train on")
    validation_split: Annotated[str | None, optional(text("a split"))] = Field(
        None, description="hub: split to validate on; null: a share of `split`"
    )
    revision: Annotated[str | None, optional(text("a revision"))] = Field(
        None, description="hub: commit, tag or branch"
    )


class TrainSpec(Section):
    """How it is trained: the same for every encoding."""

    length: Annotated[int, whole(2, tokens=True)] = Field(description="tokens in a training sequence")
    batch_tokens: Annotated[int, whole(1, tokens=True)] = Field(
        description="tokens an update, over all processes"
    )
    micro_batch_tokens: Annotated[int | None, optional(whole(1, tokens=True))] = Field(
        None, description="tokens a forward pass on one process, at most; null: no limit"
    )
    steps: Annotated[int, whole(1)] = Field(description="updates")
    lr: Annotated[float | str, Accepts(RATE, _rate)] = Field(
        description="peak learning rate; tuned: what `pe-study tune` chose for each encoding"
    )
    schedule: Annotated[str, choice("cosine", "wsd", "constant")] = Field(
        "cosine", description="shape after the warmup"
    )
    warmup_steps: Annotated[int, whole(0)] = Field(0, description="updates of linear warmup")
    min_lr_ratio: Annotated[float, number(least=0, most=1)] = Field(
        0.1, description="last learning rate over the peak"
    )
    weight_decay: Annotated[float, number(least=0)] = Field(0.1, description="AdamW, on matrices only")
    betas: Annotated[tuple[float, float], Accepts("two numbers of at least 0 and below 1", _betas)] = Field(
        (0.9, 0.95), description="AdamW's two decay rates"
    )
    grad_clip: Annotated[float | None, optional(number(above=0))] = Field(
        1.0, description="largest gradient norm; null: no clipping"
    )
    mixed_precision: Annotated[str, choice("no", "bf16", "fp16")] = Field("no", description="autocast dtype")
    compile: Annotated[bool, flag()] = Field(False, description="torch.compile the model")
    kernel: Annotated[str, choice("auto", "eager", "sdpa", "flex", "flash")] = Field(
        "auto", description="attention implementation"
    )
    gradient_checkpointing: Annotated[bool, flag()] = Field(
        False, description="recompute activations in backward"
    )
    deterministic: Annotated[bool, flag()] = Field(
        False, description="refuse kernels whose gradients differ from run to run"
    )
    skip_nonfinite: Annotated[int, whole(0)] = Field(
        0, description="how many updates with a non-finite loss may be skipped"
    )
    log_every: Annotated[int, whole(1)] = Field(10, description="updates between lines of metrics.jsonl")
    eval_every: Annotated[int | None, optional(whole(1))] = Field(
        100, description="updates between validation losses; null: at the end only"
    )
    snapshot_every: Annotated[int | None, optional(whole(1))] = Field(
        100, description="updates between snapshots; null: none"
    )
    keep_snapshots: Annotated[int, whole(1)] = Field(2, description="how many of the newest snapshots stay")
    keep_at: tuple[Annotated[float, number(above=0, below=1)], ...] = Field(
        (), description="shares of the updates after which weights are kept, for `eval --over-training`"
    )
    log_with: tuple[Annotated[str, choice("tensorboard", "trackio", "wandb")], ...] = Field(
        (), description="trackers, through Accelerate"
    )

    def at(self, encoding: EncodingSpec) -> TrainSpec:
        """This section with the learning rate of an encoding that has its own."""
        return self if encoding.lr is None else self.model_copy(update={"lr": encoding.lr})

    @property
    def peak_lr(self) -> float:
        """`lr`, which is a number once `tuning.resolve` has looked it up."""
        assert not isinstance(self.lr, str), "tuned learning rates are resolved before training"
        return self.lr
