"""Messages about files in the options that do not exist, with suggestions for what was meant."""

import difflib
import errno
import os
from dataclasses import replace
from pathlib import Path

from megalite.config.options import DataConfig

MAX_NAMED = 5  # files that a message names
DATA_PATH_OPTIONS = ("data_path", "train_data_path", "valid_data_path", "test_data_path")
TOKENIZER_PATH_OPTIONS = ("tokenizer_model", "vocab_file", "merge_file")
# the options that a built-in tokenizer reads, if not all three; the others have no effect
# (config/validation/effects.py)
READ_BY = {
    "GPT2BPETokenizer": ("vocab_file", "merge_file"),
    "ByteTokenizer": (),
    "NullTokenizer": (),
    **dict.fromkeys(("SentencePieceTokenizer", "GPTSentencePieceTokenizer", "Llama2Tokenizer"), ("tokenizer_model",)),
    **dict.fromkeys(("HuggingFaceTokenizer", "TikTokenizer"), ("tokenizer_model",)),
}


def without_data_files(data: DataConfig) -> DataConfig:
    """Return options that replace the data of another machine's rank: no tokens, and a vocabulary of the given size."""
    data = replace(data, mock_data=True, **dict.fromkeys((*DATA_PATH_OPTIONS, "dataset", "eval_requests")))
    if data.vocab_size is not None and missing_file_errors(data):
        data = replace(data, tokenizer_type="NullTokenizer", **dict.fromkeys(TOKENIZER_PATH_OPTIONS))
    return data


def missing_file_errors(data: DataConfig, elsewhere: bool = False) -> list[str]:
    """Return a line for each token file, tokenizer file and file of requests that does not exist, without URLs.

    `elsewhere` is True if the options belong to a rank on another machine (`without_data_files`).
    """
    lines = []
    alternative = " or --vocab-size" if elsewhere else ""
    for name in DATA_PATH_OPTIONS:
        for item in getattr(data, name) or ():
            _, separator, rest = item.partition("=")  # NAME=PREFIX, or NAME= before a prefix
            prefix = rest if separator and not _is_pair(item) else item
            if prefix and "://" not in prefix and not is_number(prefix) and not _is_pair(prefix):
                lines.append(missing_prefix_error(prefix))
    for name in READ_BY.get(data.tokenizer_type or "", TOKENIZER_PATH_OPTIONS):
        path = getattr(data, name)
        if path is not None and "://" not in path and not Path(path).exists():
            reason = os.strerror(errno.ENOENT)
            lines.append(f"{name}={path!r}: {reason}; give a file here{alternative}, nothing is downloaded")
    if data.eval_requests is not None and not Path(data.eval_requests).exists():
        reason = os.strerror(errno.ENOENT)
        lines.append(f"eval_requests={data.eval_requests!r}: {reason}; megalite eval --write-requests makes one")
    return list(dict.fromkeys(lines))


def missing_prefix_error(prefix: str) -> str:
    """Return why `prefix` cannot be opened when one of its files is missing, and what to give instead."""
    reason = os.strerror(errno.ENOENT)
    stem = prefix.removesuffix(".bin").removesuffix(".idx")
    if stem != prefix and _is_pair(stem):
        return f"{prefix}: the prefix of a pair is given without suffix; give {stem}"
    if Path(prefix).is_dir():
        pairs = _pairs(Path(prefix), "")
        if pairs:
            return f"{prefix}: is a directory; give a prefix in it: {_list(pairs)}"
        return f"{prefix}: is a directory without token files; tools/preprocess_data.py makes them"
    if Path(prefix).is_file():
        return f"{prefix}: is a file, not the prefix of a .bin/.idx pair; tools/preprocess_data.py makes one from text"
    for missing, present in ((".idx", ".bin"), (".bin", ".idx")):
        if Path(prefix + present).is_file() and not Path(prefix + missing).is_file():
            return f"{prefix}{missing}: {reason}, but {prefix}{present} exists; a pair needs both: write it again"
    directory = Path(prefix).parent
    if not directory.is_dir():
        return f"{prefix}.idx: {reason}; the directory {directory} does not exist; give the prefix of a .bin/.idx pair"
    completions = _pairs(directory, Path(stem).name)
    pairs_in_directory = _pairs(directory, "")
    names = [Path(pair).name for pair in pairs_in_directory]
    similar = difflib.get_close_matches(Path(stem).name, names, n=MAX_NAMED)
    if completions or similar:
        suggestions = completions or [str(directory / name) for name in similar]
        return f"{prefix}.idx: {reason}; did you mean {_list(suggestions)}?"
    hint = "tools/preprocess_data.py makes such files"
    if pairs_in_directory:
        hint = f"{directory} holds {_list(pairs_in_directory)}"
    return f"{prefix}.idx: {reason}; {hint}"


def is_number(text: str) -> bool:
    try:
        float(text)
        return True
    except ValueError:
        return False


def _is_pair(prefix: str) -> bool:
    return Path(prefix + ".bin").is_file() and Path(prefix + ".idx").is_file()


def _pairs(directory: Path, start: str) -> list[str]:
    """Return the prefixes in `directory` whose names start with `start`, sorted; none if it cannot be read."""
    try:
        names = sorted(
            path.name for path in directory.iterdir() if path.suffix == ".idx" and path.name.startswith(start)
        )
    except OSError:
        return []
    return [prefix for name in names if _is_pair(prefix := str(directory / name.removesuffix(".idx")))]


def _list(prefixes: list[str]) -> str:
    text = ", ".join(prefixes[:MAX_NAMED])
    if len(prefixes) > MAX_NAMED:
        text += f" and {len(prefixes) - MAX_NAMED} more"
    return text
