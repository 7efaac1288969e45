"""The file `prefix.json` next to a token file: it names the tokenizer that made the data, so that others are refused.

It is not part of Megatron's format. For data without it only the ids are checked, batch by batch.
Keys: tokenizer (fingerprint, name, vocabulary size, end of document), documents, tokens, sources, version.
"""

import contextlib
import json
from pathlib import Path
from typing import Any

from megalite.common.text_file import read_small_bytes
from megalite.data.errors import DataError
from megalite.data.tokenizers.tokenizer import Tokenizer

MAX_BYTES = 16 << 20  # far more than any list of sources needs


def read_sidecar(prefix: str | Path) -> dict[str, Any] | None:
    """Return the contents of prefix.json, or None if it does not exist. Raises DataError for a damaged file."""
    path = f"{prefix}.json"
    try:
        if "://" in path:
            from megalite.data.files.remote_files import UrlFile

            source = UrlFile(path)
            text = source.fetch(0, min(source.size, MAX_BYTES + 1)) if source.size else b""
        else:
            text = read_small_bytes(path, MAX_BYTES)
    except (FileNotFoundError, DataError) as error:
        if isinstance(error, FileNotFoundError) or isinstance(error.__cause__, FileNotFoundError):
            return None
        raise
    except OSError as error:
        raise DataError(f"{path}: {error.strerror}; write the data again, or remove this file") from error
    with contextlib.suppress(KeyError, TypeError, ValueError, RecursionError):
        info: Any = json.loads(text) if len(text) <= MAX_BYTES else None
        if type(info["tokenizer"]["fingerprint"]) is str and type(info["tokenizer"]["vocab_size"]) is int:
            return info
    raise DataError(f"{path}: damaged; write the data again with tools/preprocess_data.py, or remove this file")


def check_tokenizer(prefix: str | Path, tokenizer: Tokenizer) -> None:
    """Raise DataError if another tokenizer made the data.

    NullTokenizer, which stands for any tokenizer, must have a large enough vocabulary.
    """
    sidecar = read_sidecar(prefix)
    if sidecar is None:
        return
    made_by = sidecar["tokenizer"]
    is_too_small = made_by["vocab_size"] > tokenizer.vocab_size
    if not is_too_small and (tokenizer.is_null or made_by["fingerprint"] == tokenizer.fingerprint):
        return
    trait, data_value, run_value = "fingerprint", made_by["fingerprint"][:12], tokenizer.fingerprint[:12]
    if is_too_small:
        trait, data_value, run_value = "vocabulary", made_by["vocab_size"], tokenizer.vocab_size
    made_with = f"made with {made_by.get('name')} ({trait} {data_value})"
    raise DataError(
        f"{prefix}: {made_with}, but this run has {tokenizer.name} ({run_value}): "
        "give the tokenizer that made the data, or preprocess it again"
    )
