"""Refuses a plan of rescales none of which a model knows, and says which it does."""

from __future__ import annotations

from collections.abc import Sequence

from pe_study.errors import RescaleError
from pe_study.evaluators.subjects import Subject
from pe_study.loading import hf_attention, hf_rope
from pe_study.plan import Plan
from pe_study.rescales import KINDS, LOGN

# A rescale of each kind, as a person would write it.
_SPELLED = {kind: f"{kind}:S" for kind in KINDS} | {
    **{kind: kind for kind in ("none", "dynamic", LOGN)},
    "longrope": "longrope:FILE",
}


def check_rescales(plan: Plan, subjects: Sequence[Subject]) -> None:
    """RescaleError where a plan rescales and nothing else, and no subject knows one of its rescales."""
    if "none" in plan.rescales or any(
        _takes(each, plan, spec) for each in subjects for spec in plan.rescales
    ):
        return
    known = [
        text
        for text in _SPELLED.values()
        if text == "none" or any(_takes(each, plan, text.replace(":S", ":2")) for each in subjects)
    ]
    said = "; ".join(f"{subject.name} {_why_not(subject)}" for subject in subjects)
    narrow = "" if plan.rescale_all else "; rescale_all: false keeps to RoPE"
    found = ", ".join(plan.rescales)
    raise RescaleError(f"rescales: found {found}; accepted: {', '.join(known)} ({said}{narrow})")


def _takes(subject: Subject, plan: Plan, rescale: str) -> bool:
    if not plan.rescale_all and subject.checkpoint.rotary is None:
        return False
    return subject.checkpoint.takes(rescale)


def _why_not(subject: Subject) -> str:
    """Why a subject does not know a rescale, as the end of a sentence on it: it does not turn, or, where it
    does, logn does not reach its attention."""
    config = subject.checkpoint.config
    if subject.checkpoint.rotary is None:
        return hf_rope.why_not(config)
    return f"takes no {LOGN}: {hf_attention.refusal(config.model_type)}"
