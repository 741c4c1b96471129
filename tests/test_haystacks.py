"""Needles and copies: exact lengths, the needle where it is said to be, one right answer of ten."""

import numpy as np
import pytest
from tokenizers_of_all_kinds import TOKENIZERS

from pe_study.data import Document, Tokenizer
from pe_study.errors import DataError
from pe_study.evaluators.haystacks import LEVELS, NUM_CANDIDATES, Haystacks, answers
from pe_study.text.tokenization import _train, _wrap, byte_tokenizer

PROSE = ["The special magic number for amber river is 12345. What is the pass key? There and back again."] * 3
BYTES = Tokenizer(byte_tokenizer(), "byte")
BPE = Tokenizer(_wrap(_train(PROSE, 320)), "bpe:320")


def haystacks(tokenizer=BYTES, **options):
    return Haystacks(tokenizer, longest_length=4096, **options)


def text_of(ids, tokenizer=BYTES):
    return tokenizer.hf.decode(ids)


@pytest.mark.parametrize("tokenizer", [BYTES, BPE, TOKENIZERS["SentencePiece"]])
@pytest.mark.parametrize("task", LEVELS)
def test_prompts_have_exactly_the_asked_length(task, tokenizer):
    made = haystacks(tokenizer)
    for length in (1500, 1501, 3072, 4096):
        for depth in (0.0, 0.33, 1.0):
            prompt = made.build(task, length=length, depth=depth, sample=0)
            assert prompt.prompt_ids.shape == (length,)
            assert len(prompt.candidate_ids) == NUM_CANDIDATES
            assert len({tuple(ids) for ids in prompt.candidate_ids}) == NUM_CANDIDATES


@pytest.mark.parametrize("task", LEVELS)
@pytest.mark.parametrize("depth", [0.0, 0.25, 0.5, 0.9, 1.0])
def test_the_needle_is_where_it_is_said_to_be(task, depth):
    ids = haystacks().build(task, length=4096, depth=depth, sample=3)
    prompt = bytes(ids.prompt_ids.astype(np.uint8))
    before, after = prompt[: ids.needle_start], prompt[ids.needle_start :]
    assert ids.answer.encode() not in before
    assert after.startswith(b"\nThe ") and ids.answer.encode() in after[:100]
    assert prompt.endswith(b" is") and prompt.count(b"\nWhat is") == 1, "the answer comes next"
    head = prompt.index(b"there.\n") + 7
    size = prompt.rindex(b"\nWhat is") - head
    assert abs(len(before) - head - depth * size) < 500, "to a sentence, and what other needles take"
    if 0 < depth < 1:
        assert before.endswith((b".", b":"))


def test_candidates_continue_the_prompt():
    prompt = haystacks(BPE).build("passkey", length=800, depth=0.5, sample=0)
    whole = text_of(np.concatenate([prompt.prompt_ids, prompt.candidate_ids[0]]), BPE)
    assert whole.endswith(f"The pass key is {prompt.answer}")
    assert {len(ids) for ids in prompt.candidate_ids} == {len(prompt.candidate_ids[0])}
    assert BPE.encode(whole).ids.tolist()[-3:] == [*prompt.prompt_ids, *prompt.candidate_ids[0]][-3:]


def test_levels_grow_harder():
    texts = {
        task: text_of(haystacks().build(task, length=4096, depth=0.5, sample=1).prompt_ids) for task in LEVELS
    }
    assert texts["passkey"].count("The grass is green.") > 10
    assert "grass" not in texts["needle"]
    assert texts["needle"].count("The special magic number for") == 2
    assert texts["distractors"].count("The special magic number for") == 6
    assert texts["uuid"].count("The special magic uuid for") == 6


def test_distractors_are_among_the_candidates():
    prompt = haystacks().build("distractors", length=4096, depth=0.5, sample=1)
    text = text_of(prompt.prompt_ids)
    present = [text_of(ids).strip() in text for ids in prompt.candidate_ids]
    assert present == [True] * 5 + [False] * 5


def test_prompts_depend_on_their_name_alone():
    first = haystacks().build("uuid", length=3000, depth=0.5, sample=1)
    made = haystacks()
    made.build("passkey", length=1000, depth=0.1, sample=0)
    again = made.build("uuid", length=3000, depth=0.5, sample=1)
    assert np.array_equal(first.prompt_ids, again.prompt_ids)
    assert first.answer != made.build("uuid", length=3000, depth=0.5, sample=2).answer


def test_bos_is_counted_and_stands_once():
    """case 09: exactly one BOS, inside the exact length."""
    prompt = haystacks(bos_token_id=256).build("passkey", length=1000, depth=0.5, sample=0)
    assert len(prompt.prompt_ids) == 1000
    assert np.flatnonzero(prompt.prompt_ids == 256).tolist() == [0]


def test_what_does_not_fit():
    with pytest.raises(DataError, match=r"a prompt of 100 tokens is too short, (\d+) are needed") as caught:
        haystacks().build("passkey", length=100, depth=0.5, sample=0)
    least = int(str(caught.value).split()[-3])
    assert len(haystacks().build("passkey", length=least, depth=0.5, sample=0).prompt_ids) == least
    with pytest.raises(DataError, match='retrieval task "needel": did you mean "needle"'):
        haystacks().build("needel", length=1000, depth=0.5, sample=0)


@pytest.mark.parametrize("bos_token_id", [None, 999])
def test_copy_differs_in_its_first_occurrence_alone(bos_token_id):
    text = Document(np.arange(1000) % 97)
    made = haystacks(bos_token_id=bos_token_id)
    for distance in (32, 33, 200, 256 - 32 - len(made.bos_ids)):
        probe = made.copy_probe(text, length=256, distance=distance, sample=5)
        assert probe.with_ids.shape == probe.without_ids.shape == (256,)
        first = 256 - 32 - distance
        changed = np.flatnonzero(probe.with_ids != probe.without_ids)
        assert first <= changed.min() and changed.max() < first + 32
        assert np.array_equal(probe.with_ids[first : first + 32], probe.with_ids[-32:])
        assert np.isin(probe.with_ids[len(made.bos_ids) :], text.ids).all()
        assert (probe.with_ids[0] == 999) == (bos_token_id == 999)
        start = probe.without_ids[1]
        assert np.array_equal(probe.without_ids[1:-32], (start + np.arange(223)) % 97), "real text before"
    with pytest.raises(DataError, match="distance 300 in 256 tokens: expected 32 to"):
        made.copy_probe(text, length=256, distance=300, sample=0)
    with pytest.raises(DataError, match=r"at least 2000 tokens \(it has 1000\)"):
        made.copy_probe(text, length=2000, distance=300, sample=0)


def test_vocabulary_without_digits_cannot_be_asked():
    with pytest.raises(DataError, match="cannot tell ten values apart"):
        haystacks(TOKENIZERS["WordPiece"]).build("passkey", length=3000, depth=0.5, sample=0)


@pytest.mark.parametrize(
    ("text", "right"),
    [
        ("12345", True),
        (" 12345. Remember it.", True),
        ("12345\n", True),
        ("123457", False),
        ("12345-6", False),
        ("1234", False),
        ("The pass key is 12345", False),
    ],
)
def test_an_answer_is_the_whole_word(text: str, right: bool) -> None:
    assert answers(text, "12345") is right
