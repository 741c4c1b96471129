"""What a reader should know before relying on a comparison: computed from rows and runs, one line each."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence

import numpy as np
import pandas as pd

from pe_study import tables
from pe_study.reporting import likeness, uncompared
from pe_study.reporting.captions import counted, listed
from pe_study.reporting.losses import numbered
from pe_study.reporting.studies import Study
from pe_study.short_contexts import is_short
from pe_study.tables import SERIES, TRUNCATION


def cautions(studies: Sequence[Study], rows: pd.DataFrame, curves: pd.DataFrame) -> list[str]:
    """Every caution that applies, the ones that change a reading first."""
    return [
        *_seeds(curves),
        *_no_number(rows),
        *_untrained(rows),
        *_targets(rows),
        *uncompared.across_choices(rows),
        *_left_out(rows),
        *likeness.cautions(rows),
        *_kernels(rows),
        *_nothing_slid(rows),
        *_means_of_windows(studies),
        *_packing(studies),
        *_short_context(studies),
        *_seen(studies),
        *_missing(rows),
        *_unfinished(studies),
        *_devices(studies),
    ]


def _seeds(curves: pd.DataFrame) -> list[str]:
    """Studies in which every encoding has one seed."""
    if curves.empty:
        return []
    most = curves.groupby("study", observed=True, sort=False)["num_seeds"].max()
    alone = [str(study) for study in most.index[most <= 1]]
    if len(alone) == len(most):
        return [
            "One seed each: differences between encodings may be those of the draw, and no figure shows a "
            "band."
        ]
    return [
        f"{study}: one seed each: differences between its encodings may be those of the draw, and its curves "
        "have no band."
        for study in alone
    ]


def _no_number(rows: pd.DataFrame) -> list[str]:
    """Cells without a number: of all seeds, or of some, whose means are over the others. A line a kind."""
    cells = tables.cells(rows[rows["rescale"] != TRUNCATION])
    cells = cells.assign(name=_series(cells), missing=~np.isfinite(cells["nll"]))
    keys = ["name", "protocol", "length"]
    places = cells.groupby(keys, observed=True)["seed"].nunique()
    known = cells[~cells["missing"]].groupby(keys, observed=True)["seed"].nunique()
    bad = cells[cells["missing"] & ((cells["status"] != "ok") | (cells["num_tokens"] > 0))]
    lengths: dict[tuple[str, str], dict[int, None]] = {}
    for (name, protocol, length, status), part in bad.groupby([*keys, "status"], observed=True, sort=False):
        place = (name, protocol, length)
        seeds = [int(seed) for seed in part["seed"].unique()]
        why = _why(str(status), seeds if len(seeds) < places[place] else [], int(known.get(place, 0)))
        lengths.setdefault((str(name), why), {})[int(length)] = None
    said: dict[str, list[str]] = {}
    for (name, why), at in lengths.items():
        said.setdefault(why.format(lengths=listed(at)), []).append(name)
    return [f"{', '.join(names)}: {what}" for what, names in said.items()]


def _why(status: str, some: Sequence[int], others: int) -> str:
    """With a place for the lengths; `some` seeds lack a number (none given: all), `others` have one."""
    what = "no finite loss" if status == "ok" else status
    where = f" in {numbered(some)}" if some else ""
    rest = "means there are over the others" if others else "no number there"
    return f"{what} at {{lengths}}{where}; {rest}."


def _untrained(rows: pd.DataFrame) -> list[str]:
    used = rows[rows["untrained_rows"] > 0]
    return [
        f"{name}: past length {listed(part['train_length'])} it uses rows of its position table that "
        f"training never touched (up to {int(part['untrained_rows'].max()):,} of them)."
        for name, part in used.groupby(_series(rows).loc[used.index], observed=True)
    ]


def _left_out(rows: pd.DataFrame) -> list[str]:
    """Documents of one plan's choice that not every encoding was measured on: a pair leaves out its own."""
    plain = rows[(rows["num_tokens"] > 0) & (rows["rescale"] == "none")]
    plain = plain.assign(choice=plain.get("choice", 0))
    said = []
    for (study, protocol, _), part in plain.groupby(["study", "protocol", "choice"], observed=True):
        cells = part.groupby(["length", "label", "seed"], observed=True)["document"].unique()
        uneven: dict[int, int] = {}
        for length, sets in cells.groupby("length"):
            have = [set.intersection(*map(set, of)) for _, of in sets.groupby("label", observed=True)]
            every = set.union(*map(set, sets))
            if any(one != every for one in have):
                pairs = itertools.combinations(have, 2)
                uneven[int(length)] = max((len((a | b) - (a & b)) for a, b in pairs), default=0)
        if uneven and part["label"].nunique() > 1:
            said.append(
                f"{study}, {protocol}: not every encoding was measured on the same documents at "
                f"{listed(uneven)}; comparisons there leave out up to "
                f"{counted(f'{max(uneven.values()):,}', 'document')} that one of a pair lacks in some seed, "
                "while curves and tables do not."
            )
    return said


def _targets(rows: pd.DataFrame) -> list[str]:
    """Curves whose lengths do not score the same targets of the same documents (`prefix` never does)."""
    keys = [*SERIES, "seed", "length"]
    scored = rows[(rows["num_tokens"] > 0) & (rows["rescale"] != TRUNCATION)]
    targets = (
        scored.groupby([*keys, "document"], dropna=False, observed=True)["num_tokens"].sum().reset_index()
    )
    targets["mark"] = pd.util.hash_pandas_object(targets[["document", "num_tokens"]], index=False) % 2**32
    cells = targets.groupby(keys, dropna=False, observed=True)["mark"].sum()
    differ = cells.groupby(["study", "protocol", "label"], observed=True).nunique() > 1
    said = []
    for protocol, part in differ[differ].reset_index().groupby("protocol", observed=True):
        if protocol == "prefix":
            said.append(
                "prefix: each length scores its own first tokens, so its curves mix length with text."
            )
        else:
            said.append(
                f"{_names(part['label'])}, {protocol}: not the same targets everywhere (other documents or "
                "other tokens at some length, seed or rescale), so differences mix length with text."
            )
    return said


def _kernels(rows: pd.DataFrame) -> list[str]:
    pairs = rows.loc[rows["kernel"] != "", ["kernel", "dtype"]].drop_duplicates().astype(str)
    used = sorted(" ".join(pair).strip() for pair in pairs.to_numpy())
    if len(used) < 2:
        return []
    return [f"Compared rows were computed by different kernels or number types: {', '.join(used)}."]


def _nothing_slid(rows: pd.DataFrame) -> list[str]:
    """Sliding windows where every document fits one window."""
    sliding = rows[rows["protocol"].astype(str).str.startswith("sliding") & (rows["num_tokens"] > 0)]
    if sliding.empty:
        return []
    keys = ["study", "label", "rescale", "length", "seed", "document"]
    most = sliding.groupby(keys, observed=True)["num_windows"].sum().groupby("length").max()
    still = most.index[most <= 1]
    return (
        [f"sliding at {listed(still)}: every document fits one window, so nothing slid."]
        if len(still)
        else []
    )


def _means_of_windows(studies: Sequence[Study]) -> list[str]:
    """Evaluations that asked for another mean than the page's."""
    plans = {
        f"{study.name}, plan {one.plan}"
        for study in studies
        for one in study.evaluations
        if ((one.summary.get("config") or {}).get("plan") or {}).get("aggregation") == "yarn"
    }
    return [
        f"{name}: evaluated with aggregation yarn, the mean of window means; this page weights by tokens, "
        "results.json has the other."
        for name in sorted(plans)
    ]


def _packing(studies: Sequence[Study]) -> list[str]:
    packings = {str((run.recipe.get("data") or {}).get("packing")) for study in studies for run in study.runs}
    if "concatenate" not in packings:
        return []
    return [
        "Trained on concatenated documents: within a training window a token can attend to the document "
        "before its own."
    ]


def _short_context(studies: Sequence[Study]) -> list[str]:
    """Trainings whose chunks mostly hold short documents: "trained at length L" says too much of them."""
    said = []
    for study in studies:
        for run in study.runs:
            context, length = run.provenance.get("context"), run.train.get("length")
            if context and length and is_short(context["p50"], length):
                said.append(
                    f"{study.name}: trained at length {length:,}, but half of the training targets had at "
                    f"most {context['p50']:,} tokens of their own document before them (nine of ten at most "
                    f"{context['p90']:,}): it has mostly seen less."
                )
    return list(dict.fromkeys(said))


def _seen(studies: Sequence[Study]) -> list[str]:
    """Text that the models saw in training, or may have seen."""
    said = []
    for study in studies:
        for evaluation in study.evaluations:
            documents = evaluation.notes.get("documents") or {}
            names = documents.get("overlap") or []
            if names:
                said.append(
                    f"{study.name}, {evaluation.plan}: {len(names)} of the documents measured on were also "
                    f"trained on ({', '.join(names[:3])}{', …' * (len(names) > 3)})."
                )
            if documents.get("may_be_seen"):
                said.append(f"{documents['may_be_seen']}.")
    return list(dict.fromkeys(said))


def _missing(rows: pd.DataFrame) -> list[str]:
    """Cells that some labels or seeds have and others lack, per study and protocol."""
    said = []
    for (study, protocol), part in rows.groupby(["study", "protocol"], observed=True):
        plain = part[part["rescale"] == "none"]
        grid = plain.groupby(["label", "seed", "length"], observed=True).size().unstack("length")
        absent = grid.isna()
        for label, lacking in absent.groupby("label", observed=True):
            lengths = lacking.columns[lacking.any()]
            if len(lengths):
                said.append(
                    f"{label} ({study}, {protocol}): not evaluated at {listed(lengths)} for every seed."
                )
        seeds = plain.groupby("label", observed=True)["seed"].nunique()
        fewer = seeds[seeds < seeds.max()]
        if len(fewer):
            said.append(
                f"{_names(fewer.index)} ({study}, {protocol}): fewer seeds than the {seeds.max()} of others."
            )
    return said


def _unfinished(studies: Sequence[Study]) -> list[str]:
    running = [
        f"{run.run_id} (step {run.last_step:,} of {run.train.get('steps', '?')})"
        for study in studies
        for run in study.runs
        if not run.done
    ]
    said = [f"Training not finished: {', '.join(running)}."] if running else []
    for study in studies:
        seen = [ev.rows[["label", "seed"]].drop_duplicates() for ev in study.evaluations]
        evaluated = {(str(label), seed) for pairs in seen for label, seed in pairs.to_numpy()}
        absent = [run.run_id for run in study.runs if run.done and (run.label, run.seed) not in evaluated]
        said += [f"Trained but not evaluated: {', '.join(absent)}."] if absent else []
    return said


def _names(labels: Iterable[object]) -> str:
    return ", ".join(dict.fromkeys(str(label) for label in labels))


def _devices(studies: Sequence[Study]) -> list[str]:
    """Where every run was made on a CPU, what a reader with a GPU must not take from the page."""
    devices = {str(run.provenance.get("device", "")) for study in studies for run in study.runs}
    if devices != {"cpu"}:
        return []
    return ["Made on a CPU: speed and memory are its own, and the CUDA kernels (flex, flash) are unmeasured."]


def _series(frame: pd.DataFrame) -> pd.Series:
    """What to call each row: the label, its rescale, and the study where there are several."""
    name = frame["label"].astype(str)
    rescale = frame["rescale"].astype(str)
    name = name.where(rescale == "none", name + " (" + rescale + ")")
    return name + " (" + frame["study"].astype(str) + ")" if frame["study"].nunique() > 1 else name
