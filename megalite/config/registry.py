"""Registries of components: one for each kind of component that an option chooses by name (registry.toml).

A registry has built-in components and those of plugins (plugins.py). A built-in component is imported when it is first
used, so that the command line is parsed without torch.

Registries are global state of the process, unlike everything else in megalite. The reason is in
docs/adr/027-plugins-belong-to-a-process.md.
"""

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
    """The components of one kind, by name; a collection of the names, which are the choices of the option.

    `built_in` holds the built-in components as "MODULE:NAME", and `plugin_components` those of plugins. The keywords
    are the keys of registry.toml, described there.
    """

    def __init__(
        self, kind: str, description: str, *, required: str = "", require_any: str = "", allowed_values: str = "",
        forbidden: str = "", num_args: int = 0, directory: str = "", example: str = "", verifier: str = "",
        **built_in: str,
    ):  # fmt: skip
        self.kind = kind
        self.plugin_components = dict[str, Any]()
        self.description = description
        self.example = example
        self._required = required.split()
        self._require_any = require_any.split()
        self._allowed_values = allowed_values.split()
        self._forbidden = forbidden.split()
        self._num_args = num_args
        self._verifier = verifier
        files = sorted(PACKAGE.joinpath(directory).glob("[a-z]*.py")) if directory else []
        in_files = {file.stem: f"megalite.{directory.replace('/', '.')}.{file.stem}:{kind.upper()}" for file in files}
        self.built_in: dict[str, Any] = {**in_files, **built_in}

    def __iter__(self) -> Iterator[str]:
        return iter((*self.built_in, *self.plugin_components))

    def __len__(self) -> int:
        return len(self.built_in) + len(self.plugin_components)

    def __bool__(self) -> bool:
        return True  # an option with an empty registry accepts no value, but one without choices accepts any

    def __contains__(self, name: object) -> bool:
        return name in self.built_in or name in self.plugin_components

    def get(self, name: str) -> Any:
        """Return a component. Raises ValueError if the name is neither built in nor registered by a plugin."""
        if name in self.plugin_components:
            return self.plugin_components[name]
        if name not in self.built_in:
            raise ValueError(f"{self.kind}={name!r} is unknown; use one of {', '.join(self)}{PLUGIN_HINT}")
        built_in = self.built_in[name]
        return _import(built_in) if isinstance(built_in, str) else built_in

    def verify(self, name: str) -> None:
        """Check what a plugin's component computes. Raises ValueError if it is wrong.

        Must be called after all code of the plugin has run.
        """
        error = _import(self._verifier)(self.plugin_components[name]) if self._verifier else ""
        if error:
            raise ValueError(f"{self.kind}={name!r} {error}")

    def register(self, name: str, component: Any) -> None:
        """Add a component of a plugin.

        Raises:
            ValueError: if the name is in use or not a name, or `component` is not a component of this kind.
        """
        for error in self._component_errors(name, component):
            raise ValueError(f"{self.kind}={name!r} {error}")
        self.plugin_components[name] = component() if self._require_any and isinstance(component, type) else component

    def _component_errors(self, name: str, component: Any) -> Iterator[str]:
        """Yield what is wrong with a name or a component, each with a remedy."""
        attributes = (*self._required, *self._require_any, *self._forbidden)
        present = {attribute for attribute in attributes if hasattr(component, attribute)}
        if not isinstance(name, str) or not re.fullmatch(r"[A-Za-z]\w*([-.]\w+)*", name):
            yield "is not a name; use letters, digits and - _ . between them"
        if name in self:
            yield "is taken; choose another name"
        if missing := [attribute for attribute in self._required if attribute not in present]:
            yield f"has no {' and no '.join(missing)}; give {self.description}"
        if forbidden := present.intersection(self._forbidden):
            yield f"has {', '.join(forbidden)}, which only built-in ones may; give {self.description}"
        if (self._require_any and not present) or (self._allowed_values and component not in self._allowed_values):
            yield f"is {component!r}; give {self.description}"
        if self._num_args and not _accepts(component, self._num_args):
            yield f"does not take {self._num_args} arguments; give {self.description}"


def _import(path: str) -> Any:
    """Return the object at the path MODULE:NAME."""
    module, _, name = path.partition(":")
    return getattr(import_module(module), name)


def _accepts(component: Any, count: int) -> bool:
    """Return True if a component is callable with `count` positional arguments."""
    try:
        inspect.signature(component).bind(*[None] * count)
    except TypeError:  # not callable, or callable with other arguments
        return False
    except ValueError:  # a built-in function without a signature
        return callable(component)
    return True


REGISTRIES = {kind: Registry(kind, **row) for kind, row in load_table(__file__, "registry").items()}
