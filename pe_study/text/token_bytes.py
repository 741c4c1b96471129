"""How many bytes of the original text each token covers.

Every function returns counts (n,) int64 that add up to the text's UTF-8 bytes, or None where the text cannot
be recovered from the tokens. What tokens leave out (dropped blanks) counts for the token after it.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

_MOST_TOKENS_A_CHARACTER = 8


def _byte_symbols() -> dict[int, str]:
    """GPT-2's printable symbol of each byte."""
    printable = [
        *range(ord("!"), ord("~") + 1),
        *range(ord("¡"), ord("¬") + 1),
        *range(ord("®"), ord("ÿ") + 1),
    ]
    others = [byte for byte in range(256) if byte not in printable]
    symbols = {byte: chr(byte) for byte in printable}
    symbols |= {byte: chr(256 + number) for number, byte in enumerate(others)}
    return {byte: symbols[byte] for byte in range(256)}


BYTE_SYMBOLS = _byte_symbols()


def byte_level_pieces(backend: Any, vocab_size: int) -> list[bytes] | None:
    """The bytes of each token id of a byte-level vocabulary (specials: none); None for another kind."""
    settings = json.loads(backend.to_str())
    if (settings["decoder"] or {}).get("type") != "ByteLevel":
        return None
    byte_of = {symbol: byte for byte, symbol in BYTE_SYMBOLS.items()}
    pieces = [b""] * vocab_size
    for token, token_id in backend.get_vocab(with_added_tokens=False).items():
        if all(symbol in byte_of for symbol in token):
            pieces[token_id] = bytes(byte_of[symbol] for symbol in token)
    for added in settings["added_tokens"]:
        pieces[added["id"]] = b"" if added["special"] else added["content"].encode()
    return pieces


def from_pieces(text: str, ids: Sequence[int], pieces: Sequence[bytes]) -> np.ndarray | None:
    """The length of each token's bytes, if together they are the text exactly; else None."""
    found = [pieces[token_id] for token_id in ids]
    if b"".join(found) != text.encode("utf-8"):
        return None
    return np.fromiter(map(len, found), dtype=np.int64, count=len(found))


def from_offsets(text: str, offsets: Sequence[tuple[int, int]]) -> np.ndarray | None:
    """From character offsets (start, end): the bytes up to each end that no token before it covers.

    A character split over several tokens is shared evenly between them, the first taking what is over.
    """
    if not offsets:
        return None if text else np.zeros(0, dtype=np.int64)
    bytes_before = np.concatenate([[0], np.cumsum(utf8_lengths(text))])
    spans = np.asarray(offsets, dtype=np.int64)
    ends = np.maximum.accumulate(spans[:, 1])
    ends[-1] = len(text)
    covered = np.diff(bytes_before[ends], prepend=0)
    return _share_split_characters(covered, spans)


def from_decoding(text: str, ids: Sequence[int], decode: Callable[[Sequence[int]], str]) -> np.ndarray | None:
    """By decoding: each token, or few that make up a character, must come next in the text."""
    spans: list[tuple[int, int]] = []
    at = 0
    for end in range(1, len(ids) + 1):
        group = ids[len(spans) : end]
        span = _next_span(text, at, decode(group))
        if span is not None:
            spans += [span] * len(group)
            at = span[1]
        elif len(group) > _MOST_TOKENS_A_CHARACTER:
            return None
    return from_offsets(text, spans) if len(spans) == len(ids) else None


def _next_span(text: str, at: int, surface: str) -> tuple[int, int] | None:
    """Where a decoded token lies in the text from `at` on, as it is or with other blanks before it."""
    if not surface:
        return None
    if text.startswith(surface, at):
        return at, at + len(surface)
    word = surface.strip()
    while word and at < len(text) and text[at].isspace():
        at += 1
    return (at, at + len(word)) if text.startswith(word, at) else None


def utf8_lengths(text: str) -> np.ndarray:
    """(len(text),) the UTF-8 bytes of each character."""
    codes = np.frombuffer(text.encode("utf-32-le"), dtype=np.uint32)
    return 1 + (codes >= 0x80).astype(np.int64) + (codes >= 0x800) + (codes >= 0x10000)


def _share_split_characters(covered: np.ndarray, spans: np.ndarray) -> np.ndarray:
    same = (np.diff(spans, axis=0) == 0).all(axis=1) & (spans[1:, 1] > spans[1:, 0])
    first = 0
    for is_same, run in itertools.groupby(same):
        length = len(list(run))
        if is_same:  # tokens first..first+length cover one and the same character
            share, over = divmod(int(covered[first]), length + 1)
            covered[first : first + length + 1] = share
            covered[first] += over
        first += length
    return covered
