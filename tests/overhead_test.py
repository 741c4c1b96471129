"""What the trainer costs beside the bare step: `python tests/overhead_test.py`.

The same decoder of 8 layers, width 512, is trained in turn by the plain forward, backward, clip and fused
AdamW, and by the trainer with everything on: batches, seeds, agreement, checks, a metrics line at every step.
The figures are processor time on one thread, which other programs on the machine disturb least. Snapshots
(weights and moments written, hashed, flushed to the disk, read back) are a second figure, in seconds on the
clock, since they wait for the disk: one of them shared out over the steps between two.
"""

import argparse
import statistics
import tempfile
import time
from pathlib import Path

import torch
from tiny import make_updater, tiny_recipe

from pe_study import snapshots
from pe_study.training import state
from pe_study.training.run_log import RunLog
from pe_study.training.updates import Updater

SIZES = {"num_layers": 8, "d_model": 512, "num_heads": 8, "num_kv_heads": 8, "d_ff": 1408}


def bare_step(updater: Updater, ids_BT: torch.Tensor, targets_BT: torch.Tensor) -> None:
    """What any training does: nothing of ours."""
    loss = updater.model(ids_BT, shift_labels=targets_BT, num_items_in_batch=targets_BT.numel()).loss
    loss.backward()
    torch.nn.utils.clip_grad_norm_(updater.model.parameters(), 1.0)
    updater.optimizer.optimizer.step()
    updater.optimizer.optimizer.zero_grad()


def snapshot_seconds(updater: Updater, folder: Path) -> float:
    """How long one snapshot takes on the clock: the median of three."""
    seconds = []
    for step in range(1, 4):
        began = time.perf_counter()
        optimizer = state.optimizer_state(updater.model, updater.optimizer)
        parts = {"model": state.weights(updater.model), "optimizer": optimizer}
        snapshots.save(folder, {"step": step}, parts, keep=2)
        seconds.append(time.perf_counter() - began)
    return statistics.median(seconds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=8, help="of each kind")
    parser.add_argument("--tokens", type=int, default=1024, help="a step")
    parser.add_argument("--snapshot-every", type=int, default=100, help="steps, as base.yaml says")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        sizes = (f"train.batch_tokens={arguments.tokens}", "train.steps=1000", "train.warmup_steps=10")
        recipe = tiny_recipe(folder, *(f"model.{key}={size}" for key, size in SIZES.items()), *sizes)
        updater = make_updater(recipe)
        updater.model.train()
        batch = updater.batches.batch(0)
        inputs_BT = batch.ids_BT[:, :-1]
        log = RunLog(recipe, recipe.runs()[0], folder, updater.accelerator, start=0, progress=False)
        seconds: dict[str, list[float]] = {"bare": [], "trainer": []}
        for step in range(arguments.steps + 1):

            def trainer(step: int = step) -> None:
                began = time.process_time()
                update = updater.update(step)
                log.tick(time.process_time() - began)
                log.write(log.row(step + 1, update))

            ways = {"bare": lambda: bare_step(updater, inputs_BT, batch.targets_BT), "trainer": trainer}
            for way in ways if step % 2 else reversed(ways):  # neither always meets the caches first
                began = time.process_time()
                ways[way]()
                seconds[way].append(time.process_time() - began)
        log.__exit__(None, None, None)
        saving = snapshot_seconds(updater, folder / "snapshots")
    bare, ours = seconds["bare"][1:], seconds["trainer"][1:]
    off, on = statistics.median(bare), statistics.median(ours)
    ratios = sorted(100 * (b / a - 1) for a, b in zip(bare, ours, strict=True))
    fastest = min(ours) / min(bare)
    print(f"bare {off * 1e3:.1f} ms, trainer {on * 1e3:.1f} ms a step: {100 * (on / off - 1):+.2f} %")
    print(f"steps {ratios[0]:+.2f} to {ratios[-1]:+.2f} %, fastest to fastest {100 * fastest - 100:+.2f} %")
    every = arguments.snapshot_every
    each = saving / every
    print(f"a snapshot {saving * 1e3:.0f} ms, every {every} steps: {100 * each / off:+.2f} %")


if __name__ == "__main__":
    main()
