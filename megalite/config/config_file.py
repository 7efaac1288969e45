"""A configuration as TOML text: the file of --config, and the copy in the directories of runs and checkpoints."""

import json
import re
import tomllib
from collections.abc import Iterator, Mapping
from typing import Any

from megalite.common.text_file import TextFileError, read_small_text
from megalite.config.megatron_flags import closest_match
from megalite.config.options import SECTIONS, Config, ConfigError, gelu_variant, iter_options
from megalite.config.plugins import plugin_hashes

MAX_CONFIG_BYTES = 1 << 20
MAX_PROBLEMS = 40


def read_config_file(path: str) -> dict[str, Any]:
    """Return option -> value from a TOML file. Raises ConfigError if it cannot be read or has unknown keys."""
    try:
        text = read_small_text(path, "a TOML file", MAX_CONFIG_BYTES)
    except TextFileError as error:
        raise ConfigError([f"config={path!r} {error.reason}; give a TOML file"]) from None
    return parse_config_text(text, path)


def _other_format(text: str, path: str) -> str | None:
    """Return a message for a file that is JSON or YAML, with a remedy; None for another file."""
    is_json = text.lstrip()[:1] == "{"
    if not is_json and not re.search(r"^\s*[A-Za-z_]\w*:(?:\s|$)", text, re.M):
        return None
    trainers = "DeepSpeed, Accelerate, nanotron, NeMo or Megatron-Bridge"
    remedy = (
        f"if it is of {trainers}, megalite translate {path} writes it as TOML; "
        "megalite train --help all lists the options"
    )
    return f"is {'JSON' if is_json else 'YAML'}; {remedy}"


def parse_config_text(text: str, path: str) -> dict[str, Any]:
    """Return option -> value from a TOML text, with or without [section] tables.

    Args:
        path: the name of the text in errors.

    Raises:
        ConfigError: with a line for every wrong key, at most MAX_PROBLEMS.
    """
    try:
        data = tomllib.loads(text)
    except (ValueError, RecursionError) as error:  # ValueError: also a number of more than 4,300 digits
        reason = _other_format(text, path) or f"is not TOML ({error}); correct that line"
        raise ConfigError([f"config={path!r} {reason}"]) from None
    known = {f.name: section for section, f in iter_options()}
    values: dict[str, Any] = {}
    problems: list[str] = []
    for section, key, value in _entries(data):
        name = key.replace("-", "_")
        if len(problems) == MAX_PROBLEMS:  # the search for the nearest option of 100,000 keys would take minutes
            problems.append(f"config={path!r} has more wrong keys; correct these first")
            break
        if section is not None and section not in SECTIONS:
            problems.append(f"config={path!r}: unknown section [{section}]; sections are {', '.join(SECTIONS)}")
        elif name != "preset" and (name not in known or (section is not None and known[name] != section)):
            near = closest_match(f"--{name}", [f"--{other}" for other in known])
            if name in known:
                hint = f"it belongs in [{known[name]}]"
            elif near:
                hint = f"did you mean {near[2:]}?"
            else:
                hint = "megalite train --help all lists the options"
            problems.append(f"config={path!r}: unknown key {name} in [{section or 'top level'}]; {hint}")
        elif name in values:
            problems.append(f"config={path!r}: {name} is given twice; keep one")
        else:
            values[name] = value
    if problems:
        raise ConfigError(problems)
    return values


def _entries(data: Mapping[str, Any]) -> Iterator[tuple[str | None, str, Any]]:
    """Yield (section or None, key, value) for every key; an unknown section is yielded once, with an empty key."""
    for key, value in data.items():
        if not isinstance(value, dict):
            yield None, key, value
        elif key not in SECTIONS:
            yield key, "", value
        else:
            yield from ((key, name, inner) for name, inner in value.items())


def non_default_options(config: Config) -> dict[str, dict[str, Any]]:
    """Return section -> option -> value, for the options that are not at their defaults.

    `activation` is also included if it differs from what `apply_megatron_defaults` would set.
    """
    result: dict[str, dict[str, Any]] = {}
    model = config.model
    default_activation = gelu_variant(
        add_bias_linear=model.add_bias_linear, bias_gelu_fusion=model.bias_gelu_fusion, openai_gelu=model.openai_gelu
    )
    for section, f in iter_options():
        value = getattr(getattr(config, section), f.name)
        if value != f.default or (f.name == "activation" and value != default_activation):
            result.setdefault(section, {})[f.name] = value
    return result


def dump_config(config: Config) -> str:
    """Return a TOML text that starts the same run with --config.

    With --use-checkpoint-args it includes explicit model options at their defaults, because the values of missing
    options would be taken from the checkpoint.
    """
    values = {name: value for section in non_default_options(config).values() for name, value in section.items()}
    if config.checkpoint.use_checkpoint_args:
        for section, f in iter_options():
            if section == "model" and f.name in config.explicit:
                values[f.name] = getattr(config.model, f.name)
    return dump_values({name: value for name, value in values.items() if value is not None})


def dump_values(values: Mapping[str, Any]) -> str:
    """Return options as TOML, by section; the line of `plugin` has the plugins' hashes in a comment.

    Values are written as JSON literals, which are valid TOML except for an unescaped DEL character.
    """
    lines = list[str]()
    last_section = ""
    for section, f in iter_options():
        if f.name not in values:
            continue
        if section != last_section:
            lines += ["", f"[{section}]"]
            last_section = section
        literal = json.dumps(values[f.name], ensure_ascii=False).replace("\x7f", "\\u007f")
        line = f"{f.name} = {literal}"
        hashes = ", ".join(f"{name} {sha256}" for name, sha256 in plugin_hashes().items())
        if f.name == "plugin" and hashes:
            line += f"  # sha256: {hashes}"
        lines.append(line)
    return "\n".join([*lines[1:], ""])
