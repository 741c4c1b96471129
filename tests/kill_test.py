"""Kill or stop trainings at random moments and compare what they end with: `python tests/kill_test.py`.

Every moment is a fresh run, killed (SIGKILL) or asked to stop (SIGTERM) after a random part of the time that
an undisturbed run takes, snapshots being written at every second step, and then started again. It has to end
with the loss trace and the weights of the undisturbed run, bit for bit. One that was asked to stop has to
exit 75 after at most the update it was in and the next, with a snapshot of its last step, unless all updates
were made. `--output FILE` adds the counts to a JSON file. `test_kill.py` does a few of them.
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
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tiny import ENCODINGS, tiny_recipe

from pe_study import runs
from pe_study.errors import PEStudyError
from pe_study.recipe import load
from pe_study.training.stopping import StopRequest

STEPS, EVAL_EVERY = 40, 10
OVERRIDES = (f"train.steps={STEPS}", "train.snapshot_every=2", f"train.eval_every={EVAL_EVERY}")
OVERRIDES += ("model.dropout=0.1",)


@dataclass(frozen=True)
class Disturbed:
    """What became of a disturbed run: its exit code, the steps it had logged when the signal was sent and
    when it was gone, the step of its newest snapshot, whether it was within a save, how long it took to go,
    and whether it ended like the undisturbed one once it was started again."""

    code: int | None
    steps_before: int
    steps_after: int
    snapshot: int
    saving: bool
    seconds: float
    equal: bool

    @property
    def stopped_well(self) -> bool:
        """Whether a run that was asked to stop did so in time, with all it had done saved. 0 is for one that
        had made all its updates, or was making the last."""
        if self.code == 0:
            return self.steps_before >= STEPS - 2
        within = self.steps_after <= self.steps_before + 2  # one in progress, one whose stop came too late
        due = self.snapshot % EVAL_EVERY == 0  # left in its validation: saved, its line is logged after that
        return self.code == 75 and within and self.snapshot in (self.steps_after, self.steps_after + due)


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

    def run(self, root: Path, *, after: float | None = None, number: int = signal.SIGKILL) -> Any:
        """Train in `root`; send signal `number` so many seconds `after` it is ready. Returns the exit code,
        and the steps logged and the time at that moment."""
        root.mkdir(exist_ok=True)
        (root / "ready").unlink(missing_ok=True)
        process = self.context.Process(target=train, args=(self.recipe, root, self.encoding))
        process.start()
        steps, sent = STEPS, time.perf_counter()
        if after is not None:
            while process.is_alive() and not (root / "ready").exists():
                time.sleep(0.002)
            process.join(after)
            steps, sent = self.steps(root), time.perf_counter()
            if process.is_alive():
                assert process.pid is not None
                os.kill(process.pid, number)
        process.join()
        return process.exitcode, steps, time.perf_counter() - sent

    def steps(self, root: Path) -> int:
        """How many steps of the run in `root` are logged."""
        rows = runs.read_metrics(root / "tiny" / f"{self.encoding}-s0")
        return rows[-1]["step"] if rows else 0

    def disturb(self, moment: float, number: int) -> Disturbed:
        """Stop a fresh run at `moment` (0 … 1 of its time), then start it again."""
        root = self.folder / "disturbed"
        shutil.rmtree(root, ignore_errors=True)
        code, before, seconds = self.run(root, after=moment * self.seconds, number=number)
        saved = root / "tiny" / f"{self.encoding}-s0" / runs.SNAPSHOTS
        newest = max((int(path.name[5:]) for path in saved.glob("step_*")), default=0)
        saving, after = any(saved.glob(".step_*.tmp")), self.steps(root)
        assert self.run(root)[0] == 0
        equal = outcome(root, self.encoding) == self.expected
        return Disturbed(code, before, after, newest, saving, seconds, equal)


def outcome(root: Path, encoding: str) -> tuple[Any, ...]:
    """The loss trace and the hash of the final weights."""
    folder = root / "tiny" / f"{encoding}-s0"
    keys = ("step", "loss", "lr", "grad_norm", "val_loss")
    trace = [tuple(row.get(key) for key in keys) for row in runs.read_metrics(folder)]
    return trace, runs.read_json(folder / runs.DONE)["weights_sha256"]


def report(encoding: str, name: str, found: list[Disturbed]) -> dict[str, Any]:
    """The counts of one encoding and signal."""
    codes = [disturbed.code for disturbed in found]
    counts = {
        "encoding": encoding,
        "signal": name,
        "moments": len(found),
        "equal": sum(disturbed.equal for disturbed in found),
        "while_saving": sum(disturbed.saving for disturbed in found),
        "exit_codes": {str(code): codes.count(code) for code in sorted(set(codes), key=str)},
        "steps_before": sorted(disturbed.steps_before for disturbed in found),
    }
    if name != "SIGKILL":
        counts["stopped_well"] = sum(disturbed.stopped_well for disturbed in found)
        counts["slowest_stop_seconds"] = round(max(disturbed.seconds for disturbed in found), 2)
    return counts


def append(path: Path, counts: dict[str, Any]) -> None:
    """Put the counts in the place of those of the same encoding and signal."""
    kept = runs.read_json(path) if path.exists() else []
    key = (counts["encoding"], counts["signal"])
    runs.write_json(path, [row for row in kept if (row["encoding"], row["signal"]) != key] + [counts])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--moments", type=int, default=20, help="random moments of each encoding and signal")
    parser.add_argument("--encodings", nargs="+", default=list(ENCODINGS))
    parser.add_argument("--signals", nargs="+", default=["SIGKILL", "SIGTERM"])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, help="a JSON file that the counts are added to")
    arguments = parser.parse_args()
    bad = 0
    for encoding in arguments.encodings:
        with tempfile.TemporaryDirectory() as folder:
            trainings = Trainings(Path(folder), encoding)
            for name in arguments.signals:
                draw, number = random.Random(f"{arguments.seed} {encoding} {name}"), getattr(signal, name)
                found = [trainings.disturb(draw.random(), number) for _ in range(arguments.moments)]
                counts = report(encoding, name, found)
                bad += 2 * len(found) - counts["equal"] - counts.get("stopped_well", len(found))
                print(counts, flush=True)
                if arguments.output:
                    append(arguments.output, counts)
    return int(bad > 0)


if __name__ == "__main__":
    sys.exit(main())
