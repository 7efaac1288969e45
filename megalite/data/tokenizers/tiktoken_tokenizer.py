"""Byte-pair ranks for the library tiktoken, with the split pattern and special tokens that such a file lacks.

    lines "base64 rank"    tiktoken's own format. Ids are the ranks. The file's name selects pattern and special tokens
                           of OpenAI's encodings (cl100k_base.tiktoken); any other file needs --tiktoken-pattern, and
                           <|endoftext|>, the eod, is the id after its largest rank
    JSON list of {"rank", "token_bytes"}    Megatron-LM's format, also the "vocab" of a Mistral tekken.json. Special
                           tokens are ids 0..999 (<unk> <s> </s> ... <SPECIAL_999>), ranks come after them, the list is
                           cut to --vocab-size (default 131072); eod is </s>. The pattern is v2 unless v1 is requested

Special tokens that are written out in a text become their ids, the same as in Megatron-LM.
"""

import base64
import binascii
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megalite.common.optional_packages import missing_package_message
from megalite.common.tables import load_table
from megalite.data.errors import DataError
from megalite.data.tokenizers.tokenizer import Tokenizer, count_ids, read_tokenizer_file

_TABLES = load_table(__file__, "tables")
PATTERNS: Mapping[str, str] = {name: "|".join(parts) for name, parts in _TABLES["patterns"].items()}
ENCODINGS: Mapping[str, tuple[str, Mapping[str, int]]] = _TABLES["encodings"]
_END = "<|endoftext|>"
SPECIAL = ("<unk>", "<s>", "</s>", "<mask>", "<pad>", "<cls>", "<sep>")
NUM_SPECIAL = 1000
DEFAULT_VOCAB = 1 << 17


class TikTokenizer(Tokenizer):
    """A tokenizer of the library tiktoken.

    Args:
        path: the file of ranks
        content: its bytes
        ranks: ids of byte strings
        special: ids of special tokens
        eod: the special token that ends a document
        pattern: a name in PATTERNS

    Raises:
        DataError: a byte has no rank, or two tokens have the same one
    """

    def __init__(
        self, path: Path, content: bytes, ranks: dict[bytes, int], special: dict[str, int], eod: str, pattern: str
    ):
        try:
            import tiktoken
        except ImportError as error:
            raise DataError(missing_package_message("tokenizer_type=TikTokenizer", "tiktoken")) from error
        missing = [byte for byte in range(256) if bytes([byte]) not in ranks]
        if missing:
            reason = f"byte {missing[0]:#04x} has no rank, so not every text can be encoded"
            raise DataError(f"{path}: {reason}; use another file")
        rank_ids = set(ranks.values())
        if len(rank_ids) != len(ranks) or rank_ids & set(special.values()):
            raise DataError(f"{path}: two tokens have the same rank; the file is damaged")
        pat_str = PATTERNS[pattern]
        self._model = tiktoken.Encoding(path.stem, pat_str=pat_str, mergeable_ranks=ranks, special_tokens=special)
        self._path, self._pattern, self._special = path, pattern, special
        self._is_lines = not content.lstrip().startswith((b"[", b"{"))
        self.eod, self.vocab_size = special[eod], max(*rank_ids, *special.values()) + 1
        self.set_identity(str(path), "tiktoken", content, pattern.encode(), str(self.vocab_size).encode())

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        return [self._model.encode(text, allowed_special="all") for text in texts]

    def encode_concatenated(self, texts: Sequence[str]) -> tuple[NDArray[Any], NDArray[np.int64]]:
        documents = [self._model.encode_to_numpy(text, allowed_special="all") for text in texts]
        return np.concatenate(documents) if documents else np.empty(0, np.uint32), count_ids(documents)

    def token_id(self, token: str) -> int | None:
        return self._special.get(token)

    def decode(self, ids: Sequence[int]) -> str:
        try:
            return self._model.decode([int(i) for i in ids])
        except KeyError as error:
            raise DataError(f"{self.name}: {error.args[0]}") from error

    def load_gigatoken(self) -> Any:
        import gigatoken

        # gigatoken supports neither these patterns nor shifted ranks
        if not self._is_lines or self._pattern in ("v1", "v2"):
            return None
        scheme = {"cl100k": "gpt4"}.get(self._pattern, self._pattern)
        return gigatoken.Tokenizer.from_tiktoken(self._path, scheme, self._special)


def open_tiktoken(path: Path, pattern: str | None = None, vocab_size: int | None = None) -> TikTokenizer:
    """Return the tokenizer in `path`, in either format.

    Args:
        pattern: a name in PATTERNS; None: the file's default
        vocab_size: number of ids to use of a JSON list; None: its length, at most DEFAULT_VOCAB

    Raises:
        DataError: the file is damaged, or pattern or vocabulary size do not fit it
    """
    if pattern is not None and pattern not in PATTERNS:
        raise DataError(f"tiktoken_pattern={pattern} is not one of {', '.join(PATTERNS)}")
    content = read_tokenizer_file(path)
    if content.lstrip().startswith((b"[", b"{")):
        ranks = _ranks_of_json(path, content)
        total = vocab_size or min(DEFAULT_VOCAB, len(ranks) + NUM_SPECIAL)
        if not NUM_SPECIAL + 256 <= total <= len(ranks) + NUM_SPECIAL:
            allowed = f"{NUM_SPECIAL + 256}..{len(ranks) + NUM_SPECIAL}, the sizes that {path} allows"
            contents = f"{len(ranks)} ranks and {NUM_SPECIAL} special tokens"
            raise DataError(f"vocab_size={total} is outside {allowed} with its {contents}")
        names = [*SPECIAL, *(f"<SPECIAL_{i}>" for i in range(len(SPECIAL), NUM_SPECIAL))]
        token_ids = {token: rank + NUM_SPECIAL for rank, token in enumerate(ranks[: total - NUM_SPECIAL])}
        if len(token_ids) != total - NUM_SPECIAL:
            raise DataError(f"{path}: two ranks have the same bytes; the file is damaged")
        return TikTokenizer(path, content, token_ids, {n: i for i, n in enumerate(names)}, "</s>", pattern or "v2")
    lines = _ranks_of_lines(path, content)
    encoding = ENCODINGS.get(path.stem)
    if encoding is None and pattern is None:
        problem = f"the file does not say how text is split, and it is not named for one of {', '.join(ENCODINGS)}"
        raise DataError(f"{path}: {problem}; give --tiktoken-pattern ({', '.join(PATTERNS)})")
    special = dict(encoding[1]) if encoding else {_END: max(lines.values()) + 1}
    return TikTokenizer(path, content, lines, special, _END, pattern or (encoding[0] if encoding else ""))


def _ranks_of_lines(path: Path, content: bytes) -> dict[bytes, int]:
    """Return the rank of each token of a file in tiktoken's format. Raises DataError."""
    ranks: dict[bytes, int] = {}
    for number, line in enumerate(content.splitlines(), 1):
        if not line.strip():
            continue
        try:
            token, rank = line.split()
            if not rank.isdigit() or int(rank) >= 1 << 31:
                raise ValueError
            raw = base64.b64decode(token, validate=True)
        except (ValueError, binascii.Error):
            # the line is not quoted, since this may be any file
            problem = "this line is not 'base64 rank', so this is not a tiktoken file"
            raise DataError(f"{path}:{number}: {problem}") from None
        if not raw or raw in ranks:
            raise DataError(f"{path}:{number}: the token {raw!r} is {'repeated' if raw else 'empty'}")
        ranks[raw] = int(rank)
    if not ranks:
        raise DataError(f"{path}: holds no ranks; this is not a tiktoken file")
    return ranks


def _ranks_of_json(path: Path, content: bytes) -> list[bytes]:
    """Return the token bytes by rank; ranks must be 0, 1, 2 ... in order. Raises DataError."""
    try:
        table = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path}: not JSON: {error}") from error
    if isinstance(table, dict):
        table = table.get("vocab")
    if not isinstance(table, list):
        raise DataError(f"{path}: holds no list of ranks, neither at the top level nor under the key vocab")
    ranks: list[bytes] = []
    for i, record in enumerate(table):
        try:
            if record["rank"] != i:
                raise ValueError
            ranks.append(base64.b64decode(record["token_bytes"], validate=True))
        except (KeyError, TypeError, ValueError):
            expected = f"{{'rank': {i}, 'token_bytes': base64}}"
            raise DataError(f"{path}: record {i} is not {expected}; this is not a table of ranks") from None
    return ranks
