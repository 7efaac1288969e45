"""The names of what can be chosen and the parts that they stand for, a registry for each kind (registry.toml): built-in
parts and those of plugins (plugins.py). A part is imported when it is first asked for, so that a command line is read
without torch. Of a process, unlike all else here: docs/adr/027-plugins-belong-to-a-process.md says why."""

import inspect
import re
from collections.abc import Collection, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

from megalite.config.tables import table_beside

MORE = ", or give the --plugin that registers it"
PACKAGE = Path(__file__).resolve().parents[1]


class Registry(Collection[str]):
    """Of one kind: names, the choices of an option. `built_in`: parts or their places. `added`: those of plugins.
    `what`: a part in words. `example`: a file of examples/plugins."""

    def __init__(
        self, kind: str, what: str, *, has: str = "", any_of: str = "", one_of: str = "", lacks: str = "",
        takes: int = 0, folder: str = "", example: str = "", proof: str = "", **built_in: str,
    ):  # fmt: skip
        self.kind, self.added, self.what, self._takes, self.example = kind, dict[str, Any](), what, takes, example
        self._proof = proof
        self._has, self._any_of, self._one_of, self._lacks = map(str.split, (has, any_of, one_of, lacks))
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

    def find(self, name: str) -> Any:
        """The part. Raises ValueError: only what is in this table, or came from a plugin, has a name."""
        if name in self.added:
            return self.added[name]
        if name not in self.built_in:
            raise ValueError(f"{self.kind}={name!r} is unknown; use one of {', '.join(self)}{MORE}")
        place = self.built_in[name]
        return _imported(place) if isinstance(place, str) else place

    def prove(self, name: str) -> None:
        """Try what the part computes, once all of its plugin is there. Raises ValueError where it is wrong."""
        if self._proof and (fault := _imported(self._proof)(self.added[name])):
            raise ValueError(f"{self.kind}={name!r} {fault}")

    def add(self, name: str, part: Any) -> None:
        """Raises ValueError where the name is taken, or none, or the part is no such part."""
        for wrong in self._faults(name, part):
            raise ValueError(f"{self.kind}={name!r} {wrong}")
        self.added[name] = part() if self._any_of and isinstance(part, type) else part

    def _faults(self, name: str, part: Any) -> Iterator[str]:
        there = {one for one in (*self._has, *self._any_of, *self._lacks) if hasattr(part, one)}
        if not isinstance(name, str) or not re.fullmatch(r"[A-Za-z]\w*([-.]\w+)*", name):
            yield "is not a name; use letters, digits and - _ . between them"
        if name in self:
            yield "is taken; choose another name"
        if lacks := [one for one in self._has if one not in there]:
            yield f"has no {' and no '.join(lacks)}; give {self.what}"
        if more := there.intersection(self._lacks):
            yield f"has {', '.join(more)}, which only built-in ones may; give {self.what}"
        if (self._any_of and not there) or (self._one_of and part not in self._one_of):
            yield f"is {part!r}; give {self.what}"
        if self._takes and not _takes(part, self._takes):
            yield f"does not take {self._takes} arguments; give {self.what}"


def _imported(place: str) -> Any:
    """MODULE:NAME"""
    module, _, name = place.partition(":")
    return getattr(import_module(module), name)


def _takes(part: Any, count: int) -> bool:
    try:
        inspect.signature(part).bind(*[None] * count)
    except TypeError:  # not callable, or other arguments
        return False
    except ValueError:  # a signature that nobody knows
        return callable(part)
    return True


KINDS = {kind: Registry(kind, **row) for kind, row in table_beside(__file__, "registry").items()}
