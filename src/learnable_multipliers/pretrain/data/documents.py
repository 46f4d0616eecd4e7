"""Corpora: an ordered stream of documents from files, folders or Hugging Face datasets.

The order is fixed by the sources as given and by relative paths inside a folder, so that a corpus
reads the same on every machine. Nothing is shuffled here: the sample order does that.
"""

from __future__ import annotations

import os
import platform
import sysconfig
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple, TypeVar

from learnable_multipliers.pretrain.data.readers import (
    HUGGING_FACE,
    IN_FOLDERS,
    DocumentError,
    Part,
    check_regular,
    read_file,
    read_hugging_face,
    suffix_of,
)
from learnable_multipliers.pretrain.data.threads import Threads, batches_of

# Of the standard library: tests, other people's packages, build products, and the code pages,
# which are near-copies of each other and would stand on both sides of a split.
_NOT_LIBRARY = frozenset(
    {"site-packages", "dist-packages", "test", "tests", "idle_test", "encodings", "__pycache__"}
)
# Size on disk of the files of one reader.
_RUN_BYTES = 1 << 24


class Document(NamedTuple):
    """A text with its split and its size in bytes of UTF-8."""

    text: str
    split: str
    num_bytes: int


Result = TypeVar("Result")


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
        self._sources: list[Path | str]
        if sources:
            self.names = tuple(sources)
            self._sources = [entry for source in sources for entry in self._expand(source)]
        else:
            self.names = (f"Python {platform.python_version()} standard library",)
            self._sources = [*_standard_library()]
        if not self._sources:
            raise DocumentError(self._nothing("no file to read"))

    def __iter__(self) -> Iterator[str]:
        return self._some(text for part in self._parts(self._sources) for text in part.texts())

    def map(self, function: Callable[[str], Result], threads: Threads) -> Iterator[Result]:
        """Yield function(text) of the documents in order; threads read, parse and compute."""
        files = [source for source in self._sources if isinstance(source, Path)]
        if len(files) == len(self._sources):
            batches = threads.read(map(self._parts, _runs(files)))
        else:
            # Downloads are not prefetched, and one that hangs can be interrupted here.
            batches = batches_of(self._parts(self._sources))

        def parse(parts: list[Part]) -> Iterator[Result]:
            return (function(text) for part in parts for text in part.texts())

        return self._some(threads.map(parse, batches))

    def _some(self, results: Iterator[Result]) -> Iterator[Result]:
        empty = True
        for one in results:
            empty = False
            yield one
        if empty:
            raise DocumentError(self._nothing("no document"))

    def _expand(self, source: str) -> list[Path] | list[str]:
        if source.startswith(HUGGING_FACE):
            return [source]
        path = Path(source)
        if not path.exists():
            raise FileNotFoundError(
                f"no file or folder {source!r}; a Hugging Face dataset is written hf:NAME[:SPLIT]"
            )
        if not path.is_dir():
            check_regular(path)
            return [path]
        files = _files_below(path, leave_out=self._is_hidden)
        suffixes = [suffix_of(file) for file in files]
        self.skipped.update(
            suffix or "no suffix" for suffix in suffixes if suffix not in IN_FOLDERS
        )
        chosen = [file for file in files if suffix_of(file) in IN_FOLDERS]
        for file in chosen:
            check_regular(file)
        return chosen

    def _is_hidden(self, name: str) -> bool:
        hidden = name.startswith(".")
        self.skipped["hidden"] += hidden
        return hidden

    def _parts(self, sources: Iterable[Path | str]) -> Iterator[Part]:
        for source in sources:
            if isinstance(source, str):
                yield from read_hugging_face(source, self.text_field)
            else:
                yield from read_file(source, self.text_field, self.separator)

    def _nothing(self, what: str) -> str:
        text = f"{what} in {', '.join(self.names)}"
        if self.skipped:
            counts = ", ".join(f"{count} {name}" for name, count in self.skipped.most_common())
            text += f" (left out: {counts}; a file named itself is always read)"
        return f"{text}; give another source"


def first_text(folder: Path) -> Path | None:
    """Return the first file found in a folder that a corpus would read."""
    for path in folder.rglob("*"):
        hidden = any(name.startswith(".") for name in path.relative_to(folder).parts)
        if not hidden and suffix_of(path) in IN_FOLDERS and path.is_file():
            return path
    return None


def _files_below(folder: Path, leave_out: Callable[[str], bool]) -> list[Path]:
    """Return the files below a folder by relative path, without the names to leave out."""

    def fail(error: OSError) -> None:
        raise error

    files: list[Path] = []
    for root, folders, names in os.walk(folder, onerror=fail):
        folders[:] = [name for name in folders if not leave_out(name)]
        files += [Path(root, name) for name in names if not leave_out(name)]
    # By relative path, for the same order on every machine.
    return sorted(files, key=lambda path: path.relative_to(folder).as_posix())


def _standard_library() -> Iterator[Path]:
    folder = Path(sysconfig.get_paths()["stdlib"])
    for path in _files_below(folder, leave_out=_NOT_LIBRARY.__contains__):
        # The build of this interpreter wrote _sysconfigdata: it has the paths of that machine.
        if path.suffix == ".py" and not path.name.startswith("_sysconfigdata"):
            yield path


def _runs(files: Iterable[Path]) -> Iterator[list[Path]]:
    """Group files up to some size, so small ones share a reader."""
    run: list[Path] = []
    num_bytes = 0
    for file in files:
        run.append(file)
        # A missing file raises an error when it is opened.
        with suppress(OSError):
            num_bytes += file.stat().st_size
        if num_bytes >= _RUN_BYTES:
            yield run
            run, num_bytes = [], 0
    yield run
