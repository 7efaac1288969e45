"""Files of the options that do not exist, and those that may have been meant."""

import difflib
import errno
import os
from dataclasses import replace
from pathlib import Path

from megalite.config.options import DataConfig

MAX_NAMED = 5  # files that a message names
DATA_PATH_OPTIONS = ("data_path", "train_data_path", "valid_data_path", "test_data_path")
TOKENIZER_PATH_OPTIONS = ("tokenizer_model", "vocab_file", "merge_file")
# the files that a built-in tokenizer reads, if not all three; others have no effect (config/validation/effects.py)
READ_BY = {
    "GPT2BPETokenizer": ("vocab_file", "merge_file"),
    "ByteTokenizer": (),
    "NullTokenizer": (),
    **dict.fromkeys(("SentencePieceTokenizer", "GPTSentencePieceTokenizer", "Llama2Tokenizer"), ("tokenizer_model",)),
    **dict.fromkeys(("HuggingFaceTokenizer", "TikTokenizer"), ("tokenizer_model",)),
}


def without_data_files(data: DataConfig) -> DataConfig:
    """Options that stand for the data of another machine's rank: no tokens, and a vocabulary of the given size."""
    data = replace(data, mock_data=True, **dict.fromkeys((*DATA_PATH_OPTIONS, "dataset")))
    if data.vocab_size is not None and missing_file_errors(data):
        data = replace(data, tokenizer_type="NullTokenizer", **dict.fromkeys(TOKENIZER_PATH_OPTIONS))
    return data


def missing_file_errors(data: DataConfig, elsewhere: bool = False) -> list[str]:
    """A line for each token file and tokenizer file of the options that does not exist; URLs are not looked at.
    `elsewhere`: the options are those of another machine's rank (`rehearsed`)."""
    lines, size = [], " or --vocab-size" * elsewhere
    for name in DATA_PATH_OPTIONS:
        for word in getattr(data, name) or ():
            _, named, rest = word.partition("=")  # NAME=PREFIX, or NAME= before a prefix
            prefix = rest if named and not _is_pair(word) else word
            if prefix and "://" not in prefix and not is_number(prefix) and not _is_pair(prefix):
                lines.append(missing_prefix_error(prefix))
    for name in READ_BY.get(data.tokenizer_type or "", TOKENIZER_PATH_OPTIONS):
        path = getattr(data, name)
        if path is not None and "://" not in path and not Path(path).exists():
            lines.append(f"{name}={path!r}: {os.strerror(errno.ENOENT)}; give a file here{size}, nothing is downloaded")
    return list(dict.fromkeys(lines))


def missing_prefix_error(prefix: str) -> str:
    """The reason why `prefix` cannot be opened, a file of it being missing, and what to give instead."""
    reason = os.strerror(errno.ENOENT)
    stem = prefix.removesuffix(".bin").removesuffix(".idx")
    if stem != prefix and _is_pair(stem):
        return f"{prefix}: the prefix of a pair is given without suffix; give {stem}"
    if Path(prefix).is_dir():
        if pairs := _pairs(Path(prefix), ""):
            return f"{prefix}: is a directory; give a prefix in it: {_list(pairs)}"
        return f"{prefix}: is a directory without token files; tools/preprocess_data.py makes them"
    if Path(prefix).is_file():
        return f"{prefix}: is a file, not the prefix of a .bin/.idx pair; tools/preprocess_data.py makes one from text"
    for lost, other in ((".idx", ".bin"), (".bin", ".idx")):
        if Path(prefix + other).is_file() and not Path(prefix + lost).is_file():
            return f"{prefix}{lost}: {reason}, but {prefix}{other} exists; a pair needs both: write it again"
    folder = Path(prefix).parent
    if not folder.is_dir():
        return f"{prefix}.idx: {reason}; the directory {folder} does not exist; give the prefix of a .bin/.idx pair"
    begun, others = _pairs(folder, Path(stem).name), _pairs(folder, "")
    near = difflib.get_close_matches(Path(stem).name, [Path(other).name for other in others], n=MAX_NAMED)
    if begun or near:
        return f"{prefix}.idx: {reason}; did you mean {_list(begun or [str(folder / name) for name in near])}?"
    hint = f"{folder} holds {_list(others)}" if others else "tools/preprocess_data.py makes such files"
    return f"{prefix}.idx: {reason}; {hint}"


def is_number(text: str) -> bool:
    try:
        float(text)
        return True
    except ValueError:
        return False


def _is_pair(prefix: str) -> bool:
    return Path(prefix + ".bin").is_file() and Path(prefix + ".idx").is_file()


def _pairs(folder: Path, begin: str) -> list[str]:
    """The prefixes in `folder` whose names start with `begin`, sorted; none where it cannot be read."""
    try:
        names = sorted(path.name for path in folder.iterdir() if path.suffix == ".idx" and path.name.startswith(begin))
    except OSError:
        return []
    return [prefix for name in names if _is_pair(prefix := str(folder / name.removesuffix(".idx")))]


def _list(prefixes: list[str]) -> str:
    return ", ".join(prefixes[:MAX_NAMED]) + (
        f" and {len(prefixes) - MAX_NAMED} more" if len(prefixes) > MAX_NAMED else ""
    )
