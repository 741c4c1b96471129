"""Which rows may be held against each other: the same text, cut the same way, in a unit that compares."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pandas as pd

from pe_study.reporting.captions import listed
from pe_study.tables import TRUNCATION, protocols_of

# Column -> what to call several of its values.
LEVELS = {"corpus_hash": "corpora", "unit": "units of text", "tokenizer_hash": "tokenizers"}
# The same, of what may differ from length to length and has to agree at each.
AT_A_LENGTH = {
    "stride": "strides",
    "num_documents": "numbers of documents",
    "num_tokens": "numbers of targets",
    "choice": "plans' choices of documents",
}
BOS = "beginnings (BOS on and off)"
# What tells the texts of one study apart, and how to say it; the hash only where names do not.
TEXT: dict[str, Callable[[Any], str]] = {
    "corpus": str,
    "unit": lambda unit: f"unit {unit}",
    "bos": lambda bos: "bos on" if bos == 1 else "bos off",
    "corpus_hash": lambda mark: f"text {str(mark)[:8]}",
}


def unlike(shown: pd.DataFrame, metric: str) -> str | None:
    """Why values of `metric` in one figure or table do not compare ("2 corpora"), or None where they do.

    Bits per byte compares tokenizers, loss and perplexity per token do not, nor does anything at lengths in
    tokens of several. Curves without a number count for nothing.
    """
    numbers = shown[shown[metric].notna()]
    several = numbers["tokenizer_hash"].nunique() > 1
    told = {
        what: numbers[column].nunique()
        for column, what in {**LEVELS, "bos": BOS}.items()
        if not (column == "tokenizer_hash" and metric == "bits_per_byte")
    }
    for column, what in AT_A_LENGTH.items():
        if column in numbers and not (column == "num_tokens" and several):
            known = numbers[numbers[column].notna()]
            place = [name for name in ("length", "position_lo") if name in known]  # a bin has its own targets
            told[what] = int(known.groupby(place)[column].nunique().max()) if len(known) else 0
    reasons = [f"{count} different {what}" for what, count in told.items() if count > 1]
    if several and metric == "bits_per_byte" and not _known_in_bytes(numbers):
        reasons.append(f"lengths in tokens of {numbers['tokenizer_hash'].nunique()} tokenizers")
    return " and ".join(reasons) or None


def _known_in_bytes(numbers: pd.DataFrame) -> bool:
    """Whether lengths are in bytes of text, or known in them."""
    return "length_bytes" in numbers and bool(numbers["length_bytes"].notna().all())


def warning(shown: pd.DataFrame, metric: str) -> str:
    """A sentence for a caption, or nothing."""
    reason = unlike(shown, metric)
    return f" Not like for like: {reason}; only the shape of each curve can be read." if reason else ""


def apart(rows: pd.DataFrame, beside: pd.DataFrame | None = None) -> pd.DataFrame:
    """Rows in which a study that ran one protocol on several texts is several studies, named by the text.

    beside: the plain rows of the same studies, where `rows` are others (under controls, of snapshots): the
    two then carry the same names.
    """
    columns = ["study", "protocol", *TEXT]
    frames = [
        frame[columns].drop_duplicates().astype(object) for frame in (beside, rows) if frame is not None
    ]
    kinds = pd.concat(frames, ignore_index=True).drop_duplicates()
    if len(kinds) == len(kinds.drop_duplicates(["study", "protocol"])):
        return rows
    names = kinds["study"].astype(str)
    for column, text in TEXT.items():
        here = kinds.assign(study=names).groupby("study", observed=True)
        differ = here[column].transform("nunique") > 1
        names = names.where(~differ, names + " (" + kinds[column].map(text).astype(str) + ")")
    found = rows[columns].astype(object).merge(kinds.assign(name=names), on=columns, how="left")["name"]
    return rows.assign(study=pd.Categorical(found))


def cautions(rows: pd.DataFrame) -> list[str]:
    """What several studies, or texts, on one page do not share: one line a difference."""
    columns = [
        "study",
        "protocol",
        "rescale",
        "train_length",
        "length",
        "length_bytes",
        "bos",
        "stride",
        *LEVELS,
    ]
    kinds = rows[columns].drop_duplicates().assign(study=lambda frame: frame["study"].astype(str))
    return [*_levels(kinds), *_strides(kinds), *_lengths(kinds), *_protocols(kinds), *_documents(rows)]


def _levels(kinds: pd.DataFrame) -> list[str]:
    said = []
    for protocol, part in kinds.groupby("protocol", observed=True):
        for column, what in {**LEVELS, "bos": BOS}.items():
            count = part[column].nunique()
            but = "they are not like for like"
            but = "compare them in bits per byte only" if column == "tokenizer_hash" else but
            if count > 1:
                said.append(f"{protocol}: rows are over {count} different {what}; {but}.")
    return said


def _strides(kinds: pd.DataFrame) -> list[str]:
    """Lengths at which windows moved on by different numbers of tokens."""
    sliding = kinds[kinds["stride"].notna()]
    said = []
    for protocol, part in sliding.groupby("protocol", observed=True):
        differ = part.groupby("length")["stride"].nunique() > 1
        if differ.any():
            here = part[part["length"].isin(differ.index[differ])]
            said.append(
                f"{protocol}: strides of {listed(here['stride'])} tokens at length {listed(here['length'])}; "
                "a smaller one leaves targets more context, so they are not like for like."
            )
    return said


def _lengths(kinds: pd.DataFrame) -> list[str]:
    """Studies that were evaluated at other lengths, or trained at others, protocol by protocol."""
    said = []
    for protocol, part in kinds[kinds["rescale"] != TRUNCATION].groupby("protocol", observed=True):
        lengths_in = "length" if part["length_bytes"].isna().any() else "length_bytes"
        sets = {study: listed(lengths) for study, lengths in part.groupby("study")[lengths_in]}
        if len(set(sets.values())) > 1:
            each = "; ".join(f"{study} at {lengths}" for study, lengths in sets.items())
            said.append(f"{protocol}: the studies have different lengths ({each}); compare shared ones only.")
        starts = listed(part.loc[part["train_length"] > 0, "train_length"])
        if ", " in starts:
            said.append(
                f"{protocol}: models trained at different lengths ({starts}); a length is another multiple "
                "for each."
            )
    return said


def _protocols(kinds: pd.DataFrame) -> list[str]:
    """Protocols that some studies lack; a curve of one protocol is never compared with one of another."""
    studies = set(kinds["study"])
    said = []
    for protocol in protocols_of(kinds):
        lack = sorted(studies - set(kinds.loc[kinds["protocol"] == protocol, "study"]))
        if lack:
            said.append(
                f"{protocol} was not run for {', '.join(lack)}: nothing there compares with the others."
            )
    return said


def _documents(rows: pd.DataFrame) -> list[str]:
    """Studies of one text that scored other targets of it."""
    if rows["study"].nunique() < 2:
        return []
    said = []
    keys = ["protocol", "corpus_hash", "tokenizer_hash", "unit", "bos", "stride"]
    scored = rows[(rows["num_tokens"] > 0) & (rows["rescale"] == "none")]
    for key, part in scored.groupby(keys, dropna=False, observed=True):
        if part["study"].nunique() < 2 or not str(key[1]):
            continue
        one = part.drop_duplicates(["study", "length", "document", "position_lo"])
        counts = one.groupby(["study", "length"], observed=True)["num_tokens"].sum().unstack("study")
        if (counts.nunique(axis=1) > 1).any():
            said.append(
                f"{key[0]}: the studies scored different targets of the same text, so levels do not compare."
            )
    return list(dict.fromkeys(said))
