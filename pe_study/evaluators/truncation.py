"""The truncation line: the same targets, each with its context cut to the training length.

A model that simply forgets: past the training length L0 a target sees its last L0 inputs and no more.
Sampled targets (`exact-context`, `fixed-target`) get windows of L0 inputs of their own. Elsewhere a target
with more than L0 inputs before it is read in windows that move on by L0 / 2: it sees L0 / 2 to L0 of them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cached_property
from typing import Any

import numpy as np

from pe_study.evaluators import windows
from pe_study.evaluators.jobs import DocumentSequence, Job, Sums
from pe_study.evaluators.perplexity import Measured, losses, sums_rows
from pe_study.evaluators.reading import Reading

TRUNCATION = "truncation"


class Truncation:
    """Losses with at most `limit` inputs before a target. `load` gives the model at that length."""

    def __init__(
        self,
        sequences: list[DocumentSequence],
        limit: int,
        load: Callable[[], Any],
        reading: Reading,
    ):
        self.sequences, self.limit, self.load, self.reading = sequences, limit, load, reading

    def measure(self, job: Job) -> Measured:
        """The rows of `job`, whose windows are longer than the limit; bins are those of its own contexts."""
        sums = Sums.zeros(len(job.sequences), job.length)
        if job.protocol.num_targets is not None:
            self._add_sampled(job, sums)
        else:
            self._add_windows(job, sums)
        return sums_rows(job, sums, None)

    def _add_sampled(self, job: Job, sums: Sums) -> None:
        scored = job.stop - job.start - job.first
        width = np.maximum(np.minimum(job.stop - job.start, self.limit), scored)
        cut = replace(job, start=job.stop - width, first=width - scored)
        for indices, nll_BK in losses(cut, self.load(), self.reading):
            for first in np.unique(job.first[indices]):  # windows of one shape once cut may have had several
                same = job.first[indices] == first
                self._add(job, sums, indices[same], nll_BK[same])

    def _add_windows(self, job: Job, sums: Sums) -> None:
        heads = self._heads(job)
        for indices in job.batches(self.reading.batch_tokens):
            rows = [np.concatenate([heads[int(i)], self._tail(job, int(i))]) for i in indices]
            self._add(job, sums, indices, np.stack(rows))

    def _add(self, job: Job, sums: Sums, indices: np.ndarray, nll_BK: np.ndarray) -> None:
        """Adds windows that are of one shape in `job`."""
        first = int(job.first[indices[0]])
        sums.add(job.document[indices], nll_BK, job.target_bytes(indices), first)

    def _heads(self, job: Job) -> dict[int, np.ndarray]:
        """NLL of each window's scored targets that have no more than the limit before them."""
        found = {index: np.empty(0) for index in range(len(job.start))}
        short = np.flatnonzero(job.first < self.limit)
        stop = np.minimum(job.stop, job.start + self.limit)[short]
        cut = replace(
            job, document=job.document[short], start=job.start[short], stop=stop, first=job.first[short]
        )
        for indices, nll_BK in losses(cut, self.load(), self.reading) if len(short) else ():
            found |= {int(short[i]): nll_K for i, nll_K in zip(indices, nll_BK, strict=True)}
        return found

    def _tail(self, job: Job, index: int) -> np.ndarray:
        start = max(int(job.start[index]) + self.limit, int(job.start[index] + job.first[index]))
        return self._all[job.document[index]][start : job.stop[index]]

    @cached_property
    def _all(self) -> list[np.ndarray]:
        """NLL of every target of each document, by windows of the limit that move on by half of it."""
        protocol = windows.protocol("sliding", stride=max(1, self.limit // 2))
        job = Job.build(self.sequences, protocol, self.limit, longest=self.limit)
        found = [np.empty(max(len(sequence.ids) - 1, 0)) for sequence in self.sequences]
        for indices, nll_BK in losses(job, self.load(), self.reading):
            for i, nll_K in zip(indices, nll_BK, strict=True):
                found[job.document[i]][job.start[i] + job.first[i] : job.stop[i]] = nll_K
        return found
