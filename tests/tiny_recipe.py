"""A recipe small enough to load in milliseconds, for the tests of recipes."""

from pathlib import Path

import pytest

from pe_study import recipe
from pe_study.errors import RecipeError

TINY = """\
name: tiny
seeds: [0, 1]
encodings:
  - rope
  - {name: rope, label: rope-1m, base: 1000000}
  - {name: t5, num_buckets: 32, max_distance: auto}
model: {num_layers: 2, d_model: 32, num_heads: 4, num_kv_heads: 2, d_ff: 64, max_positions: 256}
data: {corpus: stdlib, tokenizer: byte}
train: {length: 64, batch_tokens: 256, steps: 4, lr: 2.0e-3, warmup_steps: 1}
eval: {lengths: [1x, 2x], protocols: [nonoverlapping]}
"""


def write(folder: Path) -> Path:
    path = folder / "tiny.yaml"
    path.write_text(TINY)
    return path


def refused(path: Path, *overrides: str) -> str:
    """The message of the RecipeError that loading gives."""
    with pytest.raises(RecipeError) as error:
        recipe.load(path, overrides)
    assert str(error.value).count("\n") <= 1
    return str(error.value).replace(str(path), path.name)
