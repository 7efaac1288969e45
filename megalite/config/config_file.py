"""A configuration as TOML text: the file of --config, and the copy that a run and its checkpoints keep."""

import json
import re
import tomllib
from collections.abc import Iterator, Mapping
from typing import Any

from megalite.config.megatron_flags import closest_match
from megalite.config.options import SECTIONS, Config, ConfigError, gelu_variant, iter_options
from megalite.config.plugins import plugin_hashes
from megalite.config.text_file import TextFileError, read_small_text

MAX_CONFIG_BYTES = 1 << 20
MAX_PROBLEMS = 40


def read_config_file(path: str) -> dict[str, Any]:
    """Option names to values from a TOML file. Raises ConfigError."""
    try:
        text = read_small_text(path, "a TOML file", MAX_CONFIG_BYTES)
    except TextFileError as error:
        raise ConfigError([f"config={path!r} {error.reason}; give a TOML file"]) from None
    return parse_config_text(text, path)


def _other_format(text: str, path: str) -> str | None:
    """What to do with a file that is JSON or YAML; None for another file."""
    is_json = text.lstrip()[:1] == "{"
    if not is_json and not re.search(r"^\s*[A-Za-z_]\w*:(?:\s|$)", text, re.M):
        return None
    of = "DeepSpeed, Accelerate, nanotron, NeMo or Megatron-Bridge"
    remedy = (
        f"if it is of {of}, megalite translate {path} writes it as TOML; megalite train --help all lists the options"
    )
    return f"is {'JSON' if is_json else 'YAML'}; {remedy}"


def parse_config_text(text: str, path: str) -> dict[str, Any]:
    """Option names to values from a TOML text, with or without [section] tables; `path` names it in errors."""
    try:
        data = tomllib.loads(text)
    except (ValueError, RecursionError) as error:  # ValueError: also a number of more than 4,300 digits
        why = _other_format(text, path) or f"is not TOML ({error}); correct that line"
        raise ConfigError([f"config={path!r} {why}"]) from None
    known = {f.name: section for section, f in iter_options()}
    values: dict[str, Any] = {}
    problems: list[str] = []
    for section, key, value in _entries(data):
        name = key.replace("-", "_")
        if len(problems) == MAX_PROBLEMS:  # to look for the nearest option of each of 100,000 keys would take minutes
            problems.append(f"config={path!r} has more wrong keys; correct these first")
            break
        if section is not None and section not in SECTIONS:
            problems.append(f"config={path!r}: unknown section [{section}]; sections are {', '.join(SECTIONS)}")
        elif name != "preset" and (name not in known or (section is not None and known[name] != section)):
            near = closest_match(f"--{name}", [f"--{other}" for other in known])
            other = f"did you mean {near[2:]}?" if near else "megalite train --help all lists the options"
            hint = f"it belongs in [{known[name]}]" if name in known else other
            problems.append(f"config={path!r}: unknown key {name} in [{section or 'top level'}]; {hint}")
        elif name in values:
            problems.append(f"config={path!r}: {name} is given twice; keep one")
        else:
            values[name] = value
    if problems:
        raise ConfigError(problems)
    return values


def _entries(data: Mapping[str, Any]) -> Iterator[tuple[str | None, str, Any]]:
    """(section or None, key, value) of each key; a section that is unknown comes once, with an empty key."""
    for key, value in data.items():
        if not isinstance(value, dict):
            yield None, key, value
        elif key not in SECTIONS:
            yield key, "", value
        else:
            yield from ((key, name, inner) for name, inner in value.items())


def non_default_options(config: Config) -> dict[str, dict[str, Any]]:
    """Section -> option -> value, of options that differ from their defaults, or from those of `completed`."""
    result: dict[str, dict[str, Any]] = {}
    m = config.model
    plain = gelu_variant(
        add_bias_linear=m.add_bias_linear, bias_gelu_fusion=m.bias_gelu_fusion, openai_gelu=m.openai_gelu
    )
    for section, f in iter_options():
        value = getattr(getattr(config, section), f.name)
        if value != f.default or (f.name == "activation" and value != plain):
            result.setdefault(section, {})[f.name] = value
    return result


def dump_config(config: Config) -> str:
    """A TOML text that starts the same run again, with --config. It also has the options that were given with their
    default where --use-checkpoint-args would take those that are left out from the checkpoint."""
    values = {name: value for section in non_default_options(config).values() for name, value in section.items()}
    if config.checkpoint.use_checkpoint_args:
        for section, f in iter_options():
            if section == "model" and f.name in config.given:
                values[f.name] = getattr(config.model, f.name)
    return dump_values({name: value for name, value in values.items() if value is not None})


def dump_values(values: Mapping[str, Any]) -> str:
    """Option -> value as TOML, by sections. TOML has JSON's literals, but takes no bare DEL."""
    lines, last = [], ""
    for section, f in iter_options():
        if f.name in values:
            lines += ["", f"[{section}]"] if section != last else []
            literal = json.dumps(values[f.name], ensure_ascii=False).replace("\x7f", "\\u007f")
            texts = ", ".join(f"{name} {sha256}" for name, sha256 in plugin_hashes().items() if f.name == "plugin")
            lines.append(f"{f.name} = {literal}" + f"  # sha256: {texts}" * bool(texts))
            last = section
    return "\n".join([*lines[1:], ""])
