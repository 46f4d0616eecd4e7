"""A tokenizer as llama.cpp reads it: tokens, their types, merges, and how text is split into words.

llama.cpp implements the splits of known tokenizers, each under a name. A tokenizer that none of
them matches is refused.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from learnable_multipliers.pretrain.data.encoding import (
    GPT2_SPLIT,
    LLAMA3_SPLIT,
    bytes_by_character,
    known_split,
)
from learnable_multipliers.pretrain.data.tokenizer import TextTokenizer

# What llama.cpp calls a split, and whether it then looks up whole words before it merges.
#
# It knows GPT-2's under several names. With this one, llama_detokenize gives back every space; with
# "gpt-2" it drops those before punctuation.
_PRE = {GPT2_SPLIT: ("trillion", False), LLAMA3_SPLIT: ("llama-bpe", True)}
# For a tokenizer of bytes: the format has no empty list, and nothing gives these symbols.
_NO_MERGES = ("<none> <none>",)
NORMAL, CONTROL, USER_DEFINED, UNUSED = 1, 3, 4, 5
"""Types of tokens: of the model, found in text only when asked to, always, and never."""


@dataclass(frozen=True)
class Vocabulary:
    """What a file says about a tokenizer."""

    pre: str
    """Name of the split."""
    tokens: tuple[str, ...]
    """By id, in the characters that stand for bytes; added tokens as they are."""
    types: tuple[int, ...]
    merges: tuple[str, ...]
    eos: int
    """Ends a document, and therefore begins the next one."""


def vocabulary(tokenizer: TextTokenizer, size: int) -> Vocabulary:
    """Return the vocabulary of a model that knows `size` tokens; refuse what cannot be expressed.

    Ids that the tokenizer does not use, such as those that pad the model's vocabulary, get names
    that no text gives.
    """
    described = json.loads(tokenizer.tokenizer.to_str())
    reason = unsupported_reason(described)
    if reason is not None:
        raise ValueError(
            f"the tokenizer cannot be written to a GGUF file: {reason}. Export without --gguf"
        )
    if tokenizer.vocab_size > size:
        raise ValueError(
            f"the tokenizer has {tokenizer.vocab_size:,} tokens, and the model has rows for "
            f"{size:,}: is it that of the model?"
        )
    tokens: list[str | None] = [None] * size
    types = [UNUSED] * size
    for token, index in described["model"]["vocab"].items():
        tokens[index], types[index] = token, NORMAL
    for added in described["added_tokens"]:
        tokens[added["id"]] = added["content"]
        types[added["id"]] = CONTROL if added["special"] else USER_DEFINED
    types[tokenizer.eos_id] = CONTROL
    known = set(tokens)
    for index, token in enumerate(tokens):
        if token is None:
            name = f"<unused {index}>"
            while name in known:
                name += ">"
            tokens[index] = name
    merges = tuple(" ".join(pair) for pair in described["model"]["merges"])
    pre, _ = _PRE[known_split(described) or ""]
    # Every place is taken by now.
    return Vocabulary(
        pre, tuple(map(str, tokens)), tuple(types), merges or _NO_MERGES, tokenizer.eos_id
    )


def unsupported_reason(described: dict[str, Any]) -> str | None:
    """Return why llama.cpp would give other ids than a tokenizer.json, or None if it would not."""
    model = described["model"]
    others = ("continuing_subword_prefix", "end_of_word_suffix", "byte_fallback")
    if model["type"] != "BPE" or any(model[name] for name in others):
        return "it is no byte-level BPE"
    alphabet = bytes_by_character().keys()
    if not alphabet <= model["vocab"].keys():
        return "it has no token for some bytes"
    if described["normalizer"] is not None:
        return f"it normalizes text ({described['normalizer']['type']}), and llama.cpp does not"
    split = known_split(described)
    if split not in _PRE:
        return "it splits text in another way than GPT-2 and Llama 3"
    name, whole_words = _PRE[split]
    if model["ignore_merges"] != whole_words:
        return (
            f"its ignore_merges is {model['ignore_merges']}, and with this split (called {name}) "
            f"llama.cpp takes {whole_words}"
        )
    added = {token["content"] for token in described["added_tokens"]}
    for token in model["vocab"]:
        if token not in added and not alphabet >= set(token):
            return f"its token {token!r} stands for no bytes"
    for token in described["added_tokens"]:
        if not token["special"] and (token["lstrip"] or token["rstrip"] or token["single_word"]):
            return f"its token {token['content']!r} is found only with certain neighbours in a text"
    return None
