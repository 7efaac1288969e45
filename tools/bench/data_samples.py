"""What data costs, each figure beside its goal: building the order of an epoch, opening a pair, reading batches.

python tools/bench/data.py samples                     all parts but training, small, under 30 s
python tools/bench/data.py samples training --full     steps from a file beside steps from --mock-data
python tools/bench/data.py samples --full              the sizes of the goals: 1.2 GB of disk, 1.5 GB of memory
python tools/bench/data.py samples index --documents 200e6

Every measurement runs in a process of its own, so that peaks of memory do not add up. Times are the best of several,
because anything else that runs makes them longer and never shorter; of reading batches, where every call reads other
samples, the median. Files are made in --directory (default: the temporary directory) and removed.
"""

import argparse
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import timeit
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megalite.data.files import indexed
from megalite.data.files.indexed import IndexedDataset
from megalite.data.samples.batches import Batches
from megalite.data.samples.gpt_dataset import GptDataset
from megalite.data.samples.permutation import permute
from tools.preprocess.indexed_writer import IndexedWriter

MEAN = 760  # tokens per document: 38 G tokens in 50 M documents
SEQ_LENGTH = 2048
VOCABULARY = 50_000


def some_lengths(n: int) -> NDArray[np.int32]:
    """Exponentially distributed, mean MEAN; made in chunks, so that making them is not the peak of memory."""
    out, rng = np.empty(n, np.int32), np.random.default_rng(0)
    for a in range(0, n, 1 << 16):
        part = out[a : a + (1 << 16)]
        part[:] = np.minimum(rng.exponential(MEAN, len(part)), 200_000)
    return out


def write_hollow(prefix: str, n: int) -> None:
    """A pair of n documents whose .bin is a hole: no tokens are needed to plan an epoch."""
    lengths = some_lengths(n)
    pointers = np.zeros(n, np.int64)
    np.cumsum(lengths[:-1], dtype=np.int64, out=pointers[1:])
    pointers *= 2
    with open(prefix + ".idx", "wb") as file:
        file.write(indexed.MAGIC + indexed.HEADER.pack(indexed.VERSION, indexed.CODES[np.dtype(np.uint16)], n, n + 1))
        lengths.tofile(file)
        pointers.tofile(file)
        np.arange(n + 1, dtype=np.int64).tofile(file)
    with open(prefix + ".bin", "wb") as file:
        file.truncate(int(pointers[-1]) + 2 * int(lengths[-1]))


def write_random(prefix: str, documents: int, vocabulary: int = VOCABULARY) -> None:
    rng = np.random.default_rng(0)
    with IndexedWriter(prefix, np.uint16) as writer:
        for _ in range(0, documents, 10_000):
            lengths = some_lengths(10_000)
            writer.add_many(rng.integers(0, vocabulary, int(lengths.sum()), np.uint16), lengths)
        writer.finish()


def peak_bytes() -> int:
    """Most that was resident; getrusage would count what the parent had when this process was made."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:"))


def best(repeats: int, call: Callable[[], object]) -> float:
    return min(timeit.repeat(call, number=1, repeat=repeats))


# --- each of these runs in a fresh process -------------------------------------------------------------------------


def plan_epoch(prefix: str) -> dict[str, float]:
    """From nothing to the first place of a training sample: open, read lengths, shuffle, prefix sums."""
    before, begin = peak_bytes(), time.perf_counter()
    data = IndexedDataset(prefix)
    dataset = GptDataset(data, range(len(data)), SEQ_LENGTH, 1)
    dataset.where(0, 0)
    return {"seconds": time.perf_counter() - begin, "bytes": peak_bytes() - before, "tokens": dataset.num_tokens}


def shuffle(n: int) -> dict[str, float]:
    """The shuffle alone, and numpy's of a table of the same size, which is what Megatron-LM's builder does."""

    computed = best(2, lambda: permute(np.arange(n), n, 1))
    table = np.arange(n, dtype=np.int32)
    return {"computed": computed, "numpy": best(1, lambda: np.random.RandomState(1).shuffle(table))}


def open_pair(prefix: str) -> dict[str, float]:
    before, begin = peak_bytes(), time.perf_counter()
    IndexedDataset(prefix)
    first, grown = time.perf_counter() - begin, peak_bytes() - before
    whole = best(9, lambda: IndexedDataset(prefix))
    indexed.FULL_CHECK = 0
    return {"first": first, "bytes": grown, "whole": whole, "places": best(9, lambda: IndexedDataset(prefix))}


def read_batches(prefix: str, kind: str, size: int) -> float:
    """Tokens per second, the files being in memory; every call asks for other samples."""
    data = IndexedDataset(prefix, mmap_bin_files=kind != "read")
    dataset = GptDataset(data, range(len(data)), SEQ_LENGTH, 1)
    batches = Batches(dataset, size, 0, 1, 1 << 16)
    for a in range(0, data.num_tokens, 1 << 20):  # from disk into memory
        data.tokens[a : a + (1 << 20)].max(initial=0)
    times = []
    for at in range(0, max(20 * size, 4096), size):
        begin = time.perf_counter()
        if kind == "batches":
            batches.at(at, size)
        else:
            dataset.samples(np.arange(at, at + size))
        times.append(time.perf_counter() - begin)
    return size * SEQ_LENGTH / statistics.median(times)


# --- the parts -----------------------------------------------------------------------------------------------------


def alone(function: Callable[..., Any], *arguments: Any) -> Any:
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        return pool.submit(function, *arguments).result()


def row(what: str, measured: str, goal: str = "", holds: bool | None = None) -> None:
    verdict = "" if holds is None else "ok" if holds else "MISSED"
    print(f"{what:<66} {measured:>22}   {goal:<22} {verdict}", flush=True)


def remove(prefix: str) -> None:
    for suffix in (".bin", ".idx"):
        Path(prefix + suffix).unlink()


def index_part(directory: Path, full: bool, documents: int | None) -> None:
    sizes = [documents // 10, documents] if documents else [10**6, 10**7, 5 * 10**7] if full else [10**6, 4 * 10**6]
    points = []
    for n in sizes:
        prefix = str(directory / f"hollow-{n}")
        write_hollow(prefix, n)
        plans = [alone(plan_epoch, prefix) for _ in range(3)]
        plan = min(plans, key=lambda plan: plan["seconds"])
        points.append((n, plan["seconds"], plan["bytes"]))
        seconds, size, name = plan["seconds"], plan["bytes"], f"order of an epoch, {n / 1e6:g} M documents"
        wanted: tuple[Any, ...] = ("10 s, 2.5 GB", seconds <= 10 and size <= 2.5e9) if n == 5 * 10**7 else ()
        row(f"{name}, {plan['tokens'] / 1e9:.3g} G tokens", f"{seconds:.2f} s, {size / 1e9:.3g} GB", *wanted)
        row("  the same, documents/s", f"{n / seconds / 1e6:.1f} M/s", "12 M/s (24 and 24)", n / seconds >= 12e6)
        remove(prefix)
    each = (points[-1][2] - points[-2][2]) / (points[-1][0] - points[-2][0])
    planned = points[-1][2] + each * (10**9 - points[-1][0])
    row(f"growth {each:.1f} bytes a document: 1 G documents", f"{planned / 1e9:.1f} GB", "20 GB", planned <= 20e9)
    times = alone(shuffle, sizes[-1])
    rate, other = sizes[-1] / times["computed"], sizes[-1] / times["numpy"]
    what, goal = f"shuffle alone, {sizes[-1] / 1e6:g} M documents", f"numpy's {other / 1e6:.1f} M/s"
    row(what, f"{rate / 1e6:.1f} M/s", goal, rate >= other)


def open_part(directory: Path, full: bool, documents: int | None) -> None:
    last = documents or (10**7 if full else 2 * 10**6)
    for n in (last // 10, last):
        prefix = str(directory / f"open-{n}")
        write_hollow(prefix, n)
        got = alone(open_pair, prefix)
        whole, places = got["whole"] * 1e3, got["places"] * 1e3
        what = f"open a pair of {n / 1e6:g} M documents, all of it checked"
        row(what, f"{whole:.1f} ms", "50 ms (10 M)", whole <= 50)
        row("  the first time in a process", f"{got['first'] * 1e3:.1f} ms, {got['bytes'] / 1e6:.1f} MB")
        row(f"  as above {indexed.FULL_CHECK >> 20} Mi entries: ends and places", f"{places:.2f} ms")
        remove(prefix)


def batches_part(directory: Path, full: bool, documents: int | None) -> None:
    n = documents or (660_000 if full else 60_000)
    prefix = str(directory / "random")
    write_random(prefix, n)
    print(f"random batches, warm, sequence length {SEQ_LENGTH}, {Path(prefix + '.bin').stat().st_size / 1e9:.2f} GB:")
    names = {"samples": "GptDataset.samples", "batches": "Batches.at"}
    for kind, name in {**names, "read": "GptDataset.samples, .bin read, not mapped"}.items():
        for size in (8, 64, 512):
            rate = alone(read_batches, prefix, kind, size)
            goal = ("65 M tokens/s", rate >= 65e6) if kind != "read" else ("", None)
            row(f"  {name}, {size} at a time", f"{rate / 1e6:.0f} M tokens/s", *goal)


def training_part(directory: Path, full: bool, documents: int | None) -> None:
    """The same training from a file and from --mock-data, run in turns; the ratio of the median step times."""
    prefix = str(directory / "random")
    vocabulary = 2000
    write_random(prefix, documents or 20_000, vocabulary)
    root = Path(__file__).resolve().parents[2]
    model = "--num-layers 4 --hidden-size 128 --num-attention-heads 4 --seq-length 256 --micro-batch-size 4 --swiglu"
    steps = "--global-batch-size 8 --lr 1e-3 --train-iters 40 --eval-iters 0 --log-interval 1"
    rest = f"--hidden-dropout 0 --attention-dropout 0 --vocab-size {vocabulary}"
    words = [*f"{model} {steps} {rest}".split(), "--run-dir", str(directory / "run")]
    sources = {"file": ["--data-path", prefix, "--split", "1,0,0"], "mock": ["--mock-data"]}
    seconds: dict[str, list[float]] = {"file": [], "mock": []}
    waits: list[float] = []
    for _ in range(6 if full else 2):
        for name, flags in sources.items():
            shutil.rmtree(directory / "run", ignore_errors=True)
            command = [sys.executable, str(root / "pretrain_gpt.py"), *words, *flags]
            subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
            lines = (directory / "run/metrics.jsonl").read_text(encoding="utf-8").splitlines()
            rows = [json.loads(line) for line in lines][5:]  # the first steps warm up
            seconds[name] += [line["perf/step_s"] for line in rows]
            waits += [line["perf/data_s"] for line in rows] if name == "file" else []
    median = {name: statistics.median(values) for name, values in seconds.items()}
    ratio = median["file"] / median["mock"]
    row("training step from a file", f"{median['file'] * 1e3:.1f} ms")
    row("  of which waited for data", f"{statistics.median(waits) * 1e3:.2f} ms")
    row("training step with --mock-data", f"{median['mock'] * 1e3:.1f} ms")
    row("  ratio of the two", f"{ratio:.3f}", "1.01", ratio <= 1.01)


PARTS = {"index": index_part, "open": open_part, "batches": batches_part, "training": training_part}


def number_of_documents(text: str) -> int:
    if not 1000 <= float(text) <= 2e9:
        raise argparse.ArgumentTypeError(f"{text} is not in 1000..2e9")
    return int(float(text))


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("parts", nargs="*", choices=[[], *PARTS], help="default: all but training")
    parser.add_argument("--full", action="store_true", help="use the sizes of the goals")
    number = "number of documents for the parts named"
    parser.add_argument("--documents", type=number_of_documents, metavar="N", help=number)
    parser.add_argument("--directory", help="where to make files")


def run(options: argparse.Namespace) -> int:
    with tempfile.TemporaryDirectory(dir=options.directory, prefix="bench_data-") as directory:
        for name in options.parts or ("index", "open", "batches"):
            PARTS[name](Path(directory), options.full, options.documents)
    return 0
