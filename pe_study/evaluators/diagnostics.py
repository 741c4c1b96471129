"""Where attention goes, by the position of the query: entropy, largest score, mass by distance, head by head.

The first `diagnostics_documents` texts of an evaluation are read from their start, each once at every length,
and the attention of every layer is measured on the side (`pe_study.kernels.statistics`), of every query up to
128 and of every k-th one after it.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from pe_study import checkpoints
from pe_study.errors import LengthError, PEStudyError, PlanError
from pe_study.evaluators import diagnostic_cells
from pe_study.evaluators.scoring import evaluation_mode, is_out_of_memory, model_device
from pe_study.kernels.scoring import Scoring, Tempered, allowed
from pe_study.kernels.statistics import Bins, Collector, Modify, Sums
from pe_study.loading import hf_attention
from pe_study.model import PEStudyForCausalLM
from pe_study.rows import DIAGNOSTICS, DIAGNOSTICS_COLUMNS, make_rows, write_rows

if TYPE_CHECKING:
    from pe_study.evaluators.evaluation import Evaluation, Models
    from pe_study.evaluators.subjects import Subject

logger = logging.getLogger(__name__)

QUERIES = 2048  # of a document, that `diagnostics_step: auto` measures at most
VERSION = 2  # raised when rows would come out differently


def check(subject: Subject, kernel: str) -> None:
    """PlanError where a model's attention cannot be looked at, or holds more than is looked at."""
    checkpoint = subject.checkpoint
    if checkpoint.is_ours:
        return
    kind = checkpoint.config.model_type
    if not hf_attention.goes_through_interface(checkpoint.config):
        raise PlanError(f"diagnostics: {subject.name}: {hf_attention.refusal(kind)}")
    if kernel == "flex":
        raise PlanError(f"diagnostics: {subject.name}: {hf_attention.no_matrix(kernel)}")
    unknown = hf_attention.unmeasured(checkpoint.config)
    if unknown:
        raise PlanError(f"diagnostics: {subject.name}: {hf_attention.unmeasured_says(kind, unknown)}")


def step_of(asked: int | str, length: int) -> int:
    """Every how manieth query is measured: what the plan says, or such that a document has about QUERIES."""
    return max(1, length // QUERIES) if isinstance(asked, str) else asked


def collect(model: Any, sequences: Iterable[np.ndarray], bins: Bins) -> dict[int, Sums]:
    """The statistics of each layer over sequences of ids, each read whole in one pass; no logits are held
    where the model can do without."""
    collector, device = Collector(bins), model_device(model)
    with evaluation_mode(model), torch.inference_mode(), _looking(model, collector):
        options: dict[str, Any] = {"use_cache": False, **_few_logits(model)}
        for ids in sequences:
            ids_1T = torch.from_numpy(np.asarray(ids, dtype=np.int64))[None].to(device)
            model(ids_1T, **options)
    return collector.layers


def _few_logits(model: Any) -> dict[str, Any]:
    """What makes a model leave its logits out, unless it leaves queries out with them."""
    hooks = hf_attention.installed(model)
    return {} if hooks and hooks.cut else hf_attention.last_logits(model)


@contextmanager
def _looking(model: Any, collector: Collector) -> Iterator[None]:
    """The collector sees what the layers of a model compute, while the block runs."""
    holder = model.controls if isinstance(model, PEStudyForCausalLM) else hf_attention.install(model)
    name = "observe" if isinstance(model, PEStudyForCausalLM) else "collector"
    setattr(holder, name, _observer(collector) if name == "observe" else collector)
    try:
        yield
    finally:
        setattr(holder, name, None)


def _observer(collector: Collector) -> Any:
    def observe(q_BHTK: Tensor, k_BGSK: Tensor, scoring: Scoring) -> None:
        encoding, at, mask = scoring.encoding, scoring.at, scoring.mask
        plain = not (encoding.has_distance_bias or encoding.has_query_bias)
        if mask.segments is None and (plain or (at.consecutive and not encoding.has_query_bias)):
            distances = torch.arange(k_BGSK.shape[2], device=q_BHTK.device)
            bias_HS = None if plain or isinstance(encoding, Tempered) else encoding.distance_bias(distances)
            collector.add(at.layer, q_BHTK, k_BGSK, scoring.scale, bias_HS=bias_HS, window=mask.window)
        else:
            collector.add(at.layer, q_BHTK, k_BGSK, scoring.scale, modify=_modify(scoring))

    return observe


def _modify(scoring: Scoring) -> Modify:
    """The scores of a block of queries as the eager kernel computes them."""
    score_mod = scoring.encoding.score_mod(scoring.unrotated_BHTK, scoring.at)

    def modify(scores_BHCS: Tensor, queries_C: Tensor) -> tuple[Tensor, Tensor]:
        batch, heads, _, num_keys = scores_BHCS.shape
        index = torch.arange(max(batch, heads, num_keys), device=scores_BHCS.device)
        b, h = index[:batch].view(-1, 1, 1, 1), index[:heads].view(-1, 1, 1)
        t, s = queries_C.view(-1, 1), index[:num_keys]
        changed = scores_BHCS if score_mod is None else score_mod(scores_BHCS, b, h, t, s)
        return changed, allowed(scoring.mask, b, t, s)

    return modify


@dataclass(frozen=True)
class _Cell:
    """The diagnostics of one rescale at one length."""

    evaluation: Evaluation
    rescale: str
    length: int

    @property
    def step(self) -> int:
        return step_of(self.evaluation.plan.diagnostics_step, self.length)

    @property
    def sequences(self) -> list[np.ndarray]:
        """The first `length` inputs of the documents that have so many; BOS stands first where it is on."""
        most = self.evaluation.plan.diagnostics_documents
        found = [each.ids for each in self.evaluation.text.sequences if len(each.ids) > self.length]
        return [ids[: self.length] for ids in found[:most]]

    @property
    def key(self) -> dict[str, Any]:
        evaluation = self.evaluation
        return {
            "version": VERSION,
            "fingerprint": evaluation.subject.fingerprint,
            "text": hashlib.sha256(b"".join(ids.tobytes() for ids in self.sequences)).hexdigest(),
            "dtype": evaluation.subject.checkpoint.dtype,
            "kernel": evaluation.kernel,
            "identity": dict(evaluation.subject.identity),
            "train_length": evaluation.subject.train_length,
            "rescale": self.rescale,
            "length": self.length,
            "step": self.step,
            **evaluation.decides(self.rescale),
        }


def measure(
    evaluations: Sequence[Evaluation],
    folder: Path,
    fingerprints: Collection[str],
    models_of: Callable[[Evaluation], Models] | None,
) -> None:
    """Write `diagnostics.parquet` below `folder`: every rescale and length of every evaluation.

    `models_of` builds the models of an evaluation; None measures nothing new. What was measured before is
    not measured again; rows of runs, rescales and lengths that this call did not pick are kept, where their
    weights are among `fingerprints` and their text is that of the evaluations.
    """
    cells, frames = [], []
    for evaluation in evaluations if models_of else ():
        assert models_of is not None
        models = models_of(evaluation)
        for rescale, length in product(evaluation.rescales, evaluation.lengths):
            cells.append(_Cell(evaluation, rescale, length))
            frames.append(_kept_or_measured(cells[-1], models, folder))
    tables = [_table_of(evaluation) for evaluation in evaluations]
    frames += diagnostic_cells.others(folder, [cell.key for cell in cells], fingerprints, tables)
    if frames:
        write_rows(pd.concat(frames, ignore_index=True), folder, DIAGNOSTICS)
    else:
        (folder / DIAGNOSTICS).unlink(missing_ok=True)


def _table_of(evaluation: Evaluation) -> list[Any]:
    """What must agree before rows of two evaluations may stand in one file."""
    return [evaluation.text.hash, evaluation.subject.checkpoint.dtype, evaluation.kernel, VERSION]


def _kept_or_measured(cell: _Cell, models: Models, root: Path) -> pd.DataFrame:
    key, of = cell.key, _table_of(cell.evaluation)
    kept = diagnostic_cells.read(root, key, of)
    if kept is not None:
        return kept
    frame = _rows(cell, models)
    diagnostic_cells.write(root, key, of, frame)
    return frame


def _rows(cell: _Cell, models: Models) -> pd.DataFrame:
    subject, text = cell.evaluation.subject, cell.evaluation.text
    bins = Bins(cell.length, subject.train_length, cell.step)
    layers, status = _measured(cell, models, bins)
    shared = {
        **subject.identity,
        **{name: value for name, value in text.columns.items() if name in DIAGNOSTICS_COLUMNS},
        "train_length": subject.train_length,
        "length": cell.length,
        "dtype": subject.checkpoint.dtype,
        "mask_kind": "causal",
        "rescale": cell.rescale,
        "factor": cell.evaluation.factor(cell.rescale, cell.length),
        "kernel": models.kernel,
        "bos": text.sequences[0].bos_token_id is not None,
        "num_documents": len(cell.sequences),
        "query_step": cell.step,
        "status": status,
    }
    found = [row for layer, sums in sorted(layers.items()) for row in table(layer, sums, bins)]
    return make_rows([{**shared, **row} for row in found or [{}]], DIAGNOSTICS_COLUMNS)


def _measured(cell: _Cell, models: Models, bins: Bins) -> tuple[dict[int, Sums], str]:
    """The statistics of a cell and its status: one that fails must not take the others with it."""
    if not cell.sequences:
        return {}, "skipped"
    try:
        model = models.get(cell.rescale, cell.length)
        limit = checkpoints.max_length(model)
        if limit is not None and cell.length > limit:
            return {}, "unsupported"
        return collect(model, cell.sequences, bins), "ok"
    except LengthError:
        return {}, "unsupported"
    except PEStudyError:
        raise
    except Exception as error:
        logger.warning("diagnostics, length %d: %s: %s", cell.length, type(error).__name__, error)
        return {}, "oom" if is_out_of_memory(error) else "error"


def table(layer: int, sums: Sums, bins: Bins) -> Iterator[dict[str, Any]]:
    """The rows of one layer: a row a head and position bin, then one for each of its bins of distances."""
    for bin_ in range(bins.num_positions):
        queries, ratios = int(sums.num_queries_P[bin_]), int(sums.num_ratios_P[bin_])
        for head in range(sums.beyond_PH.shape[1]) if queries else ():
            place = {
                "layer": layer,
                "head": head,
                "position_lo": 1 << bin_,
                "position_hi": 2 << bin_,
                "num_queries": queries,
            }
            beyond = float(sums.beyond_PH[bin_, head]) / queries
            yield {
                **place,
                "entropy_ratio": float(sums.entropy_ratio_PH[bin_, head]) / ratios if ratios else None,
                "max_logit": float(sums.max_score_PH[bin_, head]),
                "mass_beyond": None if bins.train_length is None else beyond,
            }
            for n, (lo, hi) in enumerate(bins.distances):
                if lo < 2 << bin_:
                    mass = float(sums.mass_PHN[bin_, head, n]) / queries
                    yield {**place, "distance_lo": lo, "distance_hi": hi, "mass": mass}
