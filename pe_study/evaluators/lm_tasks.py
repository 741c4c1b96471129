"""The needle tasks as documents of lm-eval: prompts as text that is exactly long enough, ten candidates.

Model arguments reach a task as metadata: the tokenizer is that of `pretrained`, and a prompt and what is
generated after it fill `max_length`. `--metadata '{"length": 4096, "num_samples": 10}'` sets other ones.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from datasets import Dataset

from pe_study.checkpoints import Checkpoint, open_checkpoint
from pe_study.data import Tokenizer
from pe_study.errors import UsageError
from pe_study.evaluators.haystacks import Haystack, Haystacks, PromptTooShort, answers
from pe_study.settings.leaves import parse_length

GENERATED = 64  # max_gen_toks of the tasks
DEPTHS = (0.0, 0.25, 0.5, 0.75, 1.0)
DEFAULT_LENGTH = 1024
_TRIES = 8


def task_documents(
    task: str,
    pretrained: str | None = None,
    max_length: int | str | None = None,
    length: int | str | None = None,
    num_samples: int = 5,
    depths: Sequence[float] = DEPTHS,
    **model_args: Any,
) -> dict[str, Dataset]:
    """The test split of a task: a prompt of `length` tokens, BOS counted, for each depth and sample.

    length: of the prompt; None: `max_length` (or 1024) less what is generated. Raises UsageError without a
    model, or for a length that no prompt has.
    """
    if pretrained is None:
        raise UsageError(f"pe_{task}: no pretrained= in --model_args, whose tokenizer counts the tokens")
    named = {
        key: model_args[key] for key in ("revision", "gguf_file", "trust_remote_code") if key in model_args
    }
    checkpoint = open_checkpoint(pretrained, **named)
    tokenizer = Tokenizer(checkpoint.tokenizer(), pretrained)
    bos = int(tokenizer.prepends_bos)  # lm-eval's tokenizer puts it in front: it counts
    size = _prompt_length(checkpoint, max_length, length) - bos
    haystacks = Haystacks(tokenizer, longest_length=size + GENERATED)
    try:
        rows = [
            _row(haystacks, task, length=size, depth=depth, sample=sample) | {"length": size + bos}
            for depth in depths
            for sample in range(int(num_samples))
        ]
    except PromptTooShort as error:
        raise _too_short(task, error.needed + bos, max_length, length) from None
    return {"test": Dataset.from_list(rows)}


def _too_short(task: str, needed: int, max_length: int | str | None, length: int | str | None) -> UsageError:
    """What is said of a length that no prompt of the task has."""
    if length is not None:
        return UsageError(
            f"pe_{task}: a prompt takes {needed} tokens at least, length is {length}; "
            f"accepted: length {needed} or more"
        )
    return UsageError(
        f"pe_{task}: a prompt takes {needed} tokens at least and its answer {GENERATED}, max_length is "
        f"{max_length}; accepted: max_length={needed + GENERATED} or more"
    )


def is_right(doc: Mapping[str, Any], results: Sequence[str]) -> dict[str, float]:
    """1 where the generated text begins with the answer."""
    return {"acc": float(answers(results[0], doc["answer"]))}


def _prompt_length(checkpoint: Checkpoint, max_length: int | str | None, length: int | str | None) -> int:
    train_length = checkpoint.original_length
    if length is not None:
        return parse_length(length, train_length)
    return parse_length(max_length or DEFAULT_LENGTH, train_length) - GENERATED


def _row(haystacks: Haystacks, task: str, *, length: int, depth: float, sample: int) -> dict[str, Any]:
    prompt, text = _as_text(haystacks, task, length=length, depth=depth, sample=sample)
    decode = haystacks.tokenizer.hf.decode
    return {
        "prompt": text,
        "answer": prompt.answer,
        "candidates": [decode(ids).strip() for ids in prompt.candidate_ids],
        "depth": depth,
        "sample": sample,
    }


def _as_text(
    haystacks: Haystacks, task: str, *, length: int, depth: float, sample: int
) -> tuple[Haystack, str]:
    """A prompt whose text is encoded to `length` tokens; where no filling gives that many, the nearest fewer.

    Decoded and encoded again, tokens may join where needles meet the filling.
    """
    asked, best = length, None
    for _ in range(_TRIES):
        prompt = haystacks.build(task, length=asked, depth=depth, sample=sample)
        text = haystacks.tokenizer.hf.decode(prompt.prompt_ids)
        size = len(haystacks.tokenizer.encode(text))
        if size <= length and (best is None or size > best[0]):
            best = size, prompt, text
        if size == length:
            break
        asked += length - size
    assert best is not None
    return best[1], best[2]
