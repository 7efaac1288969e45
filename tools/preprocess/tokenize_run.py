"""Raw text to token files: one preprocessing run, what is done so far, and how it ends or is continued.

    files -> blocks of lines (512 KiB) -> workers: parse, check, tokenize -> writer, by block number
    write    results, in order -> .bin.partial, .lengths.partial, .rejects.jsonl.partial; now and then sync + journal
    finish   the journal says complete -> pairs visible one by one -> rejects -> journal removed

A crash at any point leaves either a journal, from which the same files come out, or the finished files. The output is
the same bytes for any number of workers, and whether the run was interrupted or not.
"""

import contextlib
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import accumulate, islice
from pathlib import Path
from typing import Any

from megalite.checkpoint.storage import local_storage as file_system
from megalite.common.console import ProgressBar, print_err
from megalite.data.errors import DataError
from megalite.data.files.sidecar import read_sidecar
from megalite.data.tokenizers.build_tokenizer import build_tokenizer
from megalite.data.tokenizers.tokenizer import Tokenizer
from tools.preprocess.bad_records import Rejects, check_fraction, in_words, judge
from tools.preprocess.fast_tokenizer import FastTokenizer, accelerate
from tools.preprocess.indexed_writer import IndexedWriter, token_dtype
from tools.preprocess.journal import Journal, Tally
from tools.preprocess.parse_records import BadLine, parse_block
from tools.preprocess.text_input import MAX_DOCUMENT_BYTES, TextBlock, expand, format_of, read_blocks
from tools.preprocess.workers import Job, Result, in_process, in_workers

JOURNAL_SECONDS = 30.0  # work that an interruption can cost; an entry costs one fsync of what was written since
JOURNAL_BYTES = 256 << 20  # of tokens
READ_AHEAD = 1 << 14  # a decompressor has taken in at most this much more than it has given out


def make_info(tokenizer: Tokenizer, documents: int, tokens: int, sources: Sequence[str]) -> dict[str, Any]:
    """The content of the .json file beside a token file (megalite/data/files/sidecar.py)."""
    made_by = {name: getattr(tokenizer, name) for name in ("name", "fingerprint", "vocab_size", "eod")}
    sizes = {"documents": documents, "tokens": tokens, "sources": list(sources)}
    return {"version": 1, "tokenizer": made_by, **sizes}


class TokenRun:
    """files: input, in order; output_prefix: as the user gave it; max_bad: share of bad lines that is accepted."""

    def __init__(self, files: Sequence[str], output_prefix: str, job: Job, model: Tokenizer, max_bad: float):
        self.files, self.job, self.model, self.max_bad = files, job, model, max_bad
        self.prefixes = [f"{output_prefix}_{key}_document" for key in job.keys]
        self.journal_path, self._rejects_path = (Path(f"{output_prefix}.{x}") for x in ("journal", "rejects.jsonl"))
        self._names = [Path(name).name for name in files]
        self._stats = [None if name == "-" else os.stat(name) for name in files]
        sizes = [about.st_size for about in self._stats if about]
        self._sizes = sizes if len(sizes) == len(files) else None
        self.progress, self.resumed = Tally(), False
        self._journal: Journal | None = None
        self._writers: list[IndexedWriter | None] = []  # None: that pair is visible already
        self._rejects: Rejects | None = None

    # what the run is

    def _header(self) -> dict[str, Any]:
        """The facts that must be the same for a run to continue where another one stopped."""
        stats = zip(self.files, self._stats, strict=True)
        return {
            "version": 1,
            "tokenizer": self.model.fingerprint,
            "keys": list(self.job.keys),
            "append_eod": self.job.append_eod,
            "max_document_bytes": MAX_DOCUMENT_BYTES,
            "files": [[name, about.st_size, about.st_mtime_ns] if about else [name] for name, about in stats],
        }

    def _source_bytes(self) -> int:
        """On disk; of standard input what was read of it."""
        return self.progress.input_bytes if self._sizes is None else sum(self._sizes)

    def _info(self, k: int) -> dict[str, Any]:
        p = self.progress
        return make_info(self.model, p.documents[k], p.tokens[k], self._names) | {
            "append_eod": self.job.append_eod,
            "bytes": p.text_bytes[k],
            "source_bytes": self._source_bytes(),
            "records": p.records,
            "empty": p.empty[k],
            "bad": p.bad,
        }

    def is_complete(self) -> bool:
        """Are the files there that this run would make? Told by their sidecars and by the times of the inputs."""
        if None in self._stats:
            return False
        want = (self.model.fingerprint, self.job.append_eod, self._source_bytes(), self._names)
        newest = max(about.st_mtime for about in self._stats if about)
        for prefix in self.prefixes:
            try:
                info, written = read_sidecar(prefix), os.stat(prefix + ".idx").st_mtime
            except (OSError, DataError):
                return False
            keys = ("append_eod", "source_bytes", "sources")
            if not info or (info["tokenizer"]["fingerprint"], *(info.get(key) for key in keys)) != want:
                return False
            if written < newest:
                return False
        return True

    # begin and end

    def open(self, resume: bool, overwrite: bool) -> "TokenRun":
        """Take the journal and the files; start over, or where an interrupted run stopped."""
        n, dtype = len(self.prefixes), token_dtype(self.model.vocab_size)
        self._journal = Journal(self.journal_path, self._header(), resume, overwrite)
        self.resumed = self._journal.last is not None
        zeros: dict[str, Any] = {name: [0] * n for name in ("documents", "tokens", "empty", "text_bytes")}
        self.progress = p = self._journal.last or Tally(**zeros)
        try:
            for k, prefix in enumerate(self.prefixes):
                # `finish` of a pair removes the lengths last, and the rejects follow when all pairs are done
                visible = p.complete and not Path(prefix + ".lengths.partial").exists()
                at = (p.documents[k], p.tokens[k]) if self.resumed else None
                self._writers.append(None if visible else IndexedWriter(prefix, dtype, at))
            if not p.complete or Path(f"{self._rejects_path}.partial").exists():
                self._rejects = Rejects(self._rejects_path, self.files, p.rejects_bytes)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __enter__(self) -> "TokenRun":
        return self

    def __exit__(self, *_: object) -> None:
        """After an error: keep what the journal vouches for; without an entry there is nothing to keep."""
        keep = self._journal is not None and self._journal.last is not None
        for writer in filter(None, self._writers):
            writer.keep() if keep else writer.abort()
        if self._rejects:
            self._rejects.close(remove=not keep)
        if self._journal:
            self._journal.close(remove=not keep)

    def outlook(self) -> str:
        """The end of an error's message, which says what is left on disk."""
        if self._journal is None:
            return ""
        if self._journal.last is None:
            return "; nothing was written under the final names"
        return f"; what was done is kept in {self.journal_path}: continue from there with --resume"

    def finish(self) -> None:
        """Give all files their final names. Interrupted anywhere, it is done again by resuming."""
        for k, writer in enumerate(self._writers):
            if writer:
                writer.finish(self._info(k))
        if self._rejects:
            self._rejects.finish(self.progress.rejects_bytes)
        if self._journal:
            self._journal.close(remove=True)
        p = self.progress
        if p.bad or any(p.empty):
            bad = in_words(p.bad) or "none"
            see = f" (samples in {self._rejects_path})" if p.bad else ""
            print_err(f"left out: {sum(p.empty)} texts without tokens; bad lines: {bad}{see}")

    # the work

    def write(self, results: Iterator[tuple[TextBlock, Result]], log_interval: int) -> None:
        """Append every result, and an entry to the journal now and then; the last entry says that all is written."""
        p, meter = self.progress, Meter(self.progress, self._sizes)
        noted, noted_bytes, told = time.monotonic(), 0, p.documents[0]
        with ProgressBar(f"tokenizing {self._names[0]}", 100, "%") as bar:
            for block, result in results:
                if result.bad and not self.max_bad:
                    line, _, detail, _ = result.samples[0]
                    where = f"{self.files[block.file]}:{line}"
                    raise DataError(f"{where}: {detail}; --max-bad-fraction leaves bad lines out")
                noted_bytes += self._append(block, result)
                meter.read(block)
                if time.monotonic() - noted >= JOURNAL_SECONDS or noted_bytes >= JOURNAL_BYTES:
                    self._note()
                    noted, noted_bytes = time.monotonic(), 0
                if bar.live:
                    bar.update(100 * (meter.share or 0), meter.rates())
                elif p.documents[0] - told >= log_interval:
                    told = p.documents[0]
                    print_err(meter.line())
                if meter.share is not None:
                    self._judge(min(meter.share, 0.999))
        self._judge(1.0)
        if not any(p.tokens):
            raise DataError(f"input={' '.join(self.files[:9])} holds no text")
        p.complete = True
        self._note()

    def _append(self, block: TextBlock, result: Result) -> int:
        """Bytes of tokens written."""
        p = self.progress
        if self._rejects:
            self._rejects.add(block.file, result, p)
        for k, writer in enumerate(self._writers):
            if writer:
                writer.add_many(result.tokens[k], result.lengths[k])
                p.documents[k], p.tokens[k] = writer.num_documents, writer.num_tokens
            p.empty[k] += result.empty[k]
            p.text_bytes[k] += result.text_bytes[k]
        p.records += result.records
        p.input_bytes += result.size
        p.position = block.next
        return sum(tokens.nbytes for tokens in result.tokens)

    def _judge(self, share: float) -> None:
        try:
            judge(self.progress, self.max_bad, share, f"samples are in {self._rejects_path}.partial")
        except DataError:
            self._note()  # another limit may be chosen, and the samples are to be looked at
            raise

    def _note(self) -> None:
        for writer in filter(None, self._writers):
            writer.sync()
        if self._rejects and self._journal:
            self._rejects.sync()
            file_system.fsync_path(self._rejects_path.parent)
            self._journal.append(self.progress)


class Meter:
    """How fast a run goes, as one line: rates since it was started, share of the input, time left.

    progress: of the whole run, counted on by its owner; sizes: of the input files on disk, None if one is not known
    """

    def __init__(self, progress: Tally, sizes: Sequence[int] | None):
        self._now, self._begin = progress, time.perf_counter()
        self._documents, self._tokens = progress.documents[0], sum(progress.tokens)
        self._bytes = progress.input_bytes
        self._before = None if sizes is None else [*accumulate(sizes, initial=0)]
        self.share: float | None = None  # of the input read so far; None when its size is not known
        self._first: float | None = None

    def read(self, block: TextBlock) -> None:
        if self._before and self._before[-1]:
            self.share = (self._before[block.file] + max(block.disk - READ_AHEAD, 0)) / self._before[-1]
            if self._first is None:
                self._first = self.share

    def rates(self) -> str:
        seconds, now = max(time.perf_counter() - self._begin, 1e-9), self._now
        return (
            f"{(now.documents[0] - self._documents) / seconds:.0f} documents/s, "
            f"{(now.input_bytes - self._bytes) / seconds / 1e6:.1f} MB/s, "
            f"{(sum(now.tokens) - self._tokens) / seconds:.3g} tokens/s"
        )

    def line(self) -> str:
        text = f"{self._now.documents[0]} documents, {sum(self._now.tokens)} tokens: {self.rates()}"
        if self.share is None or self._first is None:
            return text
        text += f"; {100 * self.share:.1f} % of the input"
        if self.share > self._first:
            left = round((time.perf_counter() - self._begin) * (1 - self.share) / (self.share - self._first))
            text += f", {left // 3600}:{left // 60 % 60:02d}:{left % 60:02d} left"
        return text


COMPARED = 200  # documents on which gigatoken has to make the ids of the tokenizer it stands for
COMPARED_LENGTH = 1 << 16  # characters; longer ones would make the start slow


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
    """Write `{output_prefix}_{key}_document.bin/.idx/.json` for every key of the job; returns these prefixes.

    patterns          files or globs, see `text_input`; "-" is standard input
    log_interval      documents between two lines of progress
    max_bad_fraction  of the lines that may be bad; 0: the first one ends the run. Bad ones are left out and sampled
                      into `{output_prefix}.rejects.jsonl`. Texts without tokens are left out too, but not bad
    resume            continue an interrupted run of the same input and tokenizer, if there is one
    overwrite         discard an interrupted run; without either it is an error
    """
    files = expand(patterns)
    _check(files, job.keys, max_bad_fraction, resume, overwrite)
    model = build_tokenizer(**job.tokenizer)
    if job.fast:  # decided here, once, so that the output does not depend on the number of workers
        model = accelerate(model, _first_texts(files, job.keys))
        job = replace(job, fast=isinstance(model, FastTokenizer))
    if job.append_eod and model.ends_texts:
        already = f"{model.name} ends each text with the end of a document already"
        print_err(f"note: {already}; --append-eod adds no second one")
    run = TokenRun(files, output_prefix, job, model, max_bad_fraction)
    if resume and not run.journal_path.exists() and run.is_complete():
        print_err(f"{output_prefix}: complete already, there is nothing to resume")
        return run.prefixes
    try:
        with run.open(resume, overwrite):
            if resume:
                p = run.progress
                done = f"resuming after {p.documents[0]} documents, {sum(p.tokens)} tokens"
                print_err(done if run.resumed else "nothing to resume, starting from the beginning")
            if not run.progress.complete:
                blocks = read_blocks(files, job.keys, run.progress.position)
                results = in_workers(blocks, job, workers) if workers > 1 else in_process(blocks, job, model)
                with contextlib.closing(results):
                    run.write(results, log_interval)
            run.finish()
    except OSError as error:
        raise DataError(f"{output_prefix}: {error.strerror or error}{run.outlook()}") from error
    except DataError as error:
        raise DataError(f"{error}{run.outlook()}") from error
    return run.prefixes


def _check(files: Sequence[str], keys: Sequence[str], max_bad_fraction: float, resume: bool, overwrite: bool) -> None:
    check_fraction(max_bad_fraction)
    if resume and overwrite:
        raise DataError("resume and overwrite: an interrupted run is continued or discarded; give one of them")
    if len(set(keys)) != len(keys):
        raise DataError(f"json_keys={' '.join(keys)} names a key twice; give each once")
    for name in files:
        if len(keys) > 1 and format_of(name) == "text":
            raise DataError(f"json_keys={' '.join(keys)}: {name} has one text only; give one key")
        if name != "-" and not os.access(name, os.R_OK):  # now, and not hours later when its turn comes
            raise DataError(f"{name}: cannot be read; change its permissions or drop it from the input")


def _first_texts(files: Sequence[str], keys: Sequence[str]) -> list[str]:
    """Some to compare tokenizers on; none from standard input, which can be read only once."""
    if files[0] == "-":
        return []
    for block in read_blocks(files[:1], keys):
        found = (texts for _, texts in parse_block(block.kind, block.line, block.payload, keys))
        good = (text for texts in found if not isinstance(texts, BadLine) for text in texts)
        return list(islice((text for text in good if len(text) < COMPARED_LENGTH), COMPARED))
    return []
