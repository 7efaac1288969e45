"""How fast tools/preprocess_data.py is, beside the tokenizer library's own batch encoding of the same texts.

    python tools/python_corpus.py --out data
    python tools/bench/data.py preprocess --input data/train.jsonl --tokenizer-model spm.model
    python tools/bench/data.py preprocess --input data/train.jsonl --tokenizer-model dir/tokenizer.json

library       encode all texts, parsed and in memory before, with the library's own threads on --workers cores
preprocess    the whole work without gigatoken: start of the workers, read, parse, tokenize, write the pair, sync
by gigatoken  the same, where that package is installed and makes the same ids, over --times times the input, since the
              start would else be most of it; without that package it is preprocess once more
first result  from the start of preprocessing to its first block: starting processes, loading the tokenizer
reading       the input alone, per format: what one reader thread can feed

Repeats of both are interleaved, since a machine is seldom idle; medians are printed, MB are of
text. Processor time is what others on the machine disturb least.
"""

import argparse
import contextlib
import gzip
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from tools.preprocess.text_input import read_blocks
from tools.preprocess.token_run import preprocess
from tools.preprocess.workers import Job, in_workers


def seconds(work: Callable[[], Any]) -> tuple[float, float]:
    """Wall time; processor time of this process and of the children it waited for."""

    def processor() -> float:
        times = os.times()
        return times.user + times.system + times.children_user + times.children_system

    begin, cpu = time.perf_counter(), processor()
    work()
    return time.perf_counter() - begin, processor() - cpu


def library(model: str, workers: int) -> Callable[[list[str]], Any]:
    """Batch encoding as the library offers it, results as its own Python objects."""
    if model.endswith(".json"):
        os.environ["RAYON_NUM_THREADS"], os.environ["TOKENIZERS_PARALLELISM"] = str(workers), "true"
        import tokenizers

        bpe = tokenizers.Tokenizer.from_file(model)
        return lambda texts: [encoding.ids for encoding in bpe.encode_batch_fast(texts)]
    import sentencepiece

    spm = sentencepiece.SentencePieceProcessor(model_file=model)
    return lambda texts: spm.encode(texts, num_threads=workers)


def first_result(path: Path, job: Job, workers: int) -> None:
    results = in_workers(read_blocks([str(path)]), job, workers)
    next(results)
    results.close()


def reading(directory: Path, lines: list[bytes], texts: list[str]) -> None:
    raw = b"".join(lines)
    (directory / "r.jsonl").write_bytes(raw)
    (directory / "r.jsonl.gz").write_bytes(gzip.compress(raw, 6))
    with contextlib.suppress(ImportError):
        import zstandard

        (directory / "r.jsonl.zst").write_bytes(zstandard.compress(raw, 3))
    with contextlib.suppress(ImportError):
        import pyarrow
        import pyarrow.parquet

        pyarrow.parquet.write_table(pyarrow.table({"text": texts}), directory / "r.parquet", compression="zstd")
    for path in sorted(directory.glob("r.*")):
        took = statistics.median(seconds(lambda: list(read_blocks([str(path)])))[0] for _ in range(3))  # noqa: B023
        print(f"reading {path.name[1:]}: {len(raw) / took / 1e6:.0f} MB/s")


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--input", required=True, type=Path, help="one .jsonl file with the key text")
    parser.add_argument("--tokenizer-model", required=True, help="a SentencePiece .model or a tokenizer.json")
    parser.add_argument("--max-bytes", type=int, default=12_000_000, help="bytes of the input to read; default 12 MB")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--times", type=int, default=10, help="how often gigatoken gets the input")
    parser.add_argument("--repeats", type=int, default=5)


def first_lines(path: Path, most: int) -> list[bytes]:
    """The first lines of the file, `most` bytes of them."""
    lines, size = [], 0
    with open(path, "rb") as file:
        for line in file:
            if lines and size + len(line) > most:
                break
            lines.append(line)
            size += len(line)
    return lines


def run(args: argparse.Namespace) -> int:
    lines = first_lines(args.input, args.max_bytes)
    texts = [json.loads(line)["text"] for line in lines]
    megabytes = sum(len(text.encode("utf-8")) for text in texts) / 1e6
    kind = "HuggingFaceTokenizer" if args.tokenizer_model.endswith(".json") else "SentencePieceTokenizer"
    arguments = {"tokenizer_type": kind, "tokenizer_model": args.tokenizer_model}
    encode = library(args.tokenizer_model, args.workers)
    encode(texts[:50])
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        path = directory / "in.jsonl"
        path.write_bytes(b"".join(lines))
        long = directory / "long.jsonl"
        long.write_bytes(b"".join(line if line.endswith(b"\n") else line + b"\n" for line in lines * args.times))
        job = Job(arguments)
        out = str(directory / "out")
        rows = ("library", "preprocess", "first result", "by gigatoken")
        took: dict[str, list[tuple[float, float]]] = {row: [] for row in rows}
        for _ in range(args.repeats):
            took["library"].append(seconds(lambda: encode(texts)))
            for row, fast, source in (("preprocess", False, path), ("by gigatoken", True, long)):
                work = partial(preprocess, [str(source)], out, Job(arguments, fast=fast), workers=args.workers)
                took[row].append(seconds(work))
            took["first result"].append(seconds(lambda: first_result(path, job, args.workers)))
        print(f"{kind}: {len(texts)} documents, {megabytes:.1f} MB, {args.workers} workers, {args.repeats} repeats")
        middle = {what: statistics.median(wall for wall, _ in values) for what, values in took.items()}
        for what, size in (("library", 1), ("preprocess", 1), ("by gigatoken", args.times)):
            spread = ", ".join(f"{size * megabytes / wall:.2f}" for wall, _ in sorted(took[what]))
            cpu = statistics.median(cpu for _, cpu in took[what])
            print(f"{what}: {size * megabytes / middle[what]:.2f} MB/s   ({spread}); {cpu:.2f} s of processor time")
        fast = args.times * middle["library"] / middle["by gigatoken"]
        print(f"by gigatoken / library: {fast:.1f} of the speed")
        pairs = list(zip(took["library"], took["preprocess"], strict=True))
        wall, cpu = (statistics.median(a[i] / b[i] for a, b in pairs) for i in range(2))
        print(f"preprocess / library: {wall:.2f} of the speed, {cpu:.2f} by processor time (medians of the pairs)")
        print(f"first result after {middle['first result']:.2f} s of {middle['preprocess']:.2f} s")
        reading(directory, lines, texts)
    return 0
