"""What `pe-study tune` chose, as `tune.json` holds it: its table, and what it changes. No torch here."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any

FOLDER, RESULT = "tune", "tune.json"  # in the folder of a study


def table(tuning: Mapping[str, Any]) -> list[dict[str, str]]:
    """A row an encoding: losses at each rate, what was chosen."""
    rows = []
    for label, chosen in tuning["chosen"].items():
        trials = [trial for trial in tuning["trials"] if trial["label"] == label]
        tried = {f"x{factor:g}": losses(trials, factor) for factor in sorted({t["factor"] for t in trials})}
        picked = {"lr": f"{chosen['lr']:g}", "lr_mult": _multiplier(chosen)}
        rows.append({"encoding": label, **tried, **picked, "note": "; ".join(chosen["said"])})
    return rows


def order_change(tuning: Mapping[str, Any]) -> str:
    """Whether encodings change places between the common and the chosen rates, in these short trials."""
    common, chosen = {}, {label: found["val_loss"] for label, found in tuning["chosen"].items()}
    for trial in tuning["trials"]:
        if trial["factor"] == 1:  # of two multipliers the last, auto
            common[trial["label"]] = math.inf if trial["val_loss"] is None else trial["val_loss"]
    pairs = itertools.combinations(sorted(chosen, key=common.__getitem__), 2)
    turned = [f"{worse} before {better}" for better, worse in pairs if chosen[worse] < chosen[better]]
    if not turned:
        return "Tuned, the encodings keep their order at the training length in these trials."
    before, after = (", ".join(sorted(each, key=each.__getitem__)) for each in (common, chosen))
    return (
        f"Tuned, the order at the training length changes in these trials: {'; '.join(turned)}. Lowest first "
        f"at the common rate: {before}; tuned: {after}."
    )


def trained_multiplier(chosen: Mapping[str, Any]) -> float | str:
    """`lr_mult` of what trains at a chosen rate: a number, `auto` where that is 1 or for no parameter."""
    number = chosen.get("multiplier")
    return chosen["lr_mult"] if number in (None, 1.0) else number


def losses(trials: Sequence[Mapping[str, Any]], factor: float) -> str:
    """Of the trials at one multiple of the common rate: `2.9549 / 2.9244` where there are several."""
    found = [trial["val_loss"] for trial in trials if trial["factor"] == factor]
    return " / ".join("not finite" if loss is None else f"{loss:.4f}" for loss in found)


def _multiplier(chosen: Mapping[str, Any]) -> str:
    """`1`, or `auto (7.18)`; the number is left out where no parameter has it or it is the usual 1."""
    word, number = chosen["lr_mult"], chosen.get("multiplier")
    if word != "auto":
        return f"{word:g}"
    return word if number in (None, 1.0) else f"{word} ({number:.3g})"
