"""Turn raw text into token files, in a run that can be interrupted and resumed.

    files -> blocks of lines (512 KiB) -> workers: parse, check, tokenize -> writer, by block number
    write    results, in order -> .bin.partial, .lengths.partial, .rejects.jsonl.partial; sync + journal at intervals
    finish   the journal is marked complete -> pairs get their final names one by one -> rejects -> journal removed

A crash at any point leaves either a journal, from which a resumed run makes the same files, or the finished files. The
output has the same bytes for any number of workers, and with or without interruptions.
"""

import contextlib
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import accumulate
from pathlib import Path
from typing import Any

from megalite.checkpoint.storage import local_storage
from megalite.common.console import ProgressBar, print_err
from megalite.data.errors import DataError
from megalite.data.files.sidecar import read_sidecar
from megalite.data.tokenizers.build_tokenizer import build_tokenizer
from megalite.data.tokenizers.tokenizer import Tokenizer
from tools.preprocess.bad_records import Rejects, check_bad_fraction, check_fraction, format_counts
from tools.preprocess.fast_tokenizer import FastTokenizer, accelerate
from tools.preprocess.indexed_writer import IndexedWriter, token_dtype
from tools.preprocess.journal import Journal, Progress
from tools.preprocess.parse_records import BadLine, parse_block
from tools.preprocess.text_input import MAX_DOCUMENT_BYTES, TextBlock, expand, format_of, read_blocks
from tools.preprocess.workers import Job, Result, tokenize_in_process, tokenize_in_workers

JOURNAL_SECONDS = 30.0  # work that an interruption can lose; an entry costs an fsync of what was written since the last
JOURNAL_BYTES = 256 << 20  # of tokens
READ_AHEAD = 1 << 14  # the most that a decompressor may have read beyond the data that it has returned


def make_info(tokenizer: Tokenizer, documents: int, tokens: int, sources: Sequence[str]) -> dict[str, Any]:
    """Return the content of the .json file of a token file (megalite/data/files/sidecar.py)."""
    return {
        "version": 1,
        "tokenizer": {
            "name": tokenizer.name,
            "fingerprint": tokenizer.fingerprint,
            "vocab_size": tokenizer.vocab_size,
            "eod": tokenizer.eod,
        },
        "documents": documents,
        "tokens": tokens,
        "sources": list(sources),
    }


class TokenizeRun:
    """One preprocessing run.

    Args:
        files: the input files, in order.
        output_prefix: the prefix of all output files.
        job: how texts become tokens.
        tokenizer: the tokenizer of the job.
        max_bad_fraction: the largest allowed fraction of bad lines.
    """

    def __init__(
        self, files: Sequence[str], output_prefix: str, job: Job, tokenizer: Tokenizer, max_bad_fraction: float
    ):
        self.files = files
        self.job = job
        self.tokenizer = tokenizer
        self.max_bad_fraction = max_bad_fraction
        self.prefixes = [f"{output_prefix}_{key}_document" for key in job.keys]
        self.journal_path = Path(f"{output_prefix}.journal")
        self._rejects_path = Path(f"{output_prefix}.rejects.jsonl")
        self._names = [Path(name).name for name in files]
        self._stats = [None if name == "-" else os.stat(name) for name in files]
        sizes = [stat.st_size for stat in self._stats if stat]
        self._sizes = sizes if len(sizes) == len(files) else None
        self.progress = Progress()
        self.is_resumed = False
        self._journal: Journal | None = None
        self._writers: list[IndexedWriter | None] = []  # None: the pair has its final names
        self._rejects: Rejects | None = None

    def _header(self) -> dict[str, Any]:
        """Return the facts that must be the same when an interrupted run is resumed."""
        stats = zip(self.files, self._stats, strict=True)
        return {
            "version": 1,
            "tokenizer": self.tokenizer.fingerprint,
            "keys": list(self.job.keys),
            "append_eod": self.job.append_eod,
            "max_document_bytes": MAX_DOCUMENT_BYTES,
            "files": [[name, stat.st_size, stat.st_mtime_ns] if stat else [name] for name, stat in stats],
        }

    def _source_bytes(self) -> int:
        """Return the size of the input on disk, or what was read of standard input."""
        return self.progress.input_bytes if self._sizes is None else sum(self._sizes)

    def _info(self, k: int) -> dict[str, Any]:
        """Return the content of the .json file for key number `k`."""
        p = self.progress
        return {
            **make_info(self.tokenizer, p.documents[k], p.tokens[k], self._names),
            "append_eod": self.job.append_eod,
            "bytes": p.text_bytes[k],
            "source_bytes": self._source_bytes(),
            "records": p.records,
            "empty": p.empty[k],
            "bad": p.bad,
        }

    def is_complete(self) -> bool:
        """Return True if the output files exist, are newer than the input, and match this run by their .json files."""
        if None in self._stats:
            return False
        expected = (self.tokenizer.fingerprint, self.job.append_eod, self._source_bytes(), self._names)
        newest_input = max(stat.st_mtime for stat in self._stats if stat)
        for prefix in self.prefixes:
            try:
                info = read_sidecar(prefix)
                written = os.stat(f"{prefix}.idx").st_mtime
            except (OSError, DataError):
                return False
            if not info or written < newest_input:
                return False
            keys = ("append_eod", "source_bytes", "sources")
            if (info["tokenizer"]["fingerprint"], *(info.get(key) for key in keys)) != expected:
                return False
        return True

    def open(self, resume: bool, overwrite: bool) -> "TokenizeRun":
        """Open the journal and the output files, at the position of an interrupted run or at the start."""
        self._journal = Journal(self.journal_path, self._header(), resume, overwrite)
        self.is_resumed = self._journal.last is not None
        zeros = [0 for _ in self.prefixes]
        self.progress = self._journal.last or Progress(
            documents=list(zeros), tokens=list(zeros), empty=list(zeros), text_bytes=list(zeros)
        )
        p = self.progress
        dtype = token_dtype(self.tokenizer.vocab_size)
        try:
            for k, prefix in enumerate(self.prefixes):
                # an interrupted `finish` handles the pairs one by one and removes the lengths of each last; then the
                # rejects follow
                if p.complete and not Path(f"{prefix}.lengths.partial").exists():
                    self._writers.append(None)
                    continue
                resume_at = (p.documents[k], p.tokens[k]) if self.is_resumed else None
                self._writers.append(IndexedWriter(prefix, dtype, resume_at))
            if not p.complete or Path(f"{self._rejects_path}.partial").exists():
                self._rejects = Rejects(self._rejects_path, self.files, p.rejects_bytes)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __enter__(self) -> "TokenizeRun":
        return self

    def __exit__(self, *_: object) -> None:
        """Close the files. After an error, keep them for --resume if the journal has an entry, or delete them."""
        keep = self._journal is not None and self._journal.last is not None
        for writer in filter(None, self._writers):
            if keep:
                writer.keep()
            else:
                writer.abort()
        if self._rejects:
            self._rejects.close(remove=not keep)
        if self._journal:
            self._journal.close(remove=not keep)

    def resume_hint(self) -> str:
        """Return the end of an error message, which says what is left on disk."""
        if self._journal is None:
            return ""
        if self._journal.last is None:
            return "; nothing was written under the final names"
        return f"; what was done is kept in {self.journal_path}: continue from there with --resume"

    def finish(self) -> None:
        """Give all files their final names. If it is interrupted at any point, a resumed run repeats it."""
        for k, writer in enumerate(self._writers):
            if writer:
                writer.finish(self._info(k))
        if self._rejects:
            self._rejects.finish(self.progress.rejects_bytes)
        if self._journal:
            self._journal.close(remove=True)
        num_empty = sum(self.progress.empty)
        if self.progress.bad:
            counts = f"{format_counts(self.progress.bad)} (samples in {self._rejects_path})"
            print_err(f"left out: {num_empty} texts without tokens; bad lines: {counts}")
        elif num_empty:
            print_err(f"left out: {num_empty} texts without tokens; bad lines: none")

    def write(self, results: Iterator[tuple[TextBlock, Result]], log_interval: int) -> None:
        """Append every result, and an entry to the journal at intervals; mark the last entry as complete."""
        p = self.progress
        meter = ProgressMeter(p, self._sizes)
        journal_time = time.monotonic()
        bytes_since_journal = 0
        num_logged = p.documents[0]
        with ProgressBar(f"tokenizing {self._names[0]}", 100, "%") as bar:
            for block, result in results:
                if result.bad and not self.max_bad_fraction:
                    line, _, detail, _ = result.samples[0]
                    location = f"{self.files[block.file]}:{line}"
                    raise DataError(f"{location}: {detail}; --max-bad-fraction leaves bad lines out")
                bytes_since_journal += self._append(block, result)
                meter.update(block)
                if time.monotonic() - journal_time >= JOURNAL_SECONDS or bytes_since_journal >= JOURNAL_BYTES:
                    self._write_journal_entry()
                    journal_time = time.monotonic()
                    bytes_since_journal = 0
                if bar.live:
                    bar.update(100 * (meter.fraction or 0), meter.rates())
                elif p.documents[0] - num_logged >= log_interval:
                    num_logged = p.documents[0]
                    print_err(meter.line())
                if meter.fraction is not None:
                    self._check_bad_fraction(min(meter.fraction, 0.999))
        self._check_bad_fraction(1.0)
        if not any(p.tokens):
            raise DataError(f"input={' '.join(self.files[:9])} holds no text")
        p.complete = True
        self._write_journal_entry()

    def _append(self, block: TextBlock, result: Result) -> int:
        """Append a result to the files and counts, and return its bytes of tokens."""
        p = self.progress
        if self._rejects:
            self._rejects.add(block.file, result, p)
        for k, writer in enumerate(self._writers):
            if writer:
                writer.add_many(result.tokens[k], result.lengths[k])
                p.documents[k] = writer.num_documents
                p.tokens[k] = writer.num_tokens
            p.empty[k] += result.empty[k]
            p.text_bytes[k] += result.text_bytes[k]
        p.records += result.records
        p.input_bytes += result.size
        p.position = block.next
        return sum(tokens.nbytes for tokens in result.tokens)

    def _check_bad_fraction(self, fraction_read: float) -> None:
        hint = f"samples are in {self._rejects_path}.partial"
        try:
            check_bad_fraction(self.progress, self.max_bad_fraction, fraction_read, hint)
        except DataError:
            self._write_journal_entry()  # keeps the samples, and the work for a resumed run with another limit
            raise

    def _write_journal_entry(self) -> None:
        for writer in filter(None, self._writers):
            writer.sync()
        if self._rejects and self._journal:
            self._rejects.sync()
            local_storage.fsync_path(self._rejects_path.parent)
            self._journal.append(self.progress)


class ProgressMeter:
    """The speed of a run: rates since its start, fraction of the input, and remaining time.

    Args:
        progress: the counts, which the run updates.
        sizes: bytes of each input file on disk; None if one is unknown.

    Attributes:
        fraction: the fraction of the input that was read; None if its size is unknown.
    """

    def __init__(self, progress: Progress, sizes: Sequence[int] | None):
        self.fraction: float | None = None
        self._progress = progress
        self._start_time = time.perf_counter()
        self._start_documents = progress.documents[0]
        self._start_tokens = sum(progress.tokens)
        self._start_bytes = progress.input_bytes
        self._start_fraction: float | None = None
        self._file_offsets = None if sizes is None else [*accumulate(sizes, initial=0)]

    def update(self, block: TextBlock) -> None:
        """Update the fraction after a block."""
        offsets = self._file_offsets
        if offsets and offsets[-1]:
            self.fraction = (offsets[block.file] + max(block.disk - READ_AHEAD, 0)) / offsets[-1]
            if self._start_fraction is None:
                self._start_fraction = self.fraction

    def rates(self) -> str:
        """Return documents, bytes and tokens per second."""
        seconds = max(time.perf_counter() - self._start_time, 1e-9)
        documents = self._progress.documents[0] - self._start_documents
        num_bytes = self._progress.input_bytes - self._start_bytes
        tokens = sum(self._progress.tokens) - self._start_tokens
        return (
            f"{documents / seconds:.0f} documents/s, {num_bytes / seconds / 1e6:.1f} MB/s, "
            f"{tokens / seconds:.3g} tokens/s"
        )

    def line(self) -> str:
        """Return a line for the log."""
        text = f"{self._progress.documents[0]} documents, {sum(self._progress.tokens)} tokens: {self.rates()}"
        if self.fraction is None or self._start_fraction is None:
            return text
        text += f"; {100 * self.fraction:.1f} % of the input"
        if self.fraction > self._start_fraction:
            elapsed = time.perf_counter() - self._start_time
            left = round(elapsed * (1 - self.fraction) / (self.fraction - self._start_fraction))
            text += f", {left // 3600}:{left // 60 % 60:02d}:{left % 60:02d} left"
        return text


NUM_COMPARED = 200  # documents on which gigatoken has to return the same ids as the tokenizer
MAX_COMPARED_LENGTH = 1 << 16  # characters; longer documents would make the start slow


def preprocess(
    patterns: Sequence[str],
    output_prefix: str,
    job: Job,
    *,
    workers: int = 1,
    log_interval: int = 10_000,
    max_bad_fraction: float = 0.0,
    resume: bool = False,
    overwrite: bool = False,
) -> list[str]:
    """Write `{output_prefix}_{key}_document.bin/.idx/.json` for every key of the job, and return these prefixes.

    Args:
        patterns: files or globs (see text_input.py); "-" is standard input.
        output_prefix: the prefix of all output files.
        job: how texts become tokens.
        workers: the number of processes.
        log_interval: documents between two lines of progress.
        max_bad_fraction: the largest allowed fraction of bad lines; 0 ends the run at the first one. Bad lines are
            omitted, with samples in `{output_prefix}.rejects.jsonl`. Texts without tokens are omitted, but not bad.
        resume: resume an interrupted run of the same input and tokenizer, if there is one.
        overwrite: discard an interrupted run; without either flag it is an error.

    Raises:
        DataError: The input is bad, or the output cannot be written.
    """
    files = expand(patterns)
    _check_args(files, job.keys, max_bad_fraction, resume, overwrite)
    tokenizer = build_tokenizer(**job.tokenizer)
    if job.fast:  # decided here, once, so that the output does not depend on the number of workers
        tokenizer = accelerate(tokenizer, _first_texts(files, job.keys))
        job = replace(job, fast=isinstance(tokenizer, FastTokenizer))
    if job.append_eod and tokenizer.ends_texts:
        note = f"{tokenizer.name} ends each text with the end of a document already"
        print_err(f"note: {note}; --append-eod adds no second one")
    run = TokenizeRun(files, output_prefix, job, tokenizer, max_bad_fraction)
    if resume and not run.journal_path.exists() and run.is_complete():
        print_err(f"{output_prefix}: complete already, there is nothing to resume")
        return run.prefixes
    try:
        with run.open(resume, overwrite):
            if run.is_resumed:
                p = run.progress
                print_err(f"resuming after {p.documents[0]} documents, {sum(p.tokens)} tokens")
            elif resume:
                print_err("nothing to resume, starting from the beginning")
            if not run.progress.complete:
                blocks = read_blocks(files, job.keys, run.progress.position)
                if workers > 1:
                    results = tokenize_in_workers(blocks, job, workers)
                else:
                    results = tokenize_in_process(blocks, job, tokenizer)
                with contextlib.closing(results):
                    run.write(results, log_interval)
            run.finish()
    except OSError as error:
        raise DataError(f"{output_prefix}: {error.strerror or error}{run.resume_hint()}") from error
    except DataError as error:
        raise DataError(f"{error}{run.resume_hint()}") from error
    return run.prefixes


def _check_args(
    files: Sequence[str], keys: Sequence[str], max_bad_fraction: float, resume: bool, overwrite: bool
) -> None:
    """Raise DataError for arguments that cannot work."""
    check_fraction(max_bad_fraction)
    if resume and overwrite:
        raise DataError("resume and overwrite: an interrupted run is continued or discarded; give one of them")
    if len(set(keys)) != len(keys):
        raise DataError(f"json_keys={' '.join(keys)} names a key twice; give each once")
    for name in files:
        if len(keys) > 1 and format_of(name) == "text":
            raise DataError(f"json_keys={' '.join(keys)}: {name} has one text only; give one key")
        if name != "-" and not os.access(name, os.R_OK):  # otherwise it would fail hours later
            raise DataError(f"{name}: cannot be read; change its permissions or drop it from the input")


def _first_texts(files: Sequence[str], keys: Sequence[str]) -> list[str]:
    """Return texts to compare tokenizers on; none from standard input, which can be read only once."""
    if files[0] == "-":
        return []
    block = next(read_blocks(files[:1], keys), None)
    if block is None:
        return []
    compared: list[str] = []
    for _, record in parse_block(block.kind, block.line, block.payload, keys):
        if not isinstance(record, BadLine):
            compared += [text for text in record if len(text) < MAX_COMPARED_LENGTH]
        if len(compared) >= NUM_COMPARED:
            break
    return compared[:NUM_COMPARED]
