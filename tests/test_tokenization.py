"""Tokenizers: bytes, BPE of the training text, Hugging Face's; specials only where they are meant."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers import models, pre_tokenizers, processors
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from pe_study.errors import DataError
from pe_study.sections import DataSpec
from pe_study.text import tokenization
from pe_study.text.corpora import read_corpus
from pe_study.text.sources import Source
from pe_study.text.tokenization import (
    END_OF_TEXT,
    Tokenizer,
    byte_tokenizer,
    check_vocabulary,
    load_tokenizer,
)

TEXT = f"naïve 東京 {END_OF_TEXT} <s> <|pad|>\r\n"
TEXTS = [f"the {word} sat on the {word}\n" * 3 for word in ("cat", "dog", "été", "東京", "owl", "hen")]
LINES = Tokenizer(
    tokenization._wrap(tokenization._train(["a1 a1\n\n a.\n 'é  a1\t\n\n\na a.\n" * 9], 300)), "bpe:300"
)


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("PE_STUDY_CACHE", str(tmp_path / "cache"))


def corpus(texts=TEXTS, fraction=0.3):
    named = [(str(number), text) for number, text in enumerate(texts)]
    return read_corpus(Source("memory", lambda: iter(named)), fraction)


def load(name, texts=TEXTS):
    return load_tokenizer(DataSpec(tokenizer=name), corpus(texts))


def words(**special_tokens):
    """A word tokenizer that puts BOS in front of a text, as a checkpoint's does."""
    vocabulary = {symbol: number for number, symbol in enumerate(["<unk>", "<s>", "</s>", "the", "cat"])}
    backend = Backend(models.WordLevel(vocabulary, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    if "bos_token" in special_tokens:
        backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>", **special_tokens)


def test_byte_ids_are_byte_values():
    tokenizer = load("byte")
    document = tokenizer.encode(TEXT)
    assert document.ids.tolist() == list(TEXT.encode())
    assert (tokenizer.vocab_size, tokenizer.eos_token_id, tokenizer.bos_token_id) == (257, 256, 256)
    every_byte = Tokenizer(byte_tokenizer(), "final/").hf.backend_tokenizer
    assert [every_byte.token_to_id(every_byte.id_to_token(byte)) for byte in range(257)] == list(range(257))


@pytest.mark.parametrize("name", ["byte", "bpe:300"])
def test_saved_tokenizer_loads_and_agrees(name, tmp_path):
    tokenizer = load(name)
    tokenizer.save(tmp_path / "final")
    reloaded = Tokenizer(AutoTokenizer.from_pretrained(tmp_path / "final"), "final/")
    ours, theirs = tokenizer.encode(TEXT), reloaded.encode(TEXT)
    assert ours.ids.tolist() == theirs.ids.tolist()
    assert ours.token_bytes.tolist() == theirs.token_bytes.tolist()
    assert reloaded.hash == tokenizer.hash
    assert reloaded.hf.decode(ours.ids) == TEXT
    assert reloaded.hf.decode([*ours.ids, reloaded.eos_token_id], skip_special_tokens=True) == TEXT
    assert not reloaded.prepends_bos
    plain = reloaded.hf(TEXT, split_special_tokens=True)["input_ids"]
    assert plain == ours.ids.tolist(), "nothing is added in front or behind"


@pytest.mark.parametrize("name", ["byte", "bpe:300"])
def test_text_never_becomes_a_special_token(name):
    """case 38, case 53: a text that spells <|endoftext|> must not end a document."""
    tokenizer = load(name)
    assert tokenizer.eos_token_id not in tokenizer.encode(TEXT).ids
    tokenizer.hf(TEXT)  # a call of the wrapped tokenizer, with its own defaults, changes nothing
    assert tokenizer.eos_token_id not in tokenizer.encode(TEXT).ids


def test_encoding_neither_pads_nor_cuts():
    hf = words(bos_token="<s>", eos_token="</s>", pad_token="</s>")
    hf("the", padding="max_length", max_length=8, truncation=True)
    tokenizer = Tokenizer(hf, "words")
    assert tokenizer.encode("the cat " * 20).ids.tolist() == [3, 4] * 20
    assert tokenizer.encode("the").ids.tolist() == [3]


def test_bpe_is_trained_on_the_training_documents():
    tokenizer = load("bpe:280")
    assert (tokenizer.vocab_size, tokenizer.eos_token_id) == (280, 0)
    held_out = [document.text for document in corpus().documents("validation")]
    train = [document.text for document in corpus().documents("train")]
    assert held_out and train
    alone = read_corpus(Source("memory", lambda: iter([("", text) for text in train])), 0.0)
    assert load_tokenizer(DataSpec(tokenizer="bpe:280"), alone).hash == tokenizer.hash


def test_bpe_training_is_repeatable(tmp_path, monkeypatch):
    first = load("bpe:300")
    monkeypatch.setenv("PE_STUDY_CACHE", str(tmp_path / "another"))
    assert load("bpe:300").hash == first.hash
    assert load("bpe:270").hash != first.hash


def test_bpe_sizes():
    assert load("bpe:1k").vocab_size <= 1024
    with pytest.raises(DataError, match="N of at least 257"):
        tokenization._parse_size("bpe:256")


@pytest.mark.parametrize("kind", ["eos_token", "sep_token", "bos_token"])
def test_separator(kind):
    assert Tokenizer(words(**{kind: "</s>"}), "words").separator_id == 2


def test_no_separator_is_an_error():
    with pytest.raises(DataError, match='tokenizer "words" has no token to put between documents'):
        _ = Tokenizer(words(), "words").separator_id


def test_bos_policy_of_a_checkpoint():
    """case 09: `bos: auto` is what the tokenizer does by itself; encoding adds none, so none is doubled."""
    with_bos = Tokenizer(words(bos_token="<s>"), "words")
    assert with_bos.prepends_bos
    assert not Tokenizer(words(eos_token="</s>"), "words").prepends_bos
    assert with_bos.encode("the cat").ids.tolist() == [3, 4]
    assert with_bos.bos_token_id == 1


def test_hash_follows_what_decides_the_ids():
    tokenizer = Tokenizer(words(eos_token="</s>"), "words")
    again = Tokenizer(words(eos_token="</s>"), "another name")
    again.hf("the", truncation=True, max_length=8)
    assert again.hash == tokenizer.hash
    assert Tokenizer(words(eos_token="<s>"), "words").hash != tokenizer.hash


def test_folder_of_a_tokenizer(tmp_path):
    words(eos_token="</s>").save_pretrained(tmp_path)
    assert load(str(tmp_path)).encode("the cat").ids.tolist() == [3, 4]


@pytest.mark.parametrize("name", ["missing/folder", "no-one/nothing", "bite"])
def test_unknown_tokenizer_is_one_error(name):
    with pytest.raises(DataError, match=f'data.tokenizer "{name}"') as caught:
        load(name)
    lines = str(caught.value).splitlines()
    assert len(lines) == 2 and lines[1] == "accepted: byte, bpe:N, or a Hugging Face id or folder"


def test_ids_outside_the_vocabulary():
    check_vocabulary(np.array([0, 9]), 10, "corpus")
    check_vocabulary(np.array([], dtype=np.int64), 10, "corpus")
    with pytest.raises(DataError, match="token id 10 is outside the model's vocabulary of 10"):
        check_vocabulary(np.array([0, 10]), 10, "corpus")


@given(st.text("a1 '\n\t.é\u00a0", max_size=60), st.integers(1, 20))
def test_parts_encode_like_the_whole(text, size):
    """A long text may be encoded in parts: together they are the text, and their ids those of the whole."""
    tokenizer = LINES
    parts = tokenizer.parts(text, size)
    assert "".join(parts) == text
    whole = tokenizer.encode(text)
    assert np.concatenate([part.ids for part in tokenizer.encode_batch(parts)]).tolist() == whole.ids.tolist()


def test_parts_of_other_tokenizers_are_whole():
    assert Tokenizer(words(eos_token="</s>"), "words").parts("the\ncat\n" * 9, 8) == ["the\ncat\n" * 9]
    assert load("byte").parts("the\ncat\nthe\ncat", 5) == ["the\ncat\n", "the\ncat"]
