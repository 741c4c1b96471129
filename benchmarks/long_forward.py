"""Peak memory and time of one forward pass at long lengths: every encoding, relative to rope.

    python benchmarks/long_forward.py [--lengths 8192,32768] [--encodings rope,alibi] [--repeats 3]

Each measurement is a process of its own, since a process's peak memory never falls: a decoder of 4 x 128,
batch 1, float32, no cache, logits of the last token alone. Prints a line of JSON each, with
seconds (the fastest of the repeats) and, of one pass more, the peak above what the process held before it.

Two CPU cores, 32768 tokens: rope 16.0 s, alibi 1.10 and t5 1.09 times as long, shaw 1.48 times (29 November
2026); alibi 220 MB, 56 MB at 8192 (30 November).
"""

from __future__ import annotations

import argparse
import ctypes
import json
import subprocess
import sys
import time
from typing import Any

SIZES = {"num_layers": 4, "d_model": 128, "num_heads": 4, "num_kv_heads": 4, "d_ff": 384}


def measure(encoding: str, length: int, repeats: int) -> dict[str, Any]:
    """One encoding at one length, in this process."""
    import torch

    from pe_study.memory import held_bytes, peak_memory_bytes, reset_peak_memory
    from pe_study.model import PEStudyConfig, PEStudyForCausalLM

    config = PEStudyConfig(
        **SIZES, encoding={"name": encoding}, max_positions=length, train_length=512, vocab_size=257
    )
    model = PEStudyForCausalLM(config).eval()
    ids = torch.randint(257, (1, length), generator=torch.Generator().manual_seed(0))
    seconds = []
    with torch.no_grad():
        model(ids[:, :600], logits_to_keep=1, use_cache=False)
        for _ in range(repeats):
            start = time.perf_counter()
            model(ids, logits_to_keep=1, use_cache=False)
            seconds.append(time.perf_counter() - start)
        _free_at_once()
        before = held_bytes()
        reset_peak_memory(model.device)
        model(ids, logits_to_keep=1, use_cache=False)
    peak = peak_memory_bytes(model.device)
    return {
        "encoding": encoding,
        "length": length,
        "threads": torch.get_num_threads(),
        "seconds": min(seconds, default=None),
        "peak_bytes": peak,
        "model_bytes": before,
        "forward_bytes": peak - before,
    }


def _free_at_once() -> None:
    """From here on freed tensors leave the process, so that its peak is theirs: how the allocator happens to
    have cut its heap moves it by a third otherwise, at one length and not at another."""
    mallopt, mmap_threshold = getattr(ctypes.CDLL(None), "mallopt", None), -3
    if mallopt is not None:  # glibc's
        mallopt(mmap_threshold, 1 << 17)


def in_own_process(encoding: str, length: int, repeats: int) -> dict[str, Any]:
    command = [
        sys.executable,
        __file__,
        "--one",
        encoding,
        "--lengths",
        str(length),
        "--repeats",
        str(repeats),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return json.loads(done.stdout)


def main() -> None:
    from pe_study import encodings

    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--lengths", default="8192,32768")
    parser.add_argument("--encodings", default=",".join(encodings.available()))
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--one", help=argparse.SUPPRESS)
    given = parser.parse_args()
    lengths = [int(length) for length in given.lengths.split(",")]
    if given.one:
        print(json.dumps(measure(given.one, lengths[0], given.repeats)))
        return
    for length in lengths:
        base = in_own_process("rope", length, given.repeats)
        for name in given.encodings.split(","):
            row = base if name == "rope" else in_own_process(name, length, given.repeats)
            row["time_relative_to_rope"] = row["seconds"] / base["seconds"]
            print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
