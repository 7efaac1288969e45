"""The keys of another trainer's configuration, and the row that says what becomes of each.

translate/FORMAT.toml says what becomes of each key, by its sections (`top`: outside any). Keys share a row as "a b";
"*" is every other key at or below its section. A row is a text that begins with a mark, or a table of these by the
key's value, as text in lower case. There, "*" is any other value, but only one that asks for nothing where the text is
that it does so; a value that is filled in later, as auto, stands for the row that acts. The marks:

    + OPTION ...         acts: the options take the value, or one element each of a list
    + OPTION=VALUE ...   acts: they take these values
    > PART WHERE         acts: with other keys it gives WHERE (translate_rules.py)
    ~ OPTION REASON      acts unless another key gives the option; then it has no equivalent if its value is another
    =ON,ON REASON        always so here; with a list, what is not in it has no equivalent
    !OFF,OFF REMEDY      no equivalent, unless it asks for nothing, as the values of the list do

[settings] has `title`; `whole`: sections that are not given have their defaults, too (true, or their names);
`megatron`: a key without a row is answered as Megatron-LM's flag of that name; `references`: ${a.b} is the value of
another key, and ??? one that is to be given; `overrides`: keys that override others there; `either`: options that are
on where any key says so; `switches`: keys that switch their section off where they are false; `prefixes`: section ->
what its keys may begin with.

[defaults.SECTION] are the other trainer's own defaults where they differ from megalite's, and [[cases]] more of them:
`where` a key has one of some values. [renamed] has older names of keys, [notes] what to say where a section is absent.
"""

import re
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from megalite.common.tables import load_table
from megalite.config.megatron_flags import INSTEAD, OPTION, REFUSED, WARNED, known_flags, requests_feature
from megalite.config.option import flags_of
from megalite.config.translate_rules import DEFAULT, FIELDS, GIVEN, OVERRIDES

TABLES = ("settings", "defaults", "cases", "renamed", "notes")  # the others are sections
NOOP_VALUES = {"", "none", "no", "false", "off", "disabled", "0", "0.0", "[]", "{}"}
TRUE, FALSE = (
    {"true", "1", "1.0", "yes", "on"},
    {"false", "0", "0.0", "no", "off"},
)  # as pydantic and YAML 1.1 read them
FILLED_IN = ("auto", "???")  # not yet given
NOOP_VERDICT = "= asks for nothing"
ConfigTree = dict[str, Any]
REFERENCE = re.compile(r"\$\{(\.*)([\w.]+)\}")
MAX_REFERENCES = 10  # one that stands for another


class SourceKey(NamedTuple):
    """`name`: as in the file, with the numbers of list elements; `off`: its section is switched off; `raw`: the value
    as in the file, where a reference is not resolved; `now`: its newer name."""

    name: str
    section: str
    last: str
    value: Any
    off: bool = False
    is_default: bool = False
    raw: Any = None
    now: str = ""

    @property
    def text(self) -> str:
        return str(self.value).lower()

    @property
    def is_true(self) -> bool:
        return self.text in TRUE

    @property
    def is_false(self) -> bool:
        return self.text in FALSE


@cache
def load_format(name: str) -> dict[str, Any]:
    """Section -> key -> row, and the tables of TABLES."""
    table = load_table(str(Path(__file__).parent / "translate" / "x"), name)
    empty = {"top": {}, "defaults": {}, "cases": [], "renamed": {}, "notes": {}}
    split = {
        at: {key: row for keys, row in rows.items() for key in keys.split()}
        for at, rows in table.items()
        if at not in TABLES
    }
    return empty | {at: table[at] for at in TABLES if at in table} | split


class File:
    """A configuration as one of the formats: its keys, with older names in place of which the newer ones stand, with
    references resolved, and with the defaults of its trainer."""

    def __init__(self, name: str, tree: ConfigTree) -> None:
        self.name, self.table = name, load_format(name)
        self.settings = self.table["settings"]
        self.switches = self.settings.get("switches", ["enabled", "enable"])
        self.old_names: dict[str, str] = {}
        self.tree = self._renamed(tree)
        self.defaults = self._defaults()
        self.whole = self._with_sections(self.tree)

    def iterate(self, *, defaults: bool = True) -> Iterator[SourceKey]:
        tree, own = (self.whole, self.defaults) if defaults else (self.tree, {})
        yield from self._keys(tree, own, [], "top", False)

    def notes(self) -> list[str]:
        return [note for path, note in self.table["notes"].items() if _at(self.tree, path.split(".")) is None]

    def _renamed(self, tree: ConfigTree) -> ConfigTree:
        """The tree with keys under their newer names; a key that is there under both stays under both."""
        for old, new in self.table["renamed"].items():
            (*at, last), (*to, name) = old.split("."), new.split(".")
            section, target = _at(tree, at), _at(tree, to)
            if not isinstance(section, dict) or last not in section or not isinstance(target, dict | None):
                continue
            if isinstance(target, dict) and name in target:
                continue
            value = section[last]
            tree = _with(_without(tree, at, last), to, name, value)
            self.old_names[new] = old
        return tree

    def _defaults(self) -> dict[str, ConfigTree]:
        result = {section: dict(values) for section, values in self.table["defaults"].items()}
        for case in self.table["cases"]:
            if all(self._is(path, values, result) for path, values in case["where"].items()):
                for section, values in case["defaults"].items():
                    result.setdefault(section, {}).update(values)
        return {
            section: {last: value for last, value in values.items() if value != ""}  # "": a case without a default
            for section, values in result.items()
        }

    def _is(self, path: str, values: list[str], defaults: Mapping[str, ConfigTree]) -> bool:
        """Whether a key has one of these values, "absent" for a key that is not there and has no default."""
        *at, last = path.split(".")
        section = _at(self.tree, at)
        own = section if isinstance(section, dict) else {}
        default = defaults.get(".".join(at) or "top", {}).get(last, "absent")
        text = str(own.get(last, default)).lower()
        return text in values or (text in TRUE and "true" in values) or (text in FALSE and "false" in values)

    def _with_sections(self, tree: ConfigTree) -> ConfigTree:
        whole = self.settings.get("whole", [])
        for section in self.defaults if whole is True else whole:
            *at, last = section.split(".")
            outer = _at(tree, at)
            if section in self.defaults and section != "top" and isinstance(outer, dict) and outer.get(last) is None:
                tree = _with(tree, at, last, {})
        return tree

    def _keys(
        self, tree: ConfigTree, defaults: Mapping[str, ConfigTree], at: list[str], section: str, off: bool
    ) -> Iterator[SourceKey]:
        own = {last: value for last, value in defaults.get(section, {}).items() if last not in tree}
        is_off = off or any(str({**own, **tree}.get(switch)).lower() in FALSE for switch in self.switches)
        for last, value in {**tree, **own}.items():
            name = str(last)
            inner = f"{section}.{name}".removeprefix("top.")
            is_section = "." not in name and "[" not in name
            if is_section and isinstance(value, dict) and (value or inner in defaults):
                yield from self._keys(value, defaults, [*at, name], inner, is_off)
            elif is_section and isinstance(value, list) and value and all(isinstance(item, dict) for item in value):
                for number, item in enumerate(value):
                    yield from self._keys(item, defaults, [*at, f"{name}[{number}]"], inner, is_off)
            else:
                path = ".".join([*at, name])
                key_off = off or (is_off and last not in self.switches)
                resolved = self._resolved(value, at)
                old = self.old_names.get(path)
                now = path if old is not None else self.table["renamed"].get(path, "")
                yield SourceKey(old or path, section, name, resolved, key_off, last in own, value, now)

    def _resolved(self, value: Any, at: list[str], depth: int = 0) -> Any:
        """The value that a reference to another key stands for; a reference to none, or to itself, stays."""
        match = REFERENCE.fullmatch(value) if isinstance(value, str) and self.settings.get("references") else None
        if match is None or depth > MAX_REFERENCES:
            return value
        dots, path = len(match[1]), match[2].split(".")
        base = at[: len(at) - dots + 1] if dots else []
        *section, last = [*base, *path]
        found = _at(self.tree, section)
        if not isinstance(found, dict) or last not in found or isinstance(found[last], dict | list):
            return value
        return self._resolved(found[last], section, depth + 1)

    def row(self, key: SourceKey) -> Any:
        """Its row: a text, or a table of texts by values; None for an unknown key."""
        section, last = key.section, key.last
        if (new := self.table["renamed"].get(f"{section}.{last}")) is not None:  # it is there under both names
            section, _, last = new.rpartition(".")
        rows = self.table.get(section, {}) if section not in TABLES else {}
        prefix = self.settings.get("prefixes", {}).get(section, "")
        last = last if last in rows else prefix + last
        if last in rows:
            return rows[last]
        is_megatron = self.settings.get("megatron") and section in self.table and section != "top"
        if is_megatron and (row := _of_megatron(key)) is not None:
            return row
        inner = f"{section}.{key.last}.".removeprefix("top.")
        if key.text in NOOP_VALUES and any(
            f"{other}.".startswith(inner) for other in self.table if other not in TABLES
        ):
            return NOOP_VERDICT
        while section and (section in TABLES or "*" not in self.table.get(section, {})):
            section = section.rpartition(".")[0]
        return self.table[section]["*"] if section else None

    def weight(self, key: SourceKey) -> int:
        if f"{key.section}.{key.last}" in self.settings.get("overrides", ()):
            return OVERRIDES
        return DEFAULT if key.is_default else GIVEN


def _at(tree: Any, path: list[str]) -> Any:
    """The value at a path; None where there is none."""
    for name in path:
        tree = tree.get(name) if isinstance(tree, dict) else None
    return tree


def _with(tree: ConfigTree, path: list[str], last: str, value: Any) -> ConfigTree:
    """A copy of the tree with a value at a path, whose sections are made where they are not there."""
    if not path:
        return {**tree, last: value}
    inner = tree.get(path[0])
    return {**tree, path[0]: _with(inner if isinstance(inner, dict) else {}, path[1:], last, value)}


def _without(tree: ConfigTree, path: list[str], last: str) -> ConfigTree:
    if not path:
        return {name: value for name, value in tree.items() if name != last}
    return {**tree, path[0]: _without(tree[path[0]], path[1:], last)}


@cache
def _spelled() -> Mapping[str, tuple[str, Any]]:
    """Flag without -- -> (option, the value that it stands for, or None)."""
    return {flag[2:]: (name, value) for name, f in FIELDS.items() for flag, value in flags_of(f)}


def _of_megatron(key: SourceKey) -> str | None:
    if key.last in FIELDS:
        return f"+ {key.last}"
    for prefix in ("", "no-", "disable-"):
        flag = prefix + key.last.replace("_", "-")
        if (known := known_flags().get(f"--{flag}")) is None:
            continue
        if known.verdict == OPTION and flag in _spelled():
            option, value = _spelled()[flag]
            if value is None:
                return f"+ {option}"
            asks = key.text == ("false" if prefix else "true")
            return f"+ {option}={str(value).lower()}" if asks else NOOP_VERDICT
        if known.verdict == INSTEAD:
            return f"! give {known.reason}"
        asks = (
            key.text not in NOOP_VALUES and requests_feature(known, [key.text]) if not prefix else key.text == "false"
        )
        if known.verdict in (REFUSED, WARNED):
            return f"! {known.reason}" if asks else NOOP_VERDICT
        return f"= {known.reason or f'it belongs to {known.feature}'}"
    return None


def key_of(flag: str) -> str:
    return flag[2:].replace("-", "_")
