"""A process does not outlive the launcher that started it for longer than it takes to save."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from processes import TESTS

from pe_study.launchers import is_launcher

RUN = """
import os, sys, time
from pathlib import Path
from pe_study.errors import Interrupted
from pe_study.terminal import guarded
from pe_study.training.stopping import StopRequest

folder = Path(sys.argv[1])

def command(argv):
    with StopRequest() as stop:
        (folder / "process").write_text(str(os.getpid()), encoding="utf-8")
        while not stop.requested:
            time.sleep(0.05)
    raise Interrupted("stopped")

(folder / "code").write_text(str(guarded(command, [])), encoding="utf-8")
"""


def number_in(path: Path) -> int:
    """What is written there, as soon as it is."""
    end = time.monotonic() + 60
    while not path.exists() or not path.read_text(encoding="utf-8"):
        assert time.monotonic() < end, f"no {path.name}"
        time.sleep(0.05)
    return int(path.read_text(encoding="utf-8"))


@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGKILL, marks=pytest.mark.slow)])
def test_the_end_of_accelerate_launch_is_a_stop(tmp_path: Path, number: signal.Signals) -> None:
    """With one process it passes no signal on."""
    script = tmp_path / "run.py"
    script.write_text(RUN, encoding="utf-8")
    one = ["--cpu", "--num_processes", "1", "--num_machines", "1", "--mixed_precision", "no"]
    command = [sys.executable, "-m", "accelerate.commands.launch", *one, "--dynamo_backend", "no"]
    environment = {**os.environ, "PYTHONPATH": str(TESTS.parent)}
    launcher = subprocess.Popen([*command, str(script), str(tmp_path)], env=environment)
    try:
        process = number_in(tmp_path / "process")
        launcher.send_signal(number)
        assert launcher.wait(60) == -number
        try:
            assert number_in(tmp_path / "code") == 75
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
    finally:
        launcher.kill()
        launcher.wait()


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        (["/venv/bin/python", "/venv/bin/accelerate", "launch", "-m", "pe_study", "train", "x.yaml"], True),
        (["/venv/bin/python3.11", "/venv/bin/torchrun", "--nproc-per-node", "2", "train.py"], True),
        (["python", "-m", "accelerate.commands.launch", "train.py"], True),
        (["python3", "-X", "utf8", "-m", "torch.distributed.run", "train.py"], True),
        (["bash", "-c", "accelerate"], False),
        (["python", "-m", "pe_study", "train", "recipes/demo.yaml"], False),
        ([], False),
    ],
)
def test_launchers_are_known_by_their_command_line(command: list[str], expected: bool) -> None:
    """A shell, or a script of the user's, may end and leave its training behind."""
    assert is_launcher(command) is expected
