"""What is wrong with a configuration, as values: a line, `name=value breaks rule; remedy`, and the options in it."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import fields
from typing import Any

from megalite.config.field import flag_of
from megalite.config.options import Config


class Problem(str):
    """The line; `options`: the names of those that it is about, its remedy included."""

    options: frozenset[str]

    def __new__(cls, line: str, options: Collection[str] = ()) -> Problem:
        made = super().__new__(cls, line)
        made.options = frozenset(options)
        return made

    def concerns(self, names: Collection[str]) -> bool:
        return not self.options.isdisjoint(names)


class _Given:
    """An option's value as a problem shows it."""

    def __init__(self, name: str, value: Any):
        self.name, self.value = name, value

    def __format__(self, spec: str) -> str:
        shown = ",".join(map(str, self.value)) if isinstance(self.value, tuple) else format(self.value, spec)
        return f"{self.name}={shown}"

    def __repr__(self) -> str:
        return f"{self.name}={self.value!r}"


class Say:
    """Makes problems of templates, in which an option stands as {=lr}: its name and value, {lr}: its name, or {--lr}:
    its flag; other names are those of `more`. So a problem's options are those that its line names.

    >>> problem = Say(Config())("{=min_lr} is above {=lr:g}; lower it or raise {--lr}", lr=0.5)
    >>> problem, sorted(problem.options)
    ('min_lr=0.0 is above lr=0.5; lower it or raise --lr', ['lr', 'min_lr'])
    """

    def __init__(self, config: Config):
        parts = [getattr(config, f.name) for f in fields(config)]
        self.values = {f.name: getattr(part, f.name) for part in parts for f in fields(part)}

    def __call__(self, template: str, *also: str, option: str = "", **more: Any) -> Problem:
        """`also`: options that it is about without a word; `option`: the one that {option} stands for; `more` may also
        give what an option comes to, to be shown in place of its value."""
        named = set(also)
        line = template.format_map(_Words(self.values, option, more, named))
        return Problem(line, named)


class _Words:
    """What stands for a template's names; writes the options among them into `named`."""

    def __init__(self, values: Mapping[str, Any], option: str, more: Mapping[str, Any], named: set[str]):
        self.values, self.option, self.more, self.named = values, option, more, named

    def __getitem__(self, key: str) -> Any:
        name = key.lstrip("=-").replace("-", "_")
        name = self.option if name == "option" else name
        if name not in self.values:
            return self.more[key]
        self.named.add(name)
        if key[0] == "=":
            return _Given(name, self.more.get(name, self.values[name]))
        return flag_of(name) if key[0] == "-" else name
