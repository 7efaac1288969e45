"""Reading a configuration of another program, in JSON, TOML or YAML.

The file is not trusted, so its cost is limited before any object is built from it: bytes, keys and values, the length
of a name, nesting depth, and the size to which YAML aliases expand.
"""

import json
import re
import tomllib
from collections.abc import Sequence
from typing import Any

from megalite.common.optional_packages import MissingPackageError, missing_package_message
from megalite.common.text_file import TextFileError, read_small_text
from megalite.config.options import ConfigError

MAX_BYTES = 256 << 10  # PyYAML takes 2 seconds for them; a full configuration of Megatron-Bridge has 60 KiB
MAX_VALUES = 5000  # keys and elements of lists, counted again for each alias
MAX_DEPTH = 20
MAX_NAME = 200  # characters of a key
MERGE = "tag:yaml.org,2002:merge"  # the tag of the key <<
PART = r"""(?:[\w-]++|"[^"\n]*+"|'[^'\n]*+')"""
DOTTED = re.compile(rf"(?<![\w-]){PART}(?:[ \t]*+\.[ \t]*+{PART}){{{MAX_DEPTH},}}")


class _Limits:
    """A counter of values that raises ValueError if a limit is exceeded."""

    def __init__(self) -> None:
        self.values = 0

    def count(self, depth: int) -> None:
        self.values += 1
        if self.values > MAX_VALUES:
            raise ValueError(f"more than {MAX_VALUES} keys and values")
        if depth > MAX_DEPTH:
            raise ValueError(f"values nested more than {MAX_DEPTH} deep, as an alias within its own anchor is")

    def name(self, name: str) -> None:
        if len(name) > MAX_NAME:
            raise ValueError(f"the key {name[:20]}... has more than {MAX_NAME} characters")


def read_mapping(path: str) -> dict[str, Any]:
    """Return the keys of a file with their values.

    Raises:
        ConfigError: if the file cannot be read, is invalid, or exceeds a limit.
        MissingPackageError: for YAML without PyYAML.
    """
    try:
        text = read_small_text(path, "a configuration in JSON, TOML or YAML", MAX_BYTES)
    except TextFileError as error:
        raise ConfigError([f"{path!r}: {error.reason}; give a configuration in JSON, TOML or YAML"]) from None
    try:
        tree = _parse(path, text)
        _check(tree)
    except ImportError:
        raise MissingPackageError(missing_package_message(repr(path), "pyyaml")) from None
    except RecursionError:
        reason = f"values nested more than {MAX_DEPTH} deep"
        raise ConfigError([f"{path!r} cannot be read as JSON, TOML or YAML ({reason}); correct it"]) from None
    except ValueError as error:
        reason = " ".join(str(error).split())
        raise ConfigError([f"{path!r} cannot be read as JSON, TOML or YAML ({reason}); correct it"]) from None
    if not isinstance(tree, dict):
        raise ConfigError([f"{path!r} is not a table of keys with values; give a configuration in JSON, TOML or YAML"])
    return tree


def _parse(path: str, text: str) -> Any:
    """Parse a text in the format that its path and first character suggest.

    Raises:
        ValueError: if it is invalid.
        RecursionError: if it is nested too deeply.
        ImportError: for YAML without PyYAML.
    """
    if path.endswith(".toml"):
        _check_dots(text)
        return tomllib.loads(text)
    if text.lstrip()[:1] == "{" and not path.endswith((".yaml", ".yml")):
        return json.loads(text, object_pairs_hook=_without_repeats)
    import yaml

    try:
        loader = yaml.SafeLoader(text)
        node = loader.get_single_node()
        _check_nodes(node)
        return None if node is None else loader.construct_document(node)
    except yaml.YAMLError as error:
        raise ValueError(str(error)) from None
    except (LookupError, AttributeError, TypeError, OverflowError) as error:  # PyYAML raises these for !!bool x
        raise ValueError(f"a value does not fit its tag: {error}") from None


def _without_repeats(pairs: Sequence[tuple[Any, Any]]) -> dict[Any, Any]:
    """Return the pairs as a dictionary. Raises ValueError for a repeated key.

    Most parsers take the last value of such a key; DeepSpeed and TOML parsers reject it.
    """
    values: dict[Any, Any] = {}
    for key, value in pairs:
        if key in values:
            name = key[1] if isinstance(key, tuple) else key  # a key of YAML is (tag, text)
            raise ValueError(f"the key {name[:40]} is given twice; keep one")
        values[key] = value
    return values


def _check_dots(text: str) -> None:
    """Raise ValueError if a dotted key of TOML has too many parts.

    The time and memory that tomllib takes grow with the square of their number.
    """
    if DOTTED.search(text):
        raise ValueError(f"a key of more than {MAX_DEPTH} parts")


def _check_nodes(root: Any) -> None:
    """Raise ValueError if YAML nodes exceed a limit or a mapping repeats a key.

    Nodes are counted as if every alias were expanded; an anchor that contains its own alias then exceeds the depth. The
    mapping of a merge key is counted for each alias too, because it is copied.
    """
    limits = _Limits()
    stack = [(root, 0)]
    while stack:
        node, depth = stack.pop()
        if node is None:
            continue
        limits.count(depth)
        if isinstance(node.value, str):
            continue
        keys = [part[0] for part in node.value if isinstance(part, tuple)]
        _without_repeats([((k.tag, k.value), None) for k in keys if isinstance(k.value, str) and k.tag != MERGE])
        for part in node.value:  # a node of a list, or (node of a key, node of its value)
            key, value = part if isinstance(part, tuple) else (None, part)
            stack += [(value, depth + 1)]
            if key is not None and not isinstance(key.value, str):
                stack += [(key, depth + 1)]


def _check(tree: Any) -> None:
    """Raise ValueError if a parsed configuration exceeds a limit."""
    limits = _Limits()
    stack = [(tree, 0)]
    while stack:
        value, depth = stack.pop()
        limits.count(depth)
        if isinstance(value, dict):
            for name in value:
                limits.name(str(name))
            stack += [(inner, depth + 1) for inner in value.values()]
        elif isinstance(value, list | tuple | set):
            stack += [(inner, depth + 1) for inner in value]
