"""Controls at evaluation: what is taken from a model to see what it used.

`attention_window=W`: each query sees its last W keys, its own counted; positions stay. `shuffle_positions`:
the positions 0 .. T-1 of a window's T tokens are permuted, tokens and causal mask (by index) stay; the
permutation is drawn from the window's tokens, so that every model and rescale gets the same.
"""

from __future__ import annotations

import inspect
import zlib
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from pe_study import attention, checkpoints
from pe_study.errors import PlanError, UsageError
from pe_study.kernels.scoring import Mask
from pe_study.loading import hf_attention, hf_rope, load_checks
from pe_study.model import PEStudyForCausalLM
from pe_study.plan import Plan

if TYPE_CHECKING:
    from pe_study.evaluators.subjects import Subject

WINDOW, SHUFFLE = "attention_window", "shuffle_positions"
OF_A_WINDOW = (SHUFFLE,)
"""Controls under which a window's prefix is not the shorter window."""


def asked(plan: Plan) -> tuple[str, ...]:
    """The controls of a resolved plan, as the column `control` names them."""
    window = [] if plan.attention_window is None else [f"{WINDOW}={plan.attention_window}"]
    return (*window, *([SHUFFLE] if plan.shuffle_positions else ()))


def check(subject: Subject, control: str, kernel: str, device: torch.device | None) -> None:
    """PlanError where a model cannot take a control on a device (None: the CPU)."""
    checkpoint, name = subject.checkpoint, control.partition("=")[0]
    config = checkpoint.config
    if checkpoint.is_ours:
        where, dtype = device or torch.device("cpu"), checkpoints.DTYPES[checkpoint.dtype]
        try:
            attention.resolve(kernel, where, dtype, config.build_encoding(), **_attends(control))
        except UsageError as refused:
            raise PlanError(f"{name}: {refused}") from None
        return
    if name == WINDOW and not hf_attention.goes_through_interface(config):
        raise PlanError(f"{name}: {subject.name}: {hf_attention.refusal(config.model_type)}")
    if name == WINDOW and kernel not in ("auto", *hf_attention.WINDOWED):
        raise PlanError(f"{name}: found kernel {kernel}; accepted: {', '.join(hf_attention.WINDOWED)}")
    if name == SHUFFLE and not _takes_positions(config):
        raise PlanError(f"{name}: {subject.name}: {_ignored(config)}")


def _takes_positions(config: Any) -> bool:
    own = hf_attention.model_class(config)
    if own is None or hf_rope.is_switched_off(config):
        return False
    return "position_ids" in inspect.signature(own.forward).parameters


def _ignored(config: Any) -> str:
    return f"{config.model_type} takes no positions from outside; leave {SHUFFLE} out"


def check_effect(subject: Subject, model: Any) -> None:
    """PlanError where a loaded model says the same under any positions, whatever its call accepts."""
    if not isinstance(model, PEStudyForCausalLM) and not load_checks.follows_positions(model):
        raise PlanError(f"{SHUFFLE}: {subject.name}: {_ignored(model.config)}")


def mask_kind(control: str) -> str:
    """The mask of a call under a control, as rows name it."""
    return Mask(window=_window(control)).kind


def resolved_kernel(model: Any, control: str) -> str:
    """The attention kernel that runs under a control."""
    return checkpoints.resolved_kernel(model, **_attends(control))


def _attends(control: str) -> dict[str, Any]:
    """What a control changes of all that chooses a kernel."""
    return {"mask_kind": mask_kind(control), "consecutive": control != SHUFFLE}


def _window(control: str) -> int | None:
    name, _, value = control.partition("=")
    return int(value) if name == WINDOW else None


def put(model: Any, control: str) -> None:
    """Puts a loaded model under a control, and out of any other."""
    window = _window(control)
    model.shuffles_positions = control == SHUFFLE
    if isinstance(model, PEStudyForCausalLM):
        model.controls.window, model.controls.positions_BS = window, None
    elif window is not None or hf_attention.installed(model) is not None:
        hf_attention.install(model).window = window


def positions(model: Any, ids_BT: torch.Tensor) -> torch.Tensor | None:
    """Permuted positions (B, T) where the model is under `shuffle_positions`."""
    if not getattr(model, "shuffles_positions", False):
        return None
    rows = [_permutation(row) for row in ids_BT.cpu().numpy()]
    return torch.from_numpy(np.stack(rows)).to(ids_BT.device)


def _permutation(ids: np.ndarray) -> np.ndarray:
    return np.random.default_rng(zlib.crc32(ids.astype(np.int64).tobytes())).permutation(len(ids))


def placed(model: Any, positions_BT: torch.Tensor | None, start: int, stop: int) -> dict[str, Any]:
    """How a call on the tokens [start, stop) of windows is told their positions, cached ones behind it."""
    if positions_BT is None:
        return {}
    if isinstance(model, PEStudyForCausalLM):
        model.controls.positions_BS = positions_BT
        return {}
    seen = torch.ones(len(positions_BT), stop, dtype=torch.long, device=positions_BT.device)
    return {"position_ids": positions_BT[:, start:stop], "attention_mask": seen}
