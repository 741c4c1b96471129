"""Prompts that hide something far back: needles in levels, and a copy task for models that follow no prompt.

Every prompt has exactly the asked number of tokens and depends on (task, length, depth, sample) alone.
Levels: `passkey` hides a number in a repeated filler (Mohtashami & Jaggi 2023, as YaRN uses it); `needle`
hides it in running text; `distractors` adds four needles of other keys; `uuid` has longer values besides.
Nothing is downloaded: the running text is the documentation of Python's own syntax.
"""

from __future__ import annotations

import itertools
import random
import re
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from pe_study.data import Document, Tokenizer
from pe_study.errors import DataError, did_you_mean

NUM_CANDIDATES = 10
NUM_COPIED = 32
_DRAWS = 1000
_CHARACTERS_A_TOKEN = 12  # more than any vocabulary packs of English on average
_COLOURS = ("amber", "azure", "black", "bronze", "coral", "crimson", "golden", "green", "ivory", "scarlet")
_PLACES = (
    "bridge",
    "canyon",
    "castle",
    "forest",
    "harbor",
    "island",
    "meadow",
    "mountain",
    "river",
    "valley",
)
_SENTENCE = re.compile(rb"[.:](?=\s)")
_HEAD = (
    "There is an important info hidden inside a lot of irrelevant text. Find it and memorize it. "
    "I will quiz you about the important information there.\n"
)
_FILLER = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again. "


def answers(text: str, answer: str) -> bool:
    """Whether a generated text begins with the answer and not with a longer word that begins so."""
    return re.match(re.escape(answer) + r"(?![\w-])", text.strip()) is not None


@dataclass(frozen=True)
class Level:
    """What one task hides: where, under how many false keys, and values drawn by `draw`."""

    needle: str
    question: str
    draw: Callable[[random.Random], str]
    in_filler: bool = False
    num_distractors: int = 0


def _number(rng: random.Random) -> str:
    return str(rng.randrange(10_000, 100_000))


def _uuid(rng: random.Random) -> str:
    return str(uuid.UUID(int=rng.getrandbits(128), version=4))


_NUMBER = "The special magic number for {key} is {value}."
_ASK_NUMBER = "What is the special magic number for {key}? The special magic number for {key} is"
LEVELS = {
    "passkey": Level(
        "The pass key is {value}. Remember it. {value} is the pass key.",
        "What is the pass key? The pass key is",
        _number,
        in_filler=True,
    ),
    "needle": Level(_NUMBER, _ASK_NUMBER, _number),
    "distractors": Level(_NUMBER, _ASK_NUMBER, _number, num_distractors=4),
    "uuid": Level(
        _NUMBER.replace("number", "uuid"), _ASK_NUMBER.replace("number", "uuid"), _uuid, num_distractors=4
    ),
}


@dataclass(frozen=True)
class Haystack:
    """A prompt and ten possible continuations, the right one first.

    `prompt_ids` (length,) int64, BOS included where there is one; `candidate_ids` are of one length where the
    tokenizer allows it, so that their log-likelihoods compare; the needle begins at `needle_start`.
    """

    task: str
    depth: float
    sample: int
    prompt_ids: np.ndarray
    candidate_ids: tuple[np.ndarray, ...]
    answer: str
    needle_start: int


@dataclass(frozen=True)
class CopyProbe:
    """Ids (length,) that end in 32 tokens which also stand `distance` tokens before, and the same without.

    The gain of the copy is the NLL of the last 31 ids in `without_ids` minus that in `with_ids`.
    """

    with_ids: np.ndarray
    without_ids: np.ndarray
    distance: int
    sample: int


@dataclass(frozen=True)
class Filling:
    """Ids of a long text, and after how many of them a sentence ends."""

    ids: np.ndarray
    stops: np.ndarray


class PromptTooShort(DataError):
    """A length in tokens that the question and the needles of a task alone exceed."""

    def __init__(self, task: str, length: int, *, needed: int):
        super().__init__(
            f"retrieval task {task}: a prompt of {length} tokens is too short, {needed} are needed"
        )
        self.needed = needed


class Haystacks:
    """Builds prompts for one tokenizer, of up to `longest_length` tokens."""

    def __init__(self, tokenizer: Tokenizer, *, longest_length: int, bos_token_id: int | None = None):
        self.tokenizer = tokenizer
        self.longest_length = longest_length
        self.bos_ids = [] if bos_token_id is None else [bos_token_id]

    def build(self, task: str, *, length: int, depth: float, sample: int) -> Haystack:
        """A prompt of exactly `length` tokens with the needle at `depth` (0 front, 1 end) of the filling.

        Raises DataError for an unknown task, or a length that the question and the needles alone exceed.
        """
        if task not in LEVELS:
            raise DataError(f'retrieval task "{task}": {did_you_mean(task, LEVELS)}')
        level = LEVELS[task]
        rng = random.Random(f"{task}/{length}/{depth}/{sample}")
        keys = [f"{colour} {place}" for colour, place in itertools.product(_COLOURS, _PLACES)]
        keys = rng.sample(keys, 1 + level.num_distractors)
        question = "\n" + level.question.format(key=keys[0])
        values = self._values(level, question, rng)
        needles = [
            self._continuing("a", "\n" + level.needle.format(key=key, value=value) + "\n")
            for key, value in zip(keys, values, strict=False)
        ]
        start = np.array([*self.bos_ids, *self.tokenizer.encode(_HEAD).ids])
        end = self._continuing("a", question)
        size = length - len(start) - len(end) - sum(map(len, needles))
        if size < 0:
            raise PromptTooShort(task, length, needed=length - size)
        depths = [depth, *(rng.random() for _ in needles[1:])]
        filled, needle_start = self._fill(level, needles, depths, size)
        return Haystack(
            task,
            depth,
            sample,
            np.concatenate([start, filled, end]),
            tuple(self._continuing(question, " " + value) for value in values),
            values[0],
            len(start) + needle_start,
        )

    def copy_probe(self, text: Document, *, length: int, distance: int, sample: int) -> CopyProbe:
        """`length` tokens of a text that end in 32 random ones, and the same with these `distance` back.

        Raises DataError where the text is shorter, or the distance does not fit.
        """
        farthest = length - NUM_COPIED - len(self.bos_ids)
        if len(text) < length or not NUM_COPIED <= distance <= farthest:
            raise DataError(
                f"copy: distance {distance} in {length} tokens: expected {NUM_COPIED} to {farthest}, "
                f"in a text of at least {length} tokens (it has {len(text)})"
            )
        rng = random.Random(f"copy/{length}/{distance}/{sample}")
        offset = rng.randrange(len(text) - length + 1)
        known = np.unique(text.ids).tolist()
        without_ids = np.array(text.ids[offset : offset + length])
        without_ids[: len(self.bos_ids)] = self.bos_ids
        without_ids[-NUM_COPIED:] = [rng.choice(known) for _ in range(NUM_COPIED)]
        with_ids = without_ids.copy()
        first = length - NUM_COPIED - distance
        with_ids[first : first + NUM_COPIED] = without_ids[-NUM_COPIED:]
        return CopyProbe(with_ids, without_ids, distance, sample)

    def _values(self, level: Level, question: str, rng: random.Random) -> list[str]:
        """Ten values, the first one right, that take as many tokens where enough such are drawn."""
        drawn: dict[tuple[int, ...], str] = {}
        for _ in range(_DRAWS):
            value = level.draw(rng)
            ids = tuple(self._continuing(question, " " + value).tolist())
            drawn.setdefault(ids, value)
            size = len(next(iter(drawn)))
            same = [value for ids, value in drawn.items() if len(ids) == size]
            if len(same) == NUM_CANDIDATES:
                return same
        if len(drawn) < NUM_CANDIDATES:
            raise DataError(f'tokenizer "{self.tokenizer.name}" cannot tell ten values apart')
        return [*same, *(value for value in drawn.values() if value not in same)][:NUM_CANDIDATES]

    def _continuing(self, before: str, text: str) -> np.ndarray:
        """The ids of `text` after `before`: without the blank that some tokenizers put in front of a text."""
        first, both = self.tokenizer.encode(before).ids, self.tokenizer.encode(before + text).ids
        follows = np.array_equal(both[: len(first)], first)
        return both[len(first) :] if follows else self.tokenizer.encode(text).ids

    def _fill(
        self, level: Level, needles: list[np.ndarray], depths: list[float], size: int
    ) -> tuple[np.ndarray, int]:
        """`size` tokens of filling with needles between sentences, and where the first needle begins."""
        filling = self._filler if level.in_filler else self._prose
        ids = filling.ids[:size]
        stops = np.unique([0, *filling.stops[filling.stops < size], size])
        places = [int(stops[np.abs(stops - depth * size).argmin()]) for depth in depths]
        parts, done, needle_start = [], 0, 0
        for place, number in sorted(zip(places, range(len(needles)), strict=True)):
            parts += [ids[done:place], needles[number]]
            done = place
            if number == 0:
                needle_start = sum(map(len, parts[:-1]))
        return np.concatenate([*parts, ids[done:]]), needle_start

    @cached_property
    def _filler(self) -> Filling:
        return self._filling(_FILLER)

    @cached_property
    def _prose(self) -> Filling:
        from pydoc_data.topics import topics

        return self._filling("\n\n".join(topics[name].strip() for name in sorted(topics)) + "\n\n")

    def _filling(self, text: str) -> Filling:
        """As much of a text, repeated where it ends, as fills the longest prompt."""
        size = _CHARACTERS_A_TOKEN * self.longest_length
        part = (text * (1 + size // len(text)))[:size]
        document = self.tokenizer.encode(part)
        if document.token_bytes is None or len(document) < self.longest_length:
            raise DataError(f'tokenizer "{self.tokenizer.name}" cannot fill a prompt with English sentences')
        sentences = [match.end() for match in _SENTENCE.finditer(part.encode("utf-8"))]
        ends = np.isin(np.cumsum(document.token_bytes), sentences)
        return Filling(document.ids, np.flatnonzero(ends) + 1)
