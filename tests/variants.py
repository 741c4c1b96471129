"""Every encoding that the package finds, with every choice of its options, as decoders of two narrow layers.

Weights are drawn wide, so that attention is far from uniform and a wrong position is far from invisible.
"""

from __future__ import annotations

import typing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pe_study import encodings
from pe_study.encodings.base import Encoding
from pe_study.model import CACHE_FIELD, PEStudyConfig, PEStudyForCausalLM

TRAIN_LENGTH = 16
VOCABULARY = 61
HEADS, HEAD_DIM = 4, 8
LONGROPE = Path(__file__).parent / "data" / "longrope.json"
EXTRA: dict[str, list[dict[str, Any]]] = {
    "rope": [{"fraction": 0.5}, {"base": 500000.0}],
    "t5": [{"num_buckets": 6, "max_distance": 9}],
    "shaw": [{"clip": 1}, {"clip": 24}],
}
"""Options whose values cannot be enumerated from their types."""


@dataclass(frozen=True)
class Variant:
    """One encoding with its options and rescale."""

    name: str
    options: tuple[tuple[str, Any], ...] = ()
    rescale: str = "none"

    def __str__(self) -> str:
        chosen = [f"{key}={value}" for key, value in self.options]
        rescale = [] if self.rescale == "none" else [self.rescale.split(str(LONGROPE))[0]]
        return "-".join([self.name, *chosen, *rescale])

    def encoding(self, **sizes: Any) -> Encoding:
        """On its own, its parameters drawn as a model would."""
        given: dict[str, Any] = {
            "d_model": HEADS * HEAD_DIM,
            "num_heads": HEADS,
            "head_dim": HEAD_DIM,
            "max_positions": 4 * TRAIN_LENGTH,
            "train_length": TRAIN_LENGTH,
            "rescale": self.rescale,
        }
        built = encodings.build(self.name, **{**given, **sizes}, **dict(self.options))
        generator = torch.Generator().manual_seed(7)
        with torch.no_grad():
            for parameter in built.parameters():
                parameter.normal_(0, 0.5, generator=generator)
        return built

    def config(self, **changes: Any) -> PEStudyConfig:
        given: dict[str, Any] = {
            "vocab_size": VOCABULARY,
            "num_layers": 2,
            "d_model": HEADS * HEAD_DIM,
            "num_heads": HEADS,
            "num_kv_heads": 2,
            "d_ff": 48,
            "max_positions": 4 * TRAIN_LENGTH,
            "initializer_range": 0.3,
            "encoding": {"name": self.name, **dict(self.options)},
            "train_length": TRAIN_LENGTH,
            "rescale": self.rescale,
        }
        return PEStudyConfig(**{**given, **changes})

    def model(self, **changes: Any) -> PEStudyForCausalLM:
        """In evaluation mode; `changes` are keys of its config."""
        return PEStudyForCausalLM(self.config(**changes)).eval()


def variants(name: str) -> list[Variant]:
    """The encoding with its defaults, and with each other choice of each option."""
    chosen = [Variant(name)]
    for key, (kind, default) in encodings.options(name).items():
        choices = (True, False) if kind is bool else _choices(kind)
        chosen += [Variant(name, ((key, choice),)) for choice in choices if choice != default]
    return chosen + [Variant(name, tuple(options.items())) for options in EXTRA.get(name, [])]


def rescaled(name: str) -> list[Variant]:
    """The encoding under one spec of each rescale that it takes, the factor following the declared length."""
    kinds = [kind for kind in encodings.find(name).rescales if kind != "none"]
    specs = {"longrope": f"longrope:{LONGROPE}", "dynamic": "dynamic:2", "logn": "logn"}
    both = ["linear:3+logn"] if {"linear", "logn"} <= set(kinds) else []
    return [replace(Variant(name), rescale=specs.get(kind, f"{kind}:auto")) for kind in kinds] + [
        replace(Variant(name), rescale=spec) for spec in both
    ]


def _choices(kind: Any) -> tuple[Any, ...]:
    return typing.get_args(kind) if typing.get_origin(kind) is typing.Literal else ()


def all_variants() -> list[Variant]:
    return [variant for name in encodings.available() for variant in variants(name)]


def all_rescaled() -> list[Variant]:
    return [variant for name in encodings.available() for variant in rescaled(name)]


def draw_ids(batch: int, length: int, seed: int = 0) -> Tensor:
    """(batch, length) token ids, the same at every call."""
    return torch.randint(VOCABULARY, (batch, length), generator=torch.Generator().manual_seed(seed))


def in_pieces(model: PEStudyForCausalLM, ids_BT: Tensor, sizes: tuple[int, ...]) -> Tensor:
    """The logits of ids read through the cache, `sizes` tokens at a time, the last size repeated."""
    cache, logits, sizes_left = None, [], list(sizes)
    while ids_BT.shape[1]:
        size = sizes_left.pop(0) if len(sizes_left) > 1 else sizes_left[0]
        piece, ids_BT = ids_BT[:, :size], ids_BT[:, size:]
        out = model(piece, past_key_values=cache, use_cache=True)
        cache = out[CACHE_FIELD]
        logits.append(out.logits)
    return torch.cat(logits, dim=1)
