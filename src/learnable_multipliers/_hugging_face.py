"""Errors of transformers, in one line."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from learnable_multipliers._formats import one_line


@contextmanager
def hugging_face_errors(path: Path, function: str) -> Iterator[None]:
    """Turn any error of transformers about a file or folder into one line.

    Args:
        function: Takes a model made in Python: code that comes with a model is never run here.
    """
    try:
        import transformers  # noqa: F401
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "reading a Hugging Face folder needs transformers: "
            "pip install 'learnable-multipliers[transformers]'"
        ) from error
    try:
        yield
    except (MemoryError, RecursionError):
        raise
    # Which errors are raised depends on the files and the kind of model.
    except Exception as error:
        if "trust_remote_code" in str(error):
            raise ValueError(
                f"{path.parent if path.is_file() else path} contains code, which lrm does not run: "
                f"load it in Python and give it to {function}"
            ) from error
        raise ValueError(f"{path} cannot be loaded: {one_line(error)}") from error
