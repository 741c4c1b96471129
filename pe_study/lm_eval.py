"""The lm-eval model `pe_study`: any checkpoint, under a rescale, at an explicit context length.

    python -m pe_study.lm_eval run --model pe_study --tasks pe_passkey --include_path evals/tasks \
        --model_args pretrained=SOURCE,rescale=yarn:4,max_length=8192

It is lm-eval's own command line with this model registered. `loglikelihood_rolling` reads a text in windows
as `nonoverlapping` does, with one difference by design: its tail window reaches back to be a full one.
No prompt is cut: without max_length, a task whose prompts need more is declared for prompt and answer.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch
from accelerate.utils import gather_object
from lm_eval.api.registry import register_model
from lm_eval.models.huggingface import HFLM
from lm_eval.models.utils import normalize_gen_kwargs

from pe_study import checkpoints, terminal
from pe_study.errors import UsageError
from pe_study.evaluators.lm_tasks import GENERATED
from pe_study.settings.leaves import parse_length

logger = logging.getLogger("pe_study.lm_eval")  # also where it is __main__


@register_model("pe_study")
class PEStudyLM(HFLM):
    """HFLM over `pe_study.checkpoints`: takes a path, so that Accelerate can run it on several processes.

    max_length: the declared length in tokens (8192, 8k, or 4x the original length); None: the checkpoint's
    own, or what the prompts and answers of a task need where that is more. The context length is always this
    one, whatever the architecture's config would say. UsageError for a prompt that does not fit.
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
        self.declared_length = self.own_length = _declared(self.checkpoint, max_length)
        self.is_fixed, self.task_lengths = max_length is not None, dict[str, int]()
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
        self._device_map = device_map = "auto" if parallelize else None
        self._model = self.checkpoint.load(self.rescale, self.declared_length, self.kernel, device_map)
        limit = checkpoints.max_length(self._model)
        if limit is not None and self.declared_length > limit:
            source = self.checkpoint.source
            raise UsageError(
                f"max_length: found {self.declared_length}; {source} has no position past {limit}"
            )
        if device_map is None:
            self._model.to(self.device)

    def loglikelihood(self, requests: list[Any], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        """As lm-eval, task by task, each at a length that its prompts fit into."""
        return self._by_task(requests, self._scored_tokens, super().loglikelihood, disable_tqdm)

    def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:
        """As lm-eval, task by task, each at a length that its prompts and answers fit into."""
        return self._by_task(requests, self._generated_tokens, super().generate_until, disable_tqdm)

    def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = False) -> list[float]:
        """As lm-eval, in windows of max_length or the checkpoint's own length."""
        self._declare(self.own_length)
        return super().loglikelihood_rolling(requests, disable_tqdm)

    def _by_task(
        self,
        requests: list[Any],
        num_tokens: Callable[[Any], int],
        answer: Callable[..., list[Any]],
        disable_tqdm: bool,
    ) -> list[Any]:
        """The answers in the order of the requests, each under the length that its task needs on every
        process; neither another task nor the share of a process changes a number."""
        places: dict[str, list[int]] = {}
        for place, request in enumerate(requests):
            places.setdefault(str(getattr(request, "task_name", None) or "a task"), []).append(place)
        needs = {task: max(num_tokens(requests[place]) for place in places[task]) for task in places}
        found: dict[int, Any] = {}
        for task, needed in _highest(needs, self.world_size).items():
            if task in places:
                self._declare(self._length_for(task, needed))
                of_task = [requests[place] for place in places[task]]
                found |= zip(places[task], answer(of_task, disable_tqdm=disable_tqdm), strict=True)
        return [found[place] for place in range(len(requests))]

    def _scored_tokens(self, request: Any) -> int:
        context, continuation = request.args
        if context == "":
            return len(self.tok_encode(continuation, add_special_tokens=False))
        return sum(map(len, self._encode_pair(context, continuation))) - 1

    def _generated_tokens(self, request: Any) -> int:
        context, options = request.args
        return (
            len(self.tok_encode(context)) + normalize_gen_kwargs(options, self.max_gen_toks)["max_gen_toks"]
        )

    def _length_for(self, task: str, needed: int) -> int:
        """The length to declare for a task. UsageError where its prompts and answers do not fit."""
        if needed <= self.own_length:
            return self.own_length
        limit = self.own_length if self.is_fixed else checkpoints.max_length(self.model)
        if limit is not None and needed > limit:
            shorter = "shorter prompts"
            if task.startswith("pe_") and limit > GENERATED:
                shorter += f""" (--metadata '{{"length": N}}', N at most {limit - GENERATED})"""
            longer = f"max_length={needed} or more, or " if self.is_fixed else ""
            raise UsageError(
                f"{task}: a prompt and its answer take {needed} tokens, "
                f"{'max_length is' if self.is_fixed else 'the model has no position past'} {limit}; "
                f"accepted: {longer}{shorter}"
            )
        if self.task_lengths.get(task, 0) < needed:
            logger.warning(
                "%s: declared for %d tokens, prompt and answer; the checkpoint's own length is %d",
                task,
                needed,
                self.own_length,
            )
        self.task_lengths[task] = max(needed, self.task_lengths.get(task, 0))
        return needed

    def _declare(self, length: int) -> None:
        """The model of another declared length, in place of the one that is there."""
        if length == self.declared_length:
            return
        self.declared_length = self._max_length = length
        self._model = None
        self._create_model(self.checkpoint.name, parallelize=self._device_map is not None)
        if self.world_size > 1:
            self._model = self.accelerator.prepare_model(self._model, evaluation_mode=True)

    def get_model_info(self) -> dict[str, Any]:
        """What lm-eval writes of the model into its results, and the length and rescale it ran with;
        `task_lengths` are those of tasks that were declared for more than `max_length`."""
        return {
            **super().get_model_info(),
            "max_length": self.own_length,
            "task_lengths": self.task_lengths,
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


def _highest(needs: dict[str, int], num_processes: int) -> dict[str, int]:
    """The tokens that each task needs on any process, by the names of tasks."""
    everywhere = gather_object([needs]) if num_processes > 1 else [needs]
    names = sorted({task for each in everywhere for task in each})
    return {task: max(each.get(task, 0) for each in everywhere) for task in names}


def main() -> int:
    """lm-eval's command line; what goes wrong is one line and our exit code."""
    return terminal.guarded(_evaluate, None)


def _evaluate(argv: Sequence[str] | None) -> int:
    from lm_eval.__main__ import cli_evaluate

    cli_evaluate()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
