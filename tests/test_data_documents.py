import builtins
import gzip
import json
import lzma
import random
import sys
import sysconfig
from pathlib import Path
from types import SimpleNamespace

import pyarrow
import pyarrow.parquet
import pytest
import zstandard

from learnable_multipliers.pretrain.data import documents, readers, threads
from learnable_multipliers.pretrain.data.documents import Corpus
from learnable_multipliers.pretrain.data.readers import DocumentError
from learnable_multipliers.pretrain.data.threads import Threads

TEXTS = ["first\r\nline\n", "na\u00efve \u4f60\u597d \U0001f600\n", "  tabs\t and \x00 nul", "last"]
PACK = {
    "": lambda data: data,
    ".gz": gzip.compress,
    ".xz": lzma.compress,
    ".zst": zstandard.compress,
}


def json_lines(texts, field="text"):
    return b"".join(json.dumps({field: text, "n": 1}).encode() + b"\n" for text in texts)


def parquet(texts, field="text"):
    sink = pyarrow.BufferOutputStream()
    pyarrow.parquet.write_table(pyarrow.table({"n": range(len(texts)), field: texts}), sink)
    return sink.getvalue().to_pybytes()


def write(path, data):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    return str(path)


def read(corpus, count, into):
    """Extend a list by the documents, as one thread or several read them."""
    if count is None:
        into.extend(corpus)
        return
    with Threads(count) as some:
        for text in corpus.map(str, some):
            into.append(text)


@pytest.fixture
def small_parts(monkeypatch):
    monkeypatch.setattr(readers, "_CHUNK", 50)
    monkeypatch.setattr(documents, "_RUN_BYTES", 300)
    monkeypatch.setattr(threads, "_BATCH_BYTES", 100)
    monkeypatch.setattr(threads, "_AHEAD_BYTES", 200)


@pytest.mark.parametrize("count", [None, 1, 2, 5])
@pytest.mark.parametrize("packed", PACK)
def test_threads_read_what_was_written(tmp_path, small_parts, packed, count):
    texts = [text * (n % 30) for n in range(50) for text in TEXTS]
    data = {
        "a.jsonl": json_lines(texts).replace(b"}\n", b"}\r\n\n")[:-3],
        "b.parquet": parquet(texts),
        "c.txt": "<|>".join(texts).encode(),
        "d.json": json_lines(texts[::-1]),
    }
    sources = [write(tmp_path / (n + packed), PACK[packed](data[n])) for n in data]
    folder = tmp_path / "folder"
    for number, text in enumerate(texts):
        write(folder / f"{number:03d}.txt{packed}", PACK[packed](text.encode()))
    found = []
    read(Corpus([*sources, str(folder)], separator="<|>"), count, found)
    assert found == texts + texts + texts + texts[::-1] + texts


@pytest.mark.parametrize("packed", PACK)
def test_documents_of_every_format_and_compression_are_the_texts_written(tmp_path, packed):
    pack = PACK[packed]
    for name, make in (("a.jsonl", json_lines), ("a.parquet", parquet), ("c4.json", json_lines)):
        assert list(Corpus([write(tmp_path / (name + packed), pack(make(TEXTS)))])) == TEXTS
        source = write(tmp_path / ("b" + name + packed), pack(make(TEXTS, "content")))
        assert list(Corpus([source], text_field="content")) == TEXTS
    plain = write(tmp_path / ("a.txt" + packed), pack("".join(TEXTS).encode()))
    assert list(Corpus([plain])) == ["".join(TEXTS)]


def test_a_byte_order_mark_is_no_text(tmp_path):
    lines = tmp_path / "a.jsonl"
    lines.write_text('{"text": "one"}\n{"text": "\ufefftwo"}\n', "utf-8-sig")
    plain = tmp_path / "b.txt"
    plain.write_text("three", "utf-8-sig")
    assert list(Corpus([str(lines), str(plain)])) == ["one", "\ufefftwo", "three"]


def test_several_zstd_frames_are_read_to_the_end(tmp_path):
    data = zstandard.compress(b"one ") + zstandard.compress(b"two" * 500_000)
    assert list(Corpus([write(tmp_path / "a.txt.zst", data)])) == ["one " + "two" * 500_000]


def test_folder_is_read_by_relative_path_and_counts_what_it_skips(tmp_path):
    for name in ("b.txt", "a/z.md", "a.py", "a/b/c.rst.gz", "data.csv", "x.json", "README"):
        data = name.encode()
        write(tmp_path / name, gzip.compress(data) if name.endswith("gz") else data)
    write(tmp_path / "c.jsonl", json_lines(["one", "two"]))
    write(tmp_path / ".git/config.txt", b"secret")
    write(tmp_path / ".hidden.txt", b"secret")
    corpus = Corpus([str(tmp_path)])
    assert list(corpus) == ["a.py", "a/b/c.rst.gz", "a/z.md", "b.txt", "one", "two"]
    assert corpus.skipped == {".csv": 1, ".json": 1, "no suffix": 1, "hidden": 2}


def test_sources_keep_their_order_and_unknown_suffixes_are_text_when_named(tmp_path):
    second, first = write(tmp_path / "a.bin", b"A"), write(tmp_path / "b", b"B")
    assert list(Corpus([first, second])) == ["B", "A"]


def test_separator_cuts_text_files_alone(tmp_path):
    sources = [write(tmp_path / "a.txt", b"one<|>two<|>"), write(tmp_path / "b.jsonl", b"")]
    write(tmp_path / "b.jsonl", json_lines(["x<|>y"]))
    assert list(Corpus(sources, separator="<|>")) == ["one", "two", "", "x<|>y"]


def test_default_corpus_is_the_standard_library_without_tests():
    corpus = Corpus()
    texts = list(corpus)
    folder = Path(sysconfig.get_paths()["stdlib"])
    assert (folder / "ast.py").read_bytes().decode() in texts
    assert (folder / "json/decoder.py").read_bytes().decode() in texts
    assert (folder / "encodings/cp1252.py").read_bytes().decode() not in texts
    assert 3e6 < sum(map(len, texts)) < 3e7
    assert texts == list(Corpus())


@pytest.mark.parametrize(
    ("name", "data", "message"),
    [
        ("a.txt", b"good\xffbad", r"a\.txt: not UTF-8 at byte 4 \(0xff"),
        ("a.txt.gz", gzip.compress(b"ab\xe4", mtime=0), "at byte 2 of the decompressed text"),
        ("a.jsonl", b'{"text": "\xc3\xa9"}\n\n{"text": "\xff"}\n', r"jsonl: not UTF-8 at byte 26 "),
        ("a.jsonl", b'{"text": "ok"}\n{"text": \n', r"a\.jsonl, line 2: not JSON"),
        ("a.jsonl", b'{"text": "ok"}\n\n{"body": 1}\n', r"line 3: no field 'text' .*'body'"),
        ("a.jsonl", b'["text"]\n', r"line 1: no field 'text' \(found list"),
        ("a.jsonl", b'{"text": 3}\n', "line 1: 'text' holds int"),
        ("a.jsonl", b'{"text": "\\ud800"}\n', "line 1: half of a surrogate pair at character 0"),
        ("a.jsonl", b"", r"no document in .*a\.jsonl"),
        ("a.parquet", parquet(["x"], "body"), r"row 1: no field 'text' \(found \['body', 'n'\]\)"),
        ("a.parquet", parquet(["x", None]), "row 2: 'text' holds NoneType"),
        ("a.parquet", b"PAR1 and no more", r"a\.parquet: not a readable parquet"),
        ("a.txt.gz", b"not gzip", r"a\.txt\.gz: damaged"),
        ("a.txt.gz", gzip.compress(b"x" * 99, mtime=0)[:-9], r"a\.txt\.gz: damaged"),
        ("a.txt.xz", lzma.compress(b"x" * 99)[:-9], r"a\.txt\.xz: damaged"),
        ("a.txt.xz", b"not xz", r"a\.txt\.xz: damaged"),
        ("a.txt.zst", zstandard.compress(b"x" * 9999)[:-3], r"a\.txt\.zst: damaged"),
        ("a.txt.zst", b"not zstd", r"a\.txt\.zst: damaged"),
        ("a.txt.gz", b"", r"a\.txt\.gz: damaged or cut short \(the file is empty"),
        ("a.txt.xz", b"", r"a\.txt\.xz: damaged"),
        ("a.jsonl.zst", b"", r"a\.jsonl\.zst: damaged"),
    ],
)
def test_unusable_text_is_an_error_that_names_file_and_place(
    tmp_path, small_parts, name, data, message
):
    source = write(tmp_path / name, data)
    good = write(tmp_path / "good.jsonl", json_lines(TEXTS * 9))
    with pytest.raises(DocumentError, match=message) as caught:
        list(Corpus([source]))
    if not data and name == "a.jsonl":
        return
    before = []
    for count in (None, 1, 2, 5):
        found = []
        with pytest.raises(DocumentError) as again:
            read(Corpus([good, source, str(tmp_path / "good.jsonl")]), count, found)
        assert str(again.value) == str(caught.value)
        # What comes before the error is read first, be it in the same file.
        before.append(found)
    assert before[0][: len(TEXTS) * 9] == TEXTS * 9
    assert before == before[:1] * 4


@pytest.mark.parametrize("packed", [".gz", ".xz", ".zst"])
def test_what_lies_before_the_damage_is_read(tmp_path, packed):
    generator = random.Random(0)
    texts = [generator.randbytes(500).hex() for _ in range(2000)]
    data = PACK[packed](json_lines(texts))
    source = write(tmp_path / f"a.jsonl{packed}", data[: len(data) * 3 // 4])
    before = []
    for count in (None, 1, 2, 5):
        found = []
        with pytest.raises(DocumentError, match="damaged or cut short"):
            read(Corpus([source]), count, found)
        before.append(found)
    assert 1000 < len(before[0]) < 2000
    assert before == [texts[: len(before[0])]] * 4


def test_missing_and_empty_sources_are_errors(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"no\.txt'; a Hugging Face dataset is written hf:"):
        Corpus([str(tmp_path / "no.txt")])
    write(tmp_path / "folder/a.csv", b"1")
    with pytest.raises(DocumentError, match=r"no file to read in .*folder \(left out: 1 \.csv"):
        Corpus([str(tmp_path / "folder")])


def test_unreadable_file_is_an_error_that_names_it(tmp_path, monkeypatch):
    source = write(tmp_path / "a.txt", b"x")

    def refuse(path, *_):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(PermissionError, match=r"cannot read \(Permission denied\).*a\.txt"):
        list(Corpus([source]))


def test_missing_package_is_named_with_the_command_that_installs_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ImportError, match="hf:some/name needs datasets: pip install datasets"):
        list(Corpus(["hf:some/name"]))


def test_hugging_face_datasets_are_streamed_by_name_config_and_split(monkeypatch):
    calls = []

    def load_dataset(name, config, *, split, streaming):
        calls.append((name, config, split, streaming))
        if name == "away":
            raise builtins.ConnectionError("no route")
        return [{"text": "one"}, {"text": "two"} if name == "good" else {"body": ""}]

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load_dataset))
    assert list(Corpus(["hf:good"])) == ["one", "two"]
    assert list(Corpus(["hf:good@sample:test"])) == ["one", "two"]
    assert calls == [("good", None, "train", True), ("good", "sample", "test", True)]
    with pytest.raises(DocumentError, match=r"hf:other, row 1: no field 'text'"):
        list(Corpus(["hf:other"]))
    with pytest.raises(OSError, match=r"cannot read hf:away \(ConnectionError: no route\)"):
        list(Corpus(["hf:away"]))
    with pytest.raises(ValueError, match="names no dataset"):
        list(Corpus(["hf::train"]))
