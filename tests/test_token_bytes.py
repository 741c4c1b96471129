"""Bytes a token: they add up to the text's UTF-8 bytes for every kind of tokenizer (case 37)."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers
from transformers import ByT5Tokenizer, PreTrainedTokenizerFast

from pe_study import token_bytes
from pe_study.tokenization import END_OF_TEXT, Document, Tokenizer, byte_tokenizer

CORPUS = ["The cat sat on the mat. “Élan”, naïve café: 東京 🦙🦙\n\tdef f(x): return x\n"] * 4
TEXT = "Naïve  cats:\n\n“東京” 🦙 é\u0301 <unk> ok \n"


def fast(backend, **special_tokens):
    return Tokenizer(PreTrainedTokenizerFast(tokenizer_object=backend, **special_tokens), "fast")


def byte_level(add_prefix_space=False, normalizer=None):
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=add_prefix_space)
    backend.decoder = decoders.ByteLevel()
    if normalizer is not None:
        backend.normalizer = normalizer
    alphabet = sorted(token_bytes.BYTE_SYMBOLS.values())
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=[END_OF_TEXT], initial_alphabet=alphabet, show_progress=False
    )
    backend.train_from_iterator(CORPUS, trainer)
    return fast(backend, eos_token=END_OF_TEXT)


def word_piece():
    backend = Backend(models.WordPiece(unk_token="[UNK]"))
    backend.normalizer = normalizers.BertNormalizer(lowercase=True)
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    trainer = trainers.WordPieceTrainer(
        vocab_size=120, special_tokens=["[UNK]", "[SEP]"], show_progress=False
    )
    backend.train_from_iterator(CORPUS, trainer)
    return fast(backend, unk_token="[UNK]", sep_token="[SEP]")


def sentence_piece():
    """As Llama 2's: a blank put in front, blanks as U+2581, bytes for unknown characters."""
    symbols = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    symbols += ["▁", *"aehistnorc", "▁c", "at"]
    backend = Backend(
        models.BPE(
            vocab={symbol: number for number, symbol in enumerate(symbols)},
            merges=[("▁", "c"), ("a", "t")],
            unk_token="<unk>",
            byte_fallback=True,
        )
    )
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    return fast(backend, unk_token="<unk>", bos_token="<s>", eos_token="</s>")


def unigram():
    backend = Backend(models.Unigram())
    backend.normalizer = normalizers.NFKC()
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    trainer = trainers.UnigramTrainer(
        vocab_size=80, special_tokens=["<unk>", "</s>"], unk_token="<unk>", show_progress=False
    )
    backend.train_from_iterator(CORPUS, trainer)
    return fast(backend, unk_token="<unk>", eos_token="</s>")


KINDS = {
    "byte": lambda: Tokenizer(byte_tokenizer(), "byte"),
    "byte, reloaded": lambda: Tokenizer(byte_tokenizer(), "final/"),
    "byte-level": byte_level,
    "byte-level, prefix space": lambda: byte_level(add_prefix_space=True),
    "byte-level, NFC": lambda: byte_level(normalizer=normalizers.NFC()),
    "byte-level, NFKD": lambda: byte_level(normalizer=normalizers.NFKD()),
    "WordPiece": word_piece,
    "SentencePiece": sentence_piece,
    "Unigram": unigram,
    "slow": lambda: Tokenizer(ByT5Tokenizer(), "byt5"),
}
TOKENIZERS = {name: make() for name, make in KINDS.items()}
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
