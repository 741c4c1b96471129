"""What a position encoding is: four hooks, each the identity by default, and a few traits.

Shape legend: B batch, T queries, S keys, H query heads, G key heads, K head width, D model width.
Distance is query position minus key position, >= 0 in a causal decoder.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from pe_study.errors import RescaleError
from pe_study.rescales import LOGN, Rescale, logn_factor, parse

ScoreMod = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]
"""A FlexAttention score_mod: (score, batch, head, query index, key index) -> score. Called on broadcast
index grids it is the dense oracle."""


@dataclass(frozen=True)
class Dimensions:
    """The sizes an encoding is built for; `length` is the declared length, None where none was declared."""

    d_model: int
    num_heads: int
    head_dim: int
    max_positions: int
    train_length: int
    initializer_range: float = 0.02
    length: int | None = None
    rescale: str = "none"

    @property
    def resolved_length(self) -> int:
        """The declared length, or the training length where none was declared."""
        return self.train_length if self.length is None else self.length


@dataclass(frozen=True)
class At:
    """Where a call of a hook stands: the layer, and the positions of its queries and keys.

    `q_positions_BT` and `k_positions_BS` are int64, with a leading 1 where all rows agree. `consecutive` says
    that key s lies s - (S - T) - t positions after query t in every row, so that distances follow from the
    indices alone. `memo` lives for one forward pass and is shared by its layers; `observe`, where there is
    one, is called with the queries, keys and `Scoring` of each layer.
    """

    layer: int
    q_positions_BT: Tensor
    k_positions_BS: Tensor
    length: int
    consecutive: bool = True
    memo: dict[Any, Any] = field(default_factory=dict, repr=False)
    observe: Callable[[Tensor, Tensor, Any], None] | None = None


class Rotary(NamedTuple):
    """What a rescale needs to know of a rotary encoding: how many dimensions turn, and the base."""

    dim: int
    base: float


class Encoding(nn.Module):
    """The base of every position encoding; on its own it encodes nothing.

    Traits: `is_relative` (scores depend on distances alone), `per_layer` (one instance a layer instead of one
    a model), `max_length` (None = any), `depends_on_length` (its constants are built for the declared
    length), `rotary` (None = nothing turns), `constant_beyond` (scores change by one constant a query from
    this distance on; None = never), `rescales` (the kinds of `pe_study.rescales` it takes beside `none`).
    """

    is_relative: ClassVar[bool] = False
    per_layer: ClassVar[bool] = False
    rescales: ClassVar[tuple[str, ...]] = (LOGN,)

    def __init__(self, dims: Dimensions) -> None:
        super().__init__()
        self.dims = dims
        self.rescale = parse(dims.rescale)
        if not self.takes(self.rescale):
            raise RescaleError(
                f"rescale {dims.rescale!r} needs rotary positions; this model has none "
                f"(use {', '.join(('none', *self.rescales))})"
            )

    @classmethod
    def takes(cls, spec: str | Rescale) -> bool:
        """Whether the encoding can be built under a rescale."""
        return parse(spec).kinds <= set(cls.rescales)

    def declare(self, length: int | None) -> None:
        """Rebuilds every length-dependent constant for another declared length (None: none declared)."""
        self.dims = replace(self.dims, length=length)

    @property
    def max_length(self) -> int | None:
        return None

    @property
    def rotary(self) -> Rotary | None:
        return None

    @property
    def depends_on_length(self) -> bool:
        return self.rescale.depends_on_length

    @property
    def stretch(self) -> float:
        """S of `linear:S` at the declared length; 1.0 without."""
        return self.rescale.resolved_factor(self.dims.train_length, self.dims.resolved_length)

    def score_factor(self, num_keys: Tensor) -> Tensor | None:
        """Numbers of keys that queries see (...) -> float32 (...) that their scores are multiplied by.

        max(1, ln n / ln L), L the training length (Su 2021; Chiang, Cholak 2022, arXiv:2202.12172); None: by
        nothing.
        """
        return logn_factor(num_keys, self.dims.train_length) if self.rescale.logn else None

    @property
    def constant_beyond(self) -> int | None:
        return None

    def embed(self, x_BTD: Tensor, at: At) -> Tensor:
        """(B, T, D) token embeddings -> (B, T, D)."""
        return x_BTD

    def rotate(self, q_BHTK: Tensor, k_BGTK: Tensor, at: At) -> tuple[Tensor, Tensor]:
        """Queries and the new keys, both at `at.q_positions_BT` -> (B,H,T,E), (B,G,T,E)."""
        return q_BHTK, k_BGTK

    def distance_bias(self, distance: Tensor) -> Tensor | None:
        """Integer distances (...) -> float32 (H, ...), added to the scaled score; None: no such bias."""
        return None

    def distance_slopes(self, device: torch.device) -> Tensor | None:
        """float32 (H,), where the bias is minus slope times distance and nothing else: flash-attn adds it."""
        return None

    def score_mod(self, q_BHTK: Tensor, at: At) -> ScoreMod | None:
        """The query before `rotate` -> a score_mod; derived from `distance_bias` unless overridden."""
        if not self.has_distance_bias:
            return None
        q_positions_BT, k_positions_BS = at.q_positions_BT, at.k_positions_BS
        reach = int((q_positions_BT.max() - k_positions_BS.min()).clamp(min=0)) + 1
        table_HR = self.distance_bias(torch.arange(reach, device=q_BHTK.device))
        assert table_HR is not None

        def add_bias(score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
            distance = position_at(q_positions_BT, b, q) - position_at(k_positions_BS, b, k)
            return score + table_HR[h, distance.clamp(min=0)]

        return add_bias

    def value_term(self, weights_BHTS: Tensor, rows_T: Tensor, at: At) -> Tensor:
        """What the weights of the queries `rows_T` of `at` add to the output, (B, H, T, K)."""
        raise NotImplementedError

    @property
    def has_value_term(self) -> bool:
        """Whether `value_term` adds to the output; kernels that never hold the weights cannot run it."""
        return False

    @property
    def has_distance_bias(self) -> bool:
        return type(self).distance_bias is not Encoding.distance_bias

    @property
    def has_query_bias(self) -> bool:
        """Whether scores are changed by more than a function of the distance."""
        return type(self).score_mod is not Encoding.score_mod

    def untrained_rows(self, length: int) -> int:
        """How many rows of its table a sequence of `length` tokens uses that training never reached."""
        return 0

    def auto_lr_mult(self, lr_total: float) -> float:
        """What `lr_mult: auto` means; `lr_total` is the sum of the learning rate over training."""
        return 1.0


def divided(distance: Tensor, stretch: float) -> Tensor:
    """floor(distance / S) of integer distances, the future's counted as 0; as they are for S = 1."""
    return distance if stretch == 1 else (distance.clamp(min=0).double() / stretch).floor().long()


def reach_of(edge: int, stretch: float) -> int:
    """The smallest distance whose floor(distance / S) is at least `edge`, in the arithmetic of `divided`."""
    reach = math.ceil(edge * stretch)
    while math.floor(reach / stretch) < edge:
        reach += 1
    while reach > 0 and math.floor((reach - 1) / stretch) >= edge:
        reach -= 1
    return reach


def position_at(positions_BT: Tensor, b: Tensor, index: Tensor) -> Tensor:
    """Positions at (row b, index), also where all rows share one."""
    return positions_BT[b if positions_BT.shape[0] > 1 else torch.zeros_like(b), index]
