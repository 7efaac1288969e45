"""A problem of a configuration: a line, `name=value breaks rule; remedy`, and the options that it is about."""

from collections.abc import Collection
from string import Formatter
from typing import Any

from megalite.config.field import flag_of
from megalite.config.options import SECTIONS, Config, options


class Problem(str):
    """The line; `options`: those that it is about, its remedy included."""

    options: frozenset[str]

    def __new__(cls, line: str, options: Collection[str] = ()) -> "Problem":
        problem = super().__new__(cls, line)
        problem.options = frozenset(options)
        return problem

    def concerns(self, names: Collection[str]) -> bool:
        return not self.options.isdisjoint(names)


class Say:
    """Makes problems from templates, in which {=lr} is an option's name and value, {lr} its name and {--lr} its flag;
    {.lr} its value alone; other names are those of `more`. So a problem's options are those that its line names.

    >>> problem = Say(Config())("{=min_lr} is above {=lr:g}; lower it or raise {--lr}", lr=0.5)
    >>> problem, sorted(problem.options)
    ('min_lr=0.0 is above lr=0.5; lower it or raise --lr', ['lr', 'min_lr'])
    """

    def __init__(self, config: Config):
        self._config = config
        self.values = {f.name: getattr(getattr(config, section), f.name) for section, f in options()}

    def value(self, name: str) -> Any:
        """Of an option, or of a property of a section."""
        if name in self.values:
            return self.values[name]
        section = next(section for section, cls in SECTIONS.items() if hasattr(cls, name))
        return getattr(getattr(self._config, section), name)

    def __call__(self, template: str, *also: str, option: str = "", **more: Any) -> Problem:
        """`also`: options that it is about but does not name; `option`: the one that {option} stands for; `more` may
        also give an option's effective value, to be shown in place of its own."""
        line, named = "", set(also)
        for text, key, spec, conversion in Formatter().parse(template):
            line += text
            name = (key or "").lstrip("=-.").replace("-", "_")
            name = option if name == "option" else name
            if key and key[0] == ".":
                line += format(self.value(name), spec or "")
            elif key and name not in self.values:
                line += format(more[key], spec or "")
            elif key:
                named.add(name)
                value = more.get(name, self.values[name])
                if isinstance(value, tuple) and not conversion:
                    value, spec = (spec or ",").join(map(str, value)), ""
                shown = repr(value) if conversion else format(value, spec or "")
                line += f"{name}={shown}" if key[0] == "=" else flag_of(name) if key[0] == "-" else name
        return Problem(line, named)
