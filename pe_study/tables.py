"""From rows to the tables that figures, sentences and CSV files share.

A *series* is one line of a figure: everything that is fixed while the length varies (`SERIES`). A *cell* is
one series at one length and seed. Sums over documents and positions come first, then the division, then the
mean over seeds of the NLL, and only then the exponential: perplexity = exp(mean NLL). Loss is nats per token,
`nll`; bits per byte = nats / (ln 2 x bytes).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd
from scipy import special

from pe_study import stats
from pe_study.reporting import plans
from pe_study.reporting.choices import told_apart
from pe_study.reporting.palette import order
from pe_study.reporting.studies import Study
from pe_study.rows import LATE as LATE

SERIES = [
    "study",
    "encoding",
    "label",
    "rescale",
    "protocol",
    "train_length",
    "corpus",
    "corpus_hash",
    "tokenizer_hash",
    "unit",
    "bos",
]
# What the page calls a metric, and its unit on an axis.
METRICS = {
    "perplexity": "perplexity per token",
    "bits_per_byte": "bits per byte",
    "nll": "loss, nats per token",
}
TRUNCATION = "truncation"  # a "rescale" of rows: the same targets, context cut to the training length
# The order in which protocols are shown.
PROTOCOLS = ("nonoverlapping", "sliding", "exact-context", "fixed-target", "prefix")
LOST = ("unsupported", "oom", "error")  # statuses that leave a cell without a number
MAX_EXPONENT = 709.78  # exp overflows float64 above it


def united(rows: pd.DataFrame) -> tuple[pd.DataFrame, list[str]]:
    """Rows in which each cell comes from one plan, no target twice; and what is left out, a line a plan,
    since another plan of the study scored other targets.

    Two strides at one length are two protocols: "sliding_128", "sliding_256".
    """
    return plans.united(_by_stride(told_apart(rows)[0]), SERIES)


def prepare(rows: pd.DataFrame) -> pd.DataFrame:
    """The rows of `united`."""
    return united(rows)[0]


def _by_stride(rows: pd.DataFrame) -> pd.DataFrame:
    sliding = rows[rows["protocol"] == "sliding"]
    if not sliding.groupby(["study", "label", "length"], observed=True)["stride"].nunique().max() > 1:
        return rows
    named = "sliding_" + sliding["stride"].map("{:.0f}".format)
    return rows.assign(protocol=rows["protocol"].astype(object).where(rows["protocol"] != "sliding", named))


def protocols_of(rows: pd.DataFrame) -> list[str]:
    """The protocols of rows in the order in which they are shown, without those only decompositions need."""
    found = {str(name) for name in rows["protocol"].unique()} - {LATE}
    rank = {name: place for place, name in enumerate(PROTOCOLS)}
    return sorted(found, key=lambda name: (rank.get(name.partition("_")[0], len(rank)), name))


def cells(rows: pd.DataFrame, aggregation: str = "token") -> pd.DataFrame:
    """One row a series, length and seed: sums of nll, tokens, bytes, windows; nll and bits_per_byte.

    A cell with a lost row keeps its place with that status and no number. aggregation: `token` weights by
    tokens, `yarn` takes the mean of window means. Rows are plain, or those of one control.
    """
    assert rows["control"].nunique() <= 1, "rows under a control stand in no table of others"
    keys = [*SERIES, "length", "seed"]
    scored = rows["num_tokens"] > 0
    work = rows.assign(
        nll_sum=rows["nll_sum"].where(scored, 0.0).fillna(np.inf),
        bytes_known=rows["num_bytes"].notna(),
        lost=rows["status"].astype(object).where(rows["status"].isin(LOST)),
        counted=rows["document"].where(scored),
        choice=rows.get("choice", 0),
    )
    table = work.groupby(keys, dropna=False, observed=True).agg(
        nll_sum=("nll_sum", "sum"),
        num_tokens=("num_tokens", "sum"),
        num_bytes=("num_bytes", "sum"),
        bytes_known=("bytes_known", "all"),
        num_windows=("num_windows", "sum"),
        window_means=("window_mean_sum", "sum"),
        num_documents=("counted", "nunique"),
        untrained_rows=("untrained_rows", "max"),
        factor=("factor", "max"),
        stride=("stride", "max"),
        length_bytes=("length_bytes", "max"),
        model=("model", "first"),
        status=("lost", "first"),
        choice=("choice", "min"),
    )
    table["status"] = table["status"].fillna("ok")
    means = table.pop("window_means") / table["num_windows"]
    if aggregation == "yarn":
        table["nll_sum"] = means * table["num_tokens"]
    return _divide(table.reset_index())


def _divide(table: pd.DataFrame) -> pd.DataFrame:
    tokens = table["num_tokens"].where((table["num_tokens"] > 0) & (table["status"] == "ok"))
    num_bytes = table["num_bytes"].where(table["bytes_known"] & (table["num_bytes"] > 0))
    nll = table["nll_sum"] / tokens
    return table.assign(nll=nll, bits_per_byte=nll * tokens / (math.log(2) * num_bytes))


def over_seeds(table: pd.DataFrame, keys: Sequence[str]) -> pd.DataFrame:
    """Mean and 95 % t interval over the seeds of each group, in every metric, as in `stats.mean_interval`.

    Seeds that are not finite are left out and counted in `lost_seeds`; one finite seed has no interval.
    `overflow` marks a loss whose exponential leaves float64: its perplexity is null.
    """
    finite = np.isfinite(table["nll"])
    work = table.assign(finite=finite, lost=table["status"].where(table["status"] != "ok"))
    for metric in ("nll", "bits_per_byte"):
        work[metric] = work[metric].where(finite)
    groups = work.groupby(list(keys), dropna=False, observed=True, sort=False)
    frame = groups.agg(num_seeds=("finite", "sum"), size=("finite", "size"), lost=("lost", "first"))
    for metric in ("nll", "bits_per_byte"):
        mean, margin = groups[metric].mean(), _margin(groups[metric])
        frame = frame.assign(
            **{metric: mean, f"{metric}_low": mean - margin, f"{metric}_high": mean + margin}
        )
    for column in ("num_documents", "num_tokens", "untrained_rows", "factor", "stride", "length_bytes"):
        if column in table:
            frame[column] = groups[column].max()
    if "choice" in table and table["choice"].any():
        frame["choice"] = groups["choice"].max()
    if "model" in table:
        frame["model"] = groups["model"].first().astype(str)
    frame["lost_seeds"] = frame.pop("size") - frame["num_seeds"]
    frame["status"] = frame.pop("lost").fillna("not finite").where(frame["num_seeds"] == 0, "ok")
    return _exponentiate(frame.reset_index())


def _margin(group: Any) -> pd.Series:
    """Half the width of the 95 % t interval of each group's mean; nan for one value."""
    count = group.count()
    quantile = special.stdtrit((count - 1).where(count > 1), 0.5 + stats.CONFIDENCE / 2)
    return group.std() / np.sqrt(count) * quantile


def _exponentiate(frame: pd.DataFrame) -> pd.DataFrame:
    for end in ("", "_low", "_high"):
        frame[f"perplexity{end}"] = perplexity(frame[f"nll{end}"])
    frame["overflow"] = (frame["nll"] > MAX_EXPONENT).fillna(False).astype(bool)  # lost cells do not overflow
    return frame


def perplexity(nll: pd.Series) -> pd.Series:
    """exp(nll) in float64, nan (never infinity) where it does not fit."""
    return np.exp(nll.astype("float64").where(nll <= MAX_EXPONENT))


def length_curves(rows: pd.DataFrame, aggregation: str = "token") -> pd.DataFrame:
    """Every series at every length: the table behind each length figure."""
    curves = over_seeds(cells(rows, aggregation), [*SERIES, "length"])
    place = curves.assign(order=[order(str(encoding)) for encoding in curves["encoding"]])
    kind = place["rescale"].astype(str).where(place["rescale"] != "none", "")
    by = ["study", "order", "label", "kind", "protocol", "length"]
    return curves.loc[place.assign(kind=kind).sort_values(by, kind="stable").index].reset_index(drop=True)


def in_bytes(shown: pd.DataFrame) -> pd.DataFrame | None:
    """Curves whose `length` is in bytes of text, where tokenizers differ and every length is known in bytes.

    Their training length is not known in bytes (-1). None where tokens compare, or bytes are unknown.
    """
    if shown["tokenizer_hash"].nunique() < 2 or shown["length_bytes"].isna().any():
        return None
    return shown.assign(length=shown["length_bytes"].astype("int64"), train_length=-1)


def position_curves(rows: pd.DataFrame) -> pd.DataFrame:
    """Loss by position bin of every series and length. Rows are plain, or those of one control."""
    assert rows["control"].nunique() <= 1, "rows under a control stand in no table of others"
    keys = [*SERIES, "length", "seed", "position_lo", "position_hi"]
    scored = rows[(rows["num_tokens"] > 0) & ~rows["status"].isin(LOST)]
    scored = scored.assign(nll_sum=scored["nll_sum"].fillna(np.inf), bytes_known=scored["num_bytes"].notna())
    table = scored.groupby(keys, dropna=False, observed=True).agg(
        nll_sum=("nll_sum", "sum"),
        num_tokens=("num_tokens", "sum"),
        num_bytes=("num_bytes", "sum"),
        bytes_known=("bytes_known", "all"),
        num_documents=("document", "nunique"),
        stride=("stride", "max"),
    )
    table = table.reset_index().assign(status="ok")
    keys.remove("seed")
    return over_seeds(_divide(table), keys)


def main_table(curves: pd.DataFrame, metric: str, lengths: Sequence[int]) -> pd.DataFrame:
    """Rows: label and rescale; columns: lengths; values: numbers, or a status where there is none."""
    shown = curves[curves["length"].isin(lengths)]
    text = shown["status"].where(shown[metric].isna(), None)
    value = shown[metric].astype(object).where(shown[metric].notna(), text)
    value = value.where(~(shown["overflow"] & (metric == "perplexity")), "overflow")
    keyed = shown.assign(value=value).set_index(["study", "label", "rescale", "length"])["value"]
    table = keyed.unstack("length")
    return table.loc[list(dict.fromkeys(keyed.index.droplevel("length")))]


def training(studies: Sequence[Study]) -> pd.DataFrame:
    """The logged loss of every run: study, label, seed, step, loss (and validation loss where logged)."""
    parts = []
    for study in studies:
        for run in study.runs:
            if {"step", "loss"} <= set(run.metrics.columns):
                kept = [name for name in ("step", "tokens", "loss", "val_loss", "lr") if name in run.metrics]
                parts.append(run.metrics[kept].assign(study=study.name, label=run.label, seed=run.seed))
    return pd.concat(parts, ignore_index=True) if parts else pd.DataFrame()


def cost(studies: Sequence[Study]) -> pd.DataFrame | None:
    """Parameters, speed, time and memory of a training run by label, mean over seeds; None without any."""
    records = []
    for study in studies:
        for run in study.runs:
            parameters = run.provenance.get("parameters") or {}
            speed = (
                run.metrics["tokens_per_second"].median() if "tokens_per_second" in run.metrics else math.nan
            )
            records.append(
                {
                    "study": study.name,
                    "label": run.label,
                    "parameters": parameters.get("total"),
                    "position_parameters": parameters.get("position"),
                    "tokens_per_second": speed,
                    "minutes": (run.finished.get("wall_seconds") or math.nan) / 60,
                    "peak_memory_MiB": (run.finished.get("peak_memory_bytes") or math.nan) / 2**20,
                    "kernel": run.provenance.get("kernel") or "",
                    "device": run.provenance.get("device") or "",
                }
            )
    if not records:
        return None
    frame = pd.DataFrame(records)
    kinds = {name: "first" if name in ("kernel", "device") else "mean" for name in frame.columns[2:]}
    numbers = [name for name, kind in kinds.items() if kind == "mean"]
    frame[numbers] = frame[numbers].astype("float64")
    return frame.groupby(["study", "label"], sort=False).agg(kinds).reset_index()
