"""Corpora: an ordered stream of documents from files, folders or Hugging Face datasets.

The order is fixed by the sources as given and by relative paths inside a folder, so that a corpus
reads the same on every machine. Nothing is shuffled here: the sample order does that.
"""

from __future__ import annotations

import os
import platform
import sysconfig
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from learnable_multipliers.pretrain.data.formats import (
    JSON_LINES,
    PLAIN_TEXT,
    DocumentError,
    optional_module,
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


# Reads the documents of one file or dataset.
_Reader = Callable[[], Iterator[str]]


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
            self._readers = [reader for source in sources for reader in self._expand(source)]
        else:
            self.names = (f"Python {platform.python_version()} standard library",)
            self._readers = [self._file_reader(path) for path in _standard_library()]
        if not self._readers:
            raise DocumentError(self._nothing("no file to read"))

    def __iter__(self) -> Iterator[str]:
        empty = True
        for read in self._readers:
            for text in read():
                empty = False
                yield text
        if empty:
            raise DocumentError(self._nothing("no document"))

    def _expand(self, source: str) -> list[_Reader]:
        if source.startswith(HUGGING_FACE):
            return [_hugging_face_reader(source, self.text_field)]
        path = Path(source)
        if path.is_dir():
            return [self._file_reader(file) for file in self._files_of(path)]
        if not path.exists():
            raise FileNotFoundError(
                f"no file or folder {source!r}; a Hugging Face dataset is written hf:NAME[:SPLIT]"
            )
        return [self._file_reader(path)]

    def _file_reader(self, path: Path) -> _Reader:
        return partial(read_documents, path, self.text_field, self.separator)

    def _files_of(self, folder: Path) -> Iterator[Path]:
        for path in _walk(folder, leave_out=self._is_hidden):
            suffix = suffix_of(path)
            if suffix in _IN_FOLDERS:
                yield path
            else:
                self.skipped[suffix or "no suffix"] += 1

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


def _walk(folder: Path, leave_out: Callable[[str], bool]) -> list[Path]:
    """Return the files below a folder by relative path, without the names to leave out."""

    def fail(error: OSError) -> None:
        raise OSError(error.errno or 0, "cannot list this folder", error.filename) from error

    found: list[Path] = []
    for root, folders, names in os.walk(folder, onerror=fail):
        folders[:] = [name for name in folders if not leave_out(name)]
        found += [Path(root, name) for name in names if not leave_out(name)]
    # Independent of where the folder lies, for an order that is the same on every machine.
    return sorted(found, key=lambda path: path.relative_to(folder).as_posix())


def _standard_library() -> list[Path]:
    folder = Path(sysconfig.get_paths()["stdlib"])
    return [
        path
        for path in _walk(folder, leave_out=_NOT_LIBRARY.__contains__)
        # Written by the build of this interpreter: it has the paths of that machine.
        if path.suffix == ".py" and not path.name.startswith("_sysconfigdata")
    ]


def _hugging_face_reader(source: str, text_field: str) -> _Reader:
    name, _, split = source.removeprefix(HUGGING_FACE).partition(":")
    name, _, config = name.partition("@")
    if not name:
        raise ValueError(f"{source!r} names no dataset; write hf:NAME[@CONFIG][:SPLIT]")
    return partial(_read_hugging_face, source, name, config or None, split or "train", text_field)


def _read_hugging_face(
    source: str, name: str, config: str | None, split: str, text_field: str
) -> Iterator[str]:
    datasets: Any = optional_module("datasets", source)
    try:
        # Streaming: nothing is stored, and a limit on the text ends the download too.
        rows = datasets.load_dataset(name, config, split=split, streaming=True)
        for number, row in enumerate(rows):
            if not isinstance(row.get(text_field), str):
                raise DocumentError(
                    f"{source}, row {number}: no text in column {text_field!r} "
                    f"(found {sorted(row)}); name another one as text_field"
                )
            yield row[text_field]
    except DocumentError:
        raise
    # Whatever the library and its transports raise: they share no base class.
    except Exception as error:
        raise OSError(
            f"cannot read {source} ({type(error).__name__}: {error}); check the name, the "
            "split and the network, or give files"
        ) from error
