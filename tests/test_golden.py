"""The losses of the first twenty updates of each encoding on a CPU: a change that should not change numbers
must not. After one that should: `python tests/test_golden.py` writes them anew, and the commit says why."""

import json
import sys
import tempfile
from pathlib import Path

import pytest
from tiny import ENCODINGS, make_updater, tiny_recipe

GOLDEN = Path(__file__).parent / "golden"
OVERRIDES = ("train.steps=20", "train.warmup_steps=5", "train.length=32", "train.batch_tokens=256")


def losses(folder: Path, encoding: str) -> list[float]:
    updater = make_updater(tiny_recipe(folder, *OVERRIDES, encodings=(encoding,)))
    return [updater.update(step).loss for step in range(20)]


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_losses_are_those_of_before(tmp_path: Path, encoding: str) -> None:
    expected = json.loads((GOLDEN / f"{encoding}.json").read_text(encoding="utf-8"))
    assert losses(tmp_path, encoding) == pytest.approx(expected, rel=1e-4)  # processors round differently


if __name__ == "__main__":
    for name in sys.argv[1:] or ENCODINGS:
        with tempfile.TemporaryDirectory() as scratch:
            text = json.dumps(losses(Path(scratch), name), indent=1)
        (GOLDEN / f"{name}.json").write_text(text + "\n", encoding="utf-8")
