#!/usr/bin/env python
"""Measure what data costs: the order of an epoch, opening a dataset, and random batches.

python tools/bench/data.py                    small, under 30 s
python tools/bench/data.py --documents 5e7    the sizes of docs/performance.md: 1.2 GB of disk, 1.5 GB of memory

Every measurement runs in a process of its own, so that one does not raise the memory peak of the next. Times are the
minimum of several, because other load makes them longer but never shorter. The time of batches is a median, because
every call reads other samples. tools/preprocess_data.py reports its own speed.

Exit code 0 when everything was measured, 2 for an invalid flag, 3 for invalid input.
"""

import argparse
import statistics
import sys
import tempfile
import time
import timeit
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import numpy as np
from numpy.typing import NDArray

from megalite.data.datasets.batches import Batches
from megalite.data.datasets.gpt_dataset import GPTDataset
from megalite.data.datasets.permutation import permute
from megalite.data.files import indexed_dataset as indexed
from megalite.data.files.indexed_dataset import IndexedDataset
from megalite.launch.children import safe_start
from tools.cli_common import exits_with, make_parser, number_in_range, run_program
from tools.preprocess.indexed_writer import IndexedWriter

MEAN_LENGTH = 760  # tokens per document: 38 G tokens in 50 M documents
MAX_LENGTH = 200_000
SEQ_LENGTH = 2048
BATCH_SIZES = (8, 64, 512)
CHUNK = 1 << 16  # documents whose lengths are drawn at once, so that drawing does not set the memory peak


def sample_lengths(num_documents: int) -> NDArray[np.int32]:
    """Draw document lengths from an exponential distribution."""
    lengths, rng = np.empty(num_documents, np.int32), np.random.default_rng(0)
    for start in range(0, num_documents, CHUNK):
        chunk = lengths[start : start + CHUNK]
        chunk[:] = np.minimum(rng.exponential(MEAN_LENGTH, len(chunk)), MAX_LENGTH)
    return lengths


def write_sparse_dataset(prefix: str, num_documents: int) -> None:
    """Write a dataset whose .bin file is a hole. Planning an epoch reads no tokens."""
    lengths, pointers = sample_lengths(num_documents), np.zeros(num_documents, np.int64)
    np.cumsum(lengths[:-1], dtype=np.int64, out=pointers[1:])
    pointers *= 2
    document_indices = np.arange(num_documents + 1, dtype=np.int64)
    dtype_code = indexed.CODES[np.dtype(np.uint16)]
    with open(prefix + ".idx", "wb") as file:
        header = indexed.HEADER.pack(indexed.VERSION, dtype_code, num_documents, num_documents + 1)
        file.write(indexed.MAGIC + header)
        for column in (lengths, pointers, document_indices):
            column.tofile(file)
    with open(prefix + ".bin", "wb") as file:
        file.truncate(int(pointers[-1]) + 2 * int(lengths[-1]))


def write_random_dataset(prefix: str, num_documents: int) -> None:
    """Write a dataset of random tokens."""
    rng = np.random.default_rng(0)
    with IndexedWriter(prefix, np.uint16) as writer:
        for _ in range(0, num_documents, 10_000):
            lengths = sample_lengths(10_000)
            writer.add_many(rng.integers(0, 50_000, int(lengths.sum()), np.uint16), lengths)
        writer.finish()


def peak_bytes() -> int:
    """Return the peak resident memory of this process, in bytes.

    getrusage would include the memory of the parent at the time of the fork.
    """
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:"))


def best_of(repeats: int, call: Callable[[], object]) -> float:
    """Return the shortest time of `repeats` calls, in seconds."""
    return min(timeit.repeat(call, number=1, repeat=repeats))


# --- measurements; each runs in a fresh process ----------------------------------------------------------------------


def plan_epoch(prefix: str) -> tuple[float, int, int]:
    """Open a dataset and locate its first training sample, which shuffles the documents and sums their lengths.

    Returns:
        The seconds, the bytes of memory, and the tokens of the epoch.
    """
    memory_before, start = peak_bytes(), time.perf_counter()
    data = IndexedDataset(prefix)
    dataset = GPTDataset(data, range(len(data)), SEQ_LENGTH, 1)
    dataset.locate(0, 0)
    return time.perf_counter() - start, peak_bytes() - memory_before, dataset.num_tokens


def shuffle(num_documents: int) -> tuple[float, float]:
    """Return the seconds of the computed shuffle, and of numpy's shuffle of a table, as in Megatron-LM's builder."""
    table = np.arange(num_documents, dtype=np.int32)
    computed = best_of(2, lambda: permute(np.arange(num_documents), num_documents, 1))
    return computed, best_of(1, lambda: np.random.RandomState(1).shuffle(table))


def open_dataset(prefix: str) -> tuple[float, float]:
    """Return the seconds of the first opening in a process, and of a later one."""
    return best_of(1, lambda: IndexedDataset(prefix)), best_of(9, lambda: IndexedDataset(prefix))


def read_batches(prefix: str, as_batches: bool, size: int) -> float:
    """Return the tokens per second of reading `size` samples at a time from a dataset in the page cache.

    If `as_batches`, micro-batches are built from the samples.
    """
    data = IndexedDataset(prefix)
    dataset = GPTDataset(data, range(len(data)), SEQ_LENGTH, 1)
    batches, times = Batches(dataset, size, 0, 1, 1 << 16), []
    for start in range(0, data.num_tokens, 1 << 20):  # read the file into the page cache
        data.tokens[start : start + (1 << 20)].max(initial=0)
    for first in range(0, max(20 * size, 4096), size):  # other samples in every call
        start_s = time.perf_counter()
        if as_batches:
            batches.at(first, size)
        else:
            dataset.samples(np.arange(first, first + size))
        times.append(time.perf_counter() - start_s)
    return size * SEQ_LENGTH / statistics.median(times)


def in_subprocess(function: Callable[..., Any], *arguments: Any) -> Any:
    """Return the result of a call in a fresh process."""
    with safe_start(), ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        return pool.submit(function, *arguments).result()


def measure_all(directory: Path, num_documents: int) -> None:
    """Write datasets to the directory, and print all measurements."""
    prefix, millions = str(directory / "dataset"), num_documents / 1e6
    write_sparse_dataset(prefix, num_documents)
    seconds, size, tokens = min(in_subprocess(plan_epoch, prefix) for _ in range(3))
    dataset_size = f"{millions:g} M documents, {tokens / 1e9:.3g} G tokens"
    print(f"order of an epoch, {dataset_size}: {seconds:.2f} s, {size / 1e9:.3g} GB")
    shuffle_seconds, numpy_seconds = in_subprocess(shuffle, num_documents)
    print(
        f"documents walked and shuffled: {millions / seconds:.1f} M/s; "
        f"shuffled alone: {millions / shuffle_seconds:.1f}, by numpy {millions / numpy_seconds:.1f}"
    )
    write_sparse_dataset(prefix, num_documents // 5)
    first, later = in_subprocess(open_dataset, prefix)
    print(f"open a pair of {millions / 5:g} M documents: {later * 1e3:.1f} ms, {first * 1e3:.1f} ms the first time")
    write_random_dataset(prefix, num_documents // 75)
    for name, as_batches in (("samples", False), ("batches", True)):
        rates = [in_subprocess(read_batches, prefix, as_batches, size) / 1e6 for size in BATCH_SIZES]
        text = ", ".join(f"{rate:.0f}" for rate in rates)
        print(f"random {name} of {SEQ_LENGTH}, 8, 64 and 512 at a time: {text} M tokens/s")


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of this program's flags."""
    parser = make_parser(__doc__)
    parser.add_argument("--documents", type=number_in_range(float, "[1e3, 2e9]"), default=4_000_000, metavar="N")
    return parser


@exits_with(3, OSError, ValueError)  # a DataError is a ValueError
def main(argv: list[str]) -> int:
    """Run the program, and return its exit code."""
    num_documents = int(build_parser().parse_args(argv).documents)
    with tempfile.TemporaryDirectory(prefix="bench_data-") as directory:
        measure_all(Path(directory), num_documents)
    return 0


if __name__ == "__main__":
    run_program(main)
