"""The names of what can be chosen and the parts that they stand for, a registry for each kind (registry.toml): built-in
parts and those of plugins (plugins.py). A part is imported when it is first asked for, so that a command line is read
without torch. Of a process, unlike all else here: docs/adr/027-plugins-belong-to-a-process.md says why."""

import inspect
import re
from collections.abc import Collection, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

from megalite.common.tables import load_table

PLUGIN_HINT = ", or give the --plugin that registers it"
PACKAGE = Path(__file__).resolve().parents[1]


class Registry(Collection[str]):
    """Of one kind: names, the choices of an option. `built_in`: parts or their places. `added`: those of plugins.
    `what`: a part in words. `example`: a file of examples/plugins."""

    def __init__(
        self, kind: str, description: str, *, required: str = "", require_any: str = "", allowed_values: str = "",
        forbidden: str = "", num_args: int = 0, folder: str = "", example: str = "", proof: str = "", **built_in: str,
    ):  # fmt: skip
        self.kind, self.added = kind, dict[str, Any]()
        self.description, self._num_args, self.example = description, num_args, example
        self._proof = proof
        self._required, self._require_any = required.split(), require_any.split()
        self._allowed_values, self._forbidden = allowed_values.split(), forbidden.split()
        files = sorted(PACKAGE.joinpath(folder).glob("[a-z]*.py")) if folder else []
        there = {file.stem: f"megalite.{folder.replace('/', '.')}.{file.stem}:{kind.upper()}" for file in files}
        self.built_in: dict[str, Any] = there | built_in

    def __iter__(self) -> Iterator[str]:
        return iter((*self.built_in, *self.added))

    def __len__(self) -> int:
        return len(self.built_in) + len(self.added)

    def __bool__(self) -> bool:
        return True  # one without names has no value yet, and not any

    def __contains__(self, name: object) -> bool:
        return name in self.built_in or name in self.added

    def get(self, name: str) -> Any:
        """The part. Raises ValueError: only what is in this table, or came from a plugin, has a name."""
        if name in self.added:
            return self.added[name]
        if name not in self.built_in:
            raise ValueError(f"{self.kind}={name!r} is unknown; use one of {', '.join(self)}{PLUGIN_HINT}")
        place = self.built_in[name]
        return _imported(place) if isinstance(place, str) else place

    def prove(self, name: str) -> None:
        """Try what the part computes, once all of its plugin is there. Raises ValueError where it is wrong."""
        if self._proof and (fault := _imported(self._proof)(self.added[name])):
            raise ValueError(f"{self.kind}={name!r} {fault}")

    def register(self, name: str, part: Any) -> None:
        """Raises ValueError where the name is taken, or none, or the part is no such part."""
        for wrong in self._component_errors(name, part):
            raise ValueError(f"{self.kind}={name!r} {wrong}")
        self.added[name] = part() if self._require_any and isinstance(part, type) else part

    def _component_errors(self, name: str, part: Any) -> Iterator[str]:
        there = {one for one in (*self._required, *self._require_any, *self._forbidden) if hasattr(part, one)}
        if not isinstance(name, str) or not re.fullmatch(r"[A-Za-z]\w*([-.]\w+)*", name):
            yield "is not a name; use letters, digits and - _ . between them"
        if name in self:
            yield "is taken; choose another name"
        if missing := [one for one in self._required if one not in there]:
            yield f"has no {' and no '.join(missing)}; give {self.description}"
        if more := there.intersection(self._forbidden):
            yield f"has {', '.join(more)}, which only built-in ones may; give {self.description}"
        if (self._require_any and not there) or (self._allowed_values and part not in self._allowed_values):
            yield f"is {part!r}; give {self.description}"
        if self._num_args and not _accepts(part, self._num_args):
            yield f"does not take {self._num_args} arguments; give {self.description}"


def _imported(place: str) -> Any:
    """MODULE:NAME"""
    module, _, name = place.partition(":")
    return getattr(import_module(module), name)


def _accepts(part: Any, count: int) -> bool:
    try:
        inspect.signature(part).bind(*[None] * count)
    except TypeError:  # not callable, or other arguments
        return False
    except ValueError:  # a signature that nobody knows
        return callable(part)
    return True


REGISTRIES = {kind: Registry(kind, **row) for kind, row in load_table(__file__, "registry").items()}
