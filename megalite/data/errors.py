"""What goes wrong with data."""

from collections.abc import Iterator
from contextlib import contextmanager


class DataError(ValueError):
    """Data that cannot be used, by name and reason."""


@contextmanager
def library(refusal: str) -> Iterator[None]:
    """Whatever a tokenizer's library raises, as a DataError that begins with `refusal`. Those written in Rust raise
    bare Exceptions, and panic with a BaseException of their own where a file or a text is not as they thought."""
    try:
        yield
    except (DataError, KeyboardInterrupt, SystemExit, MemoryError):
        raise
    except BaseException as error:
        raise DataError(f"{refusal}: {error}") from error
