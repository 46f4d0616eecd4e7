"""The error for a framework that is not installed."""


def missing_extra(extra: str) -> ImportError:
    """Return an ImportError that says which extra of this package to install."""
    return ImportError(
        f"{extra} is not installed: pip install 'learnable-multipliers[{extra}]'", name=extra
    )
