"""pe_study: trained at length L, what happens past L?

Public names load on first use: `import pe_study.report` needs no torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pe_study.checkpoints import load_causal_lm
    from pe_study.data import Document
    from pe_study.evaluators.perplexity import evaluate_perplexity
    from pe_study.model import PEStudyConfig, PEStudyForCausalLM

__version__ = "0.1.0"

_HOMES = {
    "Document": "pe_study.data",
    "PEStudyConfig": "pe_study.model",
    "PEStudyForCausalLM": "pe_study.model",
    "evaluate_perplexity": "pe_study.evaluators.perplexity",
    "load_causal_lm": "pe_study.checkpoints",
}

__all__ = ["Document", "PEStudyConfig", "PEStudyForCausalLM", "evaluate_perplexity", "load_causal_lm"]


def __getattr__(name: str) -> Any:
    """A public name from its home module, or a submodule (`pe_study.encodings`), imported on first use."""
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    try:
        return importlib.import_module(f"pe_study.{name}")
    except ModuleNotFoundError as error:
        if error.name != f"pe_study.{name}":
            raise
        raise AttributeError(f"module 'pe_study' has no attribute {name!r}") from None


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
