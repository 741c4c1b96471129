"""T5's relative position buckets. Raffel et al. 2019, arXiv:1910.10683, section 2.1."""

from __future__ import annotations

from functools import lru_cache
from typing import Literal

import torch
from torch import Tensor, nn

from pe_study.encodings.base import Dimensions, Encoding, divided, reach_of
from pe_study.rescales import LOGN


@lru_cache(maxsize=64)
def bucket_edges(num_buckets: int, max_distance: int) -> tuple[int, ...]:
    """The smallest distance of each bucket, decided in integers.

    Half of the buckets hold one distance each. Bucket e + i starts at the smallest d with
    e * (max_distance / e)^(i / (B - e)) <= d, that is d^(B-e) >= e^(B-e-i) * max_distance^i.
    """
    exact = num_buckets // 2
    steps = num_buckets - exact
    edges = list(range(exact))
    for i in range(steps):
        wanted = exact ** (steps - i) * max_distance**i
        guess = max(exact, int(exact * (max_distance / exact) ** (i / steps)) - 2)
        while guess**steps < wanted:
            guess += 1
        edges.append(guess)
    return tuple(edges)


def bucket(
    distance: Tensor, num_buckets: int = 32, max_distance: int = 128, bidirectional: bool = False
) -> Tensor:
    """Distances i - j (...), any integer dtype -> int64 buckets (...).

    Causal: a negative distance (the future) counts as 0. Bidirectional: half of the buckets for each side,
    the future's above the past's, as in T5's encoder. ValueError for fewer than two buckets a side.
    """
    sides = 2 if bidirectional else 1
    if num_buckets < 2 * sides:
        raise ValueError(f"num_buckets is {num_buckets}; expected at least {2 * sides}")
    offset = torch.zeros_like(distance, dtype=torch.int64)
    if bidirectional:
        num_buckets //= 2
        offset = (distance < 0).long() * num_buckets
        distance = distance.abs()
    distance = distance.long().clamp(min=0)
    edges = torch.tensor(bucket_edges(num_buckets, max_distance), device=distance.device)
    return offset + torch.bucketize(distance, edges, right=True) - 1


class T5(Encoding):
    """One scalar for each bucket and head, shared by all layers, added to the scaled score.

    `linear:S` reads distance d as floor(d / S).
    """

    is_relative = True
    rescales = ("linear", LOGN)

    def __init__(
        self, dims: Dimensions, *, num_buckets: int = 32, max_distance: int | Literal["auto"] = "auto"
    ) -> None:
        super().__init__(dims)
        chosen = min(128, dims.train_length // 2) if max_distance == "auto" else max_distance
        if max_distance == "auto" and num_buckets >= 2:
            chosen = max(chosen, num_buckets // 2 + 1)
        if num_buckets < 2 or chosen <= num_buckets // 2:
            raise ValueError(
                f"t5 needs num_buckets >= 2 and max_distance > num_buckets / 2, found {num_buckets}, {chosen}"
            )
        self.num_buckets, self.max_distance = num_buckets, chosen
        self.weight = nn.Parameter(torch.empty(num_buckets, dims.num_heads))

    @property
    def constant_beyond(self) -> int:
        return reach_of(bucket_edges(self.num_buckets, self.max_distance)[-1], self.stretch)

    def distance_bias(self, distance: Tensor) -> Tensor:
        index = bucket(divided(distance, self.stretch), self.num_buckets, self.max_distance)
        return self.weight.float()[index].movedim(-1, 0)

    def untrained_rows(self, length: int) -> int:
        edges = set(bucket_edges(self.num_buckets, self.max_distance))  # equal ones leave all but one empty
        return sum(self.dims.train_length <= edge and reach_of(edge, self.stretch) < length for edge in edges)

    def auto_lr_mult(self, lr_total: float) -> float:
        """Adam moves a scalar by at most about the sum of lr: let it move by about 15 in all."""
        return min(max(15.0 / lr_total, 1.0), 30.0) if lr_total > 0 else 1.0
