"""The table of `pe-study eval`: a line a cell as it is measured, on a terminal only."""

from __future__ import annotations

import sys
import time
from typing import Any

import pandas as pd

from pe_study.evaluators.summary import summarise
from pe_study.rows import NO_CONTROL
from pe_study.settings.leaves import bytes_text

COLUMNS = ("run", "rescale", "protocol", "length", "perplexity", "bits/byte", "seconds")


class LiveTable:
    """A rich table on stderr that grows with `add`; nothing where stderr is no terminal."""

    def __init__(self, aggregation: str):
        self.aggregation = aggregation
        self._live: Any = None
        self._since = time.perf_counter()

    def __enter__(self) -> LiveTable:
        if sys.stderr.isatty():
            from rich.console import Console
            from rich.live import Live
            from rich.table import Table

            self._table = Table()
            for name in COLUMNS:
                self._table.add_column(name, justify="left" if name in COLUMNS[:3] else "right")
            self._live = Live(self._table, console=Console(stderr=True), vertical_overflow="visible")
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live is not None:
            self._live.stop()

    def add(self, frame: pd.DataFrame) -> None:
        """One measured cell."""
        seconds, self._since = time.perf_counter() - self._since, time.perf_counter()
        if self._live is None:
            return
        cell, row = summarise(frame, self.aggregation), frame.iloc[0]
        perplexity = f"{cell['perplexity']:.3f}" if cell["perplexity"] is not None else _why(cell)
        bits = "" if cell["bits_per_byte"] is None else f"{cell['bits_per_byte']:.3f}"
        under = "" if row["control"] == NO_CONTROL else f", {row['control']}"
        length = str(row["length"]) if pd.isna(row["length_bytes"]) else bytes_text(int(row["length_bytes"]))
        names = [str(row["run"]), f"{row['rescale']}{under}", str(row["protocol"]), length]
        self._table.add_row(*names, perplexity, bits, f"{seconds:.1f}")


def _why(cell: dict[str, Any]) -> str:
    return f"exp({cell['nll']:.0f})" if cell["overflow"] and cell["nll"] is not None else cell["status"]
