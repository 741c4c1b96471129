"""What a run says while it trains: `metrics.jsonl`, a progress bar, and Accelerate's trackers."""

from __future__ import annotations

import contextlib
import math
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from accelerate import Accelerator
from accelerate.tracking import get_available_trackers
from tqdm import tqdm

from pe_study import runs
from pe_study.errors import RecipeError
from pe_study.recipe import Recipe, RunSpec, training_values
from pe_study.training.updates import Update

SCALAR = (bool, int, float, str)  # what every tracker takes as a setting


class RunLog:
    """Open the logs of one run on the main process; elsewhere it says nothing."""

    def __init__(
        self,
        recipe: Recipe,
        run: RunSpec,
        folder: Path,
        accelerator: Accelerator,
        *,
        start: int,
        progress: bool,
        due: bool = False,
    ) -> None:
        """`start` updates were made before; `due` says that the line of the last one is not written yet."""
        self.recipe, self.accelerator = recipe, accelerator
        self._main = accelerator.is_main_process
        self._metrics = runs.Metrics(folder, after_step=start - due) if self._main else None
        self._bar = tqdm(
            total=recipe.train.steps,
            initial=start,
            desc=run.run_id,
            unit="step",
            file=sys.stderr,
            disable=not (progress and self._main),
            dynamic_ncols=True,
        )
        self._steps, self._seconds = 0, 0.0  # since the last line
        if recipe.train.log_with:
            self._start_trackers(run, folder)

    def _start_trackers(self, run: RunSpec, folder: Path) -> None:
        """Project: the study; run: the run. What says so on stdout says it on stderr."""
        wandb = {"name": run.run_id, "dir": str(folder), "mode": os.environ.get("WANDB_MODE", "offline")}
        settings = {"wandb": wandb, "trackio": {"name": run.run_id}}
        values = training_values(self.recipe, run)
        config = {key: value if isinstance(value, SCALAR) else str(value) for key, value in values.items()}
        with contextlib.redirect_stdout(sys.stderr):
            self.accelerator.init_trackers(self.recipe.name, config=config, init_kwargs=settings)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.close()
        if self._metrics:
            self._metrics.close()
        with contextlib.redirect_stdout(sys.stderr):
            for tracker in self.accelerator.trackers:
                tracker.finish()
        self.accelerator.trackers = []

    def row(self, step: int, update: Update) -> dict[str, Any]:
        """The line of `step` (counted from 1), which may be written now or in a later session."""
        return {
            "step": step,
            "tokens": step * self.recipe.train.batch_tokens,
            "loss": update.loss if math.isfinite(update.loss) else None,
            "lr": update.lr,
            "grad_norm": update.grad_norm if math.isfinite(update.grad_norm) else None,
            "tokens_per_second": self._speed(),
            "num_processes": self.accelerator.num_processes,
        }

    def write(self, row: Mapping[str, Any]) -> None:
        """Write a line to `metrics.jsonl`, the trackers and the bar."""
        if self._metrics:
            self._metrics.append(row)
        known = {key: value for key, value in row.items() if key != "step" and value is not None}
        self.accelerator.log(known, step=row["step"])
        loss = math.nan if row["loss"] is None else row["loss"]
        said = f"loss {loss:.3f}, {row['tokens_per_second']:,.0f} tokens/s"
        self._bar.set_postfix_str(said, refresh=False)

    def tick(self, seconds: float) -> None:
        """Count one update, which took `seconds`."""
        self._steps, self._seconds = self._steps + 1, self._seconds + seconds
        self._bar.update()

    def _speed(self) -> float:
        """Tokens a second since the last line, validation and snapshots not counted."""
        speed = self._steps * self.recipe.train.batch_tokens / self._seconds
        self._steps, self._seconds = 0, 0.0
        return round(speed, 1)


def check_trackers(recipe: Recipe) -> None:
    """RecipeError for a tracker that is not installed, which Accelerate would leave out without a word."""
    for name in recipe.train.log_with:
        if name not in [str(tracker) for tracker in get_available_trackers()]:
            raise RecipeError(
                f"{recipe.path}: train.log_with: {name} is not installed (pip install 'pe-study[trackers]')"
            )
