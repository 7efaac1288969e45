"""Small token files and tokenizers that tests share, and a disk that is full."""

import resource
import signal
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from megalite.data.files.indexed import IndexedDataset
from tools.preprocess.indexed_writer import IndexedWriter


def write(prefix: Path, documents: Sequence[Sequence[int]], dtype: type[np.generic] = np.uint16) -> Path:
    prefix.parent.mkdir(parents=True, exist_ok=True)
    with IndexedWriter(prefix, dtype) as writer:
        for document in documents:
            writer.add(np.array(document, np.int64))
        writer.finish()
    return prefix


def numbered(prefix: Path, lengths: Sequence[int], first: int = 0) -> IndexedDataset:
    """Documents of these lengths, in which every token is another number: `first`, `first` + 1, ..."""
    with IndexedWriter(prefix, np.int32) as writer:
        writer.add_many(first + np.arange(sum(lengths)), np.array(lengths, np.int64))
        writer.finish()
    return IndexedDataset(prefix)


def documents_of(data: IndexedDataset) -> list[list[int]]:
    return [data.document(i).tolist() for i in range(len(data))]


def byte_level_bpe(texts: Iterable[str], size: int, special: Sequence[str] = ("<|endoftext|>",)) -> Any:
    """A tokenizer of the library, as GPT-2's."""
    import tokenizers
    from tokenizers import decoders, models, pre_tokenizers, trainers

    bpe: Any = tokenizers.Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    how = dict(special_tokens=[*special], initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False)
    bpe.train_from_iterator(texts, trainers.BpeTrainer(vocab_size=size, **how))
    return bpe


def full(*_: object, **__: object) -> None:
    """In place of what writes."""
    raise OSError(28, "No space left on device")


def limit_files(size: int = 65536) -> None:
    """Of this process: none of its files grows beyond that."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))
