"""The tasks of lm-evaluation-harness, and the questions in them as a file for --eval-requests."""

import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import lm_eval
from lm_eval.api.instance import Instance
from lm_eval.api.model import LM
from lm_eval.tasks import TaskManager

from megalite.common.safe_open import write_atomically

ACCURACIES = ("acc", "acc_norm", "acc_bytes", "exact_match")  # metrics that say whether a choice is right


class HarnessError(Exception):
    """Tasks cannot be used; the message has the reason and a remedy."""


class HarnessTasks(TaskManager):
    """The tasks that lm-evaluation-harness knows, and those in a directory."""

    def __init__(self, include_path: Path | None):
        super().__init__(include_path=None if include_path is None else str(include_path))
        self._loaded: dict[tuple[str, ...], Any] = {}

    def find_unknown(self, names: Sequence[str]) -> list[str]:
        """Return the names that neither a task, a group nor a tag has."""
        return [name for name in names if not self.match_tasks([name])]

    def load(self, task_list: Any) -> Any:
        """Return the tasks of these names with their data sets, which are opened once. Raises HarnessError."""
        names = tuple(task_list)
        if names not in self._loaded:
            try:
                self._loaded[names] = super().load(list(names))
            except Exception as error:  # libraries of data sets raise errors of many types
                reason = " ".join(str(error).split())
                raise HarnessError(
                    f"tasks={','.join(names)} cannot be loaded ({type(error).__name__}: {reason}); their data sets "
                    "must be on this machine: give --download to fetch them once"
                ) from error
        return self._loaded[names]


class _Recorder(LM):
    """A model that only keeps what it is asked to score."""

    def __init__(self) -> None:
        super().__init__()
        self.instances: list[Instance] = []

    def loglikelihood(self, requests: list[Instance]) -> list[tuple[float, bool]]:
        self.instances += requests
        return [(0.0, False)] * len(requests)

    def loglikelihood_rolling(self, requests: list[Instance]) -> list[float]:
        raise HarnessError(_not_a_question(requests[0]))

    def generate_until(self, requests: list[Instance]) -> list[str]:
        raise HarnessError(_not_a_question(requests[0]))


def _not_a_question(instance: Instance) -> str:
    return (
        f"task {instance.task_name} has no answers to choose from ({instance.request_type}), so that it cannot be "
        "scored while a model trains; leave it out"
    )


def write_requests(path: Path, tasks: HarnessTasks, names: Sequence[str], **options: Any) -> int:
    """Write the questions of tasks to a file for --eval-requests, and return their number.

    Args:
        path: The file.
        tasks: The tasks.
        names: The names of the tasks.
        options: `num_fewshot` and `limit` of simple_evaluate.

    Raises:
        HarnessError: a task has no answers to choose from, or no right ones.
        OSError: the file cannot be written.
    """
    recorder = _Recorder()
    simple_evaluate: Any = lm_eval.simple_evaluate
    simple_evaluate(recorder, tasks=list(names), task_manager=tasks, bootstrap_iters=0, log_samples=False, **options)
    loaded = tasks.load(names)["tasks"]
    questions: dict[tuple[str, int], list[Instance]] = {}
    for instance in recorder.instances:
        questions.setdefault((str(instance.task_name), int(instance.doc_id or 0)), []).append(instance)
    rows = [
        row
        for (name, doc_id), instances in questions.items()
        for row in _rows_of_question(name, doc_id, instances, loaded[name])
    ]
    write_atomically(path, (f"{json.dumps(row, ensure_ascii=False)}\n" for row in rows))
    return len(questions)


def _rows_of_question(name: str, doc_id: int, instances: Sequence[Instance], task: Any) -> Iterator[dict[str, Any]]:
    """Yield the lines of one question.

    The task itself decides which answers are right: those whose choice it counts as accurate.
    """
    ordered = sorted(instances, key=lambda instance: instance.idx)
    choices = list(task.doc_to_choice(ordered[0].doc)) if task.OUTPUT_TYPE == "multiple_choice" else []
    num_answers = len(choices) or len(ordered)  # others are answers without their context (acc_mutual_info)
    has_right_answer = False
    for index, instance in enumerate(ordered[:num_answers]):
        results = [(0.0, True) if i == index else (-1e9, False) for i in range(len(ordered))]
        metrics = task.process_results(instance.doc, results)
        accuracy = next((metrics[metric] for metric in ACCURACIES if metric in metrics), None)
        if accuracy is None:
            raise HarnessError(
                f"task {name} has none of the metrics {', '.join(ACCURACIES)}, so that its right answers are unknown; "
                "leave it out"
            )
        has_right_answer |= accuracy == 1
        context, continuation = map(str, instance.args)
        answer = choices[index] if choices else continuation
        yield {
            "task": re.sub(r"[^\w.-]", "_", name),
            "id": doc_id,
            "context": context,
            "continuation": continuation,
            "gold": int(accuracy == 1),
            "bytes": max(1, len(answer.encode())),
        }
    if not has_right_answer:
        raise HarnessError(f"task {name}: no answer to question {doc_id} is right; leave the task out")
