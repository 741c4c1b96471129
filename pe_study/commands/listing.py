"""What `pe-study ls` and `pe-study validate` print: choices, runs, checked files. No torch here."""

from __future__ import annotations

import ast
import itertools
import math
import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from pe_study import encodings, plan, planned, recipe, rope_scaling, runs, shipped
from pe_study.commands import forecast, layout
from pe_study.errors import RecipeError, UsageError, did_you_mean
from pe_study.reporting import findings
from pe_study.settings import leaves, overlays, schema
from pe_study.training import bases

if TYPE_CHECKING:
    import pandas as pd

KERNELS = {
    "auto": "the best for the device, encoding and mask; logged and written into every row",
    "eager": "the definition, one dense matrix: the oracle of the others",
    "sdpa": "torch's scaled_dot_product_attention; biases as strided views, in chunks of queries",
    "flex": "FlexAttention, CUDA",
    "flash": "FlashAttention through SDPA, CUDA, half precision; of biases ALiBi's, with flash-attn",
}
CORPORA = {
    "stdlib": "source of this Python's standard library, one document a file; needs no network",
    "FILE, FOLDER": "text, JSONL or Parquet; data.text_field names the field",
    "HUB/ID": "a Hugging Face dataset, also a local dataset folder",
}
TOKENIZERS = {
    "byte": "UTF-8 bytes and an end-of-text symbol; needs no files",
    "bpe:N": "N symbols trained on the corpus, kept in the cache",
    "HUB/ID, FOLDER": "any Hugging Face tokenizer",
}


def _encodings(root: Path) -> Iterable[tuple[str, str]]:
    return [(name, _first_line(encodings.source(name))) for name in encodings.available()]


def _first_line(module: Path) -> str:
    """Of its docstring; of a file that Python cannot read, where and why."""
    try:
        text = ast.get_docstring(ast.parse(module.read_bytes(), str(module))) or ""
    except (SyntaxError, ValueError, OSError) as error:
        return f"cannot be used: {encodings.fault(module, error)}"
    return text.split("\n", 1)[0]


def _runs(root: Path) -> Iterable[tuple[str, str]]:
    states = runs.list_runs(root)
    begun = {state.folder.resolve() for state in states}
    found = [(f"{state.study}/{state.run_id}", _progress(state)) for state in states]
    for file in sorted([*root.glob(planned.STUDY), *root.glob(f"*/{planned.STUDY}")]):
        study = file.parent.resolve()
        names = [name for name in planned.read_planned(file.parent) if study / name not in begun]
        found += [(f"{study.name}/{name}", "not started") for name in names]
    return found or [(str(root), "no runs yet; pe-study train RECIPE makes some")]


def _progress(state: runs.RunState) -> str:
    loss = "" if state.loss is None else f", loss {state.loss:.3f}"
    return f"{state.status:8} step {state.step} of {state.steps}{loss}"


def _shipped(folder: str) -> Callable[[Path], Iterable[tuple[str, str]]]:
    return lambda root: [(name, _comment(shipped.find(name))) for name in shipped.names(folder)]


def _keys(root: Path) -> Iterable[tuple[str, str]]:
    return [(key, f"{text} ({accepted})") for key, accepted, _, text in schema.reference(recipe.Recipe)]


def _comment(path: Path) -> str:
    """The first sentence of the comment that opens a YAML file: what it is for."""
    prose = re.compile(r"# \S")  # not an empty comment line, nor an indented command
    lines = itertools.takewhile(prose.match, path.read_text(encoding="utf-8").split("\n"))
    opening = " ".join(line.removeprefix("# ") for line in lines)
    return re.split(r"\.(?: +(?=[A-Z`])|$)", opening)[0].rstrip(":")


KINDS: dict[str, Callable[[Path], Iterable[tuple[str, str]]]] = {
    "encodings": _encodings,
    "rescales": lambda root: rope_scaling.KINDS.items(),
    "protocols": lambda root: plan.PROTOCOLS.items(),
    "kernels": lambda root: KERNELS.items(),
    "corpora": lambda root: CORPORA.items(),
    "tokenizers": lambda root: TOKENIZERS.items(),
    "recipes": _shipped("recipes"),
    "plans": _shipped("evals"),
    "runs": _runs,
    "keys": _keys,
}
SHORT = tuple(KINDS)[:-1]  # without the keys, which fill pages


def listed(kind: str, root: Path) -> str:
    """One kind of thing as a titled table of two columns, or what the recipe of that name costs.

    Raises UsageError for a name that is neither, RecipeError for a recipe that cannot be read.
    """
    if Path(kind).suffix in (".yaml", ".yml"):
        return forecast.describe(recipe.load(shipped.find(kind)), root, {})
    if kind not in KINDS:
        raise UsageError(f'ls: nothing to list by the name "{kind}"; {did_you_mean(kind, KINDS)}')
    rows = list(KINDS[kind](root))
    width = 2 + max(len(name) for name, _ in rows)
    return "\n".join([kind, *(layout.hanging(f"  {name:{width}}", text) for name, text in rows)])


def validated(path: Path, overrides: Sequence[str]) -> str:
    """One line on a recipe or plan that is right; RecipeError or PlanError for one that is not."""
    if is_recipe(path):
        loaded = recipe.load(path, overrides)
        said = f"{path}: recipe {loaded.name}, {len(loaded.runs())} runs, hash {loaded.hash[:12]}"
        absent = bases.absence(loaded, "runs")
        return f"{said}\n{absent}" if absent else said
    checked = plan.load_plan(path, ())
    return f"{path}: plan {checked.name}, {len(checked.lengths)} lengths"


def is_recipe(path: Path) -> bool:
    """Whether a file claims to be a recipe: it trains something, where a plan only evaluates."""
    content = overlays.read(path, RecipeError).value
    return bool({"model", "train", "encodings"} & set(content))


def results(folder: Path) -> str:
    """What an evaluation measured, a table a protocol: bits per byte, or perplexity without bytes.

    Plain lines first, then one a control, marked. Lengths in bytes stand at the head as the plan has them.
    """
    from pe_study import tables

    curves = _curves(folder)
    metric = "bits_per_byte" if curves["bits_per_byte"].notna().any() else "perplexity"
    means = " (means of window means)" if _aggregation(folder) == "yarn" else ""
    blocks = []
    for protocol, shown in curves.groupby("protocol", sort=False, observed=True):
        in_bytes = bool(shown["length_bytes"].notna().all())
        shown = shown.assign(length=shown["length_bytes"].astype(int)) if in_bytes else shown
        lengths = sorted(shown["length"].unique())
        wide = tables.main_table(shown, metric, lengths)[lengths].reset_index()
        if wide["study"].nunique() == 1:
            wide = wide.drop(columns="study")
        if in_bytes:
            wide = wide.rename(columns={length: leaves.bytes_text(length) for length in lengths})
        lines = [{str(key): _figure(value) for key, value in row.items()} for row in wide.to_dict("records")]
        blocks.append(f"{tables.METRICS[metric]}, {protocol}{means}\n{layout.table(lines)}")
    return "\n\n".join([*blocks, *_cache_lines(folder)])


def _curves(folder: Path) -> pd.DataFrame:
    """The curves of plain rows, then those of each control, whose name its rescale carries."""
    import pandas as pd

    from pe_study import rows, tables
    from pe_study.reporting import studies

    frame = studies.plain(rows.read_rows(folder)).assign(plan="")
    parts = []
    for control in sorted(frame["control"].unique(), key=lambda name: (name != rows.NO_CONTROL, name)):
        measured = frame[(frame["control"] == control) & (frame["protocol"] != tables.LATE)]
        curves = tables.length_curves(tables.prepare(measured), _aggregation(folder))
        if control != rows.NO_CONTROL:
            curves["rescale"] = curves["rescale"].astype(str) + f", {control}"
        parts.append(curves.astype(dict.fromkeys(("study", "label", "rescale", "protocol"), object)))
    return pd.concat(parts, ignore_index=True)


def _aggregation(folder: Path) -> str:
    return str(runs.read_json(folder / "results.json")["config"]["plan"]["aggregation"])


def _cache_lines(folder: Path) -> list[str]:
    """What an 8-bit cache cost, in one line; none where none was asked for."""
    summary = runs.read_json(folder / "results.json")
    sentence = findings.cache_sentence(summary["notes"].get("cache_costs") or [])
    if sentence is None and summary["config"]["plan"]["cache"] == "fp8":
        sentence = "What the 8-bit cache costs is not known: run the same command with --cache full, too."
    return [sentence] if sentence else []


def _figure(value: object) -> str:
    if isinstance(value, float):
        return "-" if math.isnan(value) else f"{value:.3f}"
    return str(value)
