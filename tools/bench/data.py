#!/usr/bin/env python
"""What data costs: the order of an epoch, opening a pair, and random batches.

python tools/bench/data.py                    small, under 30 s
python tools/bench/data.py --documents 5e7    the sizes of docs/performance.md: 1.2 GB of disk, 1.5 GB of memory

Every measurement runs in a process of its own, so that peaks of memory do not add up. Times are the best of several,
because anything else that runs makes them longer and never shorter; of batches, where every call reads other samples,
the median. tools/preprocess_data.py says how fast it is itself.

Exit code 0 when all was measured, 2 for a bad flag, 3 for bad input.
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
from tools.cli_common import number, parser_of, refusing, run_program
from tools.preprocess.indexed_writer import IndexedWriter

MEAN = 760  # tokens per document: 38 G tokens in 50 M documents
SEQ_LENGTH = 2048


def some_lengths(n: int) -> NDArray[np.int32]:
    """Exponentially distributed, mean MEAN; made in chunks, so that making them is not the peak of memory."""
    out, rng = np.empty(n, np.int32), np.random.default_rng(0)
    for a in range(0, n, 1 << 16):
        part = out[a : a + (1 << 16)]
        part[:] = np.minimum(rng.exponential(MEAN, len(part)), 200_000)
    return out


def write_hollow(prefix: str, n: int) -> None:
    """A pair of n documents whose .bin is a hole: no tokens are needed to plan an epoch."""
    lengths, pointers = some_lengths(n), np.zeros(n, np.int64)
    np.cumsum(lengths[:-1], dtype=np.int64, out=pointers[1:])
    pointers *= 2
    with open(prefix + ".idx", "wb") as file:
        file.write(indexed.MAGIC + indexed.HEADER.pack(indexed.VERSION, indexed.CODES[np.dtype(np.uint16)], n, n + 1))
        for column in (lengths, pointers, np.arange(n + 1, dtype=np.int64)):
            column.tofile(file)
    with open(prefix + ".bin", "wb") as file:
        file.truncate(int(pointers[-1]) + 2 * int(lengths[-1]))


def write_random(prefix: str, documents: int) -> None:
    rng = np.random.default_rng(0)
    with IndexedWriter(prefix, np.uint16) as writer:
        for _ in range(0, documents, 10_000):
            lengths = some_lengths(10_000)
            writer.add_many(rng.integers(0, 50_000, int(lengths.sum()), np.uint16), lengths)
        writer.finish()


def peak_bytes() -> int:
    """Most that was resident; getrusage would count what the parent had when this process was made."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:"))


def best(repeats: int, call: Callable[[], object]) -> float:
    return min(timeit.repeat(call, number=1, repeat=repeats))


# --- each of these runs in a fresh process -------------------------------------------------------------------------


def plan_epoch(prefix: str) -> tuple[float, int, int]:
    """Seconds, bytes and tokens, from nothing to the first place of a training sample: open, shuffle, prefix sums."""
    before, begin = peak_bytes(), time.perf_counter()
    data = IndexedDataset(prefix)
    dataset = GPTDataset(data, range(len(data)), SEQ_LENGTH, 1)
    dataset.locate(0, 0)
    return time.perf_counter() - begin, peak_bytes() - before, dataset.num_tokens


def shuffle(n: int) -> tuple[float, float]:
    """Seconds of the shuffle alone, and of numpy's of a table of that size, as Megatron-LM's builder does it."""
    table = np.arange(n, dtype=np.int32)
    computed = best(2, lambda: permute(np.arange(n), n, 1))
    return computed, best(1, lambda: np.random.RandomState(1).shuffle(table))


def open_pair(prefix: str) -> tuple[float, float]:
    """Seconds of the first time in a process, and of others."""
    return best(1, lambda: IndexedDataset(prefix)), best(9, lambda: IndexedDataset(prefix))


def read_batches(prefix: str, whole: bool, size: int) -> float:
    """Tokens per second, the files being in memory; every call asks for other samples."""
    data = IndexedDataset(prefix)
    dataset = GPTDataset(data, range(len(data)), SEQ_LENGTH, 1)
    batches, times = Batches(dataset, size, 0, 1, 1 << 16), []
    for a in range(0, data.num_tokens, 1 << 20):  # from disk into memory
        data.tokens[a : a + (1 << 20)].max(initial=0)
    for at in range(0, max(20 * size, 4096), size):
        begin = time.perf_counter()
        batches.at(at, size) if whole else dataset.samples(np.arange(at, at + size))
        times.append(time.perf_counter() - begin)
    return size * SEQ_LENGTH / statistics.median(times)


def alone(function: Callable[..., Any], *arguments: Any) -> Any:
    with safe_start(), ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        return pool.submit(function, *arguments).result()


def samples(folder: Path, documents: int) -> None:
    pair, million = str(folder / "hollow"), documents / 1e6
    write_hollow(pair, documents)
    seconds, size, tokens = min(alone(plan_epoch, pair) for _ in range(3))
    what = f"{million:g} M documents, {tokens / 1e9:.3g} G tokens"
    print(f"order of an epoch, {what}: {seconds:.2f} s, {size / 1e9:.3g} GB")
    walked, ours, numpys = (million / taken for taken in (seconds, *alone(shuffle, documents)))
    print(f"documents walked and shuffled: {walked:.1f} M/s; shuffled alone: {ours:.1f}, by numpy {numpys:.1f}")
    write_hollow(pair, documents // 5)
    first, others = alone(open_pair, pair)
    print(f"open a pair of {million / 5:g} M documents: {others * 1e3:.1f} ms, {first * 1e3:.1f} ms the first time")
    write_random(pair, documents // 75)
    for name, whole in (("samples", False), ("batches", True)):
        rates = ", ".join(f"{alone(read_batches, pair, whole, size) / 1e6:.0f}" for size in (8, 64, 512))
        print(f"random {name} of {SEQ_LENGTH}, 8, 64 and 512 at a time: {rates} M tokens/s")


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of this program's flags."""
    parser = parser_of(__doc__)
    parser.add_argument("--documents", type=number(float, "[1e3, 2e9]"), default=4_000_000, metavar="N")
    return parser


@refusing(3, OSError, ValueError)  # a DataError is a ValueError
def main(argv: list[str]) -> int:
    documents = int(build_parser().parse_args(argv).documents)
    with tempfile.TemporaryDirectory(prefix="bench_data-") as folder:
        samples(Path(folder), documents)
    return 0


if __name__ == "__main__":
    run_program(main)
