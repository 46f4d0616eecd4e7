"""Thin adapters for training frameworks, one module each."""


def missing(extra: str) -> ImportError:
    """Return the error for a framework that is not installed."""
    return ImportError(
        f"{extra} is not installed: pip install 'learnable-multipliers[{extra}]'", name=extra
    )
