"""The bytes of each token of a tokenizer; joined, they decode any ids."""

from __future__ import annotations

import json
import re

from tokenizers import Tokenizer

from learnable_multipliers.pretrain.data.encoding import bytes_by_character

_SPACE = "\u2581"
_BYTE = re.compile(r"<0x([0-9A-F]{2})>")


def token_bytes(tokenizer: Tokenizer) -> tuple[bytes, ...]:
    """Return the bytes of each id, empty for special tokens and gaps.

    Supports byte-level tokenizers and those that mark spaces like SentencePiece.
    """
    decoder = json.loads(tokenizer.to_str())["decoder"] or {}
    parts = [decoder, *decoder.get("decoders", ())]
    kinds = {part.get("type") for part in parts}
    replaced = {json.dumps(part.get("pattern")) for part in parts if part.get("type") == "Replace"}
    if "ByteLevel" in kinds:
        alphabet = bytes_by_character()
        text_of = lambda token: bytes(map(alphabet.__getitem__, token))  # noqa: E731
    elif "Metaspace" in kinds or json.dumps({"String": _SPACE}) in replaced:
        text_of = _marked
    else:
        raise ValueError(
            f"the tokenizer's decoder ({', '.join(sorted(map(str, kinds)))}) is not supported, so "
            "generated tokens cannot be read: leave out the generation tasks"
        )
    added = tokenizer.get_added_tokens_decoder()
    vocabulary = tokenizer.get_vocab(with_added_tokens=True)
    pieces = [b""] * (max(vocabulary.values()) + 1)
    for token, index in vocabulary.items():
        if index not in added:
            pieces[index] = text_of(token)
    for index, token in added.items():
        pieces[index] = b"" if token.special else token.content.encode()
    return tuple(pieces)


def _marked(token: str) -> bytes:
    byte = _BYTE.fullmatch(token)
    return bytes([int(byte[1], 16)]) if byte else token.replace(_SPACE, " ").encode()
