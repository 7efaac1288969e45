"""Small token files and tokenizers for tests, and a simulated full disk."""

import contextlib
import random
import resource
import signal
import struct
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from megalite.data.files.indexed_dataset import IndexedDataset
from tools.preprocess.indexed_writer import IndexedWriter


def write_documents(prefix: Path, documents: Sequence[Sequence[int]], dtype: type[np.generic] = np.uint16) -> Path:
    """Write the .bin and .idx files of these documents, and return their prefix."""
    prefix.parent.mkdir(parents=True, exist_ok=True)
    with IndexedWriter(prefix, dtype) as writer:
        for document in documents:
            writer.add(np.array(document, np.int64))
        writer.finish()
    return prefix


def write_numbered(prefix: Path, lengths: Sequence[int], first: int = 0) -> IndexedDataset:
    """Write documents of these lengths whose tokens are numbered `first`, `first` + 1, ..."""
    with IndexedWriter(prefix, np.int32) as writer:
        writer.add_many(first + np.arange(sum(lengths)), np.array(lengths, np.int64))
        writer.finish()
    return IndexedDataset(prefix)


def read_documents(data: IndexedDataset) -> list[list[int]]:
    return [data.document(i).tolist() for i in range(len(data))]


def mutate(content: bytes, rng: random.Random) -> bytes:
    """Change, remove or insert a few bytes or an 8-byte number, or rarely cut off the end.

    Half of the positions are near the start.
    """
    data = bytearray(content)
    for _ in range(rng.choice([1, 1, 2, 5])):
        offset = rng.randrange(len(data) if rng.random() < 0.5 else min(len(data), 3000))
        kind = rng.random()
        if kind < 0.5:
            data[offset] = rng.randrange(256)
        elif kind < 0.6:
            del data[offset : offset + rng.randrange(1, 30)]
        elif kind < 0.7:
            data[offset:offset] = rng.randbytes(rng.randrange(1, 30))
        elif kind < 0.95:
            number = struct.pack("<q", rng.choice([-1, 0, 1, 2**31 - 1, 2**62, -(2**63)]))
            data[offset : offset + 8] = rng.choice([number, b"9" * 8])
        else:
            del data[offset:]
        data = data or bytearray(b"x")
    return bytes(data)


def byte_level_bpe(texts: Iterable[str], size: int, special: Sequence[str] = ("<|endoftext|>",)) -> Any:
    """Train a byte-level BPE tokenizer like GPT-2's."""
    import tokenizers
    from tokenizers import decoders, models, pre_tokenizers, trainers

    bpe: Any = tokenizers.Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    options = dict(special_tokens=[*special], initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False)
    bpe.train_from_iterator(texts, trainers.BpeTrainer(vocab_size=size, **options))
    return bpe


def raise_disk_full(*_: object, **__: object) -> None:
    """Raise "No space left on device". It replaces a function that writes."""
    raise OSError(28, "No space left on device")


@contextlib.contextmanager
def full_disk() -> Iterator[None]:
    """Simulate a full disk in this process."""
    limit_file_size()
    try:
        yield
    finally:
        limit_file_size(resource.RLIM_INFINITY)


def limit_file_size(size: int = 65536) -> None:
    """Limit the size of all files that this process writes."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))
