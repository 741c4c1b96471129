"""What a control changes: its loss minus the plain one on the same documents, with an interval."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import pandas as pd

from pe_study.reporting.losses import contrast, difference, read_losses
from pe_study.stats import Interval


@dataclass(frozen=True)
class Effect:
    """Control minus plain of one label at the longest length that has both, in nats."""

    study: str
    label: str
    control: str
    length: int
    interval: Interval
    num_seeds: int


def effects(
    rows: pd.DataFrame, controls: pd.DataFrame, protocol: str, measured: pd.DataFrame | None = None
) -> list[Effect]:
    """Every unrescaled label and control under one protocol, over the seeds and documents of both sides.

    measured: plain rows of every plan, where `rows` are united: a control stands beside those of its own
    plan, which chose its documents. Where both sides share no document, or the loss is not finite, the
    interval's estimate is nan.
    """
    found = []
    own = rows[(rows["protocol"] == protocol) & (rows["rescale"] == "none")]
    changed = controls[(controls["protocol"] == protocol) & (controls["rescale"] == "none")]
    keys = ["study", "label", "control"]
    for (study, label, control), part in changed.groupby(keys, observed=True, sort=False):
        plain = own[(own["study"] == study) & (own["label"] == label)]
        shared = set(part.loc[part["num_tokens"] > 0, "length"]) & set(plain["length"])
        if not shared:
            continue
        length = int(max(shared))
        part, plain = part[part["length"] == length], plain[plain["length"] == length]
        sides = [read_losses(side) for side in (part, _of_its_plan(plain, part, measured))]
        change = contrast(difference(sides[0].at(length), sides[1].at(length)), sides[0].tokens)
        interval = Interval(math.nan, num=0) if change is None else change.interval()
        num_seeds = 0 if change is None else len(change.seeds)
        found.append(Effect(str(study), str(label), str(control), length, interval, num_seeds))
    return found


def _of_its_plan(plain: pd.DataFrame, part: pd.DataFrame, measured: pd.DataFrame | None) -> pd.DataFrame:
    """The plain seeds that the plan of a control measured itself, where it did; else the united ones."""
    if measured is None:
        return plain
    cell = ["study", "label", "rescale", "protocol", "length", "seed", "plan"]
    wanted = part[cell].astype(object).drop_duplicates()
    found = measured[measured["length"] == part["length"].iloc[0]]
    marks = found[cell].astype(object).merge(wanted, on=cell, how="left", indicator=True)["_merge"]
    own = found[(marks == "both").to_numpy()]
    return own if len(own) else plain


def sentences(found: Sequence[Effect], protocol: str = "") -> list[str]:
    """A sentence a study, control and length; `protocol` is named where it is not that of the page."""
    said = []
    several = len({one.study for one in found}) > 1
    for study, control, length in dict.fromkeys((one.study, one.control, one.length) for one in found):
        group = [one for one in found if (one.study, one.control, one.length) == (study, control, length)]
        values = "; ".join(f"{one.label} {_text(one.interval)}" for one in group)
        where = (f" in {study}" if several else "") + (f" under {protocol}" if protocol else "")
        runs = ", in these runs," if max(one.num_seeds for one in group) == 1 else ""
        said.append(
            f"**{control}**{where} at {length:,} changes the loss{runs} by {values} nats. Above zero: what "
            "it takes away was used; below: it did harm; an interval around zero settles neither."
        )
    return said


def _text(interval: Interval) -> str:
    if math.isnan(interval.estimate):
        return "not known, without a finite loss of one seed and document on both sides"
    low, high = interval.bounds()
    bounds = f" [{low:+.3f}, {high:+.3f}]" if low == low else ""
    return f"{interval.estimate:+.3f}{bounds}"
