"""Tokenize blocks of text, in this process or in worker processes, and return results in the order of the blocks.

    reader thread -> queue -> this process -> pipe -> workers: parse, check, tokenize -> pipe -> this process, in order

Memory is bounded: at most MAX_AHEAD blocks per worker are in progress, and as many wait in the queue. A worker has one
block at a time, so neither end ever blocks on a full pipe. It gets the next block before this process handles its
result. Workers exchange plain bytes over pipes, so that a worker that dies (out of memory) is one clear error, where a
multiprocessing.Pool would wait forever.
"""

import json
import multiprocessing
import queue
import struct
import threading
import traceback
from collections.abc import Generator, Iterator
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection, wait
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megalite.common.environment import set_env_defaults
from megalite.common.exits import message_of
from megalite.config.plugins import PluginSources, load_plugins, plugin_sources
from megalite.data.errors import DataError
from megalite.data.tokenizers.build_tokenizer import build_tokenizer
from megalite.data.tokenizers.tokenizer import Tokenizer
from megalite.launch.children import safe_start
from tools.preprocess.fast_tokenizer import FastTokenizer, accelerate, add_prefix_suffix
from tools.preprocess.indexed_writer import token_dtype
from tools.preprocess.parse_records import BadLine, parse_block
from tools.preprocess.text_input import TextBlock

MAX_AHEAD = 3
MAX_SAMPLES = 100  # samples of bad lines with one reason, in a block and in a run
HEADER = struct.Struct("<BQ")  # kind, number of the first line


@dataclass(frozen=True)
class Job:
    """The conversion of texts into tokens, in plain values, so that any start method can send it to workers.

    Attributes:
        tokenizer: the arguments of build_tokenizer.
        keys: the keys of the texts.
        append_eod: end every document with the end-of-document token.
        fast: use gigatoken. `preprocess` decides once, for all workers, whether it returns the same ids.
        plugins: the plugins that workers load.
    """

    tokenizer: dict[str, Any]
    keys: tuple[str, ...] = ("text",)
    append_eod: bool = False
    fast: bool = False
    plugins: PluginSources = field(default_factory=plugin_sources)


@dataclass
class Result:
    """The tokens of one block.

    Attributes:
        tokens: for each key, the tokens of all documents.
        lengths: for each key, the number of tokens of each document.
        empty: for each key, the number of texts without tokens, which are omitted.
        text_bytes: for each key, the UTF-8 bytes of the texts.
        records: the number of records, good and bad.
        bad: reason -> number of bad records.
        samples: (line, reason, detail, beginning of the text) of the first bad records.
        size: the bytes of the block.
    """

    tokens: list[NDArray[Any]] = field(default_factory=list)
    lengths: list[NDArray[np.int32]] = field(default_factory=list)
    empty: list[int] = field(default_factory=list)
    text_bytes: list[int] = field(default_factory=list)
    records: int = 0
    bad: dict[str, int] = field(default_factory=dict)
    samples: list[tuple[int, str, str, str]] = field(default_factory=list)
    size: int = 0


def tokenize_block(kind: int, line: int, payload: bytes, job: Job, tokenizer: Tokenizer) -> Result:
    """Tokenize one block, as `parse_block` takes it."""
    texts: list[list[str]] = [[] for _ in job.keys]
    result = Result(size=len(payload))
    for number, record in parse_block(kind, line, payload, job.keys):
        result.records += 1
        if isinstance(record, BadLine):
            count = result.bad.get(record.reason, 0) + 1
            result.bad[record.reason] = count
            if count <= MAX_SAMPLES:
                result.samples.append((number, record.reason, str(record), record.text))
            continue
        for column, text in zip(texts, record, strict=True):
            column.append(text)
    for column in texts:
        tokens, lengths = _encode([text for text in column if text], tokenizer, job.append_eod)
        result.tokens.append(tokens)
        result.lengths.append(lengths)
        result.empty.append(len(column) - len(lengths))
        result.text_bytes.append(sum(len(text.encode("utf-8")) for text in column))
    return result


def _encode(texts: list[str], tokenizer: Tokenizer, append_eod: bool) -> tuple[NDArray[Any], NDArray[np.int32]]:
    """Return (concatenated tokens in the stored dtype, number of tokens per text), without texts that have none."""
    dtype = token_dtype(tokenizer.vocab_size)
    if not texts:
        return np.empty(0, dtype), np.empty(0, np.int32)
    ids, lengths = tokenizer.encode_concatenated(texts)
    if ids.size and not 0 <= int(ids.min()) <= int(ids.max()) < tokenizer.vocab_size:
        problem = f"made ids from {ids.min()} to {ids.max()}, outside its vocabulary of {tokenizer.vocab_size}"
        raise DataError(f"{tokenizer.name} {problem}: its files do not belong together")
    ids = ids.astype(dtype)
    lengths = lengths[lengths > 0]
    if append_eod and not tokenizer.ends_texts:
        ids, lengths = add_prefix_suffix(ids, lengths, (), (tokenizer.eod,))
    return ids, lengths.astype(np.int32)


def load_tokenizer(job: Job) -> Tokenizer:
    """Load the tokenizer of a job in a worker."""
    load_plugins([*job.plugins], job.plugins)
    tokenizer = build_tokenizer(**job.tokenizer)
    if not job.fast:
        return tokenizer
    fast = accelerate(tokenizer)
    if not isinstance(fast, FastTokenizer):
        raise DataError(f"gigatoken, chosen at the start, cannot be used for {tokenizer.name} now; run without it")
    return fast


def _pack(result: Result) -> bytes:
    """Return a result as bytes: a line of JSON, then for each key the lengths and the tokens."""
    header = {
        "dtype": result.tokens[0].dtype.str,
        "sizes": [[len(n), len(tokens)] for n, tokens in zip(result.lengths, result.tokens, strict=True)],
        "counts": {
            "empty": result.empty,
            "text_bytes": result.text_bytes,
            "records": result.records,
            "bad": result.bad,
            "samples": result.samples,
            "size": result.size,
        },
    }
    parts = [json.dumps(header).encode(), b"\n"]
    for lengths, tokens in zip(result.lengths, result.tokens, strict=True):
        parts += [lengths.tobytes(), tokens.tobytes()]
    return b"".join(parts)


def _pack_error(text: str) -> bytes:
    return json.dumps(text).encode() + b"\n"


def _unpack(message: bytes) -> Result:
    """Return the result of `_pack`. Raises DataError for a message of `_pack_error`."""
    line, _, _ = message.partition(b"\n")
    header = json.loads(line)
    if isinstance(header, str):
        raise DataError(header)
    result = Result(**header["counts"])
    dtype = np.dtype(header["dtype"])
    offset = len(line) + 1
    for num_documents, num_tokens in header["sizes"]:
        result.lengths.append(np.frombuffer(message, np.int32, num_documents, offset))
        offset += 4 * num_documents
        result.tokens.append(np.frombuffer(message, dtype, num_tokens, offset))
        offset += dtype.itemsize * num_tokens
    return result


def _run_worker(pipe: Connection, job: Job) -> None:
    """Receive blocks and send packed results or errors until the pipe closes."""
    # there is one process per core, so threads of the libraries would only compete with each other
    set_env_defaults(TOKENIZERS_PARALLELISM="false", RAYON_NUM_THREADS="1")
    tokenizer = None
    while True:
        try:
            message = pipe.recv_bytes()
        except (EOFError, ConnectionResetError, KeyboardInterrupt):
            return
        try:
            tokenizer = tokenizer or load_tokenizer(job)
            kind, line = HEADER.unpack_from(message)
            reply = _pack(tokenize_block(kind, line, message[HEADER.size :], job, tokenizer))
        except KeyboardInterrupt:
            return
        except DataError as error:
            reply = _pack_error(str(error))
        except BaseException as error:  # SystemExit of a plugin would end this process without a message
            traceback.print_exception(error)
            reply = _pack_error(f"a worker process failed: {message_of(error)}")
        try:
            pipe.send_bytes(reply)
        except (BrokenPipeError, ConnectionResetError, KeyboardInterrupt):
            return


def _worker_died(process: Any, num_workers: int) -> DataError:
    """Return the error for a worker that has ended."""
    process.join(5)
    return DataError(
        f"a worker process ended with code {process.exitcode}; -9 means that memory ran out: "
        f"use fewer than --workers {num_workers}"
    )


def read_ahead(blocks: Iterator[TextBlock], depth: int) -> Generator[TextBlock]:
    """Yield the blocks, which a thread reads up to `depth` ahead to overlap reading and decompression with the rest."""
    ready: queue.Queue[TextBlock | BaseException | None] = queue.Queue(depth)
    stop = threading.Event()

    def put(item: TextBlock | BaseException | None) -> bool:
        """Return False if nobody needs the blocks any more."""
        while not stop.is_set():
            try:
                ready.put(item, timeout=0.1)
                return True
            except queue.Full:
                pass
        return False

    def read() -> None:
        try:
            for block in blocks:
                if not put(block):
                    return
            put(None)
        except BaseException as error:  # raised again in the thread that uses the blocks
            put(error)

    threading.Thread(target=read, name="read input", daemon=True).start()
    try:
        while (item := ready.get()) is not None:
            if isinstance(item, BaseException):
                raise item
            yield item
    finally:
        stop.set()


def tokenize_in_process(
    blocks: Iterator[TextBlock], job: Job, tokenizer: Tokenizer
) -> Generator[tuple[TextBlock, Result]]:
    """Yield the blocks with their results."""
    for block in blocks:
        yield block, tokenize_block(block.kind, block.line, block.payload, job, tokenizer)


def tokenize_in_workers(blocks: Iterator[TextBlock], job: Job, num_workers: int) -> Generator[tuple[TextBlock, Result]]:
    """Yield the blocks, without their payload, with their results, in order. Raises DataError if a worker dies."""
    context = multiprocessing.get_context("spawn")  # a fork would inherit the tokenizer's threads
    processes: dict[Connection, Any] = {}
    in_progress: dict[Connection, int] = {}  # pipe of a busy worker -> number of its block
    upcoming = read_ahead(blocks, MAX_AHEAD * num_workers)
    try:
        for _ in range(num_workers):
            local_end, worker_end = context.Pipe()
            process = context.Process(target=_run_worker, args=(worker_end, job), daemon=True)
            with safe_start():
                process.start()
            worker_end.close()
            processes[local_end] = process
        sent_blocks: dict[int, TextBlock] = {}
        results: dict[int, Result] = {}
        num_sent = num_yielded = 0
        all_read = False
        while True:
            for pipe in processes.keys() - in_progress.keys():
                if all_read or num_sent - num_yielded >= MAX_AHEAD * num_workers:
                    break
                block = next(upcoming, None)
                if block is None:
                    all_read = True
                    break
                try:
                    pipe.send_bytes(HEADER.pack(block.kind, block.line) + block.payload)
                except OSError:
                    raise _worker_died(processes[pipe], num_workers) from None
                sent_blocks[num_sent] = replace(block, payload=b"")
                in_progress[pipe] = num_sent
                num_sent += 1
            while num_yielded in results:
                yield sent_blocks.pop(num_yielded), results.pop(num_yielded)
                num_yielded += 1
            if not in_progress:
                if all_read:
                    break
                continue
            for pipe in wait(list(in_progress)):
                try:
                    message = pipe.recv_bytes()  # type: ignore[union-attr]
                except (EOFError, OSError):
                    raise _worker_died(processes[pipe], num_workers) from None  # type: ignore[index]
                results[in_progress.pop(pipe)] = _unpack(message)  # type: ignore[arg-type]
    finally:
        upcoming.close()
        for pipe, process in processes.items():
            pipe.close()
            process.terminate()
        for process in processes.values():
            process.join()
