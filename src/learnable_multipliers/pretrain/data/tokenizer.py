"""Tokenizers: a byte-level BPE trained on the corpus, or a given tokenizer.json.

Every document ends with one end-of-document token. Special tokens written out in a text are encoded
as the characters they are, and the end-of-document token is always a special one, whatever its file
says. That leaves models which have it among their own words: no document that brings it forth is
ever written (`prepare`).
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

EOS_TOKEN = "<|endoftext|>"
NUM_BYTES = 256
# What the common families call the end of a document; the last is DeepSeek's.
_USUAL_EOS = (
    EOS_TOKEN,
    "<|end_of_text|>",
    "</s>",
    "<eos>",
    "[EOS]",
    "<\uff5cend\u2581of\u2581sentence\uff5c>",
)
# Small beside any sample, so that even one long text gives pieces from all over it.
_PIECE = 1 << 12


class TextTokenizer:
    """A `tokenizers.Tokenizer` made to encode whole documents, with its end-of-document token."""

    def __init__(self, tokenizer: Tokenizer, eos_token: str) -> None:
        eos_id = tokenizer.token_to_id(eos_token)
        if eos_id is None:
            raise ValueError(f"the tokenizer has no token {eos_token!r}; name another --eos-token")
        # A file may carry the settings of a chat model: no document is cut or filled up here.
        tokenizer.no_truncation()
        tokenizer.no_padding()
        tokenizer.encode_special_tokens = True
        added = tokenizer.get_added_tokens_decoder().get(eos_id)
        if added is not None and not added.special:
            # Else it would be found in text, and a document about it would fall apart.
            tokenizer.add_special_tokens([eos_token])
        if isinstance(tokenizer.model, models.BPE):
            # Dropout would make the same text encode differently each time.
            tokenizer.model.dropout = None
        self.tokenizer = tokenizer
        self.eos_token = eos_token
        self.eos_id: int = eos_id
        # Ids may have gaps: the largest one counts.
        self.vocab_size = max(tokenizer.get_vocab(with_added_tokens=True).values()) + 1

    def encode(self, text: str) -> list[int]:
        """Return the ids of a text, without the end-of-document token."""
        return self.tokenizer.encode(text, add_special_tokens=False).ids

    def decode(self, ids: Sequence[int] | NDArray[np.integer]) -> str:
        """Return the text of some ids; end-of-document tokens are left out."""
        kept = [int(index) for index in ids if index != self.eos_id]
        return self.tokenizer.decode(kept, skip_special_tokens=False)

    def token_bytes(self) -> NDArray[np.int64] | None:
        """Return how many bytes of text each id stands for (0 for special tokens and gaps).

        Summed over targets it gives the denominator of bits per byte, exactly. None if the
        tokenizer is not byte-level: then a token has no fixed number of bytes.
        """
        if not isinstance(self.tokenizer.decoder, decoders.ByteLevel):
            return None
        counts = np.zeros(self.vocab_size, dtype=np.int64)
        # The byte-level alphabet has one character for each byte.
        for token, index in self.tokenizer.get_vocab(with_added_tokens=False).items():
            counts[index] = len(token)
        for index, added in self.tokenizer.get_added_tokens_decoder().items():
            counts[index] = 0 if added.special else len(added.content.encode())
        return counts


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> TextTokenizer:
    """Train a byte-level BPE; the same texts give the same tokenizer, for any number of threads.

    The vocabulary is the end-of-document token, the 256 bytes and merges; 257 makes it a byte
    tokenizer. A text with too few words to merge gives a smaller vocabulary than asked for.
    """
    smallest = NUM_BYTES + 1
    if vocab_size < smallest:
        raise ValueError(
            f"vocab_size is {vocab_size}; {smallest} (all bytes and {EOS_TOKEN}) is the smallest"
        )
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[EOS_TOKEN],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts if vocab_size > smallest else (), trainer)
    return TextTokenizer(tokenizer, EOS_TOKEN)


def load_tokenizer(
    path: Path, eos_token: str | None = None, *, add_eos: bool = False
) -> TextTokenizer:
    """Load a tokenizer.json; its end-of-document token is found by the usual names.

    `add_eos` gives one to a tokenizer that has none, at the end of its vocabulary.
    """
    if not path.is_file():
        raise FileNotFoundError(f"no tokenizer at {path}; give the path of a tokenizer.json")
    try:
        tokenizer = Tokenizer.from_file(str(path))
    # The library raises plain Exception for a file it cannot parse.
    except Exception as error:
        raise ValueError(f"{path} is not a tokenizer.json of `tokenizers` ({error})") from error
    if eos_token is None:
        usual = [name for name in _USUAL_EOS if tokenizer.token_to_id(name) is not None]
        if add_eos and not usual:
            tokenizer.add_special_tokens([EOS_TOKEN])
            usual = [EOS_TOKEN]
        if len(usual) != 1:
            names = f"several ({', '.join(usual)})" if usual else "none"
            added = "" if usual else ", or have one added with --add-eos"
            raise ValueError(
                f"{path}: looked for a token that ends a document and found {names}; "
                f"name it with --eos-token{added}"
            )
        eos_token = usual[0]
    return TextTokenizer(tokenizer, eos_token)


class TextSample:
    """A bounded sample of text that depends on which texts there are, not on their order.

    Texts are cut into pieces, and the pieces with the smallest hashes are kept, `num_characters` in
    all. So the sample comes from all over a corpus, also from all over one long text, and one pass
    over a stream is enough. Equal pieces count once, however often they are there.
    """

    def __init__(self, num_characters: int) -> None:
        self._num_characters = num_characters
        self._by_hash: dict[int, str] = {}
        self._num_added = 0

    def add(self, text: str) -> None:
        """Add the pieces of a text whose hashes are small enough."""
        for piece in _pieces(text):
            self._by_hash.setdefault(_hash(piece), piece)
            self._num_added += len(piece)
            # Occasionally, so that memory is bounded and sorting is rare.
            if self._num_added >= self._num_characters:
                self._by_hash = dict(self._smallest())
                self._num_added = 0

    def __iter__(self) -> Iterator[str]:
        """Yield the pieces by their hashes; the last one is cut where the sample is full."""
        return (piece for _, piece in self._smallest())

    def _smallest(self) -> Iterator[tuple[int, str]]:
        left = self._num_characters
        for key in sorted(self._by_hash):
            if left <= 0:
                break
            piece = self._by_hash[key][:left]
            left -= len(piece)
            yield key, piece


def _pieces(text: str) -> Iterator[str]:
    """Split a text, at line ends where possible, so few words are split."""
    start = 0
    while start < len(text):
        stop = start + _PIECE
        if stop < len(text):
            stop = text.rfind("\n", start + _PIECE // 2, stop) + 1 or stop
        yield text[start:stop]
        start = stop


def _hash(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=16).digest(), "little")
