"""The section on learning rates: what `pe-study tune` chose in a study, and which study trained so."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd

from pe_study import chosen_rates
from pe_study.reporting import page_tables
from pe_study.reporting.captions import joined, suffixed, titled
from pe_study.reporting.page_parts import Material, Section
from pe_study.reporting.page_tables import Table
from pe_study.reporting.studies import Run, Study


def rates(material: Material) -> Section:
    """A table for each study that holds a choice of rates."""
    section = Section("rates", "Learning rates")
    tuned = [study for study in material.studies if study.tuning]
    if material.wants_table("rates"):
        section.tables += [_table(study, material, len(tuned) > 1) for study in tuned]
    return section


def _table(study: Study, material: Material, several: bool) -> Table:
    tuning = study.tuning or {}
    suffix = study.name if several else ""
    rows = chosen_rates.table(tuning)
    frame = pd.DataFrame(rows).assign(lr=[tuning["chosen"][row["encoding"]]["lr"] for row in rows])
    return page_tables.plain(
        suffixed("rates", suffix),
        titled("Rates that tuning chose", suffix),
        frame if any(frame["note"]) else frame.drop(columns="note"),
        f"Validation loss in nats at the training length, {tuning['length']}, and at no other, after "
        f"{tuning['steps']} of {tuning['full_steps']} updates, seed {tuning['seed']}; x1 is the common rate, "
        f"{tuning['lr']:g}, and of two losses the first is at lr_mult 1, the other at auto. "
        f"{_who(study, material.studies)}",
        _trials(tuning),
    )


def _who(study: Study, studies: Sequence[Study]) -> str:
    """Which study of the page trained at these rates."""
    at_them = [one.name for one in studies if one.runs and all(_at(run, study.tuning) for run in one.runs)]
    if at_them:
        return f"Trained at them: {joined(at_them)}."
    return f"No study here was trained at them; `train.lr=tuned:{study.name}` trains one."


def _at(run: Run, tuning: Mapping[str, Any] | None) -> bool:
    """Whether a run has the chosen rate and multiplier; a word means the number that tuning found in it."""
    chosen = (tuning or {})["chosen"].get(run.label)
    if chosen is None or run.train.get("lr") != chosen["lr"]:
        return False
    spec = run.recipe["encodings"][0]
    mult = "auto" if isinstance(spec, str) else spec.get("lr_mult") or "auto"
    return mult in (chosen["lr_mult"], chosen_rates.trained_multiplier(chosen), chosen.get("multiplier"))


def _trials(tuning: Mapping[str, Any]) -> pd.DataFrame:
    """Every trial, for the CSV."""
    keys = ("label", "factor", "lr", "lr_mult", "multiplier", "val_loss")
    chosen = tuning["chosen"]
    records = [
        {key: trial.get(key) for key in keys}
        | {"chosen": all(trial[key] == chosen[trial["label"]][key] for key in ("factor", "lr_mult"))}
        for trial in tuning["trials"]
    ]
    return pd.DataFrame(records)
