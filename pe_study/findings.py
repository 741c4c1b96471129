"""Sentences computed from verdicts, each no stronger than its interval.

With one seed a sentence says "in this run"; only several seeds let it speak of an encoding.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import pandas as pd

from pe_study.captions import counted, listed
from pe_study.verdicts import DELTA, FAMILY, Verdict

PERCENT = f"{100 * DELTA:g} %"


def findings(found: Sequence[Verdict], curves: pd.DataFrame) -> list[str]:
    """What the page opens with: who holds, who fails from where, who gains, what a rescale does."""
    plain = [verdict for verdict in found if verdict.rescale == "none"]
    if not plain:
        return [
            "No series has two documents or more at its training length, "
            "so nothing is said about what happens past it."
        ]
    said = [_scope(plain), *_holding(plain), *_failing(plain), *_unsettled(plain), *_unable(plain)]
    said += _at_training_length(plain, curves)
    several = len({verdict.study for verdict in found}) > 1
    for series in dict.fromkeys((v.study, v.label) for v in found if v.rescale != "none"):
        said += _rescaled([v for v in found if (v.study, v.label) == series], several)
    return said


def _scope(plain: Sequence[Verdict]) -> str:
    seeds = {verdict.num_seeds for verdict in plain}
    if seeds == {1}:
        who = (
            "One seed each: every sentence is about this run, its weights on new documents, "
            "not about encodings in general"
        )
    elif 1 in seeds:
        who = "Some ran with one seed: sentences about those are about that run only"
    else:
        who = (
            f"{_range(seeds)} seeds each: intervals are over seeds and documents, so that sentences are "
            "about the encodings"
        )
    documents = counted(_range({v.num_documents for v in plain}), "document")
    return (
        f"Trained at length {listed(v.train_length for v in plain)}, evaluated to "
        f"{max(v.longest for v in plain):,} on {documents} "
        f"({plain[0].protocol}). {who}."
    )


def _holding(plain: Sequence[Verdict]) -> list[str]:
    said = []
    held = [v for v in plain if v.survives and not v.fails_by]
    for length in sorted({v.survives for v in held if v.survives}, reverse=True):
        for group in _alike([v for v in held if v.survives == length]):
            gain = [v for v in group if v.gains_to]
            flat = [v for v in group if not v.gains_to]
            said += [_gaining(gain, length)] if gain else []
            said += [_flat(flat, length)] if flat else []
    return said


def _alike(group: Sequence[Verdict]) -> list[list[Verdict]]:
    """Runs of one seed apart from encodings of several: no sentence may mix them."""
    parts = [[v for v in group if v.about_encoding], [v for v in group if not v.about_encoding]]
    return [part for part in parts if part]


def _gaining(group: Sequence[Verdict], length: int) -> str:
    to = "; ".join(f"{v.label} to {v.gains_to:,}" for v in group)
    text = (
        f"**{_names(group)}** {_verb(group, 'holds', 'hold')} to {_times(length, group[0])}: the loss stays "
        f"within {PERCENT} of that at the training length. A doubled length still lowers it ({to})"
    )
    if group[0].protocol == "exact-context":
        return f"{text}."
    return (
        f"{text}; exact-context was not run, and under {group[0].protocol} longer windows also leave fewer "
        "targets with little context, so part of this may be that alone."
    )


def _flat(group: Sequence[Verdict], length: int) -> str:
    return (
        f"**{_names(group)}** {_verb(group, 'holds', 'hold')} to {_times(length, group[0])} "
        f"within {PERCENT}, without a gain from longer input: "
        f"{'windowed models' if len(group) > 1 else 'a windowed model'}, in effect."
    )


def _failing(plain: Sequence[Verdict]) -> list[str]:
    said = []
    for length in sorted({v.fails_by for v in plain if v.fails_by}):
        for group in _alike([v for v in plain if v.fails_by == length]):
            worst = "; ".join(f"{v.label} {_change(v, v.longest)} at {v.longest:,}" for v in group)
            said.append(
                f"**{_names(group)}** {_verb(group, 'fails', 'fail')} by {_times(length, group[0])}: the "
                f"loss is more than {PERCENT} above that at the training length ({worst})."
            )
    return said


def _unsettled(plain: Sequence[Verdict]) -> list[str]:
    group = [v for v in plain if not v.fails_by and not v.survives and v.change]
    if not group:
        return []
    return [
        f"**{_names(group)}**: not settled. The intervals neither show a rise of {PERCENT} nor rule one out "
        "at the first length past the training length; more documents or seeds would."
    ]


def _unable(plain: Sequence[Verdict]) -> list[str]:
    said = []
    words = {"unsupported": "cannot run", "oom": "ran out of memory"}
    for verdict in plain:
        for status in dict.fromkeys(status for _, status in verdict.cannot):
            lengths = listed(n for n, s in verdict.cannot if s == status)
            said.append(f"**{verdict.label}** {words.get(status, f'has status {status}')} at {lengths}.")
    return said


def _at_training_length(plain: Sequence[Verdict], curves: pd.DataFrame) -> list[str]:
    """The order at the training length."""
    here = curves[
        (curves["protocol"] == plain[0].protocol)
        & (curves["rescale"] == "none")
        & (curves["length"] == curves["train_length"])
        & np.isfinite(curves["nll"])
    ]
    said = []
    for _, part in here.groupby(FAMILY, dropna=False, observed=True, sort=False):
        said += _ranked(part, here["study"].nunique() > 1) if part["label"].nunique() > 1 else []
    return said


def _ranked(here: pd.DataFrame, several: bool) -> list[str]:
    """The order of one study on one text."""
    in_bytes = bool(here["bits_per_byte"].notna().all())
    metric, unit = ("bits_per_byte", "bits per byte") if in_bytes else ("nll", "nats per token")
    ranked = here.sort_values(metric)
    values = ", ".join(f"{a} {v:.3f}" for a, v in zip(ranked["label"], ranked[metric], strict=True))
    seeds = {int(n) for n in here["num_seeds"]}
    who = "in this run" if seeds == {1} else f"means of {_range(seeds)} seeds"
    where = f" of {here['study'].iloc[0]}" if several else ""
    return [f"At the training length{where}, lowest first ({unit}, {who}): {values}."]


def _rescaled(found: Sequence[Verdict], several: bool) -> list[str]:
    """What each rescale does to a label at the longest length, against no rescale."""
    plain = next((v for v in found if v.rescale == "none"), None)
    others = [v for v in found if v.rescale != "none" and v.change]
    if plain is None or not others or not plain.change:
        return []
    length = min(max(v.change) for v in (plain, *others))
    others = sorted(
        (v for v in others if length in v.change), key=lambda v: v.start + v.change[length].estimate
    )
    texts = [
        f"{v.rescale} {_change(v, length)}" + (f" (fails by {v.fails_by:,})" if v.fails_by else "")
        for v in others
    ]
    where = "" if plain.about_encoding else " in this run"
    study = f" ({plain.study})" if several else ""
    return [
        f"**{plain.label} rescaled**{study}{where}, change of loss at {length:,} from the training length: "
        f"unrescaled {_change(plain, length)}; {'; '.join(texts)}."
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


# --- words -----------------------------------------------------------------------------------------------


def _names(group: Sequence[Verdict]) -> str:
    several = len({verdict.study for verdict in group}) > 1
    names = [f"{v.label} ({v.study})" if several else v.label for v in group]
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def _verb(group: Sequence[Verdict], one: str, many: str) -> str:
    verb = one if len(group) == 1 else many
    return verb if group[0].about_encoding else f"{verb}, in this run,"


def _times(length: int, verdict: Verdict) -> str:
    return f"{length:,} ({length / verdict.train_length:.4g}\u00d7)"


def _change(verdict: Verdict, length: int) -> str:
    """A change with its 95 % interval, in nats."""
    interval = verdict.change[length]
    low, high = interval.bounds()
    bounds = f" [{low:+.3f}, {high:+.3f}]" if low == low else ""
    return f"{interval.estimate:+.3f}{bounds} nats"


def _range(numbers: set[int]) -> str:
    low, high = min(numbers), max(numbers)
    return f"{low:,}" if low == high else f"{low:,} to {high:,}"


def cache_sentence(costs: Sequence[Mapping[str, object]]) -> str | None:
    """How much loss an 8-bit cache added, at most, over the cells that were also read without it."""
    if not costs:
        return None
    worst = max(costs, key=lambda cost: float(str(cost["difference"])))
    cells = "the one cell" if len(costs) == 1 else f"{len(costs)} cells"
    return (
        f"The 8-bit cache adds at most {float(str(worst['difference'])):+.4f} nats a token over {cells} that "
        f"were also read without it ({worst['run']}, {worst['rescale']}, {worst['protocol']}, length "
        f"{int(str(worst['length'])):,})."
    )
