"""Raw text to token files: read documents, tokenize them in worker processes, write them in the order of the input.

    files -> blocks of lines (512 KiB) -> workers: parse, check, tokenize -> writer, by block number

The output is the same bytes for any number of workers, and whether the run was interrupted or not. Every 30
seconds or 256 MiB of tokens all is synced and noted in PREFIX.journal; a run that is killed, or stopped by an error,
continues from the last note with resume=True. Nothing has its final name before all input is read.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from dataclasses import replace
from itertools import islice

from megalite.config.console import complain
from megalite.data.errors import DataError
from megalite.data.tokenizers.tokenizer_types import build_tokenizer
from tools.preprocess.fast_tokenizer import FastTokenizer, accelerate
from tools.preprocess.records import BadLine, parse_block
from tools.preprocess.rejects import check_fraction
from tools.preprocess.text_input import expand, format_of, read_blocks
from tools.preprocess.token_run import TokenRun
from tools.preprocess.workers import Job, in_process, in_workers

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
    run = TokenRun(files, output_prefix, job, model, max_bad_fraction)
    if resume and not run.journal_path.exists() and run.is_complete():
        complain(f"{output_prefix}: complete already, there is nothing to resume")
        return run.prefixes
    try:
        with run.open(resume, overwrite):
            if resume:
                p = run.progress
                done = f"resuming after {p.documents[0]} documents, {sum(p.tokens)} tokens"
                complain(done if run.resumed else "nothing to resume, starting from the beginning")
            if not run.progress.complete:
                blocks = read_blocks(files, job.keys, run.progress.position)
                if workers > 1:
                    results = in_workers(blocks, job, workers)
                else:
                    results = in_process(blocks, job, model)
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
