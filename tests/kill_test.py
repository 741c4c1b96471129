"""Kill or stop trainings at random moments and compare what they end with: `python tests/kill_test.py`.

Every moment is a fresh run, killed (SIGKILL) or asked to stop (SIGTERM) after a random part of the time that
an undisturbed run takes, snapshots being written at every second step, and then started again. It has to end
with the loss trace and the weights of the undisturbed run, bit for bit. `test_kill.py` does a few of them.
"""

import argparse
import multiprocessing
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from tiny import ENCODINGS, tiny_recipe

from pe_study import runs
from pe_study.errors import PEStudyError
from pe_study.recipe import load
from pe_study.stopping import StopRequest

OVERRIDES = ("train.steps=40", "train.snapshot_every=2", "train.eval_every=10", "model.dropout=0.1")


def train(recipe: Path, root: Path, encoding: str) -> None:
    """In a process of its own: train to the end, or exit as the command line would."""
    import torch

    from pe_study.train import train_study

    torch.set_num_threads(1)
    with StopRequest() as stop:
        (root / "ready").touch()
        try:
            train_study(load(recipe, (*OVERRIDES, f"encodings=[{encoding}]")), root, stop=stop)
        except PEStudyError as error:
            sys.exit(error.exit_code)


class Trainings:
    """Trainings of one encoding, each a process forked from one that has imported everything."""

    def __init__(self, folder: Path, encoding: str) -> None:
        self.folder, self.encoding = folder, encoding
        self.recipe = tiny_recipe(folder).path
        self.context = multiprocessing.get_context("forkserver")
        self.context.set_forkserver_preload(["pe_study.train", "tiny", "kill_test"])
        self.run(folder / "warm")  # fills the cache and starts the server
        began = time.perf_counter()
        self.run(folder / "whole")
        self.seconds = time.perf_counter() - began
        self.expected = outcome(folder / "whole", encoding)

    def run(self, root: Path, *, after: float | None = None, number: int = signal.SIGKILL) -> int | None:
        """Train in `root`; send signal `number` so many seconds `after` it is ready. The exit code."""
        root.mkdir(exist_ok=True)
        (root / "ready").unlink(missing_ok=True)
        process = self.context.Process(target=train, args=(self.recipe, root, self.encoding))
        process.start()
        if after is not None:
            while process.is_alive() and not (root / "ready").exists():
                time.sleep(0.002)
            process.join(after)
            if process.is_alive():
                assert process.pid is not None
                os.kill(process.pid, number)
        process.join()
        return process.exitcode

    def disturb(self, moment: float, number: int) -> tuple[int | None, bool]:
        """Stop a fresh run at `moment` (0 … 1 of its time), start it again; its first exit code, and whether
        it ended like the undisturbed one."""
        root = self.folder / "disturbed"
        shutil.rmtree(root, ignore_errors=True)
        code = self.run(root, after=moment * self.seconds, number=number)
        assert self.run(root) == 0
        return code, outcome(root, self.encoding) == self.expected


def outcome(root: Path, encoding: str) -> tuple[Any, ...]:
    """The loss trace and the hash of the final weights."""
    folder = root / "tiny" / f"{encoding}-s0"
    keys = ("step", "loss", "lr", "grad_norm", "val_loss")
    trace = [tuple(row.get(key) for key in keys) for row in runs.read_metrics(folder)]
    return trace, runs.read_json(folder / runs.DONE)["weights_sha256"]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--moments", type=int, default=20, help="random moments of each encoding and signal")
    parser.add_argument("--encodings", nargs="+", default=list(ENCODINGS))
    parser.add_argument("--signals", nargs="+", default=["SIGKILL", "SIGTERM"])
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    draw, bad = random.Random(arguments.seed), 0
    for encoding in arguments.encodings:
        with tempfile.TemporaryDirectory() as folder:
            trainings = Trainings(Path(folder), encoding)
            for name in arguments.signals:
                moments = [draw.random() for _ in range(arguments.moments)]
                found = [trainings.disturb(moment, getattr(signal, name)) for moment in moments]
                same = sum(equal for _, equal in found)
                codes = sorted({code for code, _ in found}, key=str)
                bad += arguments.moments - same
                print(
                    f"{encoding:10} {name}: {same}/{arguments.moments} equal, exit codes {codes}", flush=True
                )
    return int(bad > 0)


if __name__ == "__main__":
    sys.exit(main())
