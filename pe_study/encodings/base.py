"""What a position encoding is: four hooks, each the identity by default, and a few traits.

Shape legend: B batch, T queries, S keys, H query heads, G key heads, K head width, D model width.
Distance is query position minus key position, >= 0 in a causal decoder.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from pe_study.errors import RescaleError

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
    indices alone. `memo` lives for one forward pass and is shared by its layers.
    """

    layer: int
    q_positions_BT: Tensor
    k_positions_BS: Tensor
    length: int
    consecutive: bool = True
    memo: dict[Any, Any] = field(default_factory=dict, repr=False)


class Rotary(NamedTuple):
    """What a rescale needs to know of a rotary encoding: how many dimensions turn, and the base."""

    dim: int
    base: float


class Encoding(nn.Module):
    """The base of every position encoding; on its own it encodes nothing.

    Traits: `is_relative` (scores depend on distances alone), `per_layer` (one instance a layer instead of one
    a model), `max_length` (None = any), `depends_on_length` (its constants are built for the declared
    length), `rotary` (None = nothing turns), `constant_beyond` (scores change by one constant a query from
    this distance on; None = never), `rescales` (the kinds of `pe_study.rope_scaling` it takes beside `none`).
    """

    is_relative: ClassVar[bool] = False
    per_layer: ClassVar[bool] = False
    rescales: ClassVar[tuple[str, ...]] = ()

    def __init__(self, dims: Dimensions) -> None:
        super().__init__()
        self.dims = dims
        if dims.rescale != "none" and not self.rescales:
            raise RescaleError(
                f"rescale {dims.rescale!r} needs rotary positions; this model has none (use none)"
            )

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
        return False

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


def position_at(positions_BT: Tensor, b: Tensor, index: Tensor) -> Tensor:
    """Positions at (row b, index), also where all rows share one."""
    return positions_BT[b if positions_BT.shape[0] > 1 else torch.zeros_like(b), index]
