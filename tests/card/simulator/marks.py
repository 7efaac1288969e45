"""Marks of a trace: where the program is, told by the functions that it runs through."""

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

from megalite.checkpoint.run.saver import Saver
from megalite.pipeline.graphed import GraphedPipeline
from megalite.pipeline.runtime import Pipeline
from megalite.train import loop, setup, step

# where a function is looked up -> what its time is called
NAMES = (
    (Pipeline, "_forward", "forward"),
    (Pipeline, "_backward", "backward"),
    (Pipeline, "step", "forward-backward"),
    (GraphedPipeline, "step", "forward-backward"),
    (step, "train_step", "step"),
    (step, "_agree", "agree"),
    (step, "_update", "update"),
    (loop, "evaluate", "evaluation"),
    (loop.Training, "_log", "log"),
    (loop, "check_replicas", "replica check"),
    (Saver, "save", "save"),
    (setup, "build_run", "build"),
)


def _marked(card: Any, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def marked(*args: Any, **kwargs: Any) -> Any:
        with card.mark(name):
            return original(*args, **kwargs)

    return marked


@contextlib.contextmanager
def set_by(card: Any) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        for owner, attribute, name in NAMES:
            made = _marked(card, name, getattr(owner, attribute))
            stack.enter_context(mock.patch.object(owner, attribute, made))
        yield
