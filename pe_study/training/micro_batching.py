"""How many sequences go through the model at once, and which of them go together."""

from __future__ import annotations

import logging

from pe_study.errors import UsageError

PADDING = -1  # a slot that is not there

logger = logging.getLogger(__name__)


class MicroBatching:
    """For who reads a batch in parts: fewer sequences at once where memory runs out, also after a resume."""

    micro_sequences: int
    reduced: int | None = None  # to so many sequences, where memory ran out

    def reduce_to(self, sequences: int | None) -> None:
        """Put back what `reduced` was."""
        if sequences:
            self.micro_sequences = self.reduced = min(self.micro_sequences, sequences)

    def halve(self, what: str, length: int, remedy: str) -> None:
        """Go on with half the sequences, each of `length` tokens. UsageError, ending in `remedy`, where it
        was one."""
        if self.micro_sequences == 1:
            raise UsageError(
                f"{what}: out of memory with one sequence of {length} tokens at a time; "
                f"shorten train.length, or {remedy}"
            )
        self.micro_sequences = self.reduced = -(-self.micro_sequences // 2)
        tokens = self.micro_sequences * length
        logger.warning("%s: out of memory; micro-batches now have %d tokens", what, tokens)


def micro_batches(num_slots: int, *, rank: int, num_processes: int, size: int) -> list[list[int]]:
    """The slots of one process, at most `size` at a time. Every process gets as many micro-batches of the
    same sizes, since sharded engines meet in each forward; where slots run out, PADDING stands in."""
    share = -(-num_slots // num_processes)
    mine = list(range(rank, num_slots, num_processes))
    mine += [PADDING] * (share - len(mine))
    return [mine[start : start + size] for start in range(0, share, size)]
