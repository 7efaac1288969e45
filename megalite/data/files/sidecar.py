"""`prefix.json` beside a token file says which tokenizer made it, so that data of another one is refused.

It is not a part of Megatron's format: of data without it only the ids are checked, batch by batch.
Keys: tokenizer (fingerprint, name, vocabulary size, end of document), documents, tokens, sources, version.
"""

import contextlib
import json
from pathlib import Path
from typing import Any

from megalite.config.text_file import read_small_bytes
from megalite.data.errors import DataError
from megalite.data.tokenizers.tokenizer import Tokenizer

MAX_BYTES = 16 << 20  # far above any list of sources


def read_sidecar(prefix: str | Path) -> dict[str, Any] | None:
    """The contents of prefix.json, None when it does not exist."""
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
    """Refuse data that another tokenizer made. NullTokenizer, which stands for any, must be large enough."""
    info = read_sidecar(prefix)
    if info is None:
        return
    made_by = info["tokenizer"]
    small = made_by["vocab_size"] > tokenizer.vocab_size
    if not small and (tokenizer.is_null or made_by["fingerprint"] == tokenizer.fingerprint):
        return
    trait, theirs, ours = "fingerprint", made_by["fingerprint"][:12], tokenizer.fingerprint[:12]
    if small:
        trait, theirs, ours = "vocabulary", made_by["vocab_size"], tokenizer.vocab_size
    raise DataError(
        f"{prefix}: made with {made_by.get('name')} ({trait} {theirs}), but this run has {tokenizer.name} ({ours}): "
        "give the tokenizer that made the data, or preprocess it again"
    )
