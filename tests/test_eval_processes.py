"""The whole command on two processes, started as users start it: the sums are those of one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest
from test_evaluate import llama_folder

from pe_study.rows import RETRIEVAL, read_rows

LAUNCHERS = {
    "accelerate": ["-m", "accelerate.commands.launch", "--cpu", "--num_processes", "2", "-m"],
    "torchrun": ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m"],
}
KEYS = ["run", "rescale", "protocol", "length", "document", "position_lo"]
FLAGS = {
    "lengths": "32,64",
    "protocol": "sliding:stride=8,prefix,exact-context:num_targets=5",
    "rescale": "none,yarn:auto",
    "batch-tokens": "128",
    "tasks": "copy",
    "depths": "0,1",
    "num-samples": "1",
}


def evaluated(launcher: list[str], folder: Path, source: Path, text: Path) -> subprocess.CompletedProcess:
    flags = [word for name, value in FLAGS.items() for word in (f"--{name}", value)]
    command = [sys.executable, *launcher, "pe_study", "eval", str(source), "--corpus", str(text), *flags]
    environment = {**os.environ, "ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1"}
    environment["PYTHONPATH"] = str(Path(__file__).parents[1])
    options = {"capture_output": True, "text": True, "timeout": 300, "env": environment}
    return subprocess.run([*command, "--output", str(folder)], check=False, **options)


@pytest.mark.slow
def test_two_processes_write_what_one_writes(tmp_path):
    source = llama_folder(tmp_path / "llama")
    text = tmp_path / "texts"
    text.mkdir()
    for name in "ab":
        line = f"{name}: a line of words, and some more of them. "
        (text / f"{name}.txt").write_text(line * 8, encoding="utf-8")
    alone = evaluated(["-m"], tmp_path / "one", source, text)
    assert alone.returncode == 0, alone.stderr
    one = read_rows(tmp_path / "one").sort_values(KEYS, ignore_index=True)
    assert set(one["status"]) == {"ok"}
    sums = ["nll_sum", "window_mean_sum"]
    for name, launcher in LAUNCHERS.items():
        both = evaluated(launcher, tmp_path / name, source, text)
        assert both.returncode == 0, both.stderr
        table = both.stdout.splitlines()
        assert table[:-1] == alone.stdout.splitlines()[:-1], "said once, and the same numbers"
        two = read_rows(tmp_path / name).sort_values(KEYS, ignore_index=True)
        pd.testing.assert_frame_equal(two[sums], one[sums], rtol=1e-12, atol=0)
        pd.testing.assert_frame_equal(two.drop(columns=sums), one.drop(columns=sums))
        retrieved = [read_rows(tmp_path / which, RETRIEVAL) for which in (name, "one")]
        pd.testing.assert_frame_equal(*retrieved)
