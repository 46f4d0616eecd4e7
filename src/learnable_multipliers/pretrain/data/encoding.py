"""Documents to tokens: `tiktoken` where it gives the same ids as `tokenizers`.

Both merge greedily. `tokenizers` takes the adjacent pair that comes first in its list of merges;
`tiktoken` takes the pair whose joined bytes have the lowest rank, and looks up whole words first.
Inside a word, the merges within the span of a token are those of the token encoded alone. So both
agree if the rank of a token is that of the last merge which forms it when it is encoded alone, and
a token that its merges do not form has no rank.
"""

from __future__ import annotations

import json
import math
import re
import unicodedata
from collections.abc import Iterable, Iterator
from itertools import pairwise
from typing import Any

import numpy as np
import tiktoken
from tokenizers import pre_tokenizers

from learnable_multipliers.pretrain.data.documents import Document
from learnable_multipliers.pretrain.data.readers import DocumentError
from learnable_multipliers.pretrain.data.shards import Tokens, token_dtype
from learnable_multipliers.pretrain.data.threads import Threads, batches_of
from learnable_multipliers.pretrain.data.tokenizer import TextTokenizer

GPT2_SPLIT = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
LLAMA3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# For these the regex engines of both libraries agree; the last is Qwen's. None has a look-behind
# or a space after anything but whitespace, so a text can be cut between a visible ASCII
# character and a space.
_KNOWN_SPLITS = (GPT2_SPLIT, LLAMA3_SPLIT, LLAMA3_SPLIT.replace("{1,3}", ""))
_BORDER = re.compile(r"(?<=[!-~])(?= )")
# Between short documents, so that one call encodes many. Nothing it begins with ends it, so it is
# not found across the end of a document either.
_BORDER_TOKEN = "<|border|>"
# Characters. tiktoken's regex engine fails on a million blanks in a row, so what has no border for
# so long goes through `tokenizers`.
_PIECE = 1 << 18
_LONGEST_PIECE = 1 << 19
_LONGEST_TEXT = 1 << 26
"""Characters that `tokenizers` encodes at once: it aborts when memory runs out."""


class DocumentEncoder:
    """Encodes a text to its ids, closed by the end-of-document id."""

    def __init__(self, tokenizer: TextTokenizer) -> None:
        self._tokenizer = tokenizer.tokenizer
        self._dtype = token_dtype(tokenizer.vocab_size)
        self._eos = np.array([tokenizer.eos_id], self._dtype)
        settings = json.loads(self._tokenizer.to_str())
        self._is_nfc = settings["normalizer"] is not None
        added = [one["content"] for one in settings["added_tokens"] if not one["special"]]
        self._added = {*added, *(unicodedata.normalize("NFC", token) for token in added)}
        split, ranks = known_split(settings), _token_ranks(settings["model"])
        self.uses_tiktoken = split is not None and ranks is not None
        if split is not None and ranks is not None:
            vocabulary, byte_of = settings["model"]["vocab"], bytes_by_character()
            self._border_rank = max(ranks.values()) + 1
            self._ids = np.zeros(self._border_rank + 1, self._dtype)
            self._ids[self._border_rank] = tokenizer.eos_id
            for token, rank in ranks.items():
                self._ids[rank] = vocabulary[token]
            in_bytes = {bytes(map(byte_of.__getitem__, token)): r for token, r in ranks.items()}
            self._tiktoken = tiktoken.Encoding(
                "tokenizer.json",
                pat_str=split,
                mergeable_ranks=in_bytes,
                special_tokens={_BORDER_TOKEN: self._border_rank},
            )

    def __call__(self, text: str) -> Tokens:
        """Return the tokens of a document."""
        pieces = _pieces(text) if self.uses_tiktoken and self._is_plain(text) else ()
        parts = [self._fast(one) for one in pieces] or [self._slow(text)]
        return np.concatenate([*parts, self._eos])

    def encode_all(self, texts: Iterable[str]) -> Iterator[Tokens]:
        """Yield the tokens of each document; short ones are encoded in batches."""
        short: list[str] = []
        num_characters = 0
        for text in texts:
            joins = self.uses_tiktoken and _BORDER_TOKEN not in text and self._is_plain(text)
            if not joins or num_characters + len(text) > _PIECE:
                yield from self._joined(short)
                short, num_characters = [], 0
            if joins and len(text) <= _PIECE:
                short.append(text)
                num_characters += len(text)
            else:
                yield self(text)
        yield from self._joined(short)

    def _joined(self, texts: list[str]) -> Iterator[Tokens]:
        if not texts:
            return
        ranks = self._tiktoken.encode_to_numpy(
            _BORDER_TOKEN.join([*texts, ""]),
            allowed_special={_BORDER_TOKEN},
            disallowed_special=(),
        )
        ids = self._ids[ranks]
        start = 0
        for end in np.flatnonzero(ranks == self._border_rank).tolist():
            yield ids[start : end + 1]
            start = end + 1

    def _is_plain(self, text: str) -> bool:
        """Return whether neither normalization nor tokens added to the model change the text."""
        if any(token in text for token in self._added):
            return False
        return not self._is_nfc or unicodedata.is_normalized("NFC", text)

    def _fast(self, text: str) -> Tokens:
        if len(text) > _LONGEST_PIECE:
            return self._slow(text)
        # Unlike `encode_ordinary`, this makes no list, for which it would hold Python's lock.
        return self._ids[self._tiktoken.encode_to_numpy(text, disallowed_special=())]

    def _slow(self, text: str) -> Tokens:
        if len(text) > _LONGEST_TEXT:
            raise DocumentError(
                f"a text of {len(text):,} characters has no place to be cut at, and beyond "
                f"{_LONGEST_TEXT:,} the tokens do not fit into memory; cut it into several "
                "documents (--text-separator), or leave the file out"
            )
        # Unlike `encode`, this lets other threads run.
        (encoding,) = self._tokenizer.encode_batch_fast([text], add_special_tokens=False)
        return np.array(encoding.ids, self._dtype)


def encode_documents(
    documents: Iterable[Document], tokenizer: TextTokenizer, threads: Threads
) -> Iterator[tuple[Document, Tokens]]:
    """Yield every document and its tokens, in order."""
    encoder = DocumentEncoder(tokenizer)

    def encode(batch: list[Document]) -> Iterator[tuple[Document, Tokens]]:
        return zip(batch, encoder.encode_all(one.text for one in batch), strict=True)

    yield from threads.map(encode, batches_of(documents))


def _pieces(text: str) -> Iterator[str]:
    """Cut a long text at borders of words, so that its list of ids is never large."""
    start = 0
    while len(text) - start > _PIECE and (border := _BORDER.search(text, start + _PIECE)):
        yield text[start : border.start()]
        start = border.start()
    yield text[start:]


def known_split(settings: dict[str, Any]) -> str | None:
    """Return the pattern that splits text into words, if nothing else is done to the text."""
    if settings["normalizer"] not in (None, {"type": "NFC"}):
        return None
    match settings["pre_tokenizer"]:
        case {"type": "ByteLevel", "use_regex": True, "add_prefix_space": False}:
            return GPT2_SPLIT
        case {
            "type": "Sequence",
            "pretokenizers": [
                {"type": "Split", "pattern": {"Regex": split}, "behavior": "Isolated", **more},
                {"type": "ByteLevel", "use_regex": False, "add_prefix_space": False},
            ],
        } if split in _KNOWN_SPLITS and not more.get("invert"):
            return split
    return None


def _token_ranks(model: dict[str, Any]) -> dict[str, int] | None:
    """Return the rank of each token, or None where ranks cannot express the model.

    First come the 256 bytes, then the merges, then whole words that no merge forms.
    """
    others = ("dropout", "continuing_subword_prefix", "end_of_word_suffix", "byte_fallback")
    if model["type"] != "BPE" or any(model[name] for name in others):
        return None
    byte_of = bytes_by_character()
    if not byte_of.keys() <= model["vocab"].keys():
        return None
    merges = {(first, second): rank for rank, (first, second) in enumerate(model["merges"])}
    ranks = dict(byte_of)
    num_ranks = len(byte_of) + len(merges)
    for token in model["vocab"]:
        if len(token) < 2 or not byte_of.keys() >= set(token):
            continue
        num_symbols, last = _merge(token, merges)
        if num_symbols == 1:
            ranks[token] = len(byte_of) + last
        elif model["ignore_merges"]:
            # A word by itself, though merges do not form it. A rank is that of any two symbols
            # which give the token, so with two left it would be merged inside of words too.
            if num_symbols == 2:
                return None
            ranks[token] = num_ranks
            num_ranks += 1
    return ranks


def _merge(token: str, merges: dict[tuple[str, str], int]) -> tuple[int, int]:
    """Encode a token by merges; return how many symbols are left and the rank of the last merge."""
    symbols, last = list(token), -1
    while len(symbols) > 1:
        rank, place = min(
            (merges.get(pair, math.inf), place) for place, pair in enumerate(pairwise(symbols))
        )
        if rank == math.inf:
            break
        symbols[place : place + 2] = [symbols[place] + symbols[place + 1]]
        last = int(rank)
    return len(symbols), last


def bytes_by_character() -> dict[str, int]:
    """Return the byte of each character of the byte-level alphabet.

    A printable Latin-1 character is its own byte; the others follow from 256 on, in order.
    """
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    order = sorted(range(256), key=lambda byte: (chr(byte) not in alphabet, byte))
    return dict(zip(alphabet, order, strict=True))
