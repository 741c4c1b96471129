"""Sentences computed from the rows, each no stronger than its interval: what was found, and what to beware of.

With one seed a sentence says "this run"; only several seeds let it speak of an encoding.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import pandas as pd

from pe_study.studies import Study
from pe_study.tables import LOST, SERIES
from pe_study.verdicts import DELTA, Verdict

PERCENT = f"{100 * DELTA:g} %"


def findings(found: Sequence[Verdict], curves: pd.DataFrame) -> list[str]:
    """What the page opens with: who holds, who fails from where, who gains, what a rescale does."""
    plain = [verdict for verdict in found if verdict.rescale == "none"]
    if not plain:
        return [
            "No series has a number at its training length, so nothing is said about what happens past it."
        ]
    said = [_scope(plain), *_holding(plain), *_failing(plain), *_unsettled(plain), *_unable(plain)]
    said += _at_training_length(plain, curves)
    for label in dict.fromkeys(v.label for v in found if v.rescale != "none"):
        said += _rescaled([v for v in found if v.label == label])
    return said


def _scope(plain: Sequence[Verdict]) -> str:
    first = plain[0]
    seeds = {verdict.num_seeds for verdict in plain}
    lengths = {verdict.longest for verdict in plain}
    who = (
        "One seed each: every sentence is about this run and these weights on new documents, not about encodings in general"
        if seeds == {1}
        else f"{_range(seeds)} seeds each: intervals are over seeds and documents, so sentences are about the encodings"
    )
    return (
        f"Trained at length {_range({v.train_length for v in plain})}, evaluated to {max(lengths):,} on "
        f"{_range({v.num_documents for v in plain})} documents ({first.protocol}). {who}."
    )


def _holding(plain: Sequence[Verdict]) -> list[str]:
    said = []
    for length in sorted({v.survives for v in plain if v.survives and not v.fails_by}, reverse=True):
        group = [v for v in plain if v.survives == length and not v.fails_by]
        gain = [v for v in group if v.gains_to]
        flat = [v for v in group if not v.gains_to]
        if gain:
            to = "; ".join(f"{v.label} to {v.gains_to:,}" for v in gain)
            said.append(
                f"**{_names(gain)}** {_verb(gain, 'holds', 'hold')} to {_times(length, gain[0])} (loss within {PERCENT} of "
                f"that at the training length at every length up to it) and still {_verb(gain, 'gains', 'gain')} from a "
                f"doubled length ({to}){_caveat(gain[0])}."
            )
        if flat:
            said.append(
                f"**{_names(flat)}** {_verb(flat, 'holds', 'hold')} to {_times(length, flat[0])} within {PERCENT} without a "
                "gain from longer input: in effect a windowed model."
            )
    return said


def _caveat(verdict: Verdict) -> str:
    if verdict.protocol == "exact-context":
        return ""
    return (
        f". exact-context was not run: under {verdict.protocol} longer windows also leave fewer targets with little "
        "context, so part of a gain may be that alone"
    )


def _failing(plain: Sequence[Verdict]) -> list[str]:
    said = []
    for length in sorted({v.fails_by for v in plain if v.fails_by}):
        group = [v for v in plain if v.fails_by == length]
        worst = "; ".join(
            f"{v.label} {_change(v, v.longest)} at {v.longest:,}" for v in group if v.longest in v.change
        )
        said.append(
            f"**{_names(group)}** {_verb(group, 'fails', 'fail')} by {_times(length, group[0])}: the loss is more than "
            f"{PERCENT} above that at the training length ({worst})."
        )
    return said


def _unsettled(plain: Sequence[Verdict]) -> list[str]:
    group = [v for v in plain if not v.fails_by and not v.survives and v.change]
    if not group:
        return []
    return [
        f"**{_names(group)}**: the intervals neither show a rise of {PERCENT} nor rule one out at the first length past "
        "the training length; more documents or seeds would settle it."
    ]


def _unable(plain: Sequence[Verdict]) -> list[str]:
    said = []
    for verdict in plain:
        for status in dict.fromkeys(status for _, status in verdict.cannot):
            lengths = ", ".join(f"{n:,}" for n, s in verdict.cannot if s == status)
            what = {"unsupported": "cannot run", "oom": "ran out of memory"}.get(
                status, f"has status {status}"
            )
            said.append(f"**{verdict.label}** {what} at {lengths}.")
    return said


def _at_training_length(plain: Sequence[Verdict], curves: pd.DataFrame) -> list[str]:
    """The order at the training length, and where the control stands."""
    first = plain[0]
    here = curves[
        (curves["protocol"] == first.protocol)
        & (curves["rescale"] == "none")
        & (curves["length"] == curves["train_length"])
        & np.isfinite(curves["nll"])
    ]
    metric, unit = (
        ("bits_per_byte", "bits per byte")
        if here["bits_per_byte"].notna().all()
        else ("nll", "nats per token")
    )
    if here["label"].nunique() < 2:
        return []
    ranked = here.sort_values(metric)
    listed = ", ".join(
        f"{label} {value:.3f}" for label, value in zip(ranked["label"], ranked[metric], strict=True)
    )
    who = "in this run" if first.num_seeds == 1 else f"mean of {_range(set(here['num_seeds']))} seeds"
    return [f"At the training length, lowest first ({unit}, {who}): {listed}."]


def _rescaled(found: Sequence[Verdict]) -> list[str]:
    """What each rescale does to a label at the longest length, against no rescale."""
    plain = next((v for v in found if v.rescale == "none"), None)
    others = [v for v in found if v.rescale != "none" and v.longest in v.change]
    if plain is None or not others or plain.longest not in plain.change:
        return []
    length = min(plain.longest, *(v.longest for v in others))
    listed = ", ".join(
        f"{v.rescale} {_change(v, length)}" + (f" (fails by {v.fails_by:,})" if v.fails_by else "")
        for v in sorted(others, key=lambda v: v.start + v.change[length].estimate)
    )
    return [
        f"**{plain.label} rescaled**, change of loss at {length:,} from the training length: unrescaled "
        f"{_change(plain, length)}; {listed}."
    ]


def yarn_sentence(notes: Sequence[Mapping[str, object]]) -> str | None:
    """How many frequency pairs YaRN leaves, blends and interpolates at the longest length, and what that means."""
    counted = [
        note
        for note in notes
        if str(note.get("rescale", "")).startswith("yarn") and note.get("kept") is not None
    ]
    if not counted:
        return None
    note = max(counted, key=lambda note: float(str(note["length"])))
    kept, blended, interpolated = (int(str(note[key])) for key in ("kept", "blended", "interpolated"))
    total = kept + blended + interpolated
    nearly_none = kept <= total // 8
    start = note.get("train_length") or note.get("original_length")
    trained = f" at training length {start}" if start else ""
    meaning = (
        f"nearly none is left alone{trained}, so this is no small copy of what YaRN does to a large model"
        if nearly_none
        else f"a large model's split may differ{trained}"
    )
    return (
        f"YaRN ({note['rescale']}, length {int(str(note['length'])):,}) leaves {kept} of {total} frequency pairs as they "
        f"are, blends {blended} and interpolates {interpolated}: {meaning}."
    )


# --- warnings ------------------------------------------------------------------------------------------------


def warnings(studies: Sequence[Study], rows: pd.DataFrame, curves: pd.DataFrame) -> list[str]:
    """What a reader should know before trusting a comparison."""
    said = [
        *_seeds(curves),
        *_untrained(rows),
        *_statuses(rows),
        *_unlike(rows),
        *_kernels(rows),
        *_not_sliding(rows),
    ]
    packing = {str(run.recipe.get("data", {}).get("packing")) for study in studies for run in study.runs}
    if "concatenate" in packing:
        said.append(
            "Training documents were concatenated: within a training window, a token can attend to the document before its own."
        )
    unfinished = [run for study in studies for run in study.runs if not run.done]
    if unfinished:
        listed = ", ".join(
            f"{run.run_id} (step {run.last_step} of {run.train.get('steps', '?')})" for run in unfinished
        )
        said.append(f"Not finished: {listed}.")
    return said


def _seeds(curves: pd.DataFrame) -> list[str]:
    said = []
    if len(curves) and curves["num_seeds"].max() <= 1:
        said.append(
            "One seed each: differences between encodings may be those of the draw, and no band is shown."
        )
    lost = curves[(curves["lost_seeds"] > 0) & (curves["num_seeds"] > 0)]
    for label, part in lost.groupby("label", observed=True):
        lengths = ", ".join(f"{int(n):,}" for n in sorted(set(part["length"])))
        said.append(
            f"{label}: {int(part['lost_seeds'].max())} seed(s) without a finite loss at {lengths}; means there are over the rest."
        )
    return said


def _untrained(rows: pd.DataFrame) -> list[str]:
    used = rows[rows["untrained_rows"] > 0]
    return [
        f"{label}: past length {int(part['train_length'].max()):,} it uses rows of its position table that training never "
        f"touched (up to {int(part['untrained_rows'].max()):,} of them)."
        for label, part in used.groupby("label", observed=True)
    ]


def _statuses(rows: pd.DataFrame) -> list[str]:
    lost = rows[rows["status"].isin(LOST)]
    return [
        f"{label}: {status} at {', '.join(f'{int(n):,}' for n in sorted(set(part['length'])))} ({protocol}); no number there."
        for (label, status, protocol), part in lost.groupby(["label", "status", "protocol"], observed=True)
    ]


def _unlike(rows: pd.DataFrame) -> list[str]:
    """Comparisons that are not like for like: other documents or targets at some length, other corpora."""
    said = []
    scored = rows[(rows["num_tokens"] > 0) & (rows["protocol"] != "prefix")]
    totals = scored.groupby([*SERIES, "seed", "length"], dropna=False, observed=True).agg(
        targets=("num_tokens", "sum"), documents=("document", "nunique")
    )
    spread = (
        totals.reset_index()
        .groupby(["label", "rescale", "protocol"], observed=True)[["targets", "documents"]]
        .nunique()
    )
    for label, rescale, protocol in spread[spread.max(axis=1) > 1].index:
        name = label if rescale == "none" else f"{label} ({rescale})"
        said.append(
            f"{name}, {protocol}: not the same targets at every length, so the curve mixes length with text."
        )
    for protocol, part in rows.groupby("protocol", observed=True):
        for column, what in (("corpus_hash", "corpora"), ("tokenizer_hash", "tokenizers")):
            if part[column].nunique() > 1:
                said.append(
                    f"{protocol}: rows come from {part[column].nunique()} different {what}; compare with care."
                )
    return said


def _kernels(rows: pd.DataFrame) -> list[str]:
    used = sorted({(str(k), str(d)) for k, d in rows[["kernel", "dtype"]].drop_duplicates().to_numpy() if k})
    if len(used) < 2:
        return []
    return [
        "Compared rows were computed by different kernels or types: "
        + ", ".join(f"{k} {d}" for k, d in used)
        + "."
    ]


def _not_sliding(rows: pd.DataFrame) -> list[str]:
    """Sliding windows where every document fits one window: nothing slid."""
    sliding = rows[(rows["protocol"] == "sliding") & (rows["num_tokens"] > 0)]
    if sliding.empty:
        return []
    windows = sliding.groupby(["label", "rescale", "length", "seed", "document"], observed=True)[
        "num_windows"
    ].sum()
    still = windows.groupby("length").max()
    lengths = ", ".join(f"{int(n):,}" for n in still[still <= 1].index)
    return [f"sliding at {lengths}: every document fits one window, so nothing slid."] if lengths else []


# --- words ---------------------------------------------------------------------------------------------------


def _names(group: Sequence[Verdict]) -> str:
    several = len({verdict.study for verdict in group}) > 1
    names = [f"{v.label} ({v.study})" if several else v.label for v in group]
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def _verb(group: Sequence[Verdict], one: str, many: str) -> str:
    verb = one if len(group) == 1 else many
    return verb if group[0].about_encoding else f"in this run {verb}"


def _times(length: int, verdict: Verdict) -> str:
    return f"{length:,} ({length / verdict.train_length:.4g}\u00d7)"


def _change(verdict: Verdict, length: int) -> str:
    """A change with its 95 % interval, in nats."""
    interval = verdict.change[length]
    low, high = interval.bounds()
    bounds = f" [{low:+.3f}, {high:+.3f}]" if low == low else ""
    return f"{interval.estimate:+.3f}{bounds} nats"


def _range(numbers: set[int]) -> str:
    low, high = int(min(numbers)), int(max(numbers))
    return f"{low:,}" if low == high else f"{low:,} to {high:,}"
