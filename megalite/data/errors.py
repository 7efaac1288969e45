"""The error for unusable data, and the conversion of errors of tokenizer libraries."""

from collections.abc import Iterator
from contextlib import contextmanager


class DataError(ValueError):
    """Data cannot be used; the message names it and gives the reason."""


@contextmanager
def wrap_library_errors(refusal: str) -> Iterator[None]:
    """Turn any error of a tokenizer library into a DataError that starts with `refusal`.

    Libraries written in Rust raise bare Exceptions, and panic with their own BaseException on an unexpected file or
    text.
    """
    try:
        yield
    except (DataError, KeyboardInterrupt, MemoryError):
        raise
    except BaseException as error:
        raise DataError(f"{refusal}: {error}") from error
