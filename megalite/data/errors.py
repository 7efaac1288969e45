"""Errors in data, and those of the libraries that read it."""

from collections.abc import Iterator
from contextlib import contextmanager


class DataError(ValueError):
    """Data that cannot be used, by name and reason."""


@contextmanager
def wrap_library_errors(refusal: str) -> Iterator[None]:
    """Turn whatever a tokenizer's library raises into a DataError that begins with `refusal`. Libraries written in Rust
    raise bare Exceptions, and panic with a BaseException of their own on an unexpected file or text."""
    try:
        yield
    except (DataError, KeyboardInterrupt, MemoryError):
        raise
    except BaseException as error:
        raise DataError(f"{refusal}: {error}") from error
