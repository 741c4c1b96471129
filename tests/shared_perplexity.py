"""Run by test_sharing on several processes: each prints nothing and writes its rows and its calls."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch

from pe_study.evaluators import sharing
from pe_study.evaluators.perplexity import evaluate_perplexity


def main(folder: Path, failing_rank: int) -> None:
    torch.set_num_threads(1)
    sharing.start()
    rank = torch.distributed.get_rank() if sharing.num_processes() > 1 else 0
    table = torch.randn(40, 40, generator=torch.Generator().manual_seed(0))
    calls = 0

    def model(ids: torch.Tensor) -> SimpleNamespace:
        nonlocal calls
        calls += 1
        if rank == failing_rank and ids.shape[1] > 16:
            raise torch.OutOfMemoryError("out of memory")
        return SimpleNamespace(logits=table[ids])

    generator = np.random.default_rng(0)
    documents = [generator.integers(0, 40, length) for length in (300, 170, 1, 95)]
    frame = evaluate_perplexity(
        documents, lengths=[16, 48], protocol="sliding", stride=7, model=model, batch_tokens=96
    )
    frame.assign(calls=calls).to_parquet(folder / f"{rank}.parquet")


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
