"""Which plans measured on the same documents. A document's number is only its place in its plan's choice.

Rows are paired by the numbers of documents, so those of plans that are not known to have chosen the same ones
get numbers of their own here, before anything is paired: nothing is then computed across them.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

import numpy as np
import pandas as pd

# One choice of documents a plan: lengths in training lengths, and eligible documents, depend on these.
CHOOSES = ["study", "train_length", "corpus_hash", "tokenizer_hash", "unit", "bos"]
CELL = ["label", "rescale", "protocol", "control", "length", "seed"]
COUNTS = ["num_tokens", "num_bytes"]
EVERY_TARGET = ("nonoverlapping", "sliding")  # protocols that score each target of a document once
SAME_LOSS = 5e-3  # relative: two measurements of one cell, in other number types, agree within it
BY_CHANCE = 1e-3  # documents whose sizes would agree by chance less often than this are the same


def told_apart(rows: pd.DataFrame, *beside: pd.DataFrame) -> list[pd.DataFrame]:
    """The frames with `choice`, 0 for the first choice of documents of a study and text, and document numbers
    that are equal only for documents known to be the same.

    beside: rows under controls of the same studies. Frames that have `choice` are returned as they are.

    Two plans chose the same documents where both measured a cell (series, length, seed) with equal targets
    and, document by document, equal loss; or where the sizes of the documents tell them apart and are equal.
    """
    frames = [rows, *beside]
    if all("choice" in frame for frame in frames):
        return frames
    columns = [*CHOOSES, "plan", *CELL, "document", "nll_sum", *COUNTS]
    every = pd.concat([frame[columns].astype({"plan": str}) for frame in frames], ignore_index=True)
    step = int(every["document"].max()) + 1 if len(every) else 1
    places = [
        place
        for _, part in every[[*CHOOSES, "plan"]].groupby(CHOOSES, dropna=False, observed=True, sort=False)
        for place in _placed(every.loc[part.index])
    ]
    named = pd.DataFrame(places, columns=[*CHOOSES, "plan", "choice"])
    return [_renumbered(frame, named, step) for frame in frames]


def _renumbered(frame: pd.DataFrame, named: pd.DataFrame, step: int) -> pd.DataFrame:
    if not named["choice"].any():
        return frame.assign(choice=0)
    keys = [*CHOOSES, "plan"]
    marks = frame[keys].astype(object).merge(named.astype(dict.fromkeys(keys, object)), on=keys, how="left")
    choice = marks["choice"].to_numpy(dtype=np.int64)
    document = frame["document"].to_numpy()
    return frame.assign(document=np.where(document < 0, document, document + step * choice), choice=choice)


def _placed(rows: pd.DataFrame) -> list[tuple[object, ...]]:
    """(what chooses, plan, choice) of each plan of one study and text."""
    key = tuple(rows[CHOOSES].iloc[0])
    sizes = rows.loc[rows["num_tokens"] > 0, "plan"].value_counts()
    plans = sorted(rows["plan"].unique(), key=lambda plan: (-int(sizes.get(plan, 0)), plan))
    if len(plans) < 2 or rows["unit"].iloc[0] == "stream":  # a stream is the whole split
        return [(*key, plan, 0) for plan in plans]
    cells = {plan: _cells(rows[rows["plan"] == plan]) for plan in plans}
    choice = {plan: plan for plan in plans}
    for one, other in itertools.combinations(plans, 2):
        if choice[one] != choice[other] and _same_documents(cells[one], cells[other]):
            joined = {choice[one], choice[other]}
            first = min(joined, key=plans.index)
            choice = {plan: first if name in joined else name for plan, name in choice.items()}
    order = list(dict.fromkeys(choice.values()))
    return [(*key, plan, order.index(choice[plan])) for plan in plans]


def _cells(rows: pd.DataFrame) -> pd.DataFrame:
    """Targets, bytes and loss by cell and document."""
    scored = rows[rows["num_tokens"] > 0]
    keys = scored[[*CELL, "document"]].astype(dict.fromkeys(CELL[:4], object))
    values = scored[["nll_sum", *COUNTS]].astype("float64")
    return pd.concat([keys, values], axis=1).groupby([*CELL, "document"]).sum(min_count=1)


def _same_documents(one: pd.DataFrame, two: pd.DataFrame) -> bool:
    shared = one.merge(two, left_index=True, right_index=True, suffixes=("_one", "_two"))
    measured = [same_cells(part) for _, part in shared.groupby(["protocol", "control"])]
    if measured:
        return any(measured)
    sizes = [_sizes(cells) for cells in (one, two)]
    return any(
        _tell(sizes[0][name], sizes[1][name]) for name in EVERY_TARGET if name in sizes[0].keys() & sizes[1]
    )


def same_cells(shared: pd.DataFrame) -> bool:
    """Whether cells that two plans measured have equal counts and, up to rounding, equal losses, document by
    document: `nll_sum`, `num_tokens`, `num_bytes` with the suffixes `_one` and `_two`."""
    value = {name: shared[name].to_numpy(dtype=np.float64) for name in shared}
    counts = all(
        np.array_equal(value[f"{name}_one"], value[f"{name}_two"], equal_nan=True) for name in COUNTS
    )
    one, two = value["nll_sum_one"], value["nll_sum_two"]
    return counts and bool(
        np.isfinite(one).any() and np.isclose(one, two, rtol=SAME_LOSS, equal_nan=True).all()
    )


def _sizes(cells: pd.DataFrame) -> Mapping[str, pd.Series]:
    """By protocol, (targets, bytes) of each document, of protocols that score every target."""
    found = {}
    for name, part in cells.groupby("protocol"):
        most = part[COUNTS].groupby("document").max()
        found[str(name).partition("_")[0]] = pd.Series(
            list(zip(most["num_tokens"], most["num_bytes"].fillna(-1), strict=True)), index=most.index
        )
    return found


def _tell(one: pd.Series, two: pd.Series) -> bool:
    """Whether the documents of two plans have equal sizes that documents drawn anew would hardly have."""
    documents = one.index.intersection(two.index)
    left, right = list(one[documents]), list(two[documents])
    return left == right and coincidence(left) < BY_CHANCE


def coincidence(sizes: Sequence[object]) -> float:
    """How often as many draws from these sizes would give them in this order."""
    share = pd.Series(sizes, dtype=object).map(pd.Series(sizes, dtype=object).value_counts(normalize=True))
    return float(share.astype("float64").prod()) if len(sizes) else 1.0
