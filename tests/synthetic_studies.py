"""Makes studies that look real, so that reports can be tested without training anything.

`rows` draws result rows with exactly the columns of a results.parquet; `write_study` lays out a whole study
directory: runs with recipe.yaml, provenance.json, metrics.jsonl and DONE, and an evaluation beside them.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pandas as pd
import yaml

from pe_study import rows as rows_module
from pe_study.reporting import studies

LENGTHS = (64, 80, 96, 128, 192, 256, 384, 512, 1024)
ENCODINGS = ("nope", "sinusoidal", "learned", "shaw", "t5", "rope", "alibi")
# Nats a byte at the training length, and what each doubling of the distance past it adds.
LEVEL = {
    "nope": 2.27,
    "sinusoidal": 2.17,
    "learned": 2.2,
    "shaw": 1.95,
    "t5": 1.81,
    "rope": 1.84,
    "alibi": 1.96,
}
DAMAGE = {
    "nope": 0.05,
    "sinusoidal": 0.45,
    "learned": 0.6,
    "shaw": 0.02,
    "t5": -0.006,
    "rope": 0.4,
    "alibi": -0.004,
}
RESCUE = {"none": 1.0, "linear:auto": 0.75, "ntk:auto": 0.3, "yarn:auto": 0.22}


def position_bins(length: int) -> list[tuple[int, int]]:
    """Half-open context sizes [1, 2), [2, 4), … up to `length` included."""
    edges = [1]
    while edges[-1] * 2 <= length:
        edges.append(edges[-1] * 2)
    return list(zip(edges, [*edges[1:], length + 1], strict=True))


def rows(
    *,
    study: str = "synthetic",
    encodings: Sequence[str] = ENCODINGS,
    seeds: Sequence[int] = (0,),
    lengths: Sequence[int] = LENGTHS,
    train_length: int = 64,
    protocols: Sequence[str] = ("nonoverlapping", "prefix"),
    rescales: Sequence[str] = ("none", "linear:auto", "ntk:auto", "yarn:auto"),
    num_documents: int = 12,
    seed_spread: float = 0.01,
    level: dict[str, float] | None = None,
    damage: dict[str, float] | None = None,
) -> pd.DataFrame:
    """Rows of every encoding x seed x rescale x protocol x length x document x position bin."""
    level = {**LEVEL, **(level or {})}
    damage = {**DAMAGE, **(damage or {})}
    rng = np.random.default_rng(0)
    difficulty = rng.normal(0, 0.15, num_documents)
    sizes = max(lengths) * rng.integers(1, 4, num_documents)
    parts = []
    for name in encodings:
        for seed in seeds:
            shift = rng.normal(0, seed_spread)
            for rescale in rescales if name == "rope" else ("none",):
                for protocol in protocols:
                    for length in lengths:
                        cell = _cell(
                            length,
                            train_length,
                            level.get(name, 2.0) + shift,
                            damage.get(name, 0.1) * RESCUE[rescale],
                        )
                        part = _documents(cell, protocol, length, difficulty, sizes, rng)
                        part = part.assign(
                            label=name, encoding=name, seed=seed, rescale=rescale, protocol=protocol
                        )
                        part["run"] = f"{name}-s{seed}"
                        part["factor"] = 1.0 if rescale == "none" else max(1.0, length / train_length)
                        parts.append(part.assign(length=length, train_length=train_length))
    frame = pd.concat(parts, ignore_index=True)
    return _constants(frame, study)


def _cell(length: int, train_length: int, level: float, damage: float) -> pd.DataFrame:
    bins = position_bins(length)
    context = np.array([(lo * (hi - 1)) ** 0.5 for lo, hi in bins])
    nll = level + 1.6 * context**-0.7 + damage * np.log2(np.maximum(context / train_length, 1.0)) ** 1.3
    share = np.array([hi - lo for lo, hi in bins]) / length
    return pd.DataFrame(bins, columns=["position_lo", "position_hi"]).assign(nll=nll, share=share)


def _documents(cell, protocol, length, difficulty, sizes, rng) -> pd.DataFrame:
    num_tokens = {"prefix": np.full_like(sizes, length), "exact-context": np.full_like(sizes, 64)}.get(
        protocol, sizes
    )
    if protocol in ("exact-context", "sliding"):
        cell = cell.tail(1).assign(share=1.0)
    part = cell.merge(pd.DataFrame({"document": range(len(sizes))}), how="cross")
    noise = rng.normal(0, 0.02, len(part))
    edges = [
        num_tokens[part["document"]] * end for end in (part["share"].groupby(part["document"]).cumsum(), 0)
    ]
    upto = edges[0].round().astype("int64")
    part["num_tokens"] = upto.groupby(part["document"]).diff().fillna(upto).astype("int64")
    part["nll_sum"] = (part["nll"] + difficulty[part["document"]] + noise) * part["num_tokens"]
    part["num_bytes"] = part["num_tokens"]
    part["num_windows"] = np.maximum(part["num_tokens"] // length, 1)
    part["window_mean_sum"] = part["nll"] * part["num_windows"]
    return part.drop(columns=["nll", "share"])


def _constants(frame: pd.DataFrame, study: str) -> pd.DataFrame:
    past = (frame["length"] - frame["train_length"]).clip(lower=0)
    return frame.assign(
        study=study,
        model=frame["run"],
        kernel="sdpa",
        mask_kind="causal",
        dtype="float32",
        stride=np.where(frame["protocol"] == "sliding", frame["length"] // 2, np.nan),
        corpus="stdlib",
        corpus_hash="c" * 64,
        tokenizer_hash="7" * 64,
        unit="document",
        bos=False,
        untrained_rows=np.where(frame["label"] == "learned", past, 0),
        num_skipped=0,
        status="ok",
    )


def with_status(frame: pd.DataFrame, status: str, **where: object) -> pd.DataFrame:
    """One row of `status` with no tokens in place of the rows of each selected cell."""
    chosen = np.logical_and.reduce([frame[key] == value for key, value in where.items()])
    lost = frame[chosen].drop_duplicates(["label", "seed", "rescale", "protocol", "length"]).copy()
    lost[["nll_sum", "window_mean_sum"]] = 0.0
    lost[["num_tokens", "num_bytes", "num_windows"]] = 0
    return pd.concat([frame[~chosen], lost.assign(status=status)], ignore_index=True)


def write_study(root: Path, frame: pd.DataFrame, *, plan: str = "length", steps: int = 300) -> Path:
    """Write runs/<study>/ under `root` as training and evaluation would; returns the study's folder."""
    folder = root / str(frame["study"].iloc[0])
    for (run, label, seed), _ in frame.groupby(["run", "label", "seed"]):
        _write_run(folder / str(run), str(label), int(seed), int(frame["train_length"].iloc[0]), steps)
    evaluation = folder / "eval" / plan
    evaluation.mkdir(parents=True)
    frame.to_parquet(evaluation / "results.parquet")
    lengths = sorted(int(length) for length in frame["length"].unique())
    results = {
        "results": {},
        "config": {"plan": {"name": plan, "lengths": lengths}},
        "notes": {
            "documents": {"kept": int(frame["document"].nunique()), "total": 60, "median_length": 5120},
            "rescales": [
                {
                    "label": "rope",
                    "rescale": "yarn:auto",
                    "length": n,
                    "train_length": 64,
                    "factor": max(1.0, n / 64),
                }
                | {"attention_factor": 1.0, "kept": 0, "blended": 3, "interpolated": 13}
                for n in lengths
            ],
        },
    }
    (evaluation / "results.json").write_text(json.dumps(results), encoding="utf-8")
    return folder


def _write_run(folder: Path, label: str, seed: int, train_length: int, steps: int) -> None:
    folder.mkdir(parents=True)
    recipe = {
        "name": folder.parent.name,
        "seeds": [seed],
        "encodings": [{"name": label.split("-")[0], "label": label}],
        "model": {"num_layers": 4, "d_model": 128, "num_heads": 4, "d_ff": 384},
        "data": {"corpus": "stdlib", "tokenizer": "byte", "packing": "concatenate"},
        "train": {"length": train_length, "steps": steps, "lr": 0.002, "batch_tokens": 4096},
    }
    (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe, allow_unicode=True), encoding="utf-8")
    provenance = {
        "versions": {"python": "3.11", "torch": "2.13.0", "pe_study": "0.1.0"},
        "git_commit": "0123456789abcdef",
        "steps": steps,
        "device": "cpu",
        "kernel": "sdpa",
        "parameters": {
            "total": 820_000 + (0 if label == "nope" else 128),
            "position": 0 if label == "nope" else 128,
        },
    }
    (folder / "provenance.json").write_text(json.dumps(provenance), encoding="utf-8")
    rng = np.random.default_rng(seed)
    lines = [
        {
            "step": step,
            "tokens": step * 4096,
            "loss": float(1.9 + 3.5 * np.exp(-step / 60) + rng.normal(0, 0.02)),
        }
        | {"lr": 0.002, "tokens_per_second": 14000.0}
        for step in range(10, steps + 1, 10)
    ]
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (folder / "metrics.jsonl").write_text(text, encoding="utf-8")
    (folder / "DONE").write_text("{}", encoding="utf-8")


def plain_rows(**options: object) -> pd.DataFrame:
    """`rows` as a report reads them from a file, of a plan called "length"."""
    return studies.plain(rows_module.make_rows(rows(**options))).assign(plan="length")  # type: ignore[arg-type]
