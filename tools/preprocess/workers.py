"""Blocks of text to tokens, here or in worker processes; results in the order of the blocks.

    reader thread -> queue -> this process -> pipe -> workers: parse, check, tokenize -> pipe -> this process, in order

Memory is bounded: at most AHEAD blocks per worker are under way and as many wait in the queue. A worker has one block
at a time, so that neither end ever waits in a full pipe, and gets the next one before this process looks at what it
sent. Workers speak plain bytes over pipes, so that a worker that dies (out of memory) is one clear error, where a
multiprocessing.Pool would wait forever.
"""

import json
import multiprocessing
import queue
import struct
import threading
import traceback
from collections.abc import Generator, Iterator
from dataclasses import dataclass, field
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
from tools.preprocess.fast_tokenizer import FastTokenizer, accelerate, surround
from tools.preprocess.indexed_writer import token_dtype
from tools.preprocess.parse_records import BadLine, parse_block
from tools.preprocess.text_input import TextBlock

AHEAD = 3
SAMPLES = 100  # bad lines of one reason that are shown, of a block and of a run; all are counted
FRAME = struct.Struct("<BQ")  # kind, number of the first line


@dataclass(frozen=True)
class Job:
    """How each text is turned into tokens, in plain values, which any start method can pass on to workers."""

    tokenizer: dict[str, Any]  # arguments of build_tokenizer
    keys: tuple[str, ...] = ("text",)
    append_eod: bool = False
    fast: bool = False  # by gigatoken, where it makes the same ids; `preprocess` decides it once, for all workers
    plugins: PluginSources = field(default_factory=plugin_sources)


@dataclass
class Result:
    """One block, tokenized: per key the tokens and the length of each document, and what was left out."""

    tokens: list[NDArray[Any]] = field(default_factory=list)
    lengths: list[NDArray[np.int32]] = field(default_factory=list)
    empty: list[int] = field(default_factory=list)  # per key
    text_bytes: list[int] = field(default_factory=list)  # of the texts tokenized, UTF-8, per key
    records: int = 0  # good and bad
    bad: dict[str, int] = field(default_factory=dict)  # by reason
    samples: list[tuple[int, str, str, str]] = field(default_factory=list)  # line, reason, detail, how it begins
    size: int = 0  # of the block, bytes


def tokenize_block(kind: int, line: int, payload: bytes, job: Job, tokenizer: Tokenizer) -> Result:
    """Tokenize one block. Texts without tokens are left out; bad records are counted, and the first ones shown."""
    texts: list[list[str]] = [[] for _ in job.keys]
    result = Result(size=len(payload))
    for number, found in parse_block(kind, line, payload, job.keys):
        result.records += 1
        if isinstance(found, BadLine):
            count = result.bad[found.reason] = result.bad.get(found.reason, 0) + 1
            if count <= SAMPLES:
                result.samples.append((number, found.reason, str(found), found.text))
            continue
        for column, text in zip(texts, found, strict=True):
            column.append(text)
    for column in texts:
        flat, lengths = _encode([text for text in column if text], tokenizer, job.append_eod)
        result.tokens.append(flat)
        result.lengths.append(lengths)
        result.empty.append(len(column) - len(lengths))
        result.text_bytes.append(sum(len(text.encode("utf-8")) for text in column))
    return result


def _encode(texts: list[str], tokenizer: Tokenizer, append_eod: bool) -> tuple[NDArray[Any], NDArray[np.int32]]:
    """Tokens end to end, as they are stored, and their number per text, without the texts that have none."""
    dtype = token_dtype(tokenizer.vocab_size)
    if not texts:
        return np.empty(0, dtype), np.empty(0, np.int32)
    ids, lengths = tokenizer.encode_concatenated(texts)
    if ids.size and not 0 <= int(ids.min()) <= int(ids.max()) < tokenizer.vocab_size:
        outside = f"made ids from {ids.min()} to {ids.max()}, outside its vocabulary of {tokenizer.vocab_size}"
        raise DataError(f"{tokenizer.name} {outside}: its files do not belong together")
    ids, lengths = ids.astype(dtype), lengths[lengths > 0]
    if append_eod and not tokenizer.ends_texts:
        ids, lengths = surround(ids, lengths, (), (tokenizer.eod,))
    return ids, lengths.astype(np.int32)


def load_tokenizer(job: Job) -> Tokenizer:
    load_plugins([*job.plugins], job.plugins)
    tokenizer = build_tokenizer(**job.tokenizer)
    if not job.fast:
        return tokenizer
    fast = accelerate(tokenizer)
    if not isinstance(fast, FastTokenizer):
        raise DataError(f"gigatoken, chosen at the start, cannot be used for {tokenizer.name} now; run without it")
    return fast


def _pack(result: Result) -> bytes:
    head = {
        "dtype": result.tokens[0].dtype.str,
        "sizes": [[len(n), len(tokens)] for n, tokens in zip(result.lengths, result.tokens, strict=True)],
        "rest": [result.empty, result.text_bytes, result.records, result.bad, result.samples, result.size],
    }
    parts = [array.tobytes() for pair in zip(result.lengths, result.tokens, strict=True) for array in pair]
    return b"".join([json.dumps(head).encode(), b"\n", *parts])


def _unpack(message: bytes) -> Result:
    head, _, _ = message.partition(b"\n")
    about, at = json.loads(head), len(head) + 1
    if isinstance(about, str):
        raise DataError(about)
    result, dtype = Result([], [], *about["rest"]), np.dtype(about["dtype"])
    for documents, tokens in about["sizes"]:
        result.lengths.append(np.frombuffer(message, np.int32, documents, at))
        at += 4 * documents
        result.tokens.append(np.frombuffer(message, dtype, tokens, at))
        at += dtype.itemsize * tokens
    return result


def _work(pipe: Connection, job: Job) -> None:
    """A worker: blocks in, packed results out, until the pipe closes. An error is a message too."""
    # one process per core is the parallelism: threads of the library below it would only get in each other's way
    set_env_defaults(TOKENIZERS_PARALLELISM="false", RAYON_NUM_THREADS="1")
    tokenizer = None
    while True:
        try:
            message = pipe.recv_bytes()
        except (EOFError, ConnectionResetError, KeyboardInterrupt):
            return
        try:
            tokenizer = tokenizer or load_tokenizer(job)
            kind, line = FRAME.unpack_from(message)
            answer = _pack(tokenize_block(kind, line, message[FRAME.size :], job, tokenizer))
        except KeyboardInterrupt:
            return
        except DataError as error:
            answer = json.dumps(str(error)).encode() + b"\n"
        except BaseException as error:  # SystemExit of a plugin would end this process in silence
            traceback.print_exception(error)
            answer = json.dumps(f"a worker process failed: {message_of(error)}").encode() + b"\n"
        try:
            pipe.send_bytes(answer)
        except (BrokenPipeError, ConnectionResetError, KeyboardInterrupt):
            return


def _died(process: Any, workers: int) -> DataError:
    process.join(5)
    return DataError(
        f"a worker process ended with code {process.exitcode}; -9 means that memory ran out: "
        f"use fewer than --workers {workers}"
    )


def ahead(blocks: Iterator[TextBlock], depth: int) -> Generator[TextBlock]:
    """The same blocks, read by a thread up to `depth` ahead: reading and decompressing overlap with the rest."""
    ready: queue.Queue[TextBlock | BaseException | None] = queue.Queue(depth)
    stop = threading.Event()

    def put(item: TextBlock | BaseException | None) -> bool:
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
        except BaseException as error:  # to be raised where the blocks are used
            put(error)

    threading.Thread(target=read, name="read input", daemon=True).start()
    try:
        while (item := ready.get()) is not None:
            if isinstance(item, BaseException):
                raise item
            yield item
    finally:
        stop.set()


def in_process(blocks: Iterator[TextBlock], job: Job, tokenizer: Tokenizer) -> Generator[tuple[TextBlock, Result]]:
    for block in blocks:
        yield block, tokenize_block(block.kind, block.line, block.payload, job, tokenizer)


def in_workers(blocks: Iterator[TextBlock], job: Job, workers: int) -> Generator[tuple[TextBlock, Result]]:
    """Results in the order of `blocks`, with the block. An idle worker gets the next block; a dead one ends the run."""
    context = multiprocessing.get_context("spawn")  # a fork would inherit the tokenizer's threads
    processes: dict[Connection, Any] = {}
    under_way: dict[Connection, int] = {}
    waiting = ahead(blocks, AHEAD * workers)
    try:
        for _ in range(workers):
            here, there = context.Pipe()
            process = context.Process(target=_work, args=(there, job), daemon=True)
            with safe_start():
                process.start()
            there.close()
            processes[here] = process
        sent: dict[int, TextBlock] = {}
        done: dict[int, Result] = {}
        begun = emitted = 0
        all_read = False
        while True:
            for pipe in processes.keys() - under_way.keys():
                if all_read or begun - emitted >= AHEAD * workers:
                    break
                if (block := next(waiting, None)) is None:
                    all_read = True
                    break
                try:
                    pipe.send_bytes(FRAME.pack(block.kind, block.line) + block.payload)
                except OSError:
                    raise _died(processes[pipe], workers) from None
                sent[begun], under_way[pipe] = block._replace(payload=b""), begun
                begun += 1
            while emitted in done:
                yield sent.pop(emitted), done.pop(emitted)
                emitted += 1
            if not under_way:
                if all_read:
                    break
                continue
            for pipe in wait(list(under_way)):
                try:
                    message = pipe.recv_bytes()  # type: ignore[union-attr]
                except (EOFError, OSError):
                    raise _died(processes[pipe], workers) from None  # type: ignore[index]
                done[under_way.pop(pipe)] = _unpack(message)  # type: ignore[arg-type]
    finally:
        waiting.close()
        for pipe, process in processes.items():
            pipe.close()
            process.terminate()
        for process in processes.values():
            process.join()
