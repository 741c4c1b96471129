"""Attention memory is O(L) on the default path of every encoding."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from pe_study import encodings

SCRIPT = Path(__file__).parents[1] / "benchmarks" / "long_forward.py"


def measure(name: str, length: int) -> dict[str, Any]:
    command = [sys.executable, str(SCRIPT), "--one", name, "--lengths", str(length), "--repeats", "0"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return json.loads(done.stdout)


@pytest.mark.slow
@pytest.mark.parametrize("name", encodings.available())
def test_a_forward_pass_at_32768_takes_linear_memory(name: str) -> None:
    """4 x 128, batch 1: four times the length takes at most 4.4 times what the pass adds, and < 2 GiB.

    The scores of one head alone would be 4 GiB.
    """
    short, long = measure(name, 8192), measure(name, 32768)
    assert long["forward_bytes"] <= 4.4 * short["forward_bytes"]
    assert long["peak_bytes"] < 2 * 2**30


@pytest.mark.parametrize("name", encodings.available())
def test_no_tensor_is_quadratic(name: str) -> None:
    """The largest tensor of a pass at 8400 is at most 2.2 times that of one at 4200: a quick alarm."""
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode
    from variants import Variant, draw_ids

    class Largest(TorchDispatchMode):
        size = 0

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            out = func(*args, **(kwargs or {}))
            for x in out if isinstance(out, tuple | list) else (out,):
                if isinstance(x, torch.Tensor):
                    self.size = max(self.size, x.untyped_storage().nbytes())
            return out

    largest = []
    for length in (4200, 8400):
        model = Variant(name).model(max_positions=length, num_layers=1)
        with torch.no_grad(), Largest() as watch:
            model(draw_ids(1, length), use_cache=False, logits_to_keep=1)
        largest.append(watch.size)
    assert largest[1] <= 2.2 * largest[0]
