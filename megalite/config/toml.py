"""A configuration as TOML text: the file of --config, and the copy that a run and its checkpoints keep."""

import json
import re
import tomllib
from typing import Any

from megalite.config.megatron_flags import INSTEAD, known_flags, nearest
from megalite.config.options import SECTIONS, Config, ConfigError, gelu_form, options


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


_OWNERS = {  # keys that only the files of this program have
    "DeepSpeed": "zero_optimization train_micro_batch_size_per_gpu",
    "Accelerate": "compute_environment distributed_type",
    "Hugging Face, of a model": "model_type architectures",
    "Hugging Face's Trainer": "per_device_train_batch_size",
}
_MOST_NAMED = 6


def _other_format(text: str) -> str | None:
    """The format of a file that is JSON or YAML, and the flags for its keys; None for another file."""
    is_json = text.lstrip()[:1] == "{"
    keys = set(re.findall(r'"(\w+)"\s*:' if is_json else r"^\s*([A-Za-z_]\w*):(?:\s|$)", text, re.M))
    if not is_json and not keys:
        return None
    owner = next((f" ({name})" for name, own in _OWNERS.items() if keys & {*own.split()}), "")
    ours, theirs = {f.name for _, f in options()}, known_flags()
    said = {}
    for key in sorted(keys):
        known = theirs.get(f"--{key.replace('_', '-')}")
        if key not in ours and known is not None and known.verdict == INSTEAD and known.reason.startswith("--"):
            said[key] = re.split("[;(]", known.reason)[0].strip()
    named = "".join(f"; {key} is {flag}" for key, flag in [*said.items()][:_MOST_NAMED])
    remedy = f"write it as TOML, a line name = value for each option: docs/flags.md has all options{named}"
    return f"is {'JSON' if is_json else 'YAML'}{owner}; {remedy}"


def parse_toml(text: str, path: str) -> dict[str, Any]:
    """Option names to values from a TOML text, with or without [section] tables; `path` names it in errors."""
    try:
        data = tomllib.loads(text)
    except (ValueError, RecursionError) as error:  # ValueError: also a number of more than 4,300 digits
        why = _other_format(text) or f"is not TOML ({error}); correct that line"
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
    """A TOML text that starts the same run again, with --config. TOML has JSON's literals, but takes no bare DEL."""
    lines = []
    for section, values in differences(config).items():
        lines.append(f"[{section}]")
        for name, value in values.items():
            literal = json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
            lines.append(f"{name} = {literal}")
        lines.append("")
    return "\n".join(lines)
