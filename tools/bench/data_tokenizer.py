"""How much faster gigatoken is than the library it replaces, in one run over the same text, ids compared.

    python tools/python_corpus.py --out data
    python tools/bench/data.py tokenizer --input data/train.jsonl --tokenizer-type HuggingFaceTokenizer \\
        --tokenizer-model data/bpe

The reference works as its authors meant it, one batch on the threads of all cores; gigatoken in one process per core,
as preprocessing uses it, each with an empty cache at its first repeat. Times are interleaved, medians count. Wall time
suffers when other programs run; MB per second of processor time says more then.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import multiprocessing
import os
import statistics
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import Any

from megalite.data.errors import DataError
from megalite.data.tokenizers.hugging_face_files import HuggingFaceTokenizer
from megalite.data.tokenizers.tokenizer import SentencePieceTokenizer, Tokenizer
from megalite.data.tokenizers.tokenizer_types import TYPES, build_tokenizer
from tools.preprocess.fast_tokenizer import FastTokenizer, accelerate

BATCH_BYTES = 1_000_000


def read_batches(path: str, key: str) -> list[list[str]]:
    batches: list[list[str]] = [[]]
    size = 0
    with open(path, encoding="utf-8") as file:
        for line in file:
            text = json.loads(line).get(key)
            if not isinstance(text, str):
                raise DataError(f"{path}: a line has no text under {key!r}; give --json-key")
            batches[-1].append(text)
            size += len(text)
            if size > BATCH_BYTES:
                batches.append([])
                size = 0
    return [batch for batch in batches if batch]


def on_all_cores(tokenizer: Tokenizer, batch: Sequence[str]) -> None:
    """The library's own way to encode a batch, with its own threads."""
    if isinstance(tokenizer, HuggingFaceTokenizer):
        tokenizer._model.encode_batch_fast(list(batch))
    elif isinstance(tokenizer, SentencePieceTokenizer):
        tokenizer._model.encode(list(batch), num_threads=os.cpu_count() or 1)
    else:
        tokenizer.encode_flat(batch)


def digest(tokenizer: Tokenizer, batch: Sequence[str]) -> str:
    ids, lengths = tokenizer.encode_flat(batch)
    return hashlib.sha256(ids.astype("<u4").tobytes() + lengths.astype("<i8").tobytes()).hexdigest()


def work(pipe: Connection, rank: int, ranks: int, path: str, key: str, arguments: dict[str, Any]) -> None:
    """Encode every `ranks`-th batch whenever told so; answers begin and end on the clock of the machine."""
    batches = read_batches(path, key)[rank::ranks]
    reference = build_tokenizer(**arguments)
    fast = accelerate(reference)
    pipe.send_bytes(json.dumps(isinstance(fast, FastTokenizer)).encode())
    while True:
        command = pipe.recv_bytes()
        if command == b"check":
            pipe.send_bytes(json.dumps([digest(fast, batch) for batch in batches]).encode())
            return
        fast = fast if command == b"warm" else accelerate(reference)
        begin, cpu = time.monotonic(), time.process_time()
        for batch in batches:
            fast.encode_flat(batch)
        pipe.send_bytes(json.dumps([begin, time.monotonic(), time.process_time() - cpu]).encode())


def measure(path: str, key: str, arguments: dict[str, Any], repeats: int, workers: int) -> bool:
    """Print the figures; whether all ids are the same."""
    batches, tokenizer = read_batches(path, key), build_tokenizer(**arguments)
    megabytes = sum(len(text.encode()) for batch in batches for text in batch) / 1e6
    context = multiprocessing.get_context("spawn")
    pipes: list[Connection] = []
    for rank in range(workers):
        here, there = context.Pipe()
        context.Process(target=work, args=(there, rank, workers, path, key, arguments), daemon=True).start()
        pipes.append(here)  # type: ignore[arg-type]
    if not all(json.loads(pipe.recv_bytes()) for pipe in pipes):
        raise DataError(f"gigatoken is not used for {tokenizer.name}; there is nothing to compare")

    def told(command: bytes) -> list[Any]:
        for pipe in pipes:
            pipe.send_bytes(command)
        return [json.loads(pipe.recv_bytes()) for pipe in pipes]

    names = ("reference", "gigatoken, cold", "gigatoken, warm")
    walls: dict[str, list[float]] = {name: [] for name in names}
    cpus: dict[str, list[float]] = {name: [] for name in names}
    for _ in range(repeats):
        begin, cpu = time.monotonic(), time.process_time()
        for batch in batches:
            on_all_cores(tokenizer, batch)
        walls[names[0]].append(time.monotonic() - begin)
        cpus[names[0]].append(time.process_time() - cpu)
        for name, command in zip(names[1:], (b"cold", b"warm"), strict=True):
            rows = told(command)
            walls[name].append(max(row[1] for row in rows) - min(row[0] for row in rows))
            cpus[name].append(sum(row[2] for row in rows))
    print(f"{tokenizer.name}: {megabytes:.1f} MB, {workers} processes, median of {repeats}")
    slow, slow_cpu = (statistics.median(kind[names[0]]) for kind in (walls, cpus))
    for name in names:
        wall, cpu = statistics.median(walls[name]), statistics.median(cpus[name])
        print(
            f"  {name:<16} {megabytes / wall:8.1f} MB/s {slow / wall:6.1f} x   "
            f"{megabytes / cpu:8.1f} MB per processor second {slow_cpu / cpu:6.1f} x"
        )
    made = told(b"check")
    same = all(digest(tokenizer, batch) == made[i % workers][i // workers] for i, batch in enumerate(batches))
    print(f"  ids of all {sum(map(len, batches))} documents {'are the same' if same else 'DIFFER'}")
    return same


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--input", required=True, metavar="FILE", help="one .jsonl file")
    parser.add_argument("--json-key", default="text", metavar="KEY")
    parser.add_argument("--tokenizer-type", required=True, choices=TYPES)
    for flag in ("--tokenizer-model", "--vocab-file", "--merge-file", "--tiktoken-pattern"):
        parser.add_argument(flag)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1)


def run(options: argparse.Namespace) -> int:
    names = ("tokenizer_type", "tokenizer_model", "vocab_file", "merge_file", "tiktoken_pattern")
    tokenizer = {name: getattr(options, name) for name in names}
    same = measure(options.input, options.json_key, tokenizer, options.repeats, options.workers)
    return 0 if same else 1
