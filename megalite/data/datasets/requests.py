"""The requests of --eval-requests: questions whose answers are scored by their likelihood while a run trains.

A file has a JSON object on each line:

    {"task": "arc_easy", "id": 7, "context": "Question: ...\\nAnswer:", "continuation": " gravity", "gold": 1}

A line is a possible answer, and the lines with the same task and id are the answers to one question; `gold` is 1 for
the right ones and 0 for the others. `megalite eval --write-requests` writes such files from the tasks of
lm-evaluation-harness, whose rules for tokens and lengths apply here, too (arXiv:2405.14782):

    tokens    encode(context + continuation); the tokens beyond encode(context) belong to the continuation, and so does
              white space at the end of the context
    context   an empty one is what the tokenizer puts before every text, or else an end-of-document token; one that is
              too long is cut on the left

Several requests share a sample, each as a document of its own. `pack_requests` decides which.
"""

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megalite.common.text_file import TextFileError, read_small_text
from megalite.data.datasets.batches import MicroBatch
from megalite.data.datasets.packed_dataset import plan_packing
from megalite.data.datasets.permutation import Ints
from megalite.data.errors import DataError
from megalite.data.tokenizers.tokenizer import Tokenizer

MAX_FILE_BYTES = 1 << 30
NO_REQUEST = -1  # in MicroBatch.request_ids: the label belongs to no continuation
_TASK = re.compile(r"[\w.-]{1,100}")  # a part of the names of metrics
_REQUIRED = {"task": str, "id": (str, int), "context": str, "continuation": str, "gold": int}
_KEYS = (*_REQUIRED, "bytes")


@dataclass(frozen=True)
class Request:
    """A possible answer to a question.

    line          its line in the file, from 1
    task          the name of the task
    question      the number of the question in the file, from 0
    context       the text before the answer
    continuation  the answer
    is_gold       it is a right answer
    num_bytes     the length by which acc_norm divides its log-likelihood
    """

    line: int
    task: str
    question: int
    context: str
    continuation: str
    is_gold: bool
    num_bytes: int


@dataclass(frozen=True)
class TaskScores:
    """The scores of one task.

    questions   the number of questions
    acc         the fraction of questions whose likeliest answer is right; None if each question has only one answer
    acc_norm    the same with log-likelihoods divided by the lengths of the answers
    bpb         bits per byte of the right answers; NaN if one of them has no finite likelihood
    """

    questions: int
    acc: float | None
    acc_norm: float | None
    bpb: float

    @property
    def values(self) -> dict[str, float]:
        """The scores by name, without those that are None."""
        scores = {"acc": self.acc, "acc_norm": self.acc_norm, "bpb": self.bpb}
        return {name: score for name, score in scores.items() if score is not None}


@dataclass(frozen=True)
class RequestSet:
    """The requests of a file with their tokens.

    requests     the requests in the order of the file
    tokens       for each request the tokens of context and continuation, at most seq_length + 1
    num_labels   for each request the number of tokens of the continuation, the last ones
    num_cut      the number of requests whose context was cut
    seq_length   the tokens of a sample, without the last label
    eod          the token that fills samples
    """

    requests: Sequence[Request]
    tokens: Sequence[Sequence[int]]
    num_labels: Sequence[int]
    num_cut: int
    seq_length: int
    eod: int

    def describe(self, path: str) -> str:
        """Return a line for the log."""
        questions = len({request.question for request in self.requests})
        tasks = len({request.task for request in self.requests})
        text = f"eval_requests={path}: {questions:,} questions of {tasks} tasks, {len(self.requests):,} requests"
        if self.num_cut:
            text += f"; {self.num_cut:,} contexts are cut on the left to fit into seq_length {self.seq_length}"
        return text


def open_requests(path: str, tokenizer: Tokenizer, seq_length: int) -> RequestSet:
    """Read and tokenize a file of requests. Raises DataError with the line that cannot be used."""
    requests = read_requests(path)
    tokens: list[list[int]] = []
    num_labels: list[int] = []
    num_cut = 0
    for request in requests:
        location = f"{path}, line {request.line}"
        try:
            ids, count = encode_request(request.context, request.continuation, tokenizer)
        except DataError as error:
            raise DataError(f"{location}: {error}") from error
        if count < 1:
            raise DataError(f"{location}: the continuation has no token of its own; give it a text")
        if count > seq_length:
            raise DataError(
                f"{location}: the continuation has {count} tokens, more than seq_length {seq_length}; shorten it, or "
                "raise --seq-length"
            )
        num_cut += len(ids) > seq_length + 1
        tokens.append(ids[-(seq_length + 1) :])
        num_labels.append(count)
    return RequestSet(requests, tokens, num_labels, num_cut, seq_length, tokenizer.eod)


def read_requests(path: str) -> list[Request]:
    """Read a file of requests. Raises DataError with the line that cannot be used."""
    try:
        text = read_small_text(
            path, "a JSONL file of requests, as megalite eval --write-requests makes", MAX_FILE_BYTES
        )
    except TextFileError as error:
        raise DataError(f"eval_requests: {error}") from None
    requests: list[Request] = []
    numbers: dict[tuple[str, str | int], int] = {}  # of questions
    for line, row_text in enumerate(text.split("\n"), 1):
        if not row_text.strip():
            continue
        try:
            row = json.loads(row_text)
        except (ValueError, RecursionError) as error:
            raise DataError(f"{path}, line {line}: not JSON ({error}); write one object per line") from None
        if problem := _problem_of(row):
            raise DataError(f"{path}, line {line}: {problem}")
        key = (row["task"], row["id"])
        num_bytes = row.get("bytes", len(row["continuation"].encode()))
        question = numbers.setdefault(key, len(numbers))
        is_gold = row["gold"] == 1
        requests.append(Request(line, row["task"], question, row["context"], row["continuation"], is_gold, num_bytes))
    if not requests:
        raise DataError(f"{path}: no request is in it; write one JSON object per line")
    gold_questions = {request.question for request in requests if request.is_gold}
    for request in requests:
        if request.question not in gold_questions:
            raise DataError(
                f"{path}, line {request.line}: no answer to this question of {request.task} is right; give one of the "
                'lines with its id "gold": 1'
            )
    return requests


def _problem_of(row: Any) -> str | None:
    """Return why a line of the file is not a request, with a remedy; None if it is one."""
    if not isinstance(row, dict):
        return f'not an object; write {{"{_KEYS[0]}": ..., "{_KEYS[1]}": ...}}'
    if missing := [key for key in _REQUIRED if key not in row]:
        return f"{', '.join(missing)} missing; give {', '.join(_REQUIRED)}"
    if unknown := [key for key in row if key not in _KEYS]:
        return f"unknown key {unknown[0]!r}; remove it, the keys are {', '.join(_KEYS)}"
    for key, types in _REQUIRED.items():
        if not isinstance(row[key], types) or isinstance(row[key], bool):
            return f"{key}={row[key]!r} is not {'a number' if types is int else 'a text'}; give one"
    if row["gold"] not in (0, 1):
        return f"gold={row['gold']} is neither 1, for a right answer, nor 0; give one of them on each line"
    if not _TASK.fullmatch(row["task"]):
        return f"task={row['task']!r} is not a name of letters, digits and . _ -; give one"
    if not row["continuation"]:
        return "the continuation is empty; give it a text"
    for key in ("context", "continuation"):
        try:
            row[key].encode()
        except UnicodeEncodeError as error:
            return f"{key} has {row[key][error.start]!a}, half of a pair of surrogates; remove it"
    num_bytes = row.get("bytes", 1)
    if not isinstance(num_bytes, int) or isinstance(num_bytes, bool) or not 1 <= num_bytes <= MAX_FILE_BYTES:
        return (
            f"bytes={str(num_bytes)[:40]} is not a whole number from 1 to 2^30; give the length of the answer, or "
            "leave it out"
        )
    return None


def encode_request(context: str, continuation: str, tokenizer: Tokenizer) -> tuple[list[int], int]:
    """Return the tokens of both texts, and how many of them belong to the continuation.

    Raises DataError for a text that cannot be encoded.
    """
    stripped = context.rstrip()
    prefix, start, full = tokenizer.encode_batch(["", stripped, context + continuation])
    if tokenizer.ends_texts:
        prefix, start, full = prefix[:-1], start[:-1], full[:-1]
    if not stripped and not prefix:  # nothing would predict the first token
        return [tokenizer.eod, *full], len(full)
    return full, len(full) - len(start)


@dataclass(frozen=True)
class PackedRequests:
    """The requests in samples of seq_length + 1 tokens. A sample after the last one is padding.

    request_set   the requests
    samples       the numbers of the requests of each sample
    """

    request_set: RequestSet
    samples: Sequence[Sequence[int]]

    def micro_batch(self, sample_ids: Ints) -> MicroBatch:
        """Return the samples of these numbers, [B]; their requests are its documents."""
        T = self.request_set.seq_length
        B = len(sample_ids)
        tokens = np.full((B, T + 1), self.request_set.eod, np.int64)
        request_ids = np.full((B, T), NO_REQUEST, np.int64)
        document_start = np.zeros((B, T + 1), np.int32)
        document_ids = np.zeros((B, T + 1), np.int32)
        padding = np.ones((B, T), bool)
        for row, sample in enumerate(sample_ids.tolist()):
            requests = self.samples[sample] if sample < len(self.samples) else ()
            start = 0
            for number, request in enumerate(requests):
                ids = self.request_set.tokens[request]
                end = start + len(ids)
                tokens[row, start:end] = ids
                request_ids[row, end - 1 - self.request_set.num_labels[request] : end - 1] = request
                document_start[row, start:end] = start
                document_ids[row, start:end] = number
                start = end
            document_start[row, start:] = start
            document_ids[row, start:] = len(requests)
            padding[row, :start] = False
        return MicroBatch(
            tokens=tokens,
            sample_ids=sample_ids,
            loss_mask=(request_ids != NO_REQUEST).astype(np.float32),
            document_start=document_start[:, :T],
            padding=padding,
            document_ids=document_ids,
            request_ids=request_ids,
        )


def pack_requests(request_set: RequestSet) -> PackedRequests:
    """Pack the requests into as few samples as best fit finds."""
    lengths = np.array([len(tokens) for tokens in request_set.tokens], np.int64)
    plan = plan_packing(lengths, request_set.seq_length + 1)
    bounds = plan.starts.tolist()
    samples = [plan.order[start:stop].tolist() for start, stop in zip(bounds, bounds[1:], strict=False)]
    return PackedRequests(request_set, samples)


def score_tasks(requests: Sequence[Request], loss_R: NDArray[np.float64]) -> dict[str, TaskScores]:
    """Return the scores of each task, in the order of the file.

    Args:
        requests: the requests.
        loss_R: the negative log-likelihood of each continuation in nats.
    """
    by_task: dict[str, dict[int, list[int]]] = {}  # task -> question -> its requests
    for index, request in enumerate(requests):
        by_task.setdefault(request.task, {}).setdefault(request.question, []).append(index)
    return {task: _score_task(requests, loss_R, questions) for task, questions in by_task.items()}


def _score_task(
    requests: Sequence[Request], loss_R: NDArray[np.float64], questions: Mapping[int, list[int]]
) -> TaskScores:
    """Return the scores of one task. `questions`: the requests of each of its questions."""
    num_right = num_right_norm = num_choices = 0
    nats = 0.0
    num_bytes = 0
    for answers in questions.values():
        for index in answers:
            if requests[index].is_gold:
                nats += float(loss_R[index])
                num_bytes += len(requests[index].continuation.encode())
        if len(answers) == 1:
            continue
        num_choices += 1
        if not np.isfinite(loss_R[answers]).all():
            continue  # of a diverged model, no answer is right
        best = min(answers, key=lambda index: loss_R[index])  # the first of equal ones
        best_norm = min(answers, key=lambda index: loss_R[index] / requests[index].num_bytes)
        num_right += requests[best].is_gold
        num_right_norm += requests[best_norm].is_gold
    return TaskScores(
        questions=len(questions),
        acc=num_right / num_choices if num_choices else None,
        acc_norm=num_right_norm / num_choices if num_choices else None,
        bpb=nats / (num_bytes * math.log(2)),
    )
