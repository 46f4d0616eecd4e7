"""Readers of one file: text, JSON Lines and parquet, plain or compressed, to documents.

Text is UTF-8 and nothing else; what cannot be read is an error that names the file and the place.
pyarrow and zstandard are imported only when a file needs them.
"""

from __future__ import annotations

import gzip
import importlib
import io
import json
import lzma
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any, BinaryIO, cast

COMPRESSED = (".gz", ".xz", ".zst")
JSON_LINES = frozenset({".jsonl", ".ndjson"})
# One document per file. Data files (.csv, .json) are not prose; a directory skips and counts them.
_PLAIN_TEXT = """
.txt .text .md .markdown .rst .tex .html .htm .xml .py .pyi .c .h .cc .cpp .cxx .hpp .cu .cuh .java
.js .jsx .ts .tsx .go .rs .rb .php .pl .lua .r .jl .hs .ml .scala .swift .kt .cs .sh .sql .css .toml
.yaml .yml .ini .cfg
"""
PLAIN_TEXT = frozenset(_PLAIN_TEXT.split())
_CHUNK = 1 << 20


class DocumentError(ValueError):
    """Text that cannot be used as it is: the message names the file and the place."""


def suffix_of(path: Path) -> str:
    """Return the suffix that tells the format, in lower case: ".jsonl" for "a.JSONL.gz"."""
    name = path.with_suffix("") if path.suffix.lower() in COMPRESSED else path
    return name.suffix.lower()


def read_documents(path: Path, text_field: str, separator: str | None) -> Iterator[str]:
    """Yield the documents of one file; a suffix that is not known is read as plain text."""
    suffix = suffix_of(path)
    with _errors_with_place(path):
        # A .json file named by the user is taken for JSON Lines, as the large corpora use it.
        if suffix in JSON_LINES or suffix == ".json":
            yield from _json_lines(path, text_field)
        elif suffix == ".parquet":
            yield from _parquet(path, text_field)
        else:
            with open_bytes(path) as file:
                text = _decode(file.read(), path, offset=0)
            yield from text.split(separator) if separator else (text,)


def open_bytes(path: Path) -> BinaryIO:
    """Open a file for reading, decompressed by its suffix."""
    match path.suffix.lower():
        case ".gz":
            return cast(BinaryIO, gzip.open(path, "rb"))
        case ".xz":
            return cast(BinaryIO, lzma.open(path, "rb"))
        case ".zst":
            return cast(BinaryIO, io.BufferedReader(_ZstdStream(path), _CHUNK))
        case _:
            return path.open("rb")


def _json_lines(path: Path, text_field: str) -> Iterator[str]:
    offset = 0
    with open_bytes(path) as file:
        for number, line in enumerate(file, start=1):
            text = _decode(line, path, offset)
            offset += len(line)
            if text.strip():
                yield _json_text(text, f"{path}, line {number}", text_field)


def _json_text(line: str, place: str, text_field: str) -> str:
    try:
        record = json.loads(line)
    except ValueError as error:
        raise DocumentError(
            f"{place}: not JSON ({error}); JSON Lines needs one object per line"
        ) from error
    if not isinstance(record, dict) or text_field not in record:
        found = sorted(record) if isinstance(record, dict) else type(record).__name__
        raise DocumentError(
            f"{place}: no field {text_field!r} (found {found}); name another one with --text-field"
        )
    return _checked_text(record[text_field], place, text_field)


def _parquet(path: Path, text_field: str) -> Iterator[str]:
    arrow: Any = optional_module("pyarrow", path)
    parquet: Any = optional_module("pyarrow.parquet", path)
    try:
        if path.suffix.lower() in COMPRESSED:
            with open_bytes(path) as stream:
                file = parquet.ParquetFile(arrow.BufferReader(stream.read()))
        else:
            file = parquet.ParquetFile(path)
        with file:
            if text_field not in file.schema_arrow.names:
                raise DocumentError(
                    f"{path}: no column {text_field!r} (found {file.schema_arrow.names}); "
                    "name another one with --text-field"
                )
            row = 0
            for batch in file.iter_batches(batch_size=1024, columns=[text_field]):
                for value in batch.column(0).to_pylist():
                    row += 1
                    yield _checked_text(value, f"{path}, row {row}", text_field)
    except arrow.ArrowException as error:
        raise DocumentError(f"{path}: not a readable parquet file ({error})") from error


def _checked_text(value: object, place: str, text_field: str) -> str:
    if not isinstance(value, str):
        raise DocumentError(
            f"{place}: {text_field!r} holds {type(value).__name__}, not text; "
            "remove the record or name another --text-field"
        )
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise DocumentError(
            f"{place}: half of a surrogate pair at character {error.start}, which UTF-8 cannot "
            "hold; repair or remove the record"
        ) from error
    return value


def _decode(data: bytes, path: Path, offset: int) -> str:
    try:
        text = data.decode("utf-8")
        # Some editors put a byte order mark at the start of a file; it is no text.
        return text if offset else text.removeprefix("\ufeff")
    except UnicodeDecodeError as error:
        unpacked = " of the decompressed text" if path.suffix.lower() in COMPRESSED else ""
        raise DocumentError(
            f"{path}: not UTF-8 at byte {offset + error.start}{unpacked} "
            f"(0x{data[error.start]:02x}, {error.reason}); convert the file or leave it out"
        ) from error


@contextmanager
def _errors_with_place(path: Path) -> Iterator[None]:
    try:
        yield
    except (EOFError, gzip.BadGzipFile, lzma.LZMAError, zlib.error) as error:
        raise DocumentError(
            f"{path}: damaged or cut short ({error}); fetch or compress it again"
        ) from error
    except OSError as error:
        reason = error.strerror or str(error)
        text = f"cannot read ({reason}); check that it exists and that you may read it"
        raise OSError(error.errno or 0, text, str(path)) from error


def optional_module(module: str, source: Path | str) -> ModuleType:
    """Import a package that only some sources need."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        package = module.partition(".")[0]
        raise ImportError(f"reading {source} needs {package}: pip install {package}") from error


class _ZstdStream(io.RawIOBase):
    """Decompresses frame after frame; unlike zstandard's own reader it notices a cut file."""

    def __init__(self, path: Path) -> None:
        self._zstandard: Any = optional_module("zstandard", path)
        self._file = path.open("rb")
        self._frame = self._new_frame()
        self._inside = False
        self._ready = memoryview(b"")

    def _new_frame(self) -> Any:
        # Files made with --long use windows beyond the library's own limit.
        return self._zstandard.ZstdDecompressor(max_window_size=1 << 31).decompressobj()

    def readable(self) -> bool:
        """Say that this is a stream to read from."""
        return True

    def readinto(self, buffer: Any, /) -> int:
        """Fill the buffer with decompressed bytes; 0 at the end."""
        while not self._ready:
            data = b""
            if self._frame.eof:
                data = self._frame.unused_data
                self._frame, self._inside = self._new_frame(), False
            data = data or self._file.read(_CHUNK)
            if not data:
                if self._inside:
                    raise EOFError("the last zstd frame has no end")
                return 0
            self._inside = True
            try:
                self._ready = memoryview(self._frame.decompress(data))
            except self._zstandard.ZstdError as error:
                raise EOFError(str(error)) from error
        count = min(len(buffer), len(self._ready))
        buffer[:count] = self._ready[:count]
        self._ready = self._ready[count:]
        return count

    def close(self) -> None:
        """Close the file underneath."""
        self._file.close()
        super().close()
