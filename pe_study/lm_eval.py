"""The lm-eval model `pe_study`: any checkpoint, under a rescale, at an explicit context length.

    python -m pe_study.lm_eval run --model pe_study --tasks pe_passkey --include_path evals/tasks \
        --model_args pretrained=SOURCE,rescale=yarn:4,max_length=8192

It is lm-eval's own command line with this model registered. `loglikelihood_rolling` reads a text in windows
as `nonoverlapping` does, with one difference by design: its tail window reaches back to be a full one.
"""

from __future__ import annotations

from typing import Any

import torch
from lm_eval.api.registry import register_model
from lm_eval.models.huggingface import HFLM

from pe_study import checkpoints, terminal
from pe_study.errors import PEStudyError, UsageError
from pe_study.leaves import parse_length


@register_model("pe_study")
class PEStudyLM(HFLM):
    """HFLM over `pe_study.checkpoints`: takes a path, so that Accelerate can run it on several processes.

    max_length: the declared length in tokens (8192, 8k, or 4x the original length); None: the checkpoint's
    own. The context length is always this one, whatever the architecture's config would say.
    """

    def __init__(
        self,
        pretrained: str,
        rescale: str = "none",
        max_length: int | str | None = None,
        kernel: str = "auto",
        dtype: str = "float32",
        revision: str | None = None,
        gguf_file: str | None = None,
        trust_remote_code: bool = False,
        device: str | None = None,
        **options: Any,
    ) -> None:
        self.checkpoint = checkpoints.open_checkpoint(
            pretrained,
            dtype=dtype,
            revision=revision,
            gguf_file=gguf_file,
            trust_remote_code=trust_remote_code,
        )
        self.rescale, self.kernel = rescale, kernel
        self.declared_length = _declared(self.checkpoint, max_length)
        super().__init__(
            pretrained=pretrained,
            backend="causal",
            tokenizer=self.checkpoint.tokenizer(),
            max_length=self.declared_length,
            dtype=dtype,
            device=device or ("cuda" if torch.cuda.is_available() else "cpu"),
            trust_remote_code=trust_remote_code,
            **options,
        )

    def _get_config(self, pretrained: str, **_: Any) -> None:
        self._config = self.checkpoint.config

    def _create_model(self, pretrained: str, parallelize: bool | None = False, **_: Any) -> None:
        device_map = "auto" if parallelize else None
        self._model = self.checkpoint.load(self.rescale, self.declared_length, self.kernel, device_map)
        limit = checkpoints.max_length(self._model)
        if limit is not None and self.declared_length > limit:
            source = self.checkpoint.source
            raise UsageError(
                f"max_length: found {self.declared_length}; {source} has no position past {limit}"
            )
        if device_map is None:
            self._model.to(self.device)

    def get_model_info(self) -> dict[str, Any]:
        """What lm-eval writes of the model into its results, and the length and rescale it ran with."""
        return {
            **super().get_model_info(),
            "max_length": self.declared_length,
            "rescale": self.rescale,
            "kernel": checkpoints.resolved_kernel(self.model),
        }


def _declared(checkpoint: checkpoints.Checkpoint, max_length: int | str | None) -> int:
    """The context length in tokens. UsageError where none is given and the checkpoint has none."""
    if max_length is None:
        if checkpoint.original_length is None:
            raise UsageError(f"{checkpoint.source}: give a context length, such as max_length=4096")
        return checkpoint.original_length
    try:
        return parse_length(max_length, checkpoint.original_length)
    except ValueError as error:
        raise UsageError(f"max_length: {error}") from None


def main() -> int:
    """lm-eval's command line; what we refuse is one line and our exit code."""
    from lm_eval.__main__ import cli_evaluate

    try:
        cli_evaluate()
    except PEStudyError as error:
        terminal.complain(str(error))
        return error.exit_code
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
