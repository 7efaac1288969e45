"""Read a configuration of another program: JSON, TOML or YAML.

It may come from anywhere, so what it can cost is bounded before anything is built from it: bytes, keys and values, the
length of a name, depth, and what YAML's aliases expand to.
"""

import json
import re
import tomllib
from collections.abc import Sequence
from typing import Any

from megalite.common.optional_packages import MissingPackageError, missing_package_message
from megalite.config.options import ConfigError
from megalite.config.text_file import TextFileError, read_small_text

MAX_BYTES = 256 << 10  # PyYAML reads that in 2 seconds; a full configuration of Megatron-Bridge has 60 KiB
MAX_VALUES = 5000  # keys and elements of lists, each counted wherever an alias repeats it
MAX_DEPTH = 20
MAX_NAME = 200  # characters of a key
MERGE = "tag:yaml.org,2002:merge"  # of the key <<
PART = r"""(?:[\w-]++|"[^"\n]*+"|'[^'\n]*+')"""
DOTTED = re.compile(rf"(?<![\w-]){PART}(?:[ \t]*+\.[ \t]*+{PART}){{{MAX_DEPTH},}}")


class _Limits:
    """Counts values; raises ValueError at the first that is beyond a limit."""

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
    """Return the keys of a file and their values. Raises ConfigError, and MissingPackage for YAML without PyYAML."""
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
        why = f"values nested more than {MAX_DEPTH} deep"
        raise ConfigError([f"{path!r} is no JSON, TOML or YAML that can be read ({why}); correct it"]) from None
    except ValueError as error:
        why = " ".join(str(error).split())
        raise ConfigError([f"{path!r} is no JSON, TOML or YAML that can be read ({why}); correct it"]) from None
    if not isinstance(tree, dict):
        raise ConfigError([f"{path!r} is no list of keys with values; give a configuration in JSON, TOML or YAML"])
    return tree


def _parse(path: str, text: str) -> Any:
    """Raises ValueError, RecursionError, ImportError."""
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
    except (LookupError, AttributeError, TypeError, OverflowError) as error:  # PyYAML's own, of !!bool x and the like
        raise ValueError(f"a value does not fit its tag: {error}") from None


def _without_repeats(pairs: Sequence[tuple[Any, Any]]) -> dict[Any, Any]:
    """Return the pairs as a dictionary. Raises ValueError for a repeated key.

    Most readers take the last value of such a key, and DeepSpeed refuses it; so does TOML's reader.
    """
    values: dict[Any, Any] = {}
    for key, value in pairs:
        if key in values:
            name = key[1] if isinstance(key, tuple) else key  # of YAML with its type
            raise ValueError(f"the key {name[:40]} is given twice; keep one")
        values[key] = value
    return values


def _check_dots(text: str) -> None:
    """TOML's reader takes time and memory that grow with the square of a dotted key's parts. Raises ValueError."""
    if DOTTED.search(text):
        raise ValueError(f"a key of more than {MAX_DEPTH} parts")


def _check_nodes(root: Any) -> None:
    """Count YAML's nodes as if each alias were written out, which an anchor within itself never is. A merge key, whose
    mapping is copied for each alias, is counted in the same way. Raises ValueError."""
    limits, stack = _Limits(), [(root, 0)]
    while stack:
        node, depth = stack.pop()
        if node is None:
            continue
        limits.count(depth)
        if isinstance(node.value, str):
            continue
        keys = [part[0] for part in node.value if isinstance(part, tuple)]
        _without_repeats([((k.tag, k.value), None) for k in keys if isinstance(k.value, str) and k.tag != MERGE])
        for part in node.value:  # a node of a list, or the nodes of a key and its value
            key, value = part if isinstance(part, tuple) else (None, part)
            stack += [(value, depth + 1)]
            if key is not None and not isinstance(key.value, str):
                stack += [(key, depth + 1)]


def _check(tree: Any) -> None:
    """Raises ValueError."""
    limits, stack = _Limits(), [(tree, 0)]
    while stack:
        value, depth = stack.pop()
        limits.count(depth)
        if isinstance(value, dict):
            for name in value:
                limits.name(str(name))
            stack += [(inner, depth + 1) for inner in value.values()]
        elif isinstance(value, list | tuple | set):
            stack += [(inner, depth + 1) for inner in value]
