"""The words around a figure: caption (protocol, corpus, n, training length), absences, alternative text."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

import pandas as pd

from pe_study.reporting.curves import number

SHORT = {"perplexity": "perplexity", "bits_per_byte": "bits per byte", "nll": "loss"}


def caption(shown: pd.DataFrame, protocol: str, *, bands: bool = True) -> str:
    """ "Protocol …; corpus …, 24 documents; trained at length 64; n = 3 seeds; …"; `bands` explains them."""
    corpora = ", ".join(sorted({str(name) for name in shown["corpus"]})) or "unknown corpus"
    documents = shown["num_documents"].max()
    how_many = counted(f"{int(documents):,}", "document") if documents > 0 else "documents not counted"
    return (
        f"Protocol {protocol}{_stride(shown, protocol)}; corpus {corpora}, {how_many}; "
        f"{trained(shown['train_length'])}; {seeds_text(shown, bands=bands)}."
    )


def counted(number: str, noun: str) -> str:
    """ "1 document", "2 to 3 documents"."""
    return f"{number} {noun}" if number == "1" else f"{number} {noun}s"


def trained(lengths: Iterable[float]) -> str:
    """ "trained at length 64", where that is known."""
    known = listed(length for length in lengths if length > 0)
    return f"trained at length {known}" if known else "training length not known"


def _stride(shown: pd.DataFrame, protocol: str) -> str:
    strides = sorted(set(shown["stride"].dropna()))
    if "sliding" not in protocol or not strides:
        return ""
    text = listed(strides) if len(strides) < 4 else f"{int(strides[0]):,} to {int(strides[-1]):,}"
    return f" (stride {text})"


def seeds_text(shown: pd.DataFrame, *, bands: bool) -> str:
    """How many seeds a figure rests on, and what its bands are."""
    seeds = shown.groupby(["study", "label"], observed=True)["num_seeds"].max()
    low, high = int(seeds.min()), int(seeds.max())
    if high <= 1:
        return "n = 1 seed each" + (", so no bands" if bands else "")
    seeds_each = f"n = {high} seeds" if low == high else f"n = {low} to {high} seeds"
    return seeds_each + (
        "; line: mean, band: 95 % t interval over seeds, the documents held fixed" if bands else ""
    )


def absences(shown: pd.DataFrame, metric: str) -> str:
    """What the figure cannot show: cells with a status instead of a number, perplexities past float64."""
    lost = shown[shown["status"] != "ok"]
    said = [
        f" {label}: {status} at {listed(part['length'])}."
        for (label, status), part in lost.groupby([named(lost), "status"], observed=True, sort=False)
    ]
    if metric == "perplexity" and shown["overflow"].any():
        said.append(" A perplexity too large for a 64-bit number leaves at the top edge; its loss is known.")
    return "".join(said)


def named(shown: pd.DataFrame, by: str = "label") -> pd.Series:
    """What a reader calls each row: its label (or `by`) and, where there are several, its study."""
    name = shown[by].astype(str)
    return name if shown["study"].nunique() < 2 else name + ", " + shown["study"].astype(str)


def suffixed(name: str, study: str) -> str:
    """The name of a figure that is drawn once a study; `study` is "" where there is one alone."""
    return f"{name}-{slug(study)}" if study else name


def titled(title: str, study: str) -> str:
    """The same of its title."""
    return f"{title} ({study})" if study else title


def alternative(shown: pd.DataFrame, metric: str, *, by: str = "label", what: str = "tokens") -> str:
    """The figure in a clause a line: its first and last value."""
    known = shown.assign(name=named(shown, by)).loc[shown[metric].notna(), ["name", "length", metric]]
    ends: dict[str, list[str]] = {str(name): [] for name in known["name"]}
    ordered = known.sort_values("length", kind="stable")
    for end in ("first", "last"):
        one = ordered.drop_duplicates("name", keep=end)
        for name, length, value in zip(one["name"], one["length"], one[metric], strict=True):
            ends[str(name)].append(f"{number(value)} at {int(length):,}")
    said = [f"{name} {' and '.join(dict.fromkeys(values))} {what}" for name, values in ends.items()]
    return f"{SHORT[metric].capitalize()}: {'; '.join(said)}."


def slug(name: str) -> str:
    """A label as a part of file names and ids: "HuggingFaceTB/SmolLM2" is "HuggingFaceTB-SmolLM2"."""
    return re.sub(r"[^\w.+-]+", "-", name)


def joined(words: Sequence[str]) -> str:
    """ "a, b and c"."""
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"


def listed(numbers: Iterable[float]) -> str:
    """ "64, 1,024", in order, each once."""
    return ", ".join(f"{int(number):,}" for number in sorted(set(numbers)))
