"""Documents to token bytes, with a fast path that is exact.

`tokenizers` spends most of its time cutting text into words. For the cuts of GPT-2 (the one trained
here), GPT-4, Llama 3 and Qwen, Python's `re` makes the same cut of ASCII text several times faster,
and a table then gives the ids of each word. Other tokenizers use `encode_batch_fast`.

This file is also the program of a worker process. It imports nothing of this package: torch alone
would take longer to import than many megabytes take to encode.
"""

from __future__ import annotations

import json
import pickle
import re
import signal
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
from tokenizers import Tokenizer

_GPT2_CUT = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_GPT4_CUT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# Three things hold for all of these. A word cut out alone stays whole. The pattern never looks
# back. No word has a space behind anything but whitespace: so a text may be taken apart between
# a visible ASCII character and a space.
_KNOWN_CUTS = (_GPT2_CUT, _GPT4_CUT, _GPT4_CUT.replace("{1,3}", ""))
_BORDER = re.compile(r"(?<=[!-~])(?= )")
_PIECE = 1 << 18
_TABLE_SIZE = 400_000
_LONGEST_ENTRY = 64


class DocumentEncoder:
    """Encodes documents to little-endian bytes of ids, each closed by the end-of-document id."""

    def __init__(self, serialized: str, eos_id: int, dtype: str) -> None:
        self._tokenizer = Tokenizer.from_str(serialized)
        # Not part of the serialized form: special tokens written out in a text are characters.
        self._tokenizer.encode_special_tokens = True
        self._dtype = np.dtype(dtype)
        self._eos = np.array([eos_id], dtype).tobytes()
        settings = json.loads(serialized)
        self._added = [one["content"] for one in settings["added_tokens"] if not one["special"]]
        # The only known normalizer leaves ASCII alone.
        self._ascii_only = settings["normalizer"] is not None
        cut = _known_cut(settings)
        self._words = _WordTable(self._tokenizer, self._dtype, cut) if cut else None

    def __call__(self, batch: list[str]) -> list[bytes]:
        """Return the bytes of each document."""
        if self._words is None:
            encoded = self._tokenizer.encode_batch_fast(batch, add_special_tokens=False)
            return [np.array(one.ids, self._dtype).tobytes() + self._eos for one in encoded]
        return [self._encode(text, self._words) + self._eos for text in batch]

    def _encode(self, text: str, words: _WordTable) -> bytes:
        # Added tokens are cut out of a text before its words.
        if any(token in text for token in self._added):
            return words.encode_whole(text)
        if self._ascii_only and not text.isascii():
            return words.encode_whole(text)
        return words.encode(text)


class _WordTable(dict[str, bytes]):
    """Text to the bytes of its ids, filled as words are met."""

    def __init__(self, tokenizer: Tokenizer, dtype: np.dtype, cut: re.Pattern[str]) -> None:
        super().__init__()
        self._tokenizer = tokenizer
        self._dtype = dtype
        self._cut = cut

    def encode(self, text: str) -> bytes:
        return b"".join([self._encode_piece(piece) for piece in _pieces(text)])

    def encode_whole(self, text: str) -> bytes:
        ids = self._tokenizer.encode(text, add_special_tokens=False).ids
        return np.array(ids, self._dtype).tobytes()

    def _encode_piece(self, piece: str) -> bytes:
        # Words of other alphabets are looked up between ASCII spaces, whole.
        parts = self._cut.findall(piece) if piece.isascii() else _BORDER.split(piece)
        return b"".join(map(self.__getitem__, parts))

    def __missing__(self, text: str) -> bytes:
        found = self.encode_whole(text)
        if len(text) <= _LONGEST_ENTRY:
            if len(self) >= _TABLE_SIZE:
                self.clear()
            self[text] = found
        return found


def _pieces(text: str) -> Iterator[str]:
    """Cut a long text where no word is cut, so that its words need not fit into memory at once."""
    start = 0
    while len(text) - start > _PIECE and (border := _BORDER.search(text, start + _PIECE)):
        yield text[start : border.start()]
        start = border.start()
    yield text[start:]


def _known_cut(settings: dict[str, Any]) -> re.Pattern[str] | None:
    """Return the pattern that cuts ASCII text as the tokenizer does, if it is a known one."""
    if settings["model"]["type"] != "BPE" or settings["normalizer"] not in (None, {"type": "NFC"}):
        return None
    match settings["pre_tokenizer"]:
        case {"type": "ByteLevel", "use_regex": True, "add_prefix_space": False}:
            pattern = _GPT2_CUT
        case {
            "type": "Sequence",
            "pretokenizers": [
                {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", **split},
                {"type": "ByteLevel", "use_regex": False, "add_prefix_space": False},
            ],
        } if pattern in _KNOWN_CUTS and not split.get("invert"):
            pass
        case _:
            return None
    # In ASCII text \p{L} and \p{N} are these ranges.
    pattern = pattern.replace(r"\p{L}\p{N}]", "A-Za-z0-9]")
    pattern = pattern.replace(r"\p{L}", "[A-Za-z]").replace(r"\p{N}", "[0-9]")
    return re.compile(pattern, re.ASCII)


def serve() -> None:
    """Encode the pickled batches of standard input to standard output until it ends."""
    # An interrupt is the parent's to handle; it closes the input.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    encode = DocumentEncoder(*pickle.load(sys.stdin.buffer))
    while True:
        try:
            batch = pickle.load(sys.stdin.buffer)
        except EOFError:
            return
        pickle.dump(encode(batch), sys.stdout.buffer)
        sys.stdout.buffer.flush()


if __name__ == "__main__":
    serve()
