"""Where a change of the nonoverlapping loss comes from: early tokens of a window, or context."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from matplotlib.axes import Axes

from pe_study.reporting.captions import joined, listed, slug
from pe_study.reporting.charts import named_rows, of_rows
from pe_study.reporting.comparisons import Decomposition, decomposition_table
from pe_study.reporting.cuts import arrow, arrows_text, drawn_interval, reach_of, write
from pe_study.reporting.drawing import INK, MUTED, Canvas, Figure
from pe_study.reporting.palette import Look
from pe_study.stats import Interval

PALE = 0.35  # the opacity of a bar of early tokens


def decomposition_figure(
    found: Sequence[Decomposition], looks: Mapping[str, Look], suffix: str = ""
) -> Figure | None:
    """For each encoding: the change of N at the longest shared length, in early tokens and context.

    Where no length is shared by all, the one that most have; the caption names who is missing.
    """
    if not found:
        return None
    length = _shared_length(found)
    rows = {one.label: one for one in found if one.length == length}
    labels = [label for label in looks if label in rows]
    bars = [(one, *one.bounds()) for label in labels for _, one, _ in _bars(rows[label])]
    drawn = [(one.estimate, low, high) for one, low, high in bars]
    reach = reach_of([value for value, *_ in drawn], [end for _, *ends in drawn for end in ends])

    def draw(canvas: Canvas) -> None:
        axes = canvas.axes()[0]
        canvas.reserve_left(labels)
        for place, label in enumerate(labels):
            for offset, interval, alpha in _bars(rows[label]):
                _bar(axes, place + offset, interval, looks[label].light, alpha, reach, canvas.points - 1)
        axes.axvline(0, color=MUTED, linewidth=1)
        axes.set_xlim(-reach * 1.05, reach * 1.05)
        named_rows(axes, labels)
        canvas.xlabel(axes, "change of loss from the training length, nats")

    return Figure(
        name=f"decomposition{suffix and '-' + slug(suffix)}",
        title=f"Where the change at {length:,} comes from{suffix and f' ({suffix})'}",
        caption=_caption(list(rows.values()))
        + _absent(found, length, labels)
        + arrows_text("bar", drawn, reach),
        alt="; ".join(
            f"{label}: early tokens {rows[label].early.estimate:+.3f}, "
            f"context {rows[label].context.estimate:+.3f} nats"
            for label in labels
        ),
        table=decomposition_table(found),
        draw=draw,
        height=of_rows(labels, 1.0, lines=2),
        narrow_height=of_rows(labels, 1.0, narrow=True, lines=2),
    )


def _shared_length(found: Sequence[Decomposition]) -> int:
    """The longest length of those that most labels have."""
    labels_at = {
        n: len({one.label for one in found if one.length == n}) for n in {one.length for one in found}
    }
    return max(labels_at, key=lambda length: (labels_at[length], length))


def _bars(one: Decomposition) -> Iterator[tuple[float, Interval, float]]:
    """(offset from the row, interval, opacity) of the two bars of a row."""
    yield -0.2, one.early, PALE
    yield 0.2, one.context, 1.0


def _bar(
    axes: Axes, row: float, interval: Interval, colour: str, alpha: float, reach: float, points: float
) -> None:
    """A bar with its interval; one that is cut ends in an arrow, its number written on its empty side."""
    value, (low, high) = interval.estimate, interval.bounds()
    end = max(min(value, reach), -reach)
    axes.barh(row, end, height=0.34, color=colour, alpha=alpha, linewidth=0)
    if abs(value) <= reach:
        drawn_interval(axes, low, high, row, reach, INK, 1)
        return
    arrow(axes, end, row, INK)
    write(axes, value, low, high, row, points)


def _caption(here: Sequence[Decomposition]) -> str:
    starts = listed(one.train_length for one in here)
    both = {one.num_seeds == 1 for one in here}
    over = "documents, these runs" if both == {True} else "seeds and documents"
    over = "seeds and documents, or documents alone where there is one seed" if len(both) > 1 else over
    same = {one.same_range for one in here} == {True}
    targets = "one index range" if same else "whole documents for N, the last part of them for X"
    return (
        f"Change of the nonoverlapping loss from the training length {starts}, in two parts. Pale, above: "
        "early tokens of a window (nonoverlapping minus exact-context; longer windows have fewer of them). "
        "Full, below: what more context does to a target (exact-context). Black: 95 % intervals "
        f"({over}); {targets}."
    )


def _absent(found: Sequence[Decomposition], length: int, labels: Sequence[str]) -> str:
    """Who has no numbers at this length, and whether others have longer ones."""
    missing = [label for label in dict.fromkeys(one.label for one in found) if label not in labels]
    said = f" Not measured at {length:,}: {joined(missing)}." if missing else ""
    longer = listed(one.length for one in found if one.length > length)
    return said + (f" At {longer}, which not all have: in the table." if longer else "")
