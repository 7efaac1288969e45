"""Raw text to token files: read documents, tokenize them in worker processes, write them in the order of the input.

    files -> blocks of lines (1 MiB) -> workers: parse, check, tokenize -> writer, by block number

The output is the same bytes for any number of workers. Memory is bounded: at most AHEAD blocks per worker are under
way. Workers speak plain bytes over pipes, so that a worker that dies (out of memory) is one clear error, where a
multiprocessing.Pool would wait for ever.
"""

from __future__ import annotations

import glob
import json
import multiprocessing
import os
import struct
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megalite.data.indexed import DataError, IndexedWriter, token_dtype
from megalite.data.info import make_info
from megalite.data.tokenizer import Tokenizer, build_tokenizer

BLOCK_BYTES = 1 << 20
AHEAD = 3
FRAME = struct.Struct("<QQ?")  # file number, number of the first line (from 1), whole file is one document


@dataclass(frozen=True)
class Job:
    """What a worker needs to know; plain values, so that any start method can pass it on."""

    files: tuple[str, ...]
    keys: tuple[str, ...]
    append_eod: bool
    tokenizer: dict[str, Any]  # arguments of build_tokenizer


@dataclass
class Result:
    """One block, tokenized: per key the tokens and the length of each document."""

    tokens: list[NDArray[Any]] = field(default_factory=list)
    lengths: list[NDArray[np.int32]] = field(default_factory=list)


def expand(patterns: Sequence[str]) -> list[str]:
    """Files that match, each pattern sorted; a pattern without a match is an error."""
    files: list[str] = []
    for pattern in patterns:
        found = sorted(glob.glob(pattern, recursive=True))
        if not found:
            raise DataError(f"input={pattern} matches no file")
        files += [name for name in found if name not in files]
    for name in files:
        if not name.endswith((".jsonl", ".json", ".txt")) or os.path.isdir(name):
            raise DataError(f"input={name} is not a .jsonl, .json (one object per line) or .txt file")
    return files


def read_blocks(files: Sequence[str]) -> Iterator[bytes]:
    """Whole lines of the files, about BLOCK_BYTES at a time, each block behind its FRAME. A .txt is one document."""
    for number, name in enumerate(files):
        try:
            with open(name, "rb") as file:
                if name.endswith(".txt"):
                    yield FRAME.pack(number, 1, True) + file.read()
                    continue
                line = 1
                while lines := file.readlines(BLOCK_BYTES):
                    yield FRAME.pack(number, line, False) + b"".join(lines)
                    line += len(lines)
        except OSError as error:
            raise DataError(f"{name}: {error.strerror}") from error


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) != len(pairs):
        raise ValueError("an object has the same key twice")
    return made


def _constant(text: str) -> Any:
    raise ValueError(f"{text} is not JSON")


DECODER = json.JSONDecoder(object_pairs_hook=_object, parse_constant=_constant)


def parse_line(raw: bytes, keys: Sequence[str]) -> list[str] | None:
    """The texts under `keys` of one JSON line; None for a blank line. ValueError says what is wrong with it."""
    text = raw.decode("utf-8").strip(" \t\r\n")
    if not text:
        return None
    if text.startswith("\ufeff"):
        raise ValueError("begins with a byte order mark")
    try:
        record = DECODER.decode(text)
    except RecursionError:
        raise ValueError("is nested too deeply") from None
    if not isinstance(record, dict):
        raise ValueError(f"is not a JSON object but {type(record).__name__}")
    for key in keys:
        if not isinstance(record.get(key), str):
            raise ValueError(f"key {key!r} is " + ("missing" if key not in record else "not a string"))
        record[key].encode("utf-8")  # half a surrogate pair is no text
    return [record[key] for key in keys]


def tokenize_block(block: bytes | memoryview, job: Job, tokenizer: Tokenizer, dtype: np.dtype[Any]) -> Result:
    """Tokenize one block. DataError names file, line and reason."""
    number, line, whole = FRAME.unpack(block[: FRAME.size])
    payload = bytes(block[FRAME.size :])
    texts: list[list[str]] = [[] for _ in job.keys]
    for raw in [payload] if whole else payload.split(b"\n"):
        try:
            found = [raw.decode("utf-8")] * len(job.keys) if whole else parse_line(raw, job.keys)
        except ValueError as error:
            raise DataError(f"{job.files[number]}:{line}: {error}") from None
        for column, text in zip(texts, found or (), strict=False):
            if text:  # an empty document has nothing to learn from
                column.append(text)
        line += 1
    result = Result()
    for column in texts:
        documents = tokenizer.encode_batch(column)
        if job.append_eod:
            for ids in documents:
                ids.append(tokenizer.eod)
        documents = [ids for ids in documents if ids]
        lengths = np.array([len(ids) for ids in documents], np.int32)
        flat = np.fromiter(chain.from_iterable(documents), np.int64, int(lengths.sum(dtype=np.int64)))
        result.tokens.append(flat.astype(dtype))
        result.lengths.append(lengths)
    return result


def _pack(result: Result) -> bytes:
    head = json.dumps(
        [[len(lengths), len(tokens)] for lengths, tokens in zip(result.lengths, result.tokens, strict=True)]
    )
    parts = [array.tobytes() for pair in zip(result.lengths, result.tokens, strict=True) for array in pair]
    return b"".join([head.encode(), b"\n", *parts])


def _unpack(message: bytes, dtype: np.dtype[Any]) -> Result:
    head, _, _ = message.partition(b"\n")
    sizes, result, at = json.loads(head), Result(), len(head) + 1
    if isinstance(sizes, str):
        raise DataError(sizes)
    for documents, tokens in sizes:
        result.lengths.append(np.frombuffer(message, np.int32, documents, at))
        at += 4 * documents
        result.tokens.append(np.frombuffer(message, dtype, tokens, at))
        at += dtype.itemsize * tokens
    return result


def _work(pipe: Connection, job: Job) -> None:
    """A worker: blocks in, packed results out, until the pipe closes. An error is a message too."""
    try:
        tokenizer = build_tokenizer(**job.tokenizer)
        dtype = token_dtype(tokenizer.vocab_size)
        while True:
            block = pipe.recv_bytes()
            try:
                answer = _pack(tokenize_block(block, job, tokenizer, dtype))
            except DataError as error:
                answer = json.dumps(str(error)).encode() + b"\n"
            pipe.send_bytes(answer)
    except (EOFError, BrokenPipeError, KeyboardInterrupt):
        pass


def _in_workers(blocks: Iterator[bytes], job: Job, workers: int, dtype: np.dtype[Any]) -> Iterator[Result]:
    """Results in the order of `blocks`. An idle worker gets the next block; a dead one ends the run."""
    context = multiprocessing.get_context("spawn")  # a fork would inherit the tokenizer's threads
    pipes: dict[Connection, Any] = {}
    under_way: dict[Connection, list[int]] = {}
    try:
        for _ in range(workers):
            here, there = context.Pipe()
            process = context.Process(target=_work, args=(there, job), daemon=True)
            process.start()
            there.close()
            pipes[here], under_way[here] = process, []
        done: dict[int, Result] = {}
        sent = emitted = 0
        more = True
        while more or emitted < sent:
            while more and sent - emitted < AHEAD * workers:
                pipe = min(pipes, key=lambda p: len(under_way[p]))
                if under_way[pipe]:
                    break  # all are busy: a block that waits in a full pipe could block both ends
                block = next(blocks, None)
                if block is None:
                    more = False
                    break
                pipe.send_bytes(block)
                under_way[pipe].append(sent)
                sent += 1
            for pipe in wait([p for p in pipes if under_way[p]]) if emitted < sent else []:
                try:
                    done[under_way[pipe].pop(0)] = _unpack(pipe.recv_bytes(), dtype)  # type: ignore[index, attr-defined]
                except (EOFError, OSError):
                    process = pipes[pipe]  # type: ignore[index]
                    process.join(5)
                    raise DataError(
                        f"a worker process ended with code {process.exitcode}; -9 means that memory ran out: "
                        f"use fewer than --workers {workers}"
                    ) from None
            while emitted in done:
                yield done.pop(emitted)
                emitted += 1
    finally:
        for pipe, process in pipes.items():
            pipe.close()
            process.terminate()
        for process in pipes.values():
            process.join()


def preprocess(
    patterns: Sequence[str],
    output_prefix: str,
    *,
    keys: Sequence[str] = ("text",),
    tokenizer_type: str,
    tokenizer_model: str | None = None,
    vocab_file: str | None = None,
    merge_file: str | None = None,
    vocab_size: int | None = None,
    append_eod: bool = False,
    workers: int = 1,
    log_interval: int = 10_000,
) -> list[str]:
    """Write `{output_prefix}_{key}_document.bin/.idx/.json` for every key; returns these prefixes.

    No file has its final name before all input is read. log_interval counts documents.
    """
    files = expand(patterns)
    if len(keys) > 1 and any(name.endswith(".txt") for name in files):
        raise DataError(f"json_keys={' '.join(keys)}: a .txt file has one text only; give one key")
    arguments: dict[str, Any] = {
        "tokenizer_type": tokenizer_type,
        "tokenizer_model": tokenizer_model,
        "vocab_file": vocab_file,
        "merge_file": merge_file,
        "vocab_size": vocab_size,
    }
    tokenizer = build_tokenizer(**arguments)
    dtype = token_dtype(tokenizer.vocab_size)
    job = Job(tuple(files), tuple(keys), append_eod, arguments)
    prefixes = [f"{output_prefix}_{key}_document" for key in keys]
    writers: list[IndexedWriter] = []
    counts = [0] * len(keys)
    begin, told = time.perf_counter(), 0
    try:
        writers += [IndexedWriter(prefix, dtype) for prefix in prefixes]
        blocks = read_blocks(files)
        if workers > 1:
            results = _in_workers(blocks, job, workers, dtype)
        else:
            results = (tokenize_block(block, job, tokenizer, dtype) for block in blocks)
        for result in results:
            for k, writer in enumerate(writers):
                writer.add_many(result.tokens[k], result.lengths[k])
                counts[k] += len(result.tokens[k])
            documents, seconds = writers[0].num_documents, time.perf_counter() - begin
            if documents - told >= log_interval:
                told = documents
                print(
                    f"{documents} documents, {sum(counts)} tokens: {documents / seconds:.0f} documents/s, "
                    f"{sum(counts) / seconds:.3g} tokens/s",
                    file=sys.stderr,
                )
        if not any(counts):
            raise DataError(f"input={' '.join(patterns)} holds no text")
        names = [Path(name).name for name in files]
        for k, writer in enumerate(writers):
            writer.finish(make_info(tokenizer, writer.num_documents, counts[k], names))
    except OSError as error:
        raise DataError(
            f"{output_prefix}: {error.strerror or error}; nothing was written under the final names"
        ) from error
    finally:
        for writer in writers:
            writer.abort()
    return prefixes
