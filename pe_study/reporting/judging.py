"""By which protocol each series is judged, and encodings are compared: `exact-context` where it was run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pandas as pd

from pe_study.reporting.verdicts import FAMILY, PREFERRED, Verdict, verdicts
from pe_study.tables import TRUNCATION, protocols_of

ONE_TEXT = [name for name in FAMILY if name != "protocol"]  # one study on one text


def preferred(rows: pd.DataFrame) -> list[str]:
    """The protocols with the same targets at every length that were run, `exact-context` first."""
    return in_order(protocols_of(rows))


def in_order(ran: Sequence[str]) -> list[str]:
    """Those of some protocols that a series can be judged by, the first choice first."""
    return [name for wanted in PREFERRED for name in ran if name.partition("_")[0] == wanted]


def protocol_order(rows: pd.DataFrame) -> list[str]:
    """The same, the one of most unrescaled series first: what a page shows and encodings are compared by."""
    names = preferred(rows)
    plain = rows.loc[rows["rescale"] == "none", ["study", "label", "protocol"]].drop_duplicates()
    series = plain["protocol"].astype(str).value_counts()
    main = max(names, key=lambda name: series.get(name, 0), default=None)
    return sorted(names, key=lambda name: name != main)


def protocol_for(rows: pd.DataFrame) -> str | None:
    """The first of `protocol_order`."""
    return next(iter(protocol_order(rows)), None)


def judge(rows: pd.DataFrame) -> list[Verdict]:
    """A verdict for every series by the first protocol of `preferred` that measured it.

    A label and its rescales are judged by one protocol; rescales that ran under another alone are judged by
    that one, beside the unrescaled series once more (`aside`).
    """
    every: list[Verdict] = []
    for protocol in preferred(rows):
        done = {(v.study, v.train_length, v.label, v.rescale) for v in every}
        ran = rows.loc[rows["protocol"] == protocol, ["study", "train_length", "label", "rescale"]]
        if {*ran[ran["rescale"] != TRUNCATION].drop_duplicates().itertuples(index=False, name=None)} - done:
            every += verdicts(rows, protocol)
    own: dict[tuple[str, int, str, str], str] = {}
    for verdict in sorted(every, key=lambda verdict: verdict.rescale != "none"):
        own.setdefault(_who(verdict), verdict.protocol)
    found = [v for v in every if v.protocol == own[_who(v)]]
    chosen = {(*_who(v), v.rescale) for v in found}
    for verdict in every:
        if (*_who(verdict), verdict.rescale) not in chosen:
            chosen.add((*_who(verdict), verdict.rescale))
            found.append(verdict)
    wanted = {(*_who(v), v.protocol) for v in found if v.protocol != own[_who(v)]}
    plain = [v for v in every if v.rescale == "none" and (*_who(v), v.protocol) in wanted]
    return [*found, *(replace(v, aside=True) for v in plain)]


def _who(verdict: Verdict) -> tuple[str, int, str, str]:
    return verdict.study, verdict.train_length, verdict.label, verdict.encoding
