"""Load any causal language model (run directory, Hugging Face id or folder, GGUF) at one declared length.

A rescale is written into the config before the model is built, so that no table is ever patched afterwards.
"""

from __future__ import annotations

import copy
import inspect
import logging
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

import pe_study.model
from pe_study import attention, finished, hub, rope_scaling, runs
from pe_study.errors import CheckpointError, PEStudyError, RescaleError, UsageError, did_you_mean
from pe_study.loading import hf_attention, hf_rope, trained_rescale
from pe_study.loading.declared import Declaration, declare
from pe_study.loading.frozen import follows_running_length as follows_running_length
from pe_study.loading.load_checks import check_causal, check_kind, check_rescaled, check_weights
from pe_study.loading.position_tables import max_length as max_length

logger = logging.getLogger(__name__)

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
COMPUTED_TABLES = ("gptj", "codegen", "ctrl")  # built for `n_positions` rows, held in no file
CACHE_NAMES = ("cache", "past_key_values")  # transformers 5.20 renamed the second; it takes both
HF_KERNELS = {
    "auto": None,
    "eager": "eager",
    "sdpa": "sdpa",
    "flex": "flex_attention",
    "flash": "flash_attention_2",
}


def load_causal_lm(
    source: str | Path,
    rescale: str = "none",
    length: int | None = None,
    kernel: str = "auto",
    dtype: str = "float32",
    revision: str | None = None,
    gguf_file: str | None = None,
    trust_remote_code: bool = False,
    device_map: Any = None,
) -> tuple[Any, Any]:
    """(model, tokenizer) of `source`, built for one declared `length` (None: the checkpoint's own).

    source: a run directory, a Hugging Face id or folder, or a .gguf file. rescale: as in `rope_scaling`.
    The model is in evaluation mode. Raises CheckpointError for what cannot be loaded, RescaleError where the
    model cannot take the rescale, UsageError for an unknown dtype or kernel.
    """
    checkpoint = open_checkpoint(
        source, dtype=dtype, revision=revision, gguf_file=gguf_file, trust_remote_code=trust_remote_code
    )
    return checkpoint.load(rescale, length, kernel, device_map), checkpoint.tokenizer()


def open_checkpoint(
    source: str | Path,
    *,
    dtype: str = "float32",
    revision: str | None = None,
    gguf_file: str | None = None,
    trust_remote_code: bool = False,
) -> Checkpoint:
    """The checkpoint `source` names, its config read, its weights not yet."""
    if dtype not in DTYPES:
        raise UsageError(f'unknown dtype "{dtype}"; {did_you_mean(dtype, DTYPES)}')
    path = Path(source).expanduser()
    if not path.exists() and (path.is_absolute() or str(source).count("/") != 1 or path.suffix == ".gguf"):
        _check_hub_id(str(source))
    finished.check_source(path)
    if (path / runs.FINAL).is_dir():
        path = path / runs.FINAL
    elif (path / runs.RECIPE).is_file():
        raise CheckpointError(f"{source}: an unfinished run (no {runs.FINAL}/); finish its training first")
    if path.suffix == ".gguf":
        path, gguf_file = path.parent, path.name
    name = str(path) if path.exists() else str(source)
    options = {"revision": revision, "gguf_file": gguf_file, "trust_remote_code": trust_remote_code}
    given = {key: value for key, value in options.items() if value is not None}
    return Checkpoint(str(source), name, dtype, given)


def _check_hub_id(source: str) -> None:
    """CheckpointError for what is neither there nor a name that the Hub could know."""
    if "/" in source or source.startswith(".") or source.endswith(".gguf"):
        raise CheckpointError(
            f"{source}: no such file or folder; accepted: a run directory, a checkpoint folder, a .gguf file "
            "or a Hugging Face id such as HuggingFaceTB/SmolLM2-135M"
        )


class Checkpoint:
    """A model's files: its config, and the models that can be built from them."""

    def __init__(self, source: str, name: str, dtype: str, options: dict[str, Any]):
        self.source, self.name, self.dtype, self.options = source, name, dtype, options

    @cached_property
    def config(self) -> Any:
        """The checkpoint's own config. CheckpointError where there is none."""
        from transformers import AutoConfig

        with loading(self.source):
            config = AutoConfig.from_pretrained(self.name, **self.options)
        check_kind(self.source, config)
        said = hf_rope.mismatch(config)
        if said:
            logger.warning("%s: %s", self.source, said)
        return config

    @property
    def is_ours(self) -> bool:
        return isinstance(self.config, pe_study.model.PEStudyConfig)

    @property
    def original_length(self) -> int | None:
        """The length that training saw, as far as the files say."""
        return self.config.train_length if self.is_ours else hf_rope.original_length(self.config)

    @cached_property
    def rotary(self) -> hf_rope.Rotary | None:
        """The rotary geometry; None for a model that no rescale applies to."""
        if not self.is_ours:
            return hf_rope.rotary(self.config)
        encoding = self.config.build_encoding()
        if encoding.rotary is None:
            return None
        return hf_rope.Rotary(encoding.rotary_dim, encoding.base, self.config.train_length)

    def depends_on_length(self, rescale: str) -> bool:
        """Whether another declared length makes another model."""
        if not self.is_ours:
            return rope_scaling.depends_on_length(rescale) or hf_rope.follows_running_length(self.config)
        config = copy.deepcopy(self.config)
        follows = rope_scaling.depends_on_length(rescale)
        config.rescale = rescale if follows else trained_rescale.in_force(config, rescale, None)
        return config.build_encoding().depends_on_length

    def takes(self, rescale: str) -> bool:
        """Whether the model can be built under a rescale, as far as its files tell."""
        spec = rope_scaling.parse(rescale)
        if self.is_ours:
            return self.config.build_encoding().takes(spec)
        turns = spec.kind == "none" or self.rotary is not None
        return turns and (not spec.logn or hf_attention.goes_through_interface(self.config))

    def frequencies(self, rescale: str, length: int) -> tuple[torch.Tensor, float] | None:
        """Inverse frequencies and attention factor under a rescale; None where nothing here can tell them.

        RescaleError where the model cannot take it.
        """
        if not self.is_ours:
            return hf_rope.frequencies(self.config, rescale, length)
        if self.rotary is None:
            return None
        built = trained_rescale.in_force(self.config, rescale, length)
        return rope_scaling.frequencies(built, **asdict(self.rotary), length=length)

    def kept_scaling(self, rescale: str, length: int) -> tuple[str, float | None] | None:
        """Kind and factor of the checkpoint's own scaling, where it has one and the rescale leaves it."""
        find = trained_rescale.kept if self.is_ours else hf_rope.kept_scaling
        return find(self.config, rescale, length)

    @property
    def trained_in(self) -> dict[str, str]:
        """`{"trained_in": SPEC}` for a decoder of ours that was trained under a rescale, else nothing."""
        spec = self.config.rescale if self.is_ours else "none"
        return {} if spec == "none" else {"trained_in": spec}

    def check_kernel(
        self, kernel: str, device: torch.device | None = None, rescales: Iterable[str] = ()
    ) -> None:
        """UsageError for an attention kernel that is unknown or cannot run the model (None: on the CPU),
        RescaleError where it cannot under one of the rescales."""
        if self.is_ours:
            where, encoding = device or torch.device("cpu"), self.config.build_encoding()
            attention.resolve(kernel, where, DTYPES[self.dtype], encoding, "causal")
        elif kernel not in HF_KERNELS:
            raise UsageError(f'unknown kernel "{kernel}"; {did_you_mean(kernel, HF_KERNELS)}')
        else:
            hf_attention.check_kernel(self.config, kernel, DTYPES[self.dtype], rescales)

    def load(
        self, rescale: str = "none", length: int | None = None, kernel: str = "auto", device_map: Any = None
    ) -> Any:
        """The model, for one declared length, in evaluation mode."""
        from transformers import AutoModelForCausalLM

        rope_scaling.parse(rescale)
        options = {**self.options, "dtype": DTYPES[self.dtype]}
        if device_map is not None:
            options["device_map"] = device_map
        if self.is_ours:
            built = trained_rescale.in_force(self.config, rescale, length)
            options |= {"length": length, "rescale": built, "kernel": kernel}
        else:
            options |= self._hf_options(rescale, length, kernel)
        with loading(self.source):
            model, report = AutoModelForCausalLM.from_pretrained(
                self.name, **options, output_loading_info=True
            )
        check_weights(self.source, report)
        if not self.is_ours:
            hf_attention.add_logn(model.eval(), rescale, self.original_length)
            check_causal(self.source, model)
            if rope_scaling.parse(rescale).kind != "none":
                check_rescaled(self.source, rescale, model)
            if self.original_length is not None and self.depends_on_length(rescale):
                declare(model, Declaration(self.config, rescale, length, self.original_length), CACHE_NAMES)
        return model.eval()

    def _hf_options(self, rescale: str, length: int | None, kernel: str) -> dict[str, Any]:
        self.check_kernel(kernel, rescales=[rescale])
        config = copy.deepcopy(self.config)
        declared = length or self.original_length
        if declared is not None:
            hf_rope.apply(config, rescale, declared)
            lift_limits(config, declared)
        elif rope_scaling.parse(rescale).kind != "none":
            raise RescaleError(f"rescale {rescale}: {self.source} {hf_rope.why_not(config)} (use none)")
        implementation = HF_KERNELS[kernel]
        return {"config": config, **({"attn_implementation": implementation} if implementation else {})}

    def tokenizer(self) -> Any:
        from transformers import AutoTokenizer

        with loading(f"{self.source}: tokenizer"):
            return AutoTokenizer.from_pretrained(self.name, **self.options)


@contextmanager
def loading(source: str) -> Iterator[None]:
    """Turns whatever the libraries raise while they read a checkpoint into one line, and keeps them quiet."""
    from transformers.utils import logging

    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()
    with nullcontext() if Path(source).exists() else hub.no_retries(), hub.no_progress_bars():
        try:
            yield
        except PEStudyError:
            raise
        except Exception as error:
            lines = [line.strip() for line in str(error).splitlines() if line.strip()]
            reason = " ".join(lines[:2]) if lines and lines[0].endswith(":") else (lines or [""])[0]
            missing = "" if Path(source.split(": ")[0]).exists() else hub.why()
            reason = reason[:300] or type(error).__name__
            raise CheckpointError(f"{source}: {reason}{missing}") from error
        finally:
            logging.set_verbosity(verbosity)


def lift_limits(config: Any, length: int) -> None:
    """Raise limits that only size a computed table (MPT's ALiBi, GPT-J's angles), in place, before the model
    is built."""
    if config.model_type in COMPUTED_TABLES:
        config.n_positions = max(config.n_positions, length)
    if config.model_type == "mpt" and config.attn_config.alibi:
        config.max_seq_len = max(config.max_seq_len, length)


def cache_name(model: Any) -> str | None:
    """The argument of a model's call that takes its cache."""
    parameters = inspect.signature(model.forward).parameters
    return next((name for name in CACHE_NAMES if name in parameters), None)


def exact_cache_name(model: Any) -> str | None:
    """`cache_name` where what is read in parts through the cache is what is read at once, else None.

    Not where frequencies follow the running length, nor where a cache is a recurrent state: transformers
    continues those by one token at a time only.
    """
    if follows_running_length(model) or getattr(model, "_is_stateful", False):
        return None
    return cache_name(model)


def vocabulary_size(model: Any) -> int | None:
    """Rows of the input embedding, None where a model has none to show."""
    find = getattr(model, "get_input_embeddings", None)
    table = find() if find is not None else None
    return getattr(table, "num_embeddings", None)


def resolved_kernel(model: Any, mask_kind: str = "causal", *, consecutive: bool = True) -> str:
    """The attention kernel that runs under such a mask, with positions that follow from indices or not."""
    if hasattr(model, "resolved_kernel"):
        return model.resolved_kernel(model.device, mask_kind, consecutive=consecutive)
    return str(getattr(model.config, "_attn_implementation", "unknown"))
