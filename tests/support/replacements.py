"""Functions that replace some of megalite's functions, so that a test can change their behaviour."""

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Replacement:
    """A function that is called instead of a function or method, with the original as its first argument.

    Attributes:
        function: the replacement.
        owner: the module or class in which the original is looked up.
        original: the name of the original in `owner`.
    """

    function: Callable[..., Any]
    owner: Any
    original: str

    def __post_init__(self) -> None:
        getattr(self.owner, self.original)  # if it was renamed, raises AttributeError when tests are collected

    @property
    def name(self) -> str:
        return self.function.__name__

    @property
    def file(self) -> str:
        """The file of megalite that contains `owner`."""
        return str(Path(inspect.getfile(self.owner)).relative_to(ROOT))

    def plant(self) -> None:
        """Replace the original in this process, before anything has called it."""
        original = getattr(self.owner, self.original)

        @functools.wraps(original)
        def replacement(*args: Any, **kwargs: Any) -> Any:
            return self.function(original, *args, **kwargs)

        setattr(self.owner, self.original, replacement)
