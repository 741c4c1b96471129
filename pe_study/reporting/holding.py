"""Which printed numbers our curves can be held against, which agree, and why others cannot be."""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import pandas as pd

from pe_study.reporting.agreements import Agreement, Unheld
from pe_study.reporting.captions import joined
from pe_study.reporting.printed import same_corpus
from pe_study.reporting.published import PublishedTable
from pe_study.tables import protocols_of

NEARBY = 1.15  # two lengths count as the same multiple of the training length within this factor
MOST = 700.0  # exp of a larger one leaves float64

Held = tuple[list[Agreement], str]  # and, of none, why


def held(published: Sequence[PublishedTable], curves: pd.DataFrame) -> tuple[list[Agreement], list[Unheld]]:
    """What of the published tables these curves can be held against, and the tables that nothing can."""
    ours = curves[curves["perplexity"].notna()]
    found: list[Agreement] = []
    unheld: list[Unheld] = []
    for table in published:
        made, reason = _held(table, ours)
        found += made
        if not made:
            unheld.append(Unheld(table, reason))
    return list(dict.fromkeys(found)), unheld


def _held(table: PublishedTable, ours: pd.DataFrame) -> Held:
    if table.data["metric"] != "perplexity":
        return [], f"it prints {table.data['metric']}, our rows hold losses alone"
    kind = table.data["compare"]
    if kind not in ("ratio", "ordering"):
        return _reruns(table, ours)
    made, reason = _ratios(table, ours) if kind == "ratio" else _orderings(table, ours)
    return [*_reruns(table, ours)[0], *made], reason


# --- the same weights ------------------------------------------------------------------------------------


def _reruns(table: PublishedTable, ours: pd.DataFrame) -> Held:
    """The same checkpoints evaluated by us, a study and corpus at a time."""
    rows = [
        row for row in table.rows if row.get("checkpoint") and table.compare(row) in ("rerun", "disputed")
    ]
    names = list(dict.fromkeys(str(row["checkpoint"]) for row in rows))
    if not ours["model"].astype(str).str.lower().isin({one for name in names for one in _called(name)}).any():
        return [], f"none of its checkpoints was evaluated ({', '.join(names) or 'it names none'})"
    found = [
        _rerun(table, row, part, str(corpus))
        for row in rows
        for (_, corpus), part in _evaluated(table, row, ours).groupby(
            ["study", "corpus"], observed=True, sort=False
        )
    ]
    where = f"under {table.data.get('protocol')} at its lengths and rescales"
    return found, f"its checkpoints were not evaluated {where}"


def _called(checkpoint: str) -> tuple[str, str]:
    """The names that rows may have a checkpoint under."""
    return checkpoint.lower(), checkpoint.lower().split("/")[-1]


def _evaluated(table: PublishedTable, row: Mapping[str, Any], ours: pd.DataFrame) -> pd.DataFrame:
    """Our curves of a row's checkpoint at its lengths that have a number."""
    return ours[
        ours["model"].astype(str).str.lower().isin(_called(str(row["checkpoint"])))
        & (ours["rescale"] == (row.get("rescale") or "none"))
        & (ours["protocol"] == table.data.get("protocol"))
        & ours["length"].isin([n for n, value in row["values"].items() if value is not None])
    ]


def _rerun(table: PublishedTable, row: Mapping[str, Any], part: pd.DataFrame, corpus: str) -> Agreement:
    """Every shared length within the tolerance; not counted on text of another name."""
    kind = table.compare(row)
    shared = part.drop_duplicates("length")
    pairs = [
        (int(n), float(row["values"][n]), p)
        for n, p in zip(shared["length"], shared["perplexity"], strict=True)
    ]
    like = same_corpus(table.data.get("corpus"), corpus)
    tolerance = float(table.data.get("tolerance", 0.03))
    near = all(abs(printed - p) <= tolerance for _, printed, p in pairs)
    return Agreement(
        table=table.id,
        row=str(row["name"]),
        kind=kind,
        printed=", ".join(f"{printed:g} at {n:,}" for n, printed, _ in pairs),
        ours=", ".join(f"{p:.2f} at {n:,}" for n, _, p in pairs),
        agrees=near if kind == "rerun" and like else None,
        other_text="" if like else corpus or "unknown",
    )


# --- runs of one's own -----------------------------------------------------------------------------------


def _own(ours: pd.DataFrame, table: PublishedTable) -> pd.DataFrame:
    """Our own trained runs under the table's protocol, or under the first that was run."""
    plain = ours[(ours["rescale"] == "none") & (ours["train_length"] > 0)]
    ran = protocols_of(plain)
    protocol = table.data.get("protocol")
    return plain[plain["protocol"] == (protocol if protocol in ran else next(iter(ran), ""))]


def _ratios(table: PublishedTable, ours: pd.DataFrame) -> Held:
    """Perplexity in the printed unit at about twice the training length over that at it, in the range."""
    ratios = table.data["ratios"]
    own = _own(ours, table)
    own = own[own["encoding"].isin(list(ratios["ranges"]))]
    own, reason = _in_unit(table, own)
    found = [
        one
        for (_, label), part in own.groupby(["study", "label"], observed=True, sort=False)
        if (one := _ratio(table, str(label), part)) is not None
    ]
    times = ratios["longer"] / ratios["shorter"]
    return found, reason or f"no run of ours at its training length and at about {times:.2g} times that"


def _in_unit(table: PublishedTable, own: pd.DataFrame) -> tuple[pd.DataFrame, str]:
    """Runs with `nll_unit`, nats per unit of the printed metric; or none of them, and why.

    A ratio of perplexities depends on the unit: a byte model that reproduces a paper's 1.3 per word has 1.05
    per byte. The bytes of a unit are those of the table's corpus.
    """
    unit = table.unit or "unit that it does not name"
    corpora = sorted(set(own["corpus"].astype(str)))
    if own.empty:
        return own, "no run of ours has one of its encodings"
    own = own[[same_corpus(table.data.get("corpus"), str(name)) for name in own["corpus"]]]
    if own.empty:
        text = f"ours is of {joined(corpora)}, not of {table.data.get('corpus') or 'a corpus that it names'}"
        return own, f"{text}: a ratio of perplexities per {unit} takes the same text"
    size = table.data.get("bytes_per_unit")
    if size is None:
        return own.iloc[:0], f"it prints perplexity per {unit}, and no bytes_per_unit to bring ours to it"
    own = own[own["bits_per_byte"].notna()]
    if own.empty:
        return own, f"the bytes of our tokens are not known, so nothing of ours is per {unit}"
    return own.assign(nll_unit=own["bits_per_byte"] * math.log(2) * size), ""


def _ratio(table: PublishedTable, label: str, part: pd.DataFrame) -> Agreement | None:
    ratios = table.data["ratios"]
    times = ratios["longer"] / ratios["shorter"]
    low, high = ratios["ranges"][str(part["encoding"].iloc[0])]
    by_times = {n / t: nll for n, t, nll in part[["length", "train_length", "nll_unit"]].to_numpy()}
    near = min(by_times, key=lambda multiple: abs(math.log(multiple / times)))
    if 1.0 not in by_times or near == 1.0 or not 1 / NEARBY < near / times < NEARBY:
        return None
    value = math.exp(min(by_times[near] - by_times[1.0], MOST))
    other = _other_protocol(table, part)
    return Agreement(
        table=str(table.data.get("ratio_group") or table.id),
        row=f"{label} ({part['study'].iloc[0]})",
        kind="ratio",
        printed=f"{low:g} to {high:g} at about {times:.2g}\u00d7",
        ours=f"{value:.3g} at {near:.3g}\u00d7, at {table.data['bytes_per_unit']:g} bytes a unit"
        f"{_protocol_text(table, other)}",
        agrees=None if other else bool(low <= value <= high),
        other_protocol=other,
    )


def _orderings(table: PublishedTable, ours: pd.DataFrame) -> Held:
    """The order of two encodings at each printed multiple of the training length that ours have too."""
    rows = [row for row in table.rows if row.get("encoding") and not row.get("rescale")]
    own = _own(ours, table)
    own = own[own["encoding"].isin([row["encoding"] for row in rows])]
    if not table.data.get("train_length") or own["encoding"].nunique() < 2:
        return [], "no two of its encodings among our runs"
    groups = own.groupby(["study", "tokenizer_hash"], observed=True, sort=False)
    several = own["study"].nunique() > 1
    found = [
        one
        for (study, _), part in groups  # an order across studies or tokenizers would not be like for like
        for pair in itertools.combinations(rows, 2)
        for one in _orders(table, pair, part, f" ({study})" if several else "")
    ]
    return (
        found,
        "no two of its encodings in one study of ours at one of its multiples of the training length",
    )


def _orders(
    table: PublishedTable, pair: tuple[Mapping[str, Any], Mapping[str, Any]], own: pd.DataFrame, suffix: str
) -> Iterator[Agreement]:
    """Two printed rows, against every two labels of their encodings, at the nearest lengths of both."""
    start = table.data["train_length"]
    printed = {
        n / start: (value, pair[1]["values"][n])
        for n, value in pair[0]["values"].items()
        if None not in (value, pair[1]["values"].get(n)) and value != pair[1]["values"][n]
    }
    sides = [_by_multiple(own[own["encoding"] == row["encoding"]]) for row in pair]
    names = [str(row["name"]) for row in pair]
    corpus, other = str(own["corpus"].iloc[0]), _other_protocol(table, own)
    like = same_corpus(table.data.get("corpus"), corpus)
    for (a, left), (b, right) in itertools.product(sides[0].items(), sides[1].items()):
        labels = f" ({a} and {b})" if max(len(side) for side in sides) > 1 else ""
        for times, near in matched(printed, left.keys() & right.keys()):
            first = printed[times][0] < printed[times][1]
            below = names if first else names[::-1]
            yield Agreement(
                table=table.id,
                row=", ".join(names) + labels + suffix,
                kind="ordering",
                printed=f"{below[0]} below {below[1]} at {times:.3g}\u00d7",
                ours=f"{left[near]:.4g} and {right[near]:.4g} at {near:.3g}\u00d7"
                f"{_protocol_text(table, other)}",
                agrees=first == bool(left[near] < right[near]) if like and not other else None,
                other_text="" if like else corpus or "unknown",
                other_protocol=other,
            )


def _by_multiple(own: pd.DataFrame) -> dict[str, dict[float, float]]:
    """Perplexity by label and multiple of the training length."""
    found: dict[str, dict[float, float]] = {}
    columns = own[["label", "length", "train_length", "perplexity"]].itertuples(index=False)
    for label, length, start, value in columns:
        found.setdefault(str(label), {})[length / start] = float(value)
    return found


def matched(printed: Collection[float], ours: Collection[float]) -> list[tuple[float, float]]:
    """Pairs of multiples that are each other's nearest and within `NEARBY`: none of ours counts twice."""

    def nearest(one: float, others: Collection[float]) -> float:
        return min(sorted(others), key=lambda other: abs(math.log(other / one)))

    pairs = [(one, nearest(one, ours)) for one in printed] if ours else []
    return [
        (one, near)
        for one, near in pairs
        if 1 / NEARBY < near / one < NEARBY and nearest(near, printed) == one
    ]


def _other_protocol(table: PublishedTable, own: pd.DataFrame) -> str:
    """The protocol of ours where it is not the table's."""
    used = str(own["protocol"].iloc[0])
    return "" if used == table.data.get("protocol") else used


def _protocol_text(table: PublishedTable, other: str) -> str:
    return f" ({other}, printed: {table.data.get('protocol')})" if other else ""
