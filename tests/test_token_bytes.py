"""Bytes a token: they add up to the text's UTF-8 bytes for every kind of tokenizer (case 37)."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers_of_all_kinds import TOKENIZERS

from pe_study.text import token_bytes
from pe_study.text.tokenization import Document

TEXT = "Naïve  cats:\n\n“東京” 🦙 é\u0301 <unk> ok \n"


each_kind = pytest.mark.parametrize("tokenizer", TOKENIZERS.values(), ids=TOKENIZERS.keys())


def test_oracle_utf8_lengths():
    text = "aé東🦙\x00\u07ff\u0800\uffff\U00010000"
    assert token_bytes.utf8_lengths(text).tolist() == [len(c.encode()) for c in text]


@each_kind
def test_bytes_add_up(tokenizer):
    document = tokenizer.encode(TEXT)
    assert document.token_bytes.sum() == len(TEXT.encode())
    assert document.token_bytes.shape == document.ids.shape
    assert (document.token_bytes >= 0).all()


@each_kind
@given(text=st.text(max_size=40))
def test_bytes_add_up_for_any_text(tokenizer, text):
    document = tokenizer.encode(text)
    if document.token_bytes is None:
        assert text and (not len(document) or tokenizer.name == "byt5")
    else:
        assert document.token_bytes.sum() == len(text.encode())


@given(text=st.text(max_size=60))
def test_pieces_are_the_bytes_that_decoding_gives(text):
    """Each token of a byte-level vocabulary covers exactly its own bytes."""
    tokenizer = TOKENIZERS["byte-level"]
    document = tokenizer.encode(text)
    ends = np.cumsum(document.token_bytes)
    for count, end in enumerate(ends, 1):
        decoded = tokenizer.hf.decode(document.ids[:count], clean_up_tokenization_spaces=False)
        assert decoded == text.encode()[:end].decode(errors="replace")


def test_a_character_of_several_tokens_is_shared():
    """A character is split over tokens in byte-level and in byte-fallback vocabularies alike."""
    assert TOKENIZERS["byte, reloaded"].encode("é東🦙").token_bytes.tolist() == [1] * 9
    assert TOKENIZERS["SentencePiece"].encode("at🦙").token_bytes.tolist()[-4:] == [1, 1, 1, 1]


def test_offsets_that_overlap_or_leave_gaps():
    assert token_bytes.from_offsets("a  bé", [(0, 1), (3, 4), (4, 5), (4, 5)]).tolist() == [1, 3, 1, 1]
    assert token_bytes.from_offsets("ab  ", [(0, 1), (1, 2)]).tolist() == [1, 3], "the end counts"
    assert token_bytes.from_offsets("", []).tolist() == []
    assert token_bytes.from_offsets("x", []) is None, "a text of no token cannot be recovered"
    assert token_bytes.from_offsets("東", [(0, 1), (0, 1)]).tolist() == [2, 1]


def test_special_tokens_cover_nothing():
    tokenizer = TOKENIZERS["byte-level"]
    pieces = token_bytes.byte_level_pieces(tokenizer._backend, tokenizer.vocab_size)
    assert pieces[tokenizer.eos_token_id] == b""
    assert len(pieces) == tokenizer.vocab_size


def test_text_that_decoding_does_not_give_back_has_no_counts():
    decode = "".join
    assert token_bytes.from_decoding("a b", ["a", "b"], decode).tolist() == [1, 2]
    assert token_bytes.from_decoding("a c", ["a", "b"], decode) is None


def test_slow_tokenizer_without_offsets():
    document = TOKENIZERS["slow"].encode("aé b")
    assert document.token_bytes.tolist() == [1, 1, 1, 1, 1]
    assert isinstance(document, Document)
