"""Readers of one source: a file of text, JSON Lines or parquet, or a Hugging Face dataset.

Files may be compressed. Text is UTF-8 and nothing else; what cannot be read is an error that names
the file and the place.
"""

from __future__ import annotations

import gzip
import io
import json
import lzma
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from io import BufferedIOBase
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, cast

HUGGING_FACE = "hf:"
_COMPRESSED = (".gz", ".xz", ".zst")
_JSON_LINES = {".jsonl", ".ndjson"}
# One document per file. Data files (.csv, .json) are not prose; a directory skips and counts them.
_PLAIN_TEXT = """
.txt .text .md .markdown .rst .tex .html .htm .xml .py .pyi .c .h .cc .cpp .cxx .hpp .cu .cuh .java
.js .jsx .ts .tsx .go .rs .rb .php .pl .lua .r .jl .hs .ml .scala .swift .kt .cs .sh .sql .css .toml
.yaml .yml .ini .cfg
"""
IN_FOLDERS = {*_JSON_LINES, *_PLAIN_TEXT.split(), ".parquet"}
_CHUNK = 1 << 20
_LARGEST = 1 << 30
"""Bytes of the longest document, decompressed."""


class DocumentError(ValueError):
    """Text that cannot be used as it is: the message names the file and the place."""


class Part(NamedTuple):
    """Some bytes of a source, read but not parsed."""

    num_bytes: int
    texts: Callable[[], Iterator[str]]
    """Parses them."""


def suffix_of(path: Path) -> str:
    """Return the suffix that names the format, in lower case: ".jsonl" for "a.JSONL.gz"."""
    name = path.with_suffix("") if path.suffix.lower() in _COMPRESSED else path
    return name.suffix.lower()


def read_file(path: Path, text_field: str, separator: str | None) -> Iterator[Part]:
    """Yield the parts of one file; a suffix that is not known is read as plain text."""
    suffix = suffix_of(path)
    with _errors_with_place(path):
        # A .json file named by the user is taken for JSON Lines, as the large corpora use it.
        if suffix in _JSON_LINES or suffix == ".json":
            yield from _read_json_lines(path, text_field)
        elif suffix == ".parquet":
            yield from _read_parquet(path, text_field)
        else:
            with _open(path) as file:
                data = _bounded(file.read(_LARGEST + 1), str(path))
            yield Part(len(data), partial(_plain_texts, data, path, separator))


def _plain_texts(data: bytes, path: Path, separator: str | None) -> Iterator[str]:
    text = _decode(data, path, offset=0)
    yield from text.split(separator) if separator else (text,)


def _read_json_lines(path: Path, text_field: str) -> Iterator[Part]:
    first, offset = 1, 0
    with _open(path) as file:
        for data in _whole_lines(file):
            yield Part(len(data), partial(_json_texts, data, path, first, offset, text_field))
            first += data.count(b"\n")
            offset += len(data)


def _whole_lines(file: BinaryIO) -> Iterator[bytes]:
    """Yield the bytes of a file, split after lines; data before damage is yielded first."""
    begun: list[bytes] = []
    num_bytes = 0
    # More than the longest line is an error already.
    while num_bytes <= _LARGEST and (chunk := cast(BufferedIOBase, file).read1(_CHUNK)):
        stop = chunk.rfind(b"\n") + 1
        if stop:
            yield b"".join((*begun, chunk[:stop]))
            begun, num_bytes = [], 0
        begun.append(chunk[stop:])
        num_bytes += len(begun[-1])
    if num_bytes:
        yield b"".join(begun)


def _json_texts(data: bytes, path: Path, first: int, offset: int, text_field: str) -> Iterator[str]:
    """Yield the texts of some lines, which begin with line `first` at an offset in the file."""
    for number, line in enumerate(io.BytesIO(data), start=first):
        place = f"{path}, line {number}"
        text = _decode(_bounded(line, place), path, offset)
        offset += len(line)
        if not text.strip():
            continue
        try:
            record = json.loads(text)
        except RecursionError as error:
            raise DocumentError(f"{place}: nested too deeply; remove the record") from error
        except ValueError as error:
            raise DocumentError(
                f"{place}: not JSON ({error}); JSON Lines needs one object per line"
            ) from error
        yield _text_of(record, place, text_field)


def _read_parquet(path: Path, text_field: str) -> Iterator[Part]:
    # Slow to import, and few corpora need it.
    from pyarrow import parquet

    with _arrow_errors(path):
        if path.suffix.lower() in _COMPRESSED:
            with _open(path) as stream:
                source = io.BytesIO(_bounded(stream.read(_LARGEST + 1), str(path)))
        else:
            source = path
        with parquet.ParquetFile(source) as file:
            columns = file.schema_arrow.names
            # A missing column would be read as no column at all.
            chosen = [text_field] if text_field in columns else columns
            first = 1
            for rows in file.iter_batches(batch_size=1024, columns=chosen):
                yield Part(rows.nbytes, partial(_row_texts, rows, path, first, text_field))
                first += rows.num_rows


def _row_texts(rows: Any, path: Path, first: int, text_field: str) -> Iterator[str]:
    with _arrow_errors(path):
        for number, record in enumerate(rows.to_pylist(), start=first):
            yield _text_of(record, f"{path}, row {number}", text_field)


@contextmanager
def _arrow_errors(path: Path) -> Iterator[None]:
    import pyarrow as arrow

    try:
        yield
    except arrow.ArrowException as error:
        raise DocumentError(f"{path}: not a readable parquet file ({error})") from error


def read_hugging_face(source: str, text_field: str) -> Iterator[Part]:
    """Yield the rows of a dataset, as they are downloaded."""
    name, _, split = source.removeprefix(HUGGING_FACE).partition(":")
    name, _, config = name.partition("@")
    if not name:
        raise ValueError(f"{source!r} names no dataset; write hf:NAME[@CONFIG][:SPLIT]")
    try:
        import datasets  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise ImportError(f"reading {source} needs datasets: pip install datasets") from error
    try:
        # Streaming: nothing is stored, and a limit on the text ends the download too.
        rows = datasets.load_dataset(name, config or None, split=split or "train", streaming=True)
        for number, row in enumerate(rows):
            text = _text_of(row, f"{source}, row {number}", text_field)
            yield Part(len(text), partial(iter, (text,)))
    except DocumentError:
        raise
    # Whatever the library and its transports raise: they share no base class.
    except Exception as error:
        raise OSError(
            f"cannot read {source} ({type(error).__name__}: {error}); check the name, the "
            "split and the network, or give files"
        ) from error


def _text_of(record: Any, place: str, text_field: str) -> str:
    """Return the text in a record of JSON Lines or a row of a table."""
    if not isinstance(record, dict) or text_field not in record:
        fields = sorted(record) if isinstance(record, dict) else type(record).__name__
        raise DocumentError(
            f"{place}: no field {text_field!r} (found {fields}); name another one with --text-field"
        )
    text = record[text_field]
    if not isinstance(text, str):
        raise DocumentError(
            f"{place}: {text_field!r} holds {type(text).__name__}, not text; "
            "remove the record or name another --text-field"
        )
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise DocumentError(
            f"{place}: half of a surrogate pair at character {error.start}, which UTF-8 cannot "
            "hold; repair or remove the record"
        ) from error
    return text


# -- bytes -------------------------------------------------------------------------------------


def check_regular(path: Path) -> None:
    """Raise unless a path is a file: a device may have no end, and a pipe is read only once."""
    if not path.is_file():
        raise DocumentError(
            f"{path} is not a regular file, but a corpus is read twice: write the text to a file "
            "first"
        )


def _bounded(data: bytes, place: str) -> bytes:
    """Return the bytes of a document; raise if it is too long to be held in memory whole."""
    if len(data) > _LARGEST:
        raise DocumentError(
            f"{place}: longer than {_LARGEST:,} bytes of text, and a document is held in memory "
            "whole; cut it into several files, or into the lines of a JSON Lines file"
        )
    return data


def _open(path: Path) -> BinaryIO:
    """Open a file for reading, decompressed by its suffix."""
    # Compressed, even no text has some bytes; not all libraries notice.
    if path.suffix.lower() in _COMPRESSED and not path.stat().st_size:
        raise EOFError("the file is empty")
    match path.suffix.lower():
        case ".gz":
            return cast(BinaryIO, gzip.open(path, "rb"))
        case ".xz":
            return cast(BinaryIO, lzma.open(path, "rb"))
        case ".zst":
            return cast(BinaryIO, io.BufferedReader(_ChunkStream(_zstd_chunks(path)), _CHUNK))
        case _:
            return path.open("rb")


def _decode(data: bytes, path: Path, offset: int) -> str:
    try:
        text = data.decode("utf-8")
        # Some editors put a byte order mark at the start of a file; it is not text.
        return text if offset else text.removeprefix("\ufeff")
    except UnicodeDecodeError as error:
        unpacked = " of the decompressed text" if path.suffix.lower() in _COMPRESSED else ""
        raise DocumentError(
            f"{path}: not UTF-8 at byte {offset + error.start}{unpacked} "
            f"(0x{data[error.start]:02x}, {error.reason}); convert the file or leave it out"
        ) from error


@contextmanager
def _errors_with_place(path: Path) -> Iterator[None]:
    damage = (EOFError, gzip.BadGzipFile, lzma.LZMAError, zlib.error)
    try:
        yield
    except damage as error:
        raise DocumentError(
            f"{path}: damaged or cut short ({error}); fetch or compress it again"
        ) from error
    except OSError as error:
        reason = error.strerror or str(error)
        text = f"cannot read ({reason}); check that it exists and that you may read it"
        raise OSError(error.errno or 0, text, str(path)) from error


def _zstd_chunks(path: Path) -> Iterator[bytes]:
    """Decompress frame after frame; unlike zstandard's own reader this notices a cut file."""
    import zstandard

    # Files made with --long use windows beyond the library's own limit.
    decompressor = zstandard.ZstdDecompressor(max_window_size=1 << 31)
    with path.open("rb") as file:
        data = file.read(_CHUNK)
        while data:
            frame = decompressor.decompressobj()
            while not frame.eof:
                if not data:
                    raise EOFError("the last zstd frame has no end")
                try:
                    yield frame.decompress(data)
                except zstandard.ZstdError as error:
                    raise EOFError(str(error)) from error
                data = frame.unused_data or file.read(_CHUNK)


class _ChunkStream(io.RawIOBase):
    """Chunks of bytes as a stream to read from."""

    def __init__(self, chunks: Iterator[bytes]) -> None:
        self._chunks = filter(None, chunks)
        self._rest = memoryview(b"")

    def readable(self) -> bool:
        """Return True."""
        return True

    def readinto(self, buffer: Any, /) -> int:
        """Fill the buffer; return how many bytes it got, 0 at the end."""
        self._rest = self._rest or memoryview(next(self._chunks, b""))
        count = min(len(buffer), len(self._rest))
        buffer[:count] = self._rest[:count]
        self._rest = self._rest[count:]
        return count
