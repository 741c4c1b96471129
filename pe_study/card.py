"""The model card of a finished run, with what was measured of it, and its way to the Hugging Face Hub.

Nothing leaves the machine unless a repository is named. Numbers are those of the `results.json` that lie
beside the study: one card, one run.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from huggingface_hub import EvalResult, HfApi, ModelCard, ModelCardData, get_token
from huggingface_hub.errors import HfHubHTTPError, HFValidationError

from pe_study import finished, hub, recipe, runs
from pe_study.errors import CheckpointError, UsageError
from pe_study.recipe import Recipe

CARD = "README.md"
TEMPLATE = Path(__file__).parent / "templates" / "card.md.j2"
SUMMARY = "results.json"
METRICS = {"": "perplexity", "bits_per_byte_": "bits_per_byte"}  # of results.json -> of the card
_CELL = re.compile(r"(|bits_per_byte_)(\d+),none")

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Measured:
    """One line of a table: what was measured, by which metric, and the value at each length (None: none)."""

    plan: str
    corpus: str
    how: str
    metric: str
    values: Mapping[int, float | None]


def write_card(run: Path | str, repo_id: str | None = None) -> Path:
    """Write the model card of a run into its `final/`; returns its path. CheckpointError for an unfinished
    run."""
    folder = Path(run)
    if not (folder / runs.RECIPE).is_file():
        raise UsageError(f"{run}: not a run directory; name one, such as runs/demo/rope-s0")
    if not runs.is_whole(folder):
        raise CheckpointError(f"{run}: an unfinished run; finish its training first")
    finished.check(folder)
    path = folder / runs.FINAL / CARD
    compose(folder, repo_id).save(path)
    return path


def push(run: Path | str, repo_id: str, *, private: bool = False) -> str:
    """Write the card and upload it with the model and tokenizer to `owner/name`; returns the address.

    UsageError for a name that cannot be, without a token, without the network, or where the Hub refuses.
    """
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", repo_id):
        raise UsageError(f'--push: found "{repo_id}"; accepted: OWNER/NAME, such as me/rope-64')
    path = write_card(run, repo_id)
    if get_token() is None:
        raise UsageError(f"--push: no token of the Hub; run hf auth login, or set HF_TOKEN\n{_kept(path)}")
    if not hub.reachable():
        raise UsageError(f"--push: the Hugging Face Hub cannot be reached from here\n{_kept(path)}")
    api = HfApi()
    try:
        address = api.create_repo(repo_id, private=private, exist_ok=True)
        api.upload_folder(repo_id=repo_id, folder_path=path.parent, commit_message=f"Add {Path(run).name}")
    except (HfHubHTTPError, HFValidationError, OSError) as error:
        said = " ".join(str(error).split())[:200]
        raise UsageError(f"--push: {repo_id}: the Hub refused ({said})\n{_kept(path)}") from None
    return str(address)


def _kept(path: Path) -> str:
    return f"the card is in {path}; the same command goes on"


def compose(folder: Path, repo_id: str | None = None) -> ModelCard:
    """The card of the finished run in `folder`."""
    narrowed = _without_paths(recipe.load(folder / runs.RECIPE))
    measured = list(read_measured(folder, narrowed))
    name = repo_id or f"{folder.resolve().parent.name}/{folder.resolve().name}"
    return ModelCard.from_template(
        _data(narrowed, name, measured),
        template_path=str(TEMPLATE),
        name=name,
        run=narrowed.runs()[0],
        recipe=narrowed,
        recipe_yaml=recipe.resolved_yaml(narrowed),
        tokens=narrowed.train.steps * narrowed.train.batch_tokens,
        done=runs.read_json(folder / runs.DONE),
        provenance=runs.read_json(folder / runs.PROVENANCE),
        tables=_tables(measured),
        lengths=sorted({length for line in measured for length in line.values}),
    )


def read_measured(folder: Path, narrowed: Recipe) -> Iterator[Measured]:
    """What the evaluations beside the study say of the run in `folder`. Those from before its weights were
    there are left out with a warning."""
    finished = datetime.fromisoformat(runs.read_json(folder / runs.DONE)["finished"])
    for path in sorted(folder.resolve().parent.glob(f"eval/*/{SUMMARY}")):
        summary = runs.read_json(path)
        if datetime.fromisoformat(summary["date"]) < finished:
            logger.warning("%s: older than the weights of %s, left out of its card", path, folder.name)
            continue
        corpus = _public_name(summary["config"]["plan"]["corpus"] or narrowed.data.corpus)
        for task, cells in summary["results"].items():
            run_id, _, how = task.partition("/")
            if run_id != folder.resolve().name:
                continue
            for prefix, metric in METRICS.items():
                found = {key: _CELL.fullmatch(key) for key in cells}
                values = {int(m[2]): cells[key] for key, m in found.items() if m and m[1] == prefix}
                yield Measured(path.parent.name, corpus, how, metric, values)


def _data(narrowed: Recipe, name: str, measured: list[Measured]) -> ModelCardData:
    """The machine-readable head of the card."""
    encoding = narrowed.encodings[0].name
    source = narrowed.init.source if narrowed.init else None
    return ModelCardData(
        model_name=name,
        library_name="transformers",
        pipeline_tag="text-generation",
        tags=["pe_study", "position-encoding", "length-extrapolation", encoding],
        datasets=narrowed.data.corpus if _is_hub_id(narrowed.data.corpus) else None,
        base_model=source if source and _is_hub_id(source) else None,
        eval_results=[
            EvalResult(
                task_type="text-generation",
                dataset_type=line.corpus,
                dataset_name=line.corpus,
                metric_type=line.metric,
                metric_name=f"{line.metric} at {length} tokens ({line.how})",
                metric_value=value,
                metric_args={"plan": line.plan, "how": line.how, "length": length},
            )
            for line in measured
            for length, value in line.values.items()
            if value is not None
        ]
        or None,
    )


def _tables(measured: list[Measured]) -> dict[str, list[Measured]]:
    """The lines of each plan and metric, under the heading of their table."""
    tables: dict[str, list[Measured]] = {}
    for line in measured:
        unit = {"perplexity": "perplexity per token", "bits_per_byte": "bits per byte"}[line.metric]
        tables.setdefault(f"{line.plan}, on {line.corpus}: {unit}", []).append(line)
    return tables


def _without_paths(narrowed: Recipe) -> Recipe:
    """The recipe for everybody to read: files and folders by their last name alone."""
    data, init, plan = narrowed.data, narrowed.init, narrowed.eval
    public = {name: _public_name(getattr(data, name)) for name in ("corpus", "tokenizer")}
    return narrowed.model_copy(
        update={
            "data": data.model_copy(update=public),
            "init": init and init.model_copy(update={"source": _public_name(init.source)}),
            "eval": plan.model_copy(update={"corpus": plan.corpus and _public_name(plan.corpus)}),
        }
    )


def _public_name(source: str) -> str:
    return source if _is_hub_id(source) else Path(source).name


def _is_hub_id(name: str) -> bool:
    return name.count("/") == 1 and not name.startswith((".", "/", "~")) and not Path(name).exists()
