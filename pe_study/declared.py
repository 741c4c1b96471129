"""The declared length of a Hugging Face model whose frequencies depend on it: never crossed, and for one
`generate` on a model without one that of prompt and new tokens, as of our own decoder."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from pe_study import hf_rope
from pe_study.errors import LengthError


@dataclass
class Declaration:
    """config: the checkpoint's own, as it was before a rescale. length: declared (None: not by the caller),
    original: what the frequencies are built for then."""

    config: Any
    rescale: str
    length: int | None
    original: int

    @property
    def limit(self) -> int:
        return self.length or self.original

    def check(self, total: int) -> None:
        """LengthError where `total` tokens are more than the frequencies were built for."""
        if total > self.limit:
            raise LengthError(
                f"{total} tokens cross the declared length {self.limit}; "
                f"load the checkpoint with length={total} or more"
            )


class DeclaredLength:
    """What `declare` lays over a model's own class."""

    declaration: Declaration

    def generate(self, *args: Any, **options: Any) -> Any:
        """As transformers generates; where no length is declared, prompt + new tokens are, for this call."""
        declared = self.declaration.length
        try:
            return super().generate(*args, **options)  # type: ignore[misc]
        finally:
            if self.declaration.length != declared:
                self._rebuild(declared)

    def _prepare_generated_length(self, *args: Any, **options: Any) -> Any:
        """transformers' own moment of knowing the whole length, before the first token is read."""
        prepared = super()._prepare_generated_length(*args, **options)  # type: ignore[misc]
        if self.declaration.length is None:
            self._rebuild(max(prepared.max_length, self.declaration.original))
        self.declaration.check(prepared.max_length)
        return prepared

    def _rebuild(self, length: int | None) -> None:
        """The tables of angles of another declared length, in place of those that are there."""
        self.declaration.length = length
        config = copy.deepcopy(self.declaration.config)
        hf_rope.apply(config, self.declaration.rescale, self.declaration.limit)
        for name, module in list(self.named_modules()):  # type: ignore[attr-defined]
            tables = [table for key, table in module.named_buffers(recurse=False) if "inv_freq" in key]
            if tables and hasattr(module, "rope_type"):
                built = type(module)(config.get_text_config())
                self.set_submodule(name, built.to(tables[0].device))  # type: ignore[attr-defined]


def declare(model: Any, declaration: Declaration, cache_names: Sequence[str]) -> None:
    """Makes a model keep to a declared length, cached tokens counted (LengthError past it)."""
    own = type(model)
    names = {"__module__": own.__module__, "__qualname__": own.__qualname__, "__doc__": own.__doc__}
    model.__class__ = type(own.__name__, (DeclaredLength, own), names)
    model.declaration = declaration

    def check(module: Any, arguments: tuple[Any, ...], options: dict[str, Any]) -> None:
        ids = arguments[0] if arguments else options.get("input_ids")
        caches = (options.get(name) for name in cache_names)
        past = max((int(cache.get_seq_length()) for cache in caches if cache is not None), default=0)
        if ids is not None:
            module.declaration.check(past + ids.shape[-1])

    model.register_forward_pre_hook(check, with_kwargs=True)
