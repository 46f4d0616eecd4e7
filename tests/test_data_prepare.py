import errno
import gzip
import json
import lzma
import os
import random
import shutil
import threading
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import zstandard
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

from learnable_multipliers.pretrain.data import documents, readers
from learnable_multipliers.pretrain.data import threads as threads_module
from learnable_multipliers.pretrain.data.documents import Corpus
from learnable_multipliers.pretrain.data.prepare import PrepareConfig, prepare
from learnable_multipliers.pretrain.data.readers import DocumentError
from learnable_multipliers.pretrain.data.shards import Manifest, ShardWriter, TokenDataset
from learnable_multipliers.pretrain.data.tokenizer import load_tokenizer

KINDS = ["txt", "gz", "xz", "zst", "jsonl", "parquet", "directory"]
TEXTS = [
    f"Document {n}.\r\n\tna\u00efve \u4f60\u597d <|endoftext|> it's {'x' * n}\n" for n in range(40)
]


def json_lines(path, texts):
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), "utf-8")
    return str(path)


def tokenizer_of(folder):
    return load_tokenizer(folder / "tokenizer.json")


def read_back(folder, split):
    """Cut the tokens of a split at the end-of-document token and decode them."""
    dataset = TokenDataset(folder, split)
    tokens = dataset.tokens(0, len(dataset))
    ends = np.flatnonzero(tokens == dataset.manifest.eos_id)
    assert ends[-1] == len(tokens) - 1
    tokenizer = tokenizer_of(folder)
    return [tokenizer.decode(part) for part in np.split(tokens, ends + 1)[:-1]]


def files_of(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def write_sources(folder, kind, texts=TEXTS):
    joined = "".join(texts).encode()
    one = [joined.decode()]
    match kind:
        case "txt":
            (folder / "a.txt").write_bytes(joined)
        case "gz":
            (folder / "a.txt.gz").write_bytes(gzip.compress(joined))
        case "xz":
            (folder / "a.txt.xz").write_bytes(lzma.compress(joined))
        case "zst":
            (folder / "a.txt.zst").write_bytes(zstandard.compress(joined))
        case "jsonl":
            return json_lines(folder / "a.jsonl", texts), texts
        case "parquet":
            pyarrow.parquet.write_table(pyarrow.table({"text": texts}), folder / "a.parquet")
            return str(folder / "a.parquet"), texts
        case "directory":
            for number, text in enumerate(texts):
                (folder / f"{number:03d}.md").write_bytes(text.encode())
            return str(folder), texts
    return str(next(folder.iterdir())), one


@pytest.mark.parametrize("kind", KINDS)
def test_text_comes_back_from_the_shards_of_every_format(tmp_path, kind):
    (tmp_path / "in").mkdir()
    source, texts = write_sources(tmp_path / "in", kind)
    out = tmp_path / "out"
    manifest = prepare(
        PrepareConfig(sources=(source,), out=out, vocab_size=300, valid_fraction=0, shard_tokens=97)
    )
    assert read_back(out, "train") == texts
    assert manifest == Manifest.load(out)
    assert list(manifest.splits) == ["train"]
    assert manifest.num_documents("train") == len(texts)
    assert manifest.num_bytes("train") == sum(len(text.encode()) for text in texts)
    *full, last = manifest.splits["train"]
    assert {shard.tokens for shard in full} == {97}
    assert 0 < last.tokens <= 97
    dataset = TokenDataset(out, "train")
    dataset.verify()
    counts = tokenizer_of(out).token_bytes()
    assert counts[dataset.tokens(0, len(dataset))].sum() == dataset.manifest.num_bytes("train")


def test_tokens_across_shard_borders_equal_the_flat_sequence(tmp_path):
    source = json_lines(tmp_path / "a.jsonl", TEXTS)
    flat, cut = tmp_path / "flat", tmp_path / "cut"
    for out, size in ((flat, 10**9), (cut, 7)):
        prepare(PrepareConfig(sources=(source,), out=out, vocab_size=300, shard_tokens=size))
    whole = np.fromfile(flat / "train-00000.bin", "<u2")
    dataset = TokenDataset(cut, "train")
    assert len(dataset) == len(whole)
    for start, stop in [(0, len(whole)), (6, 8), (7, 14), (7, 7), (3, 40), (len(whole),) * 2]:
        assert dataset.tokens(start, stop).tolist() == whole[start:stop].tolist()
    for start, stop in [(-1, 3), (0, len(whole) + 1), (5, 4)]:
        with pytest.raises(IndexError, match="outside"):
            dataset.tokens(start, stop)


def test_split_is_by_document_and_copies_stay_on_one_side(tmp_path):
    texts = [f"text number {n}" for n in range(400)]
    source = json_lines(tmp_path / "a.jsonl", texts + texts[::-1])
    folders = {}
    for seed in (0, 1):
        folders[seed] = tmp_path / f"out{seed}"
        prepare(
            PrepareConfig(
                sources=(source,), out=folders[seed], vocab_size=300, valid_fraction=0.25, seed=seed
            )
        )
    train, valid = (read_back(folders[0], split) for split in ("train", "valid"))
    assert sorted(train + valid) == sorted(texts * 2)
    assert not set(train) & set(valid)
    # Binomial(400, 1/4): 100 +- 4 standard deviations.
    assert 65 < len(set(valid)) < 135
    assert train == [text for text in texts + texts[::-1] if text in set(train)]
    assert set(valid) != set(read_back(folders[1], "valid"))


def test_validation_sources_are_kept_out_of_training(tmp_path):
    source = json_lines(tmp_path / "a.jsonl", TEXTS)
    held_out = json_lines(tmp_path / "b.jsonl", [*TEXTS[5:8], "another"])
    out = tmp_path / "out"
    config = PrepareConfig(sources=(source,), out=out, valid_sources=(held_out,), vocab_size=300)
    manifest = prepare(config)
    assert read_back(out, "train") == TEXTS[:5] + TEXTS[8:]
    assert read_back(out, "valid") == [*TEXTS[5:8], "another"]
    assert manifest.source["dropped_because_in_validation"] == 3


def test_texts_to_test_on_are_splits_by_name_and_kept_out_of_training(tmp_path):
    source = json_lines(tmp_path / "a.jsonl", TEXTS)
    one = json_lines(tmp_path / "b.jsonl", [*TEXTS[5:7], "another"])
    two = json_lines(tmp_path / "c.jsonl", ["a third", "a third"])
    three = json_lines(tmp_path / "e.jsonl", [TEXTS[0], TEXTS[5], TEXTS[9]])
    held_out = json_lines(tmp_path / "d.jsonl", TEXTS[:1])
    out = tmp_path / "out"
    config = PrepareConfig(
        sources=(source,),
        out=out,
        valid_sources=(held_out,),
        test_sources=(f"wiki={one}", f"other={three}", f"wiki={two}"),
        vocab_size=300,
    )
    manifest = prepare(config)
    assert list(manifest.splits) == ["train", "valid", "wiki", "other"]
    assert read_back(out, "train") == TEXTS[1:5] + TEXTS[7:9] + TEXTS[10:]
    # A document in two of them belongs to the first.
    assert read_back(out, "valid") == TEXTS[:1]
    assert read_back(out, "wiki") == [*TEXTS[5:7], "another", "a third", "a third"]
    assert read_back(out, "other") == TEXTS[9:10]
    assert manifest.source["test_sources"] == {"wiki": [one, two], "other": [three]}
    assert manifest.source["dropped_because_in_validation"] == 4 + 2


@pytest.mark.parametrize("given", ["wiki", "=a.jsonl", "wiki=", "train=a", "valid=a", "../x=a"])
def test_texts_to_test_on_need_a_name_of_their_own(tmp_path, given):
    with pytest.raises(ValueError, match="give NAME=SOURCE"):
        PrepareConfig(out=tmp_path / "out", test_sources=(given,))


@pytest.mark.parametrize("texts", [[""], TEXTS[:2]], ids=["empty", "repeated"])
def test_a_text_to_test_on_without_text_of_its_own_is_rejected(tmp_path, texts):
    source = json_lines(tmp_path / "a.jsonl", TEXTS)
    valid = json_lines(tmp_path / "v.jsonl", TEXTS[:2])
    other = json_lines(tmp_path / "b.jsonl", texts)
    config = PrepareConfig(
        sources=(source,),
        valid_sources=(valid,),
        out=tmp_path / "out",
        test_sources=(f"wiki={other}",),
        vocab_size=300,
    )
    with pytest.raises(DocumentError, match="leaves nothing to hold out as wiki"):
        prepare(config)
    assert not (tmp_path / "out").exists()


def test_tokenizer_never_sees_validation_text(tmp_path):
    source = json_lines(tmp_path / "a.jsonl", ["abab " * 50])
    held_out = json_lines(tmp_path / "b.jsonl", ["xyxy " * 500])
    both = json_lines(tmp_path / "c.jsonl", ["abab " * 50, "xyxy " * 500])
    for name in (source, both):
        out = tmp_path / "out"
        config = PrepareConfig(
            sources=(name,), valid_sources=(held_out,), out=out, overwrite=True, vocab_size=300
        )
        prepare(config)
        vocabulary = tokenizer_of(out).tokenizer.get_vocab()
        assert "ab" in vocabulary
        assert "xy" not in vocabulary


@pytest.mark.parametrize("kind", ["jsonl", "jsonl.gz", "parquet", "folder"])
def test_tokenizer_does_not_depend_on_the_order_of_the_documents(tmp_path, kind):
    # Two languages one after the other, each several times the sample.
    generator = random.Random(0)
    alphabets = (
        "abcdefghijklm",
        "\u0430\u0431\u0432\u0433\u0434\u0435\u0436\u0437\u0438\u043a\u043b\u043c\u043d",
    )
    words = [["".join(generator.choices(one, k=6)) for _ in range(80)] for one in alphabets]
    texts = [" ".join(generator.choices(some, k=40)) for some in words for _ in range(200)]
    made = {}
    for name, order in (("sorted", texts), ("shuffled", generator.sample(texts, len(texts)))):
        source = written(tmp_path / name, kind, order)
        config = PrepareConfig(
            sources=(source,),
            out=tmp_path / name / "out",
            vocab_size=1300,
            tokenizer_sample=20_000,
            valid_fraction=0.1,
        )
        made[name] = prepare(config)
    assert made["sorted"].tokenizer_sha256 == made["shuffled"].tokenizer_sha256
    assert made["sorted"].num_tokens("train") == made["shuffled"].num_tokens("train")
    # The words of both languages are tokens, all but those that begin a text.
    assert made["sorted"].num_tokens("train") < 1.2 * 40 * made["sorted"].num_documents("train")


def written(folder, kind, texts):
    folder.mkdir()
    match kind:
        case "jsonl":
            return json_lines(folder / "a.jsonl", texts)
        case "jsonl.gz":
            plain = Path(json_lines(folder / "a.jsonl", texts))
            (folder / "a.jsonl.gz").write_bytes(gzip.compress(plain.read_bytes()))
            return str(folder / "a.jsonl.gz")
        case "parquet":
            pyarrow.parquet.write_table(pyarrow.table({"text": texts}), folder / "a.parquet")
            return str(folder / "a.parquet")
    (folder / "in").mkdir()
    for number, text in enumerate(texts):
        (folder / "in" / f"{number:03d}.txt").write_bytes(text.encode())
    return str(folder / "in")


def test_tokenizer_is_trained_on_no_more_than_is_encoded(tmp_path):
    source = json_lines(tmp_path / "a.jsonl", ["abab " * 50, "xyxy " * 50])
    with open(source, "a", encoding="utf-8") as file:
        file.write("never read\n")
    out = tmp_path / "out"
    prepare(
        PrepareConfig(sources=(source,), out=out, vocab_size=300, valid_fraction=0, max_bytes=250)
    )
    vocabulary = tokenizer_of(out).tokenizer.get_vocab()
    assert "ab" in vocabulary
    assert "xy" not in vocabulary


@pytest.fixture
def small_batches(monkeypatch):
    """Make many batches of small text, so that several threads finish out of order."""
    monkeypatch.setattr(readers, "_CHUNK", 2000)
    monkeypatch.setattr(documents, "_RUN_BYTES", 10_000)
    monkeypatch.setattr(threads_module, "_BATCH_BYTES", 5000)
    monkeypatch.setattr(threads_module, "_AHEAD_BYTES", 20_000)


@pytest.mark.parametrize("how", ["train", "tiktoken", "tokenizers", "held out", "max bytes"])
@pytest.mark.parametrize("kind", KINDS)
def test_datasets_do_not_depend_on_the_number_of_threads(tmp_path, small_batches, kind, how):
    # Of unequal work, with an empty one and copies.
    texts = [text * (37 * n % 50) for n, text in enumerate(TEXTS)] + TEXTS
    (tmp_path / "in").mkdir()
    source, _ = write_sources(tmp_path / "in", kind, texts)
    config = PrepareConfig(
        sources=(source,),
        out=tmp_path / "out",
        text_separator="Document",
        valid_fraction=0.2,
        shard_tokens=3000,
        overwrite=True,
        num_threads=1,
    )
    if how == "held out":
        held_out = json_lines(tmp_path / "b.jsonl", [*texts[5:8], "another"])
        test = json_lines(tmp_path / "c.jsonl", ["another", *texts[20:50], "a third"])
        config = replace(config, valid_sources=(held_out,), test_sources=(f"more={test}",))
    if how == "max bytes":
        config = replace(config, max_bytes=20_000)
    if how in ("tiktoken", "tokenizers"):
        inner = Tokenizer(models.BPE())
        inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=how == "tokenizers")
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        trainer = trainers.BpeTrainer(
            vocab_size=300, initial_alphabet=alphabet, show_progress=False
        )
        inner.train_from_iterator(texts, trainer)
        inner.save(str(tmp_path / "given.json"))
        config = replace(config, tokenizer=tmp_path / "given.json", add_eos=True)
    made, steps = [], []
    for count in (1, 2, 5):
        steps.append([])
        prepare(replace(config, num_threads=count), steps[-1].append)
        made.append(files_of(tmp_path / "out"))
    assert made == made[:1] * 3
    assert steps == steps[:1] * 3
    assert len(made[0]) > 3


@pytest.mark.parametrize("count", [1, 2, 5])
@pytest.mark.parametrize("held_out", [False, True])
@pytest.mark.parametrize(
    ("line", "message"),
    [
        (
            b'{"body": 1}',
            ", line 151: no field 'text' (found ['body']); name another one with --text-field",
        ),
        (
            b'{"text": "\xff',
            ": not UTF-8 at byte {} (0xff, invalid start byte); convert the file or leave it out",
        ),
    ],
)
def test_a_bad_line_is_named_whatever_the_number_of_threads(
    tmp_path, small_batches, count, held_out, line, message
):
    lines = [json.dumps({"text": text * 20}).encode() for text in TEXTS * 5]
    message = message.format(len(b"\n".join(lines[:150])) + 1 + line.find(b"\xff"))
    lines[150], lines[160] = line, b"no JSON"
    (tmp_path / "bad.jsonl").write_bytes(b"\n".join(lines))
    good = json_lines(tmp_path / "good.jsonl", TEXTS)
    bad = str(tmp_path / "bad.jsonl")
    config = PrepareConfig(
        sources=(good,) if held_out else (good, bad),
        valid_sources=(bad,) if held_out else (),
        out=tmp_path / "out",
        num_threads=count,
    )
    with pytest.raises(DocumentError) as caught:
        prepare(config)
    assert str(caught.value) == bad + message
    assert not (tmp_path / "out").exists()
    # Text behind the limit is read ahead, perhaps, but nobody is told about it.
    if not held_out:
        prepare(replace(config, max_bytes=20_000, vocab_size=300))


def test_max_bytes_ends_with_the_document_that_reaches_it(tmp_path):
    source = json_lines(tmp_path / "a.jsonl", ["0123456789", "", "abcde", "vwxyz", "end"])
    for limit, count in ((1, 1), (10, 1), (11, 2), (15, 2), (16, 3)):
        out = tmp_path / f"out{limit}"
        config = PrepareConfig(
            sources=(source,), out=out, vocab_size=257, valid_fraction=0, max_bytes=limit
        )
        prepare(config)
        assert read_back(out, "train") == ["0123456789", "abcde", "vwxyz"][:count]


def test_progress_counts_what_is_written(tmp_path):
    source = json_lines(tmp_path / "a.jsonl", TEXTS)
    steps = []
    config = PrepareConfig(sources=(source,), out=tmp_path / "out", vocab_size=300)
    manifest = prepare(config, steps.append)
    assert [step.stage for step in steps] == [
        *["tokenizer"] * len(TEXTS),
        *["encode"] * (1 + len(TEXTS)),
    ]
    for name, count in zip(
        ("documents", "bytes", "tokens"),
        (manifest.num_documents, manifest.num_bytes, manifest.num_tokens),
        strict=True,
    ):
        assert getattr(steps[-1], name) == count("train") + count("valid")


def test_progress_counts_what_is_read_for_the_tokenizer(tmp_path):
    steps = []
    texts = [f"{n:0100d}" for n in range(10)]
    source = json_lines(tmp_path / "a.jsonl", texts)
    prepare(PrepareConfig(sources=(source,), out=tmp_path / "out", valid_fraction=0), steps.append)
    read = [(step.documents, step.bytes) for step in steps if step.stage == "tokenizer"]
    assert read == [(n, 100 * n) for n in range(1, 11)]


def test_large_vocabulary_is_stored_in_32_bits(tmp_path):
    tokenizer = tmp_path / "words.json"
    words = {f"w{n}": n for n in range(65_540)} | {"</s>": 65_540}
    inner = Tokenizer(models.WordLevel(words, unk_token="w0"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    inner.save(str(tokenizer))
    source = json_lines(tmp_path / "a.jsonl", ["w1 w65539", "w65535 w65536"])
    out = tmp_path / "out"
    config = PrepareConfig(sources=(source,), out=out, tokenizer=tokenizer, valid_fraction=0)
    manifest = prepare(config)
    assert (manifest.dtype, manifest.vocab_size) == ("<u4", 65_541)
    assert (out / "tokenizer.json").read_bytes() == tokenizer.read_bytes()
    found = TokenDataset(out, "train").tokens(0, 6).tolist()
    assert found == [1, 65_539, 65_540, 65_535, 65_536, 65_540]


@pytest.mark.parametrize("threads", [1, 2])
def test_text_that_would_end_its_document_is_an_error_and_leaves_nothing(tmp_path, threads):
    # A model that has the end among its own words cannot take it for text.
    inner = Tokenizer(models.WordLevel({"a": 0, "b": 1, "</s>": 2}, unk_token="b"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    inner.add_special_tokens(["</s>"])
    inner.save(str(tmp_path / "words.json"))
    for name, texts in (("good", ["a </s>b a", "b"]), ("bad", ["a b", "a", "a </s> b"])):
        source = json_lines(tmp_path / f"{name}.jsonl", texts)
        config = PrepareConfig(
            sources=(source,),
            out=tmp_path / name,
            tokenizer=tmp_path / "words.json",
            valid_fraction=0,
            num_threads=threads,
        )
        if name == "good":
            prepare(config)
            found = TokenDataset(tmp_path / name, "train").tokens(0, 6).tolist()
            assert found == [0, 1, 0, 2, 1, 2]
        else:
            with pytest.raises(DocumentError, match=r"document 3 has .* token '</s>', so it would"):
                prepare(config)
            assert not (tmp_path / name).exists()


def test_documents_about_the_end_stay_whole_though_the_file_calls_it_no_special_token(tmp_path):
    source = json_lines(tmp_path / "a.jsonl", TEXTS)
    common = {"sources": (source,), "valid_fraction": 0}
    expected = prepare(PrepareConfig(**common, out=tmp_path / "trained", vocab_size=300))
    settings = json.loads((tmp_path / "trained" / "tokenizer.json").read_text())
    settings["added_tokens"][0]["special"] = False
    given = tmp_path / "given.json"
    given.write_text(json.dumps(settings))
    found = prepare(PrepareConfig(**common, out=tmp_path / "out", tokenizer=given))
    assert found.splits == expected.splits
    assert read_back(tmp_path / "out", "train") == TEXTS
    assert (tmp_path / "out" / "tokenizer.json").read_bytes() == given.read_bytes()


@pytest.fixture
def dataset_folder(tmp_path):
    source = json_lines(tmp_path / "a.jsonl", TEXTS)
    config = PrepareConfig(
        sources=(source,),
        out=tmp_path / "out",
        vocab_size=300,
        shard_tokens=100,
        valid_fraction=0.3,
    )
    prepare(config)
    return tmp_path / "out"


def test_fingerprint_is_of_what_training_depends_on(dataset_folder):
    manifest = Manifest.load(dataset_folder)
    train, valid = (manifest.splits[name] for name in ("train", "valid"))
    first, *rest = train
    same = [
        replace(manifest, source={"sources": ["elsewhere"]}),
        replace(manifest, splits={"valid": valid, "train": train}),
    ]
    assert {one.fingerprint() for one in same} == {manifest.fingerprint()}
    others = [
        *(
            replace(manifest, **change)
            for change in (
                {"dtype": "<u4"},
                {"vocab_size": 301},
                {"eos_id": 1},
                {"eos_token": "</s>"},
                {"tokenizer_sha256": "0" * 64},
                {"splits": {"train": train}},
                {"splits": {"train": valid, "valid": train}},
            )
        ),
        *(
            replace(manifest, splits={"train": shards, "valid": valid})
            for shards in (
                train[::-1],
                train[1:],
                (replace(first, sha256="0" * 64), *rest),
                (replace(first, tokens=99), *rest),
                (replace(first, documents=99), *rest),
                (replace(first, bytes=99), *rest),
            )
        ),
    ]
    assert len({one.fingerprint() for one in [manifest, *others]}) == 1 + len(others)


def test_changed_byte_is_found_by_verify_and_named(dataset_folder):
    path = dataset_folder / "train-00001.bin"
    good = path.read_bytes()
    path.write_bytes(good[:-1] + bytes([good[-1] ^ 1]))
    with pytest.raises(ValueError, match=r"train-00001\.bin is damaged"):
        TokenDataset(dataset_folder, "train").verify()
    path.write_bytes(good)
    TokenDataset(dataset_folder, "train").verify()


def test_wrong_size_is_found_on_opening_and_named(dataset_folder):
    path = dataset_folder / "train-00001.bin"
    path.write_bytes(path.read_bytes()[:-2])
    with pytest.raises(ValueError, match=r"train-00001\.bin has 198 bytes, the manifest says 200"):
        TokenDataset(dataset_folder, "train")
    path.unlink()
    with pytest.raises(ValueError, match=r"train-00001\.bin is missing"):
        TokenDataset(dataset_folder, "train")
    TokenDataset(dataset_folder, "valid")


def test_folder_that_is_no_dataset_is_an_error(dataset_folder, tmp_path):
    (tmp_path / "empty").mkdir()
    with pytest.raises(FileNotFoundError, match=r"manifest\.json is missing.*lrm data prepare"):
        TokenDataset(tmp_path / "empty", "train")
    with pytest.raises(ValueError, match="no split 'test', only train, valid"):
        TokenDataset(dataset_folder, "test")
    manifest = dataset_folder / "manifest.json"
    text = manifest.read_text()
    for bad, message in [
        ("{", "Expecting"),
        ("[]", "is not a JSON object"),
        (text.replace("lrm-tokens-2", "lrm-tokens-9"), "'lrm-tokens-9'"),
        (text.replace('"eos_id"', '"eos"'), "was changed after it was written"),
    ]:
        manifest.write_text(bad)
        with pytest.raises(ValueError, match=rf"manifest\.json cannot be used \(.*{message}"):
            TokenDataset(dataset_folder, "train")


def test_a_path_that_is_no_dataset_is_named_for_what_it_is(tmp_path):
    texts = tmp_path / "my texts"
    (texts / "deep").mkdir(parents=True)
    # Of a dataset, but without its manifest.
    (texts / "tokenizer.json").write_text("{}")
    (texts / ".hidden.txt").write_text("No source.")

    def refused(path):
        with pytest.raises(FileNotFoundError) as error:
            TokenDataset(path, "train")
        return str(error.value).removeprefix(f"no token dataset at {path}: ")

    missing = "there is no such folder; make one with `lrm data prepare`"
    assert refused(tmp_path / "nowhere") == missing
    assert refused(texts) == "manifest.json is missing; make one with `lrm data prepare`"
    for name in ("deep/a.jsonl.gz", "b.txt"):
        (texts / name).touch()
        assert refused(texts) == (
            f"it holds text ({name}), not tokens; make them with `lrm data prepare --sources "
            f"'{texts}' --out DATA`, and give DATA"
        )
        (texts / name).unlink()
    (texts / "b.txt").touch()
    wanted = "it is a file; give the folder that `lrm data prepare` wrote"
    assert refused(texts / "b.txt") == wanted


def test_existing_output_is_rejected_and_replaced_only_on_demand(dataset_folder, tmp_path):
    before = files_of(dataset_folder)
    source = json_lines(tmp_path / "b.jsonl", ["new text"])
    config = {"sources": (source,), "out": dataset_folder, "vocab_size": 257, "valid_fraction": 0}
    with pytest.raises(
        FileExistsError, match="out exists; choose another folder or give --overwrite"
    ):
        prepare(PrepareConfig(**config))
    assert files_of(dataset_folder) == before
    prepare(PrepareConfig(**config, overwrite=True))
    assert read_back(dataset_folder, "train") == ["new text"]
    assert set(files_of(dataset_folder)) == {"manifest.json", "tokenizer.json", "train-00000.bin"}
    assert {path.name for path in tmp_path.iterdir()} == {"a.jsonl", "b.jsonl", "out"}


def test_folder_of_something_else_is_never_overwritten(tmp_path):
    source = json_lines(tmp_path / "b.jsonl", ["new text"])
    precious = tmp_path / "precious"
    precious.mkdir()
    (precious / "thesis.tex").write_text("all of it")
    config = PrepareConfig(sources=(source,), out=precious, overwrite=True, valid_fraction=0)
    with pytest.raises(FileExistsError, match="precious is not a token dataset"):
        prepare(config)
    assert (precious / "thesis.tex").read_text() == "all of it"


@pytest.mark.parametrize(
    ("moment", "threads"),
    [("write", 1), ("write", 2), ("fsync", 1), ("tokenizer", 1), ("manifest", 1), ("rename", 1)],
)
def test_full_disk_leaves_nothing_and_keeps_the_old_dataset(
    dataset_folder, tmp_path, monkeypatch, moment, threads
):
    before = files_of(dataset_folder)
    calls = []

    def full(*arguments):
        calls.append(arguments)
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(threads_module, "_BATCH_BYTES", 500)
    given = tmp_path / "given.json"
    shutil.copyfile(dataset_folder / "tokenizer.json", given)
    match moment:
        case "write":
            add = ShardWriter.add
            monkeypatch.setattr(
                ShardWriter,
                "add",
                lambda *given: full() if len(given[0].shards) > 1 else add(*given),
            )
        case "fsync":
            monkeypatch.setattr(os, "fsync", full)
        case "tokenizer":
            monkeypatch.setattr(shutil, "copyfile", full)
        case "manifest":
            monkeypatch.setattr(Manifest, "save", full)
        case "rename":
            rename = Path.rename
            monkeypatch.setattr(
                Path, "rename", lambda a, b: full() if a.suffix == ".partial" else rename(a, b)
            )
    config = PrepareConfig(
        sources=(str(tmp_path / "a.jsonl"),),
        out=dataset_folder,
        overwrite=True,
        tokenizer=given,
        shard_tokens=100,
        num_threads=threads,
    )
    with pytest.raises(OSError, match=r"No space left .*; nothing was kept.*out") as caught:
        prepare(config)
    assert caught.value.errno == errno.ENOSPC
    assert calls
    assert {path.name for path in tmp_path.iterdir()} == {"a.jsonl", "given.json", "out"}
    assert files_of(dataset_folder) == before


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit])
@pytest.mark.parametrize("stage", ["tokenizer", "encode"])
def test_interrupt_leaves_nothing(tmp_path, small_batches, stage, error):
    source = json_lines(tmp_path / "a.jsonl", TEXTS * 50)
    running = []

    def ours():
        return [one.name for one in threading.enumerate() if one.name.startswith("lrm-")]

    def interrupt(progress):
        if progress.stage == stage and progress.documents == 70:
            running.extend(ours())
            raise error

    config = PrepareConfig(sources=(source,), out=tmp_path / "out", num_threads=3, vocab_size=300)
    with pytest.raises(error):
        prepare(config, interrupt)
    # How many depends on how busy they are; none is left.
    assert running
    assert not ours()
    assert {path.name for path in tmp_path.iterdir()} == {"a.jsonl"}


def test_bad_document_leaves_nothing_and_is_named(tmp_path):
    source = json_lines(tmp_path / "a.jsonl", TEXTS)
    with open(source, "a", encoding="utf-8") as file:
        file.write("{}\n")
    config = PrepareConfig(sources=(source,), out=tmp_path / "out", tokenizer_sample=100)
    with pytest.raises(DocumentError, match=r"a\.jsonl, line 41: no field 'text'"):
        prepare(config)
    assert {path.name for path in tmp_path.iterdir()} == {"a.jsonl"}


def test_empty_splits_are_errors_that_say_what_to_do(tmp_path):
    one = json_lines(tmp_path / "a.jsonl", ["only one"])
    empty = json_lines(tmp_path / "b.jsonl", ["", ""])
    out = tmp_path / "out"
    with pytest.raises(DocumentError, match=r"none of the 1 documents .* fell into validation"):
        prepare(PrepareConfig(sources=(one,), out=out, vocab_size=257, valid_fraction=1e-9))
    with pytest.raises(DocumentError, match=r"none of the 1 documents .* left to train on"):
        prepare(PrepareConfig(sources=(one,), out=out, vocab_size=257, valid_sources=(one,)))
    with pytest.raises(DocumentError, match="no document with any text in"):
        prepare(PrepareConfig(sources=(empty,), out=out, vocab_size=257))
    assert not out.exists()


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"valid_fraction": 1.0}, r"valid_fraction is 1\.0"),
        ({"valid_fraction": -0.1}, "valid_fraction is -0"),
        ({"shard_tokens": 0}, "shard_tokens is 0"),
        ({"num_threads": 0}, "num_threads is 0"),
        ({"max_bytes": 0}, "max_bytes is 0"),
        ({"eos_token": "</s>"}, "pass tokenizer as well"),
        ({"tokenizer": Path("t.json"), "vocab_size": 300}, "a given one brings its own"),
    ],
)
def test_impossible_settings_are_rejected_at_once(tmp_path, wrong, message):
    with pytest.raises(ValueError, match=message):
        PrepareConfig(out=tmp_path / "out", **wrong)


def test_default_corpus_prepares_with_default_settings(tmp_path):
    manifest = prepare(PrepareConfig(out=tmp_path / "out", vocab_size=300, max_bytes=500_000))
    texts = [text for text in Corpus() if text]
    assert read_back(tmp_path / "out", "train")[0] in texts
    assert 500_000 <= manifest.num_bytes("train") + manifest.num_bytes("valid") < 1_500_000
    assert str(tmp_path) not in (tmp_path / "out" / "manifest.json").read_text()
