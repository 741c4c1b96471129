"""What a page opens with: sentences computed from verdicts and curves, each no stronger than its interval.

With one seed a sentence says "in this run"; only several seeds let it speak of an encoding.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np
import pandas as pd

from pe_study.reporting.captions import counted, listed
from pe_study.reporting.judging import ONE_TEXT, in_order, protocol_for
from pe_study.reporting.outcomes import change_text, names, outcomes
from pe_study.reporting.verdicts import Verdict
from pe_study.rows import NO_CONTROL, QUANTISED_CHUNK


def findings(found: Sequence[Verdict], curves: pd.DataFrame) -> list[str]:
    """What the page opens with: who holds, who fails from where, who gains, what a rescale does.

    Where several studies are on the page, every label is named with its study.
    """
    several = curves["study"].nunique() > 1
    unjudged = _unjudged(found, curves, several)
    found = _named(found, several)
    plain = [verdict for verdict in found if verdict.rescale == "none" and not verdict.aside]
    if not plain:
        return [f"{_silent(curves)}, so nothing is said about what happens past it."]
    said = [_scope(plain), *outcomes(plain), *unjudged]
    said += _at_training_length(curves, several, len({v.protocol for v in found}) > 1)
    for series in dict.fromkeys((v.study, v.protocol, v.label) for v in found if v.rescale != "none"):
        said += _rescaled([v for v in found if (v.study, v.protocol, v.label) == series])
    return said


def _named(found: Sequence[Verdict], several: bool) -> list[Verdict]:
    """Verdicts whose labels say their study, where there are several, and their protocol, where there are."""
    protocols = len({v.protocol for v in found}) > 1
    more = [[v.study] * several + [v.protocol] * protocols for v in found]
    return [
        dataclasses.replace(v, label=f"{v.label} ({', '.join(words)})") if words else v
        for v, words in zip(found, more, strict=True)
    ]


def _silent(curves: pd.DataFrame) -> str:
    """Why there is no verdict at all."""
    plain = curves[curves["rescale"] == "none"]
    ran = sorted({str(name) for name in plain["protocol"]})
    if curves.empty:
        return "No series was evaluated yet at its training length"
    if plain.empty:
        return "No unrescaled series was evaluated at its training length"
    if not in_order(ran):
        return (
            f"Only {' and '.join(ran)} was run, which scores other targets at every length: no loss compares "
            "with that at the training length"
        )
    if not (plain["train_length"] > 0).any():
        return "The training length is not known"
    if not (plain["length"] == plain["train_length"]).any():
        return "No series was evaluated at its training length"
    return "No series has a finite loss at its training length"


def _unjudged(found: Sequence[Verdict], curves: pd.DataFrame, several: bool) -> list[str]:
    """Series without a number at their training length under any protocol that they could be judged by."""
    kinds = in_order([str(name) for name in curves["protocol"].unique()])
    shown = curves[curves["protocol"].isin(kinds) & (curves["rescale"] == "none")]
    judged = {(v.study, v.train_length, v.label) for v in found}
    said = []
    keys = ["study", "train_length", "label"]
    for (study, start, label), part in shown.groupby(keys, observed=True, sort=False):
        name = f"{label} ({study})" if several else str(label)
        if (study, start, label) in judged:
            continue
        here = part.loc[part["length"] == start, "status"]
        if start <= 0:
            why = "its training length is not known"
        elif here.empty:
            why = f"it was not run at its training length, {int(start):,}"
        else:
            why = f"no number at its training length, {int(start):,} ({here.iloc[0]})"
        said.append(f"**{name}**: nothing is said, for {why}." if not here.empty else f"**{name}**: {why}.")
    return said


_WHO = {
    "a": "One seed each: every sentence is about this run, its weights on new documents, not about encodings "
    "in general",
    "b": "{seeds} seeds each on one document: intervals are over seeds alone, so that sentences are about "
    "new seeds on this text, not about other texts",
    "c": "{seeds} seeds each: intervals are over seeds and documents, so that sentences are about the "
    "encodings",
    "": "One seed on one document each: no interval, so nothing is settled past the training length",
    "-": "One document has more than two thirds of the targets: no interval, so nothing is settled past the "
    "training length",
}


def _scope(plain: Sequence[Verdict]) -> str:
    groups = {level: [v for v in plain if v.level == level] for level in _WHO}
    groups = {level: group for level, group in groups.items() if group}
    told = {
        level: _WHO[level].format(seeds=_range({v.num_seeds for v in of})) for level, of in groups.items()
    }
    who = next(iter(told.values()))
    if len(told) > 1:
        who = ". ".join(
            f"{names(groups[level])}: {text[0].lower()}{text[1:]}" for level, text in told.items()
        )
    documents = counted(_range({v.num_documents for v in plain}), "document")
    return (
        f"Trained at length {listed(v.train_length for v in plain)}, evaluated to "
        f"{max(v.longest for v in plain):,} on {documents} "
        f"({_protocols(plain)}). {who}."
    )


def _protocols(plain: Sequence[Verdict]) -> str:
    """ "exact-context", "exact-context where it was run, else nonoverlapping"."""
    ran = sorted({v.protocol for v in plain})
    return " where it was run, else ".join(in_order(ran))


def _at_training_length(curves: pd.DataFrame, studies: bool, protocols: bool) -> list[str]:
    """The order at the training length, a study and text each, by the protocol of most of its encodings."""
    here = curves[
        (curves["rescale"] == "none")
        & (curves["length"] == curves["train_length"])
        & np.isfinite(curves["nll"])
    ]
    said = []
    for _, text in here.groupby(ONE_TEXT, dropna=False, observed=True, sort=False):
        protocol = protocol_for(text)
        part = text[text["protocol"] == protocol]
        if part["label"].nunique() > 1:
            where = f" of {part['study'].iloc[0]}" * studies + f" under {protocol}" * protocols
            said.append(_ranked(part, where))
    return said


def _ranked(here: pd.DataFrame, where: str) -> str:
    """The order of one study on one text under one protocol; `where` says which, where there are several."""
    in_bytes = bool(here["bits_per_byte"].notna().all())
    metric, unit = ("bits_per_byte", "bits per byte") if in_bytes else ("nll", "nats per token")
    ranked = here.sort_values(metric)
    values = ", ".join(f"{a} {v:.3f}" for a, v in zip(ranked["label"], ranked[metric], strict=True))
    seeds = {int(n) for n in here["num_seeds"]}
    who = "in this run" if seeds == {1} else f"means of {_range(seeds)} seeds"
    apart = here["num_documents"].nunique() > 1 or ("choice" in here and here["choice"].nunique() > 1)
    who += ", not on the same documents" if apart else ""
    return f"At the training length{where}, lowest first ({unit}, {who}): {values}."


def _rescaled(found: Sequence[Verdict]) -> list[str]:
    """What each rescale does to a label at the longest length that all reach, against no rescale."""
    plain = next((v for v in found if v.rescale == "none"), None)
    others = [v for v in found if v.rescale != "none"]
    if plain is None or not plain.change:
        return []
    length = min(max(v.change) for v in (plain, *others) if v.change)
    there = sorted(
        (v for v in others if length in v.change), key=lambda v: v.change[length].estimate + v.start
    )
    texts = [
        f"{v.rescale} {change_text(v.change[length])}" + (f" (fails by {v.fails_by:,})" if v.fails_by else "")
        for v in there
    ]
    for v in (v for v in others if length not in v.change):
        lost = dict(sorted((*v.not_finite, *v.cannot)))
        texts.append(f"{v.rescale} has no number ({lost.get(length, 'not run')})")
    if not texts or length not in plain.change:
        return []
    where = {"b": " on this text", "c": ""}.get(plain.level, " in this run")
    return [
        f"**{plain.label} rescaled**{where}, change of loss at {length:,} from the training length: "
        f"unrescaled {change_text(plain.change[length])}; {'; '.join(texts)}."
    ]


def yarn_sentence(notes: Sequence[Mapping[str, object]]) -> str | None:
    """How many frequency pairs YaRN leaves, blends and interpolates at the longest length."""
    yarn = [note for note in notes if str(note.get("rescale", "")).startswith("yarn")]
    yarn = [note for note in yarn if note.get("kept") is not None]
    if not yarn:
        return None
    note = max(yarn, key=lambda note: float(str(note["length"])))
    kept, blended, interpolated = (int(str(note[key])) for key in ("kept", "blended", "interpolated"))
    total = kept + blended + interpolated
    trained = note.get("train_length") or note.get("original_length")
    at = f" at training length {int(str(trained)):,}" if trained else ""
    if kept <= total // 8:
        meaning = (
            f"nearly none is left alone{at}, so this is no small copy of what YaRN does to a large model"
        )
    else:
        meaning = f"a model of another training length would split them otherwise{at and ' than' + at[3:]}"
    return (
        f"YaRN ({note['rescale']}, length {int(str(note['length'])):,}) leaves {kept} of {total} frequency "
        f"pairs as they are, blends {blended} and interpolates {interpolated}: {meaning}."
    )


def _range(numbers: set[int]) -> str:
    low, high = min(numbers), max(numbers)
    return f"{low:,}" if low == high else f"{low:,} to {high:,}"


def cache_sentence(costs: Sequence[Mapping[str, object]]) -> str | None:
    """How much loss an 8-bit cache added, at most, over the plain cells that were also read without it, those
    left out whose windows are one pass: they read no quantised key."""
    costs = [cost for cost in costs if cost.get("control", NO_CONTROL) == NO_CONTROL]
    if not costs:
        return None
    costs = [cost for cost in costs if int(str(cost.get("window", cost["length"]))) > QUANTISED_CHUNK]
    if not costs:
        return (
            "What the 8-bit cache costs is not known, for no window was read through the cache: up to "
            f"{QUANTISED_CHUNK} tokens are one pass."
        )
    worst = max(costs, key=lambda cost: float(str(cost["difference"])))
    cells = "the one cell" if len(costs) == 1 else f"{len(costs)} cells"
    return (
        f"The 8-bit cache adds at most {float(str(worst['difference'])):+.4f} nats a token over {cells} that "
        f"were also read without it ({worst['run']}, {worst['rescale']}, {worst['protocol']}, length "
        f"{int(str(worst['length'])):,})."
    )
