import itertools
import json
import os
import subprocess
import sys
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    trainers,
)

from learnable_multipliers.pretrain.data import encoding
from learnable_multipliers.pretrain.data.encoding import DocumentEncoder
from learnable_multipliers.pretrain.data.shards import token_dtype
from learnable_multipliers.pretrain.data.tokenizer import (
    TextTokenizer,
    load_tokenizer,
    train_tokenizer,
)

CORPUS = [
    "def f(x):\n    return x + 1  # the sum\n" * 3,
    "It's the end, isn't it? We'll see what they've got.\n\n\tYes\r\n" * 3,
    "d\u00e9j\u00e0 vu \u4f60\u597d 123 4567\u00b2 \u00bd\n" * 3,
]


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer(CORPUS, 330)


def encoded(tokenizer, text):
    return DocumentEncoder(tokenizer)(text).tolist()


def test_tokenizer_gives_back_every_text(tokenizer):
    assert tokenizer.vocab_size == 330
    for text in [*CORPUS, "", "\x00\x1c\x85\u00a0", "<|endoftext|>", "\U0001f600\u0301"]:
        assert tokenizer.decode(tokenizer.encode(text)) == text


# Text where splits or merges could differ: blanks of every kind, controls, contractions, digits
# that are no digits, combining marks, emoji with joiners and flags, the end of a document written
# out, and what decoding invalid UTF-8 leaves.
PARTS = (
    ["a", "Zb", "'s", "'ll", "'LL", "'\u017f", "'", "0", "19", "1234567", " ", "  ", " " * 9, "\n"]
    + ["\n\n", "\t", "\r\n", "\r", "\x00", "\x0b", "\x0c", "\x1c", "\x1f", "\x7f", "\x85"]
    + ["\u00a0", "\u3000", "\u2028", "\u180e", "\ufeff", "\u00e9", "\u00b2", "\u00bd", "\u0660"]
    + ["\u2167", "\u4f60\u597d", "e\u0301", "\u0301", "\u200b", "\u212a", "_", "!", "--", "?!\n"]
    + ["<|endoftext|>", "<|im_start|>", "\U0001f600", "\U0001f468\u200d\U0001f469", "\ufffd"]
    + ["\U0001f1e9\U0001f1ea", "\u01c5", "\u0e01\u0e33", "\u0b95\u0bcd", "\U0001d7d9", "\uac00"]
)
# What stands between documents that are encoded together, and what could make more of it.
BORDERS = [
    encoding._BORDER_TOKEN,
    encoding._BORDER_TOKEN[:-1],
    encoding._BORDER_TOKEN[1:],
    "<",
    ">",
]
LLAMA3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def trained(split, normalizer=None, vocab_size=700):
    """Train a byte-level BPE whose merges another split of the text would break."""
    inner = Tokenizer(models.BPE())
    inner.normalizer = normalizer
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    if split is not None:
        inner.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(Regex(split), behavior="isolated"),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )
    inner.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=["<|endoftext|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    inner.train_from_iterator([first + second for first in PARTS for second in PARTS], trainer)
    return inner


def all_merges(inner):
    """Return a copy as a conversion from ranks makes it: a merge for every way to cut a token."""
    settings = json.loads(inner.to_str())
    model = settings["model"]
    model["ignore_merges"] = True
    in_order = [first + second for first, second in model["merges"]]
    model["merges"] = [
        [token[:cut], token[cut:]]
        for token in dict.fromkeys(in_order)
        for cut in range(1, len(token))
        if token[:cut] in model["vocab"] and token[cut:] in model["vocab"]
    ]
    return Tokenizer.from_str(json.dumps(settings))


@pytest.fixture(scope="module", params=["gpt2", "llama3", "qwen"])
def layout(request):
    """Tokenizers laid out as those of the common families."""
    if request.param == "gpt2":
        inner = trained(None)
    elif request.param == "llama3":
        inner = all_merges(trained(LLAMA3_SPLIT))
    else:
        inner = trained(LLAMA3_SPLIT.replace("{1,3}", ""), normalizers.NFC())
        inner.add_tokens([AddedToken("!Zb", special=False, normalized=False)])
    inner.add_special_tokens(["<|im_start|>"])
    return TextTokenizer(inner, "<|endoftext|>")


@pytest.fixture(scope="module")
def layout_encoder(layout):
    encoder = DocumentEncoder(layout)
    assert encoder.uses_tiktoken
    return encoder


@settings(max_examples=400)
@given(parts=st.lists(st.sampled_from(PARTS), max_size=30), piece=st.sampled_from([1, 7, 1 << 18]))
def test_tiktoken_gives_the_ids_of_tokenizers(layout, layout_encoder, parts, piece):
    text = "".join(parts)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(encoding, "_PIECE", piece)
        found = layout_encoder(text).tolist()
    assert found == [*layout.encode(text), layout.eos_id]
    assert layout.eos_id not in found[:-1]


@settings(max_examples=200)
@given(
    texts=st.lists(st.lists(st.sampled_from([*PARTS, *BORDERS]), max_size=9).map("".join)),
    piece=st.sampled_from([7, 40, 1 << 18]),
)
def test_documents_encoded_together_are_those_encoded_alone(layout, layout_encoder, texts, piece):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(encoding, "_PIECE", piece)
        found = [tokens.tolist() for tokens in layout_encoder.encode_all(texts)]
    assert found == [[*layout.encode(text), layout.eos_id] for text in texts]


@settings(max_examples=200)
@given(text=st.text(max_size=60), data=st.binary(max_size=60))
def test_tiktoken_gives_the_ids_of_tokenizers_for_any_character(layout, layout_encoder, text, data):
    for one in (text, data.decode("utf-8", errors="replace"), data.decode("latin-1")):
        found = layout_encoder(one).tolist()
        assert found == [*layout.encode(one), layout.eos_id]


@pytest.mark.slow
def test_both_libraries_split_at_the_same_characters(layout, layout_encoder):
    # Of the first two planes, which have all scripts but rare ideographs, and the tags.
    points = [*range(0xD800), *range(0xE000, 0x20000), *range(0xE0000, 0xE0200)]
    # Each character beside a letter, a digit, a sign, a blank and an apostrophe.
    texts = ["".join(f"a{chr(n)}1{chr(n)}! {chr(n)}'{chr(n)}" for n in points[i : i + 500])
             for i in range(0, len(points), 500)]  # fmt: skip
    for text, found in zip(texts, layout.tokenizer.encode_batch_fast(texts), strict=True):
        assert layout_encoder(text).tolist() == [*found.ids, layout.eos_id]


@pytest.mark.parametrize(
    "text",
    [
        " " * 1_200_000 + "x",
        "\n\t" * 600_000,
        "a" * 200_000,
        "".join(chr(97 + n * n * 7919 % 26) for n in range(200_000)),
        "".join(chr(0x4E00 + n * n % 9973) for n in range(100_000)),
        "1234567" * 20_000,
        "=-" * 100_000,
        "word " * 60_000,
    ],
    ids=["blanks", "lines", "one letter", "letters", "ideographs", "digits", "signs", "words"],
)
def test_long_text_takes_linear_time_and_gives_the_ids_of_tokenizers(layout, layout_encoder, text):
    start = time.process_time()
    found = layout_encoder(text)
    # Quadratic time would be minutes.
    assert time.process_time() - start < 20
    (expected,) = layout.tokenizer.encode_batch_fast([text], add_special_tokens=False)
    assert np.array_equal(found[:-1], expected.ids)


def chain(merges, *, ignore_merges=False, more=()):
    """Return a byte-level BPE with these merges in this order, and more words without merges."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = ["<|endoftext|>", *alphabet, *dict.fromkeys(a + b for a, b in merges), *more]
    inner = Tokenizer(
        models.BPE({word: n for n, word in enumerate(words)}, merges, ignore_merges=ignore_merges)
    )
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.add_special_tokens(["<|endoftext|>"])
    return TextTokenizer(inner, "<|endoftext|>")


def check_all_words(encoder, tokenizer):
    for length in range(7):
        for letters in itertools.product("abcd", repeat=length):
            text = "".join(letters)
            found = encoder(text).tolist()
            assert found == [*tokenizer.encode(text), tokenizer.eos_id]


# (a, bc) is never met, since (a, b) comes before (b, c); nor are words without merges.
HARD_MERGES = [("a", "b"), ("b", "c"), ("a", "bc"), ("d", "d"), ("dd", "d"), ("c", "dd")]


@pytest.mark.parametrize(
    ("ignore_merges", "more", "uses_tiktoken"),
    [
        (False, (), True),
        (False, ("abc", "abcd", "dcba"), True),
        # abc is left as (ab, c): a word by itself, but never merged inside of one.
        (True, (), False),
        (True, ("dcba",), False),
    ],
)
def test_tokens_that_merges_never_form_stay_unformed(ignore_merges, more, uses_tiktoken):
    tokenizer = chain(HARD_MERGES, ignore_merges=ignore_merges, more=more)
    encoder = DocumentEncoder(tokenizer)
    assert encoder.uses_tiktoken == uses_tiktoken
    check_all_words(encoder, tokenizer)


@pytest.mark.parametrize(
    "merges",
    [
        [("b", "c"), ("a", "bc"), ("d", "d")],
        # Two ways to form abc, of which text meets the second alone; the first would come too soon.
        [("b", "c"), ("a", "b"), ("ab", "c"), ("c", "d"), ("a", "bc"), ("abc", "d")],
    ],
)
def test_words_that_merges_do_not_form_are_looked_up_whole(merges):
    tokenizer = chain(merges, ignore_merges=True, more=("dcba",))
    encoder = DocumentEncoder(tokenizer)
    assert encoder.uses_tiktoken
    check_all_words(encoder, tokenizer)
    assert encoded(tokenizer, "dcba") == [tokenizer.tokenizer.token_to_id("dcba"), 0]


@pytest.mark.parametrize(
    "change",
    ["prefix space", "no split", "other split", "normalizer", "unknown bytes", "end of word"],
)
def test_settings_that_tiktoken_lacks_go_through_tokenizers(tokenizer, change):
    inner = Tokenizer.from_str(tokenizer.tokenizer.to_str())
    match change:
        case "prefix space":
            inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
        case "no split":
            inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        case "other split":
            inner.pre_tokenizer = pre_tokenizers.Sequence(
                [
                    pre_tokenizers.Split(Regex(r"[aeiou]|\s+$"), behavior="isolated"),
                    pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
                ]
            )
        case "normalizer":
            inner.normalizer = normalizers.Lowercase()
        case "unknown bytes":
            words = {"<|endoftext|>": 0, "a": 1, "e": 2, "t": 3}
            inner = Tokenizer(models.BPE(words, [], unk_token="a"))
            inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        case "end of word":
            inner.model.end_of_word_suffix = "t"
    other = TextTokenizer(inner, "<|endoftext|>")
    assert not DocumentEncoder(other).uses_tiktoken
    expected = [[*other.encode(text), 0] for text in CORPUS]
    assert [encoded(other, text) for text in CORPUS] == expected
    assert expected != [[*tokenizer.encode(text), 0] for text in CORPUS]


def test_added_tokens_are_found_in_text(tokenizer):
    inner = Tokenizer.from_str(tokenizer.tokenizer.to_str())
    inner.add_tokens([AddedToken("turn x", special=False, normalized=False)])
    other = TextTokenizer(inner, "<|endoftext|>")
    assert DocumentEncoder(other).uses_tiktoken
    assert [encoded(other, text) for text in CORPUS] == [
        [*other.encode(text), 0] for text in CORPUS
    ]
    assert other.tokenizer.token_to_id("turn x") in encoded(other, CORPUS[0])


@pytest.mark.parametrize("content", ["Ka b", "\u212aa b"])
def test_added_tokens_that_appear_by_normalization_are_found(tokenizer, content):
    inner = Tokenizer.from_str(tokenizer.tokenizer.to_str())
    inner.normalizer = normalizers.NFC()
    inner.add_tokens([AddedToken(content, special=False, normalized=True)])
    other = TextTokenizer(inner, "<|endoftext|>")
    assert DocumentEncoder(other).uses_tiktoken
    # NFC turns the Kelvin sign into a K.
    for text in ("x \u212aa b", "x Ka b"):
        found = encoded(other, text)
        assert found == [*other.encode(text), 0]
        assert other.tokenizer.token_to_id(content) in found


def test_training_does_not_depend_on_process_or_threads(tokenizer):
    code = (
        "import json, sys;"
        "from learnable_multipliers.pretrain.data.tokenizer import train_tokenizer;"
        "print(train_tokenizer(json.load(sys.stdin), 330).tokenizer.to_str())"
    )
    found = subprocess.run(
        [sys.executable, "-c", code],
        input=json.dumps(CORPUS),
        env=os.environ | {"TOKENIZERS_PARALLELISM": "false"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert json.loads(found.stdout) == json.loads(tokenizer.tokenizer.to_str())


def test_bytes_of_tokens_sum_to_bytes_of_text(tokenizer):
    counts = tokenizer.token_bytes()
    for text in [*CORPUS, "<|endoftext|>"]:
        found = counts[[*tokenizer.encode(text), tokenizer.eos_id]].sum()
        assert found == len(text.encode())


def test_smallest_vocabulary_is_a_byte_tokenizer():
    tokenizer = train_tokenizer(CORPUS, 257)
    assert tokenizer.vocab_size == 257
    for text in CORPUS:
        assert len(tokenizer.encode(text)) == len(text.encode())
        assert tokenizer.decode(tokenizer.encode(text)) == text
    with pytest.raises(ValueError, match="vocab_size is 256; 257"):
        train_tokenizer(CORPUS, 256)


def test_given_tokenizer_encodes_whole_documents_whatever_its_file_says(tmp_path, tokenizer):
    inner = Tokenizer.from_str(tokenizer.tokenizer.to_str())
    inner.enable_truncation(3)
    inner.enable_padding(length=5000)
    inner.model.dropout = 0.9
    inner.save(str(tmp_path / "t.json"))
    loaded = load_tokenizer(tmp_path / "t.json")
    expected = [[*tokenizer.encode(text), 0] for text in CORPUS]
    assert [[*loaded.encode(text), 0] for text in CORPUS] == expected
    assert [encoded(loaded, text) for text in CORPUS] == expected


@pytest.mark.parametrize("normalized", [False, True])
def test_text_never_encodes_to_the_end_of_a_document_that_is_no_special_token(
    tmp_path, tokenizer, normalized
):
    settings = json.loads(tokenizer.tokenizer.to_str())
    settings["added_tokens"][0] |= {"special": False, "normalized": normalized}
    (tmp_path / "t.json").write_text(json.dumps(settings))
    loaded = load_tokenizer(tmp_path / "t.json")
    for text in ("<|endoftext|>", "the<|endoftext|> end", *CORPUS):
        expected = tokenizer.encode(text)
        assert loaded.eos_id == 0
        assert 0 not in expected
        assert loaded.encode(text) == expected
        assert encoded(loaded, text) == [*expected, 0]
        assert loaded.decode(expected) == text
    assert loaded.vocab_size == tokenizer.vocab_size
    assert loaded.token_bytes().tolist() == tokenizer.token_bytes().tolist()


def words_tokenizer(path, names):
    inner = Tokenizer(models.WordLevel({"a": 0, "[UNK]": 1}, unk_token="[UNK]"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    inner.add_special_tokens(list(names))
    inner.save(str(path))
    return path


def test_end_of_document_token_is_found_by_its_usual_names_or_asked_for(tmp_path):
    path = tmp_path / "t.json"
    for name in ("</s>", "<|end_of_text|>", "<eos>"):
        found = load_tokenizer(words_tokenizer(path, ["<pad>", name]))
        assert (found.eos_token, found.eos_id, found.vocab_size) == (name, 3, 4)
    with pytest.raises(ValueError, match=r"t\.json: .* found none; name it with --eos-token"):
        load_tokenizer(words_tokenizer(path, ["<end>"]))
    assert load_tokenizer(path, "<end>").eos_id == 2
    added = load_tokenizer(path, add_eos=True)
    assert (added.eos_token, added.eos_id, added.vocab_size) == ("<|endoftext|>", 3, 4)
    assert load_tokenizer(words_tokenizer(path, ["</s>"]), add_eos=True).eos_token == "</s>"
    words_tokenizer(path, ["<end>"])
    with pytest.raises(ValueError, match="no token '<fin>'"):
        load_tokenizer(path, "<fin>")
    with pytest.raises(ValueError, match=r"found several \(</s>, <eos>\)"):
        load_tokenizer(words_tokenizer(path, ["</s>", "<eos>"]))
    assert load_tokenizer(path, "</s>").token_bytes() is None


def test_bad_tokenizer_files_are_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"no tokenizer at .*t\.json"):
        load_tokenizer(tmp_path / "t.json")
    (tmp_path / "t.json").write_text("{}")
    with pytest.raises(ValueError, match=r"t\.json is not a tokenizer\.json"):
        load_tokenizer(tmp_path / "t.json")


def test_ids_beyond_16_bits_get_32():
    assert token_dtype(65_536) == np.dtype("<u2")
    assert token_dtype(65_537) == np.dtype("<u4")
