"""Tokenizers of every kind, small and made here: for tests of whatever takes any tokenizer."""

from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers
from transformers import ByT5Tokenizer, PreTrainedTokenizerFast

from pe_study.text import token_bytes
from pe_study.text.tokenization import END_OF_TEXT, Tokenizer, byte_tokenizer

CORPUS = ["The cat sat on the mat. “Élan”, naïve café: 東京 🦙🦙\n\tdef f(x): return x\n"] * 4


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
