import json
import os
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, pre_tokenizers, trainers

from learnable_multipliers.pretrain.data import TextTokenizer, load_tokenizer, train_tokenizer
from learnable_multipliers.pretrain.data import encoding as encoding_module
from learnable_multipliers.pretrain.data.encoding import DocumentEncoder
from learnable_multipliers.pretrain.data.manifest import token_dtype

CORPUS = [
    "def f(x):\n    return x + 1  # the sum\n" * 3,
    "It's the end, isn't it? We'll see what they've got.\n\n\tYes\r\n" * 3,
    "d\u00e9j\u00e0 vu \u4f60\u597d 123 4567\u00b2 \u00bd\n" * 3,
]
UINT16 = np.dtype("<u2")


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer(CORPUS, 330)


def encoder(tokenizer):
    return DocumentEncoder(tokenizer.tokenizer.to_str(), tokenizer.eos_id, UINT16.str)


def ids(encoded):
    return np.frombuffer(encoded, UINT16).tolist()


def test_tokenizer_gives_back_every_text(tokenizer):
    assert tokenizer.vocab_size == 330
    for text in [*CORPUS, "", "\x00\x1c\x85\u00a0", "<|endoftext|>", "\U0001f600\u0301"]:
        assert tokenizer.decode(tokenizer.encode(text)) == text


# Alphabets where the cut could differ: blanks of every kind, controls, digits that are no digits.
ALPHABET = (
    ["a", "Zb", "'s", "'ll", "'", "0", "19", " ", "  ", "\n", "\t", "\r\n", "\x0b", "\x0c", "\x1c"]
    + ["\x1f", "\x7f", "\x85", "\u00a0", "\u3000", "\u2028", "\u00e9", "\u00b2", "\u00bd", "\u0660"]
    + ["\u4f60", "\u0301", "\u200b", "_", "!", "--", "<|endoftext|>", "\U0001f600", "\u01c5"]
)
PARTS = st.sampled_from(ALPHABET)


@pytest.fixture(scope="module", params=["gpt2", "llama3", "qwen"])
def known(request, tokenizer):
    """Tokenizers with the cuts of the common families."""
    if request.param == "gpt2":
        return tokenizer
    inner = Tokenizer.from_str(tokenizer.tokenizer.to_str())
    pattern = (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
        r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    )
    if request.param == "qwen":
        pattern = pattern.replace("{1,3}", "")
        inner.normalizer = normalizers.NFC()
        inner.add_tokens([AddedToken("!Zb", special=False, normalized=False)])
    inner.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    # Trained with this cut, so that merges exist which another cut would break.
    trainer = trainers.BpeTrainer(
        vocab_size=500,
        special_tokens=["<|endoftext|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    texts = [first + second for first in ALPHABET for second in ALPHABET]
    inner.train_from_iterator(texts, trainer)
    return TextTokenizer(inner, "<|endoftext|>")


@settings(max_examples=300)
@given(parts=st.lists(PARTS, max_size=30), piece=st.sampled_from([1, 7, 1 << 18]))
def test_fast_path_equals_the_library_on_any_text(known, parts, piece):
    text = "".join(parts)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(encoding_module, "_PIECE", piece)
        encode = encoder(known)
        (encoded,) = encode([text])
    assert encode._words is not None
    assert ids(encoded) == [*known.encode(text), known.eos_id]


def test_fast_path_equals_the_library_when_the_word_table_overflows(tokenizer, monkeypatch):
    monkeypatch.setattr(encoding_module, "_TABLE_SIZE", 5)
    encode = encoder(tokenizer)
    for text in CORPUS * 2:
        assert ids(encode([text])[0]) == [*tokenizer.encode(text), tokenizer.eos_id]
    assert len(encode._words) <= 5


@pytest.mark.parametrize("change", ["added token", "prefix space", "no cut", "other cut"])
def test_tokenizers_that_cut_otherwise_give_their_own_tokens(tokenizer, change):
    inner = Tokenizer.from_str(tokenizer.tokenizer.to_str())
    if change == "added token":
        inner.add_tokens([AddedToken("turn x", special=False, normalized=False)])
    elif change == "prefix space":
        inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    elif change == "no cut":
        inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    else:
        inner.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(Regex(r"[aeiou]|\s+$"), behavior="isolated"),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )
    other = TextTokenizer(inner, "<|endoftext|>")
    expected = [[*other.encode(text), 0] for text in CORPUS]
    assert [ids(one) for one in encoder(other)(CORPUS)] == expected
    assert expected != [[*tokenizer.encode(text), 0] for text in CORPUS]


def test_added_token_that_appears_by_normalization_is_found_on_the_fast_path(tokenizer):
    inner = Tokenizer.from_str(tokenizer.tokenizer.to_str())
    inner.normalizer = normalizers.NFC()
    inner.add_tokens([AddedToken("Ka b", special=False, normalized=True)])
    other = TextTokenizer(inner, "<|endoftext|>")
    # NFC turns the Kelvin sign into a K.
    (encoded,) = encoder(other)(["x \u212aa b"])
    assert ids(encoded) == [*other.encode("x \u212aa b"), 0]
    assert other.tokenizer.token_to_id("Ka b") in ids(encoded)


def test_training_does_not_depend_on_process_or_threads(tokenizer):
    code = (
        "import json, sys; from learnable_multipliers.pretrain.data import train_tokenizer;"
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
    assert [ids(one) for one in encoder(loaded)(CORPUS)] == expected


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
        assert ids(encoder(loaded)([text])[0]) == [*expected, 0]
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
    with pytest.raises(ValueError, match="only a byte-level tokenizer"):
        load_tokenizer(path, "</s>").token_bytes()


def test_bad_tokenizer_files_are_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"no tokenizer at .*t\.json"):
        load_tokenizer(tmp_path / "t.json")
    (tmp_path / "t.json").write_text("{}")
    with pytest.raises(ValueError, match=r"t\.json is not a tokenizer\.json"):
        load_tokenizer(tmp_path / "t.json")


def test_ids_beyond_16_bits_get_32():
    assert token_dtype(65_536) == np.dtype("<u2")
    assert token_dtype(65_537) == np.dtype("<u4")
