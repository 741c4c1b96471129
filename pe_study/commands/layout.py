"""Plain text fitted to a terminal: 80 columns, or what the terminal has."""

from __future__ import annotations

import shutil
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any


def hanging(head: str, text: str) -> str:
    """`head` and then `text`, whose further lines are indented to where it starts."""
    width = max(60, shutil.get_terminal_size((80, 24)).columns)
    lines = textwrap.wrap(text, width - len(head), break_on_hyphens=False, break_long_words=False) or [""]
    return "\n".join([(head + lines[0]).rstrip(), *(" " * len(head) + line for line in lines[1:])])


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Rows of the same keys as aligned columns under their names; columns that hold numbers to the right."""
    columns = {name: [name, *(str(row[name]) for row in rows)] for name in (rows[0] if rows else ())}
    widths = {name: max(map(len, cells)) for name, cells in columns.items()}
    right = {name for name in columns if any(cell[:1].isdigit() for cell in columns[name][1:])}
    lines = [
        "  ".join(
            cells[line].rjust(widths[name]) if name in right else cells[line].ljust(widths[name])
            for name, cells in columns.items()
        ).rstrip()
        for line in range(len(rows) + 1)
    ]
    return "\n".join(lines)
