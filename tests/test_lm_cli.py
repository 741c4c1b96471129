"""lm-eval's command line with our model, as the README types it, on a tiny local model and a local task."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from test_evaluate import llama_folder

ROOT = Path(__file__).parents[1]


def run(folder: Path, model_args: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "pe_study.lm_eval", "run", "--model", "pe_study"]
    command += ["--model_args", model_args, "--tasks", "pe_passkey,pe_passkey_choice", "--limit", "1"]
    command += ["--include_path", str(ROOT / "evals" / "tasks"), "--output_path", str(folder)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    options = {"capture_output": True, "text": True, "timeout": 300, "env": environment}
    return subprocess.run(command, check=False, **options)


@pytest.mark.slow
def test_the_command_of_the_readme(tmp_path):
    """LMH: the declared length, the rescale and the kernel are in the results that lm-eval writes."""
    source = llama_folder(tmp_path / "llama")
    done = run(tmp_path / "out", f"pretrained={source},rescale=linear:4,max_length=448")
    assert done.returncode == 0, done.stderr
    assert "pe_passkey" in done.stdout
    [path] = (tmp_path / "out").rglob("results_*.json")
    results = json.loads(path.read_text(encoding="utf-8"))
    assert results["results"]["pe_passkey"]["acc,none"] == 0.0
    config = results["config"]
    assert (config["max_length"], config["rescale"]) == (448, "linear:4")
    assert config["kernel"] == "sdpa"


@pytest.mark.slow
def test_wrong_arguments_are_one_line(tmp_path):
    source = llama_folder(tmp_path / "llama")
    for model_args, code, message in (
        (f"pretrained={source},rescale=yarnn:4,max_length=448", 2, 'did you mean "yarn"'),
        (f"pretrained={tmp_path}/no/such/model", 4, "no such file or folder"),
    ):
        done = run(tmp_path / "out", model_args)
        assert done.returncode == code, done.stderr
        [line] = [line for line in done.stderr.splitlines() if line.startswith("pe-study: ")]
        assert message in line
        assert "Traceback" not in done.stderr
