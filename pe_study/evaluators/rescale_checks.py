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
    if "none" in plan.rescales or any(_takes(subjects, spec, plan.rescale_all) for spec in plan.rescales):
        return
    known = _known(subjects, plan.rescale_all)
    accepted = ", ".join(known)
    more = [text for text in _known(subjects, True) if text not in known]
    if more:
        accepted += f", with rescale_all true also {', '.join(more)}"
    said = "; ".join(f"{subject.name} {_why_not(subject)}" for subject in subjects)
    raise RescaleError(f"rescales: found {', '.join(plan.rescales)}; accepted: {accepted} ({said})")


def _known(subjects: Sequence[Subject], rescale_all: bool) -> list[str]:
    """A rescale of each kind that some subject takes."""
    takes = {text: _takes(subjects, text.replace(":S", ":2"), rescale_all) for text in _SPELLED.values()}
    return [text for text in takes if text == "none" or takes[text]]


def _takes(subjects: Sequence[Subject], rescale: str, rescale_all: bool) -> bool:
    """Whether some subject takes a rescale; without `rescale_all` RoPE alone is rescaled."""
    chosen = [each.checkpoint for each in subjects if rescale_all or each.checkpoint.rotary is not None]
    return any(checkpoint.takes(rescale) for checkpoint in chosen)


def _why_not(subject: Subject) -> str:
    """Why a subject does not know a rescale, as the end of a sentence on it: it does not turn, or, where it
    does, logn does not reach its attention."""
    config = subject.checkpoint.config
    if subject.checkpoint.rotary is None:
        return hf_rope.why_not(config)
    return f"takes no {LOGN}: {hf_attention.refusal(config.model_type)}"
