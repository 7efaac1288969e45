"""The keys of another trainer's configuration, and the rows of the tables that translate them.

formats/FORMAT.toml has a row for each key, by section (`top`: keys outside of sections). Several keys may have one
row, as "a b"; "*" stands for all other keys of its section and below it.

A row is a text that starts with a mark, or a table of such texts by the key's value, as text in lower case. In a table,
"*" stands for any other value; if its text is "= requests nothing", only for values that request nothing. A value that
is filled in later, such as auto, uses the text that acts. The marks:

    + OPTION ...         acts: the options take the value, or one element each of a list
    + OPTION=VALUE ...   acts: the options take these values
    > PART WHERE         acts: it sets a part, which with other keys sets WHERE (rules.py)
    ~ OPTION REASON      acts unless another key sets the option; it has no equivalent if the values then differ
    =ON,ON REASON        always so in megalite; with a list, other values have no equivalent
    !OFF,OFF REMEDY      no equivalent, unless the value requests nothing or is in the list

[settings] has these keys:

    title             the name of the format
    implied_sections  sections whose defaults count even if the file lacks them: true for all, or their names
    megatron          a key without a row is treated as Megatron-LM's flag of that name
    references        ${a.b} is the value of another key, and ??? a value that the user must set
    overrides         keys that take precedence over others
    enabled_by_any    options that are on if any key sets them
    switches          keys that switch off their section if they are false
    prefixes          section -> a prefix that its keys may have

[defaults.SECTION] has the other trainer's defaults that differ from megalite's, and [[cases]] those that apply only if
the keys in `where` have one of the given values. [renamed] has older names of keys. [notes] has lines that are printed
if a section is missing.
"""

import re
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from megalite.config.megatron_flags import INSTEAD, OPTION, REFUSED, WARNED, known_flags, requests_feature
from megalite.config.option import flags_of
from tools.translation.rules import DEFAULT, FIELDS, GIVEN, OVERRIDES

TABLES = ("settings", "defaults", "cases", "renamed", "notes")  # all other tables of a format are sections
NOOP_VALUES = {"", "none", "no", "false", "off", "disabled", "0", "0.0", "[]", "{}"}
# as pydantic and YAML 1.1 parse them
TRUE = {"true", "1", "1.0", "yes", "on"}
FALSE = {"false", "0", "0.0", "no", "off"}
FILLED_IN = ("auto", "???")  # values that are set later
NOOP_VERDICT = "= requests nothing"
ConfigTree = dict[str, Any]
REFERENCE = re.compile(r"\$\{(\.*)([\w.]+)\}")
MAX_REFERENCES = 10  # maximum length of a chain of references


@dataclass(frozen=True)
class SourceKey:
    """A key of another trainer's configuration."""

    name: str  # with its sections, as in the file, and with the indices of list elements
    section: str  # "top" outside of sections
    last: str  # without its section
    value: Any
    off: bool = False  # its section is switched off
    is_default: bool = False
    raw: Any = None  # the value as in the file, with unresolved references
    now: str = ""  # the newer name of a renamed key

    @property
    def text(self) -> str:
        """The value as text in lower case."""
        return str(self.value).lower()

    @property
    def is_true(self) -> bool:
        return self.text in TRUE

    @property
    def is_false(self) -> bool:
        return self.text in FALSE


@cache
def load_format(name: str) -> dict[str, Any]:
    """Return section -> key -> row, and the tables of TABLES."""
    path = Path(__file__).parent / "formats" / f"{name}.toml"
    table = tomllib.loads(path.read_text(encoding="utf-8"))
    empty = {"top": {}, "defaults": {}, "cases": [], "renamed": {}, "notes": {}}
    sections = {
        section: {key: row for keys, row in rows.items() for key in keys.split()}
        for section, rows in table.items()
        if section not in TABLES
    }
    return {**empty, **{name: table[name] for name in TABLES if name in table}, **sections}


class SourceConfig:
    """A configuration in one of the formats.

    Its keys have their newer names, references are resolved, and the defaults of its trainer are added.
    """

    def __init__(self, name: str, tree: ConfigTree) -> None:
        self.name = name
        self.table = load_format(name)
        self.settings = self.table["settings"]
        self.switches = self.settings.get("switches", ["enabled", "enable"])
        self.old_names: dict[str, str] = {}
        self.tree = self._renamed(tree)
        self.defaults = self._defaults()
        self.tree_with_sections = self._with_sections(self.tree)

    def iterate(self, *, defaults: bool = True) -> Iterator[SourceKey]:
        """Yield all keys of the file, and if `defaults`, the defaults that it does not set."""
        if defaults:
            yield from self._keys(self.tree_with_sections, self.defaults, [], "top", False)
        else:
            yield from self._keys(self.tree, {}, [], "top", False)

    def notes(self) -> list[str]:
        """Return the notes about missing sections."""
        return [note for path, note in self.table["notes"].items() if _at(self.tree, path.split(".")) is None]

    def _renamed(self, tree: ConfigTree) -> ConfigTree:
        """Return the tree with the newer names of keys. A key that has both names in the file keeps both."""
        for old, new in self.table["renamed"].items():
            *old_path, old_last = old.split(".")
            *new_path, new_last = new.split(".")
            section = _at(tree, old_path)
            target = _at(tree, new_path)
            if not isinstance(section, dict) or old_last not in section or not isinstance(target, dict | None):
                continue
            if isinstance(target, dict) and new_last in target:
                continue
            value = section[old_last]
            tree = _with(_without(tree, old_path, old_last), new_path, new_last, value)
            self.old_names[new] = old
        return tree

    def _defaults(self) -> dict[str, ConfigTree]:
        """Return section -> key -> default, including the cases that apply to this file."""
        result = {section: dict(values) for section, values in self.table["defaults"].items()}
        for case in self.table["cases"]:
            if all(self._is(path, values, result) for path, values in case["where"].items()):
                for section, values in case["defaults"].items():
                    result.setdefault(section, {}).update(values)
        return {
            section: {last: value for last, value in values.items() if value != ""}  # "" means no default in this case
            for section, values in result.items()
        }

    def _is(self, path: str, values: list[str], defaults: Mapping[str, ConfigTree]) -> bool:
        """Return True if a key has one of these values; "absent" is the value of a missing key without a default."""
        *section_path, last = path.split(".")
        section = _at(self.tree, section_path)
        own = section if isinstance(section, dict) else {}
        default = defaults.get(".".join(section_path) or "top", {}).get(last, "absent")
        text = str(own.get(last, default)).lower()
        return text in values or (text in TRUE and "true" in values) or (text in FALSE and "false" in values)

    def _with_sections(self, tree: ConfigTree) -> ConfigTree:
        """Return the tree with empty sections for the missing ones whose defaults count (settings.implied_sections)."""
        sections = self.settings.get("implied_sections", [])
        if sections is True:
            sections = self.defaults
        for section in sections:
            *outer_path, last = section.split(".")
            outer = _at(tree, outer_path)
            if section in self.defaults and section != "top" and isinstance(outer, dict) and outer.get(last) is None:
                tree = _with(tree, outer_path, last, {})
        return tree

    def _keys(
        self, tree: ConfigTree, defaults: Mapping[str, ConfigTree], path: list[str], section: str, off: bool
    ) -> Iterator[SourceKey]:
        """Yield the keys of a section and of the sections in it.

        Args:
            tree: the section.
            defaults: section -> key -> default.
            path: the path of the section, with indices of list elements.
            section: the path of the section as text, without indices; "top" for the root.
            off: an outer section is switched off.
        """
        own_defaults = {last: value for last, value in defaults.get(section, {}).items() if last not in tree}
        is_off = off or any(str({**own_defaults, **tree}.get(switch)).lower() in FALSE for switch in self.switches)
        for last, value in {**tree, **own_defaults}.items():
            name = str(last)
            inner = f"{section}.{name}".removeprefix("top.")
            is_section = "." not in name and "[" not in name
            if is_section and isinstance(value, dict) and (value or inner in defaults):
                yield from self._keys(value, defaults, [*path, name], inner, is_off)
            elif is_section and isinstance(value, list) and value and all(isinstance(item, dict) for item in value):
                for i, item in enumerate(value):
                    yield from self._keys(item, defaults, [*path, f"{name}[{i}]"], inner, is_off)
            else:
                full_name = ".".join([*path, name])
                key_off = off or (is_off and last not in self.switches)
                resolved = self._resolved(value, path)
                old = self.old_names.get(full_name)
                now = full_name if old is not None else self.table["renamed"].get(full_name, "")
                yield SourceKey(old or full_name, section, name, resolved, key_off, last in own_defaults, value, now)

    def _resolved(self, value: Any, section_path: list[str], depth: int = 0) -> Any:
        """Return the value that a reference in this section stands for.

        A value that is not a reference, or a reference to a missing key, a section, a list or itself is returned as is.
        """
        match = REFERENCE.fullmatch(value) if isinstance(value, str) and self.settings.get("references") else None
        if match is None or depth > MAX_REFERENCES:
            return value
        num_dots = len(match[1])
        base = section_path[: len(section_path) - num_dots + 1] if num_dots else []
        *target_path, last = [*base, *match[2].split(".")]
        target = _at(self.tree, target_path)
        if not isinstance(target, dict) or last not in target or isinstance(target[last], dict | list):
            return value
        return self._resolved(target[last], target_path, depth + 1)

    def row(self, key: SourceKey) -> Any:
        """Return the row of a key: a text, or a table of texts by value; None for an unknown key."""
        section = key.section
        last = key.last
        new = self.table["renamed"].get(f"{section}.{last}")
        if new is not None:  # the file has both names
            section, _, last = new.rpartition(".")
        rows = self.table.get(section, {}) if section not in TABLES else {}
        prefix = self.settings.get("prefixes", {}).get(section, "")
        last = last if last in rows else prefix + last
        if last in rows:
            return rows[last]
        is_megatron = self.settings.get("megatron") and section in self.table and section != "top"
        if is_megatron and (row := _megatron_row(key)) is not None:
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
        """Return the precedence of a key over others that set the same option."""
        if f"{key.section}.{key.last}" in self.settings.get("overrides", ()):
            return OVERRIDES
        return DEFAULT if key.is_default else GIVEN


def _at(tree: Any, path: list[str]) -> Any:
    """Return the value at a path; None if there is none."""
    for name in path:
        tree = tree.get(name) if isinstance(tree, dict) else None
    return tree


def _with(tree: ConfigTree, path: list[str], last: str, value: Any) -> ConfigTree:
    """Return a copy of the tree with a value at a path; missing sections are created."""
    if not path:
        return {**tree, last: value}
    inner = tree.get(path[0])
    return {**tree, path[0]: _with(inner if isinstance(inner, dict) else {}, path[1:], last, value)}


def _without(tree: ConfigTree, path: list[str], last: str) -> ConfigTree:
    """Return a copy of the tree without a key."""
    if not path:
        return {name: value for name, value in tree.items() if name != last}
    return {**tree, path[0]: _without(tree[path[0]], path[1:], last)}


@cache
def _spelled() -> Mapping[str, tuple[str, Any]]:
    """Return flag without -- -> (option, the value that the flag sets, or None if it takes a value)."""
    return {flag[2:]: (name, value) for name, f in FIELDS.items() for flag, value in flags_of(f)}


def _megatron_row(key: SourceKey) -> str | None:
    """Return a row for a key that is named like an option or a flag of Megatron-LM; None for another key."""
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
            has_request = key.text == ("false" if prefix else "true")
            return f"+ {option}={str(value).lower()}" if has_request else NOOP_VERDICT
        if known.verdict == INSTEAD:
            return f"! give {known.reason}"
        if prefix:
            has_request = key.text == "false"
        else:
            has_request = key.text not in NOOP_VALUES and requests_feature(known, [key.text])
        if known.verdict in (REFUSED, WARNED):
            return f"! {known.reason}" if has_request else NOOP_VERDICT
        return f"= {known.reason or f'it belongs to {known.feature}'}"
    return None


def key_of(flag: str) -> str:
    """Return the key of a flag: without -- and with underscores."""
    return flag[2:].replace("-", "_")
