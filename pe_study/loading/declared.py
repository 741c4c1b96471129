"""The declared length of a Hugging Face model whose frequencies depend on it: never crossed, and for one
`generate` on a model without one that of prompt and new tokens, as of our own decoder."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from pe_study.errors import LengthError
from pe_study.loading import hf_rope


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


def embedded_prompt(
    *, model_input_name: str = "", input_ids_length: int = 0, inputs_tensor: Any = None, **_: Any
) -> int:
    """Tokens of a prompt given as embeddings, which transformers leaves out of the length it generates to."""
    if model_input_name != "inputs_embeds" or input_ids_length == inputs_tensor.shape[1]:
        return 0
    return int(inputs_tensor.shape[1])


def check_cache(cache: Any, past: int, length: int) -> None:
    """LengthError where a filled cache was read under another declared length, with other constants.

    An empty cache is marked with this one.
    """
    built = length if past == 0 else getattr(cache, "declared_length", length)
    if built != length:
        raise LengthError(
            f"the cache was filled under the declared length {built}, this call has {length}; begin with an "
            "empty cache, or load the model with the whole length declared"
        )
    cache.declared_length = length


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
        total = prepared.max_length + embedded_prompt(**options)
        if self.declaration.length is None:
            self._rebuild(max(total, self.declaration.original))
        self.declaration.check(total)
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
        given = [options[name] for name in cache_names if options.get(name) is not None]
        past = max((int(cache.get_seq_length()) for cache in given), default=0)
        if ids is not None:
            module.declaration.check(past + ids.shape[-1])
        for cache in given:
            check_cache(cache, int(cache.get_seq_length()), module.declaration.limit)

    model.register_forward_pre_hook(check, with_kwargs=True)
