"""Corpora: an ordered stream of documents from files, folders or Hugging Face datasets.

The order is fixed by the sources as given and by relative paths inside a folder, so that a corpus
reads the same on every machine. Nothing is shuffled here: the sample order does that.
"""

from __future__ import annotations

import importlib
import os
import platform
import sysconfig
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from learnable_multipliers.pretrain.data.formats import (
    JSON_LINES,
    PLAIN_TEXT,
    DocumentError,
    read_documents,
    suffix_of,
)

HUGGING_FACE = "hf:"
_IN_FOLDERS = JSON_LINES | PLAIN_TEXT | {".parquet"}
# Of the standard library: tests, other people's packages, build products, and the code pages,
# which are near-copies of each other and would stand on both sides of a split.
_NOT_LIBRARY = frozenset(
    {"site-packages", "dist-packages", "test", "tests", "idle_test", "encodings", "__pycache__"}
)


@dataclass(frozen=True)
class _File:
    path: Path
    # Independent of where the folder lies, for an order that is the same on every machine.
    label: str


@dataclass(frozen=True)
class _HuggingFace:
    name: str
    config: str | None
    split: str
    label: str


class Corpus:
    """The documents of some sources; iterating twice gives the same documents twice.

    A source is a file, a folder or `hf:NAME[@CONFIG][:SPLIT]`; none at all means the sources of
    the running Python's standard library.
    """

    def __init__(
        self, sources: Sequence[str] = (), *, text_field: str = "text", separator: str | None = None
    ) -> None:
        self.text_field = text_field
        self.separator = separator
        self.skipped: Counter[str] = Counter()
        """Files of folders left out, by suffix; "hidden" counts names with a leading dot."""
        if sources:
            self.names = tuple(sources)
            self._parts = [part for source in sources for part in self._expand(source)]
        else:
            self.names = (f"Python {platform.python_version()} standard library",)
            self._parts = _standard_library()
        if not self._parts:
            raise DocumentError(self._nothing("no file to read"))

    def __iter__(self) -> Iterator[str]:
        empty = True
        for part in self._parts:
            for text in self._read(part):
                empty = False
                yield text
        if empty:
            raise DocumentError(self._nothing("no document"))

    def _read(self, part: _File | _HuggingFace) -> Iterator[str]:
        if isinstance(part, _HuggingFace):
            return _read_hugging_face(part, self.text_field)
        return read_documents(part.path, self.text_field, self.separator)

    def _expand(self, source: str) -> list[_File] | list[_HuggingFace]:
        if source.startswith(HUGGING_FACE):
            return [_parse_hugging_face(source)]
        path = Path(source)
        if path.is_dir():
            return self._files_of(path)
        if not path.exists():
            raise FileNotFoundError(
                f"no file or folder {source!r}; a Hugging Face dataset is written hf:NAME[:SPLIT]"
            )
        return [_File(path, path.name)]

    def _files_of(self, folder: Path) -> list[_File]:
        files = []
        for file in _walk(folder, leave_out=self._is_hidden):
            suffix = suffix_of(file.path)
            if suffix in _IN_FOLDERS:
                files.append(file)
            else:
                self.skipped[suffix or "no suffix"] += 1
        return files

    def _is_hidden(self, name: str) -> bool:
        hidden = name.startswith(".")
        self.skipped["hidden"] += hidden
        return hidden

    def _nothing(self, what: str) -> str:
        text = f"{what} in {', '.join(self.names)}"
        if self.skipped:
            counts = ", ".join(f"{count} {name}" for name, count in self.skipped.most_common())
            text += f" (left out: {counts}; a file named itself is always read)"
        return f"{text}; give another source"


def _walk(folder: Path, leave_out: Callable[[str], bool]) -> list[_File]:
    """Return the files below a folder by relative path, without the names to leave out."""

    def fail(error: OSError) -> None:
        raise OSError(error.errno or 0, "cannot list this folder", error.filename) from error

    found = []
    for root, folders, names in os.walk(folder, onerror=fail):
        folders[:] = [name for name in folders if not leave_out(name)]
        relative = os.path.relpath(root, folder).replace(os.sep, "/") + "/"
        found += [
            _File(Path(root, name), (relative + name).removeprefix("./"))
            for name in names
            if not leave_out(name)
        ]
    return sorted(found, key=lambda file: file.label)


def _standard_library() -> list[_File]:
    folder = Path(sysconfig.get_paths()["stdlib"])
    files = _walk(folder, leave_out=_NOT_LIBRARY.__contains__)
    return [
        file
        for file in files
        # Written by the build of this interpreter: it holds the paths of that machine.
        if file.path.suffix == ".py" and not file.path.name.startswith("_sysconfigdata")
    ]


def _parse_hugging_face(source: str) -> _HuggingFace:
    name, _, split = source.removeprefix(HUGGING_FACE).partition(":")
    name, _, config = name.partition("@")
    if not name:
        raise ValueError(f"{source!r} names no dataset; write hf:NAME[@CONFIG][:SPLIT]")
    return _HuggingFace(name, config or None, split or "train", source)


def _read_hugging_face(part: _HuggingFace, text_field: str) -> Iterator[str]:
    try:
        datasets: Any = importlib.import_module("datasets")
    except ImportError as error:
        raise ImportError(f"{part.label} needs datasets: pip install datasets") from error
    try:
        # Streaming: nothing is stored, and a limit on the text ends the download too.
        rows = datasets.load_dataset(part.name, part.config, split=part.split, streaming=True)
        for number, row in enumerate(rows):
            if not isinstance(row.get(text_field), str):
                raise DocumentError(
                    f"{part.label}, row {number}: no text in column {text_field!r} "
                    f"(found {sorted(row)}); name another one as text_field"
                )
            yield row[text_field]
    except DocumentError:
        raise
    # Whatever the library and its transports raise: they share no base class.
    except Exception as error:
        raise OSError(
            f"cannot read {part.label} ({type(error).__name__}: {error}); check the name, the "
            "split and the network, or give files"
        ) from error
