"""A configuration as TOML text: the file of --config, and the copy that a run and its checkpoints keep."""

import json
import re
import tomllib
from collections.abc import Mapping
from typing import Any

from megalite.config.megatron_flags import nearest
from megalite.config.options import SECTIONS, Config, ConfigError, gelu_form, options
from megalite.config.plugins import hashes


def read_toml(path: str) -> dict[str, Any]:
    """Option names to values from a TOML file. Raises ConfigError."""
    try:
        with open(path, encoding="utf-8") as file:
            text = file.read()
    except OSError as error:
        raise ConfigError([f"config={path!r} cannot be read ({error.strerror}); give a TOML file"]) from None
    except UnicodeDecodeError as error:
        raise ConfigError([f"config={path!r} is not UTF-8 text ({error}); give a TOML file"]) from None
    return parse_toml(text, path)


def _other_format(text: str, path: str) -> str | None:
    """What to do with a file that is JSON or YAML; None for another file."""
    is_json = text.lstrip()[:1] == "{"
    if not is_json and not re.search(r"^\s*[A-Za-z_]\w*:(?:\s|$)", text, re.M):
        return None
    of = "DeepSpeed, Accelerate, nanotron, NeMo or Megatron-Bridge"
    remedy = f"if it is of {of}, megalite translate {path} writes it as TOML; docs/flags.md has all options"
    return f"is {'JSON' if is_json else 'YAML'}; {remedy}"


def parse_toml(text: str, path: str) -> dict[str, Any]:
    """Option names to values from a TOML text, with or without [section] tables; `path` names it in errors."""
    try:
        data = tomllib.loads(text)
    except (ValueError, RecursionError) as error:  # ValueError: also a number of more than 4,300 digits
        why = _other_format(text, path) or f"is not TOML ({error}); correct that line"
        raise ConfigError([f"config={path!r} {why}"]) from None
    known = {f.name: section for section, f in options()}
    values: dict[str, Any] = {}
    problems = []
    for key, value in data.items():
        section, rows = (key, value) if isinstance(value, dict) else (None, {key: value})
        if section is not None and section not in SECTIONS:
            problems.append(f"config={path!r}: unknown section [{key}]; sections are {', '.join(SECTIONS)}")
            continue
        for name, inner in ((name.replace("-", "_"), inner) for name, inner in rows.items()):
            if name != "preset" and (name not in known or (section is not None and known[name] != section)):
                near = nearest(f"--{name}", [f"--{other}" for other in known])
                other = f"did you mean {near[2:]}?" if near else "docs/flags.md lists the options"
                hint = f"it belongs in [{known[name]}]" if name in known else other
                problems.append(f"config={path!r}: unknown key {name} in [{section or 'top level'}]; {hint}")
            elif name in values:
                problems.append(f"config={path!r}: {name} is given twice; keep one")
            else:
                values[name] = inner
    if problems:
        raise ConfigError(problems)
    return values


def differences(config: Config) -> dict[str, dict[str, Any]]:
    """Section -> option -> value, of options that differ from their defaults, or from those of `completed`."""
    result: dict[str, dict[str, Any]] = {}
    m = config.model
    plain = gelu_form(add_bias_linear=m.add_bias_linear, bias_gelu_fusion=m.bias_gelu_fusion, openai_gelu=m.openai_gelu)
    for section, f in options():
        value = getattr(getattr(config, section), f.name)
        if value != f.default or (f.name == "activation" and value != plain):
            result.setdefault(section, {})[f.name] = value
    return result


def to_toml(config: Config) -> str:
    """A TOML text that starts the same run again, with --config."""
    return toml_of({name: value for values in differences(config).values() for name, value in values.items()})


def toml_of(values: Mapping[str, Any]) -> str:
    """Option -> value as TOML, by sections. TOML has JSON's literals, but takes no bare DEL."""
    lines, last = [], ""
    for section, f in options():
        if f.name in values:
            lines += ["", f"[{section}]"] if section != last else []
            literal = json.dumps(values[f.name], ensure_ascii=False).replace("\x7f", "\\u007f")
            texts = ", ".join(f"{name} {sha256}" for name, sha256 in hashes().items() if f.name == "plugin")
            lines.append(f"{f.name} = {literal}" + f"  # sha256: {texts}" * bool(texts))
            last = section
    return "\n".join([*lines[1:], ""])
