"""Translation of another trainer's configuration to a file for --config, with a verdict for each of its keys.

formats/FORMAT.toml has a row for each key; source_keys.py documents the rows. rules.py has the options
that follow from several keys together.
"""

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from megalite.config.config_file import dump_values
from megalite.config.megatron_flags import closest_match
from megalite.config.option import flag_name, mask_url_secrets
from megalite.config.options import ConfigError, apply_megatron_defaults, apply_preset, build
from megalite.config.validation import find_problems
from megalite.models.families import PRESETS
from tools.translation.external_config import read_mapping
from tools.translation.rules import (
    BUILT_IN,
    FALLBACK,
    FIELDS,
    NO_EQUIVALENT,
    SUPPORTED,
    Translation,
    ValueStore,
    checked_values,
    convert_option,
    convert_part,
    set_features,
    set_layout,
    set_learning_rates,
)
from tools.translation.source_keys import (
    FILLED_IN,
    NOOP_VALUES,
    NOOP_VERDICT,
    TABLES,
    ConfigTree,
    SourceConfig,
    SourceKey,
    key_of,
)

FORMATS = ("deepspeed", "accelerate", "torchtitan", "nanotron", "bridge", "nemo")
SECRET = re.compile(r"key$|token$|passw|secret", re.IGNORECASE)
CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029]+")  # not allowed in a comment of TOML, or end its line
MAX_SHOWN = 200  # characters of a value
MAX_HINTS = 40  # unknown keys for which the nearest known key is searched
MAX_TOGETHER = 20  # keys in one line


class Verdict(NamedTuple):
    """The result for one key of the configuration."""

    key: SourceKey
    kind: str  # SUPPORTED, BUILT_IN or NO_EQUIVALENT
    text: str  # the reason; if "", the final values of the options or of the part
    values: Mapping[str, Any] = {}  # option -> value that the key sets
    part: str = ""  # the part that the key sets (rules.py)


def translate_key(file: SourceConfig, key: SourceKey, translation: Translation, hints: list[str]) -> Verdict:
    """Return the verdict on a key, and add the options or the part that it sets to the translation.

    Args:
        hints: unknown keys for which the nearest known key was searched so far; an unknown key is added.
    """
    row = file.row(key)
    if row is None:
        return Verdict(key, NO_EQUIVALENT, _unknown(file, key, hints))
    if key.off:
        return Verdict(key, BUILT_IN, "its section is off")
    if key.last in file.switches and key.is_false:
        return Verdict(key, BUILT_IN, NOOP_VERDICT[2:])
    if isinstance(row, dict):
        row = _row_of_value(row, key)
    head, _, rest = row.partition(" ")
    mark = head[0]
    listed = head[1:].split(",") if head[1:] else []
    acts = mark in "+>~"
    if acts and key.text in FILLED_IN:
        reason = "the script that reads the file fills it in" if key.text == "auto" else "the file leaves it unset"
        flags = [flag_name(word) for word in re.findall(r"\w+", rest) if word in FIELDS]
        return Verdict(key, NO_EQUIVALENT, f"{reason}; give {' '.join(flags) or 'it as a flag'}")
    if (mark == "!" and key.text in {*NOOP_VALUES, *listed}) or (acts and key.value is None):
        return Verdict(key, BUILT_IN, NOOP_VERDICT[2:])
    if acts and "${" in str(key.value):
        return Verdict(key, NO_EQUIVALENT, "it is computed from other values; write its value")
    if not acts:
        is_built_in = mark == "=" and key.text in (listed or [key.text])
        return Verdict(key, BUILT_IN if is_built_in else NO_EQUIVALENT, rest)
    try:
        return _set(file, key, translation, mark, rest.split())
    except ValueError as error:
        return Verdict(key, NO_EQUIVALENT, str(error))


def _row_of_value(row: Mapping[str, str], key: SourceKey) -> str:
    """Return the text for the key's value from a row that is a table of texts by value."""
    if key.text in row:
        return row[key.text]
    if key.is_true and "true" in row:
        return row["true"]
    if key.text in FILLED_IN or "${" in key.text:  # any of the values is possible; prefer a text that acts
        return min(row.values(), key=lambda text: "+>~!=".index(text[0]))
    if "*" in row and (row["*"] != NOOP_VERDICT or key.text in NOOP_VALUES):
        return row["*"]
    return f"! this is not a valid value there; give one of {', '.join(other for other in row if other != '*')}"


def _unknown(file: SourceConfig, key: SourceKey, hints: list[str]) -> str:
    """Return the text for a key without a row, with the nearest known key."""
    rows = file.table.get(key.section, {}) if key.section not in TABLES else {}
    prefix = file.settings.get("prefixes", {}).get(key.section, "")
    near = None
    if len(hints) < MAX_HINTS and len(key.last) < 80:
        hints.append(key.name)
        known = {last: flag_name(last) for last in rows} | {last.removeprefix(prefix): flag_name(last) for last in rows}
        near = closest_match(flag_name(key.last), known.values())
        near = near or closest_match(flag_name(prefix + key.last), known.values())
    if near:
        return f"unknown here; did you mean {key_of(near)}?"
    return "unknown here, so nothing is set for it; megalite train --help all lists the options"


def _set(file: SourceConfig, key: SourceKey, translation: Translation, mark: str, targets: list[str]) -> Verdict:
    """Set the options or the part of a row that acts, and return the verdict.

    Args:
        mark: "+", ">" or "~".
        targets: the rest of the row, split at spaces.

    Raises:
        ValueError: if the value has the wrong type.
    """
    if mark == ">":
        part, equals, value = targets[0].partition("=")
        translation.parts.set(part, value if equals else convert_part(part, key.value), key.name, file.weight(key))
        return Verdict(key, SUPPORTED, " ".join(targets[1:]), part=part)
    if mark == "~":
        option = targets[0]
        values = {option: convert_option(option, key.value)}
        translation.options.set(option, values[option], key.name, FALLBACK)
        return Verdict(key, SUPPORTED, " ".join(targets[1:]), values, part="fallback")
    names = [target for target in targets if "=" not in target]
    values: ConfigTree = dict.fromkeys(names, key.value)
    if len(names) > 1 and isinstance(key.value, list):
        if len(key.value) != len(names):
            raise ValueError(
                f"{len(key.value)} values, where there are {len(names)}: {', '.join(names)}; write as many"
            )
        values = dict(zip(names, key.value, strict=True))
    values |= dict(target.split("=") for target in targets if "=" in target)
    typed_values = {name: convert_option(name, value) for name, value in values.items()}
    for name, value in typed_values.items():
        translation.options.set(name, value, key.name, file.weight(key))
    return Verdict(key, SUPPORTED, "", typed_values)


def _final(verdict: Verdict, translation: Translation) -> Verdict | None:
    """Return the verdict after all keys and rules were applied; None for a default that a key replaces."""
    key, kind, text, values, part = verdict
    if kind != SUPPORTED:
        return verdict
    if part == "fallback":
        (name, value), *_ = values.items()
        if translation.options.get(name) != value:
            return verdict._replace(kind=NO_EQUIVALENT)
        return verdict._replace(text=f"{name} = {_shown(value)}")
    if part:
        entry = translation.parts.entries[part]
        if entry.key != key.name:
            return None if key.is_default else _overridden(verdict, entry.key, {})
        if part in translation.verdicts:
            kind, text = translation.verdicts[part]
            return None if key.is_default and kind == BUILT_IN else verdict._replace(kind=kind, text=text)
        names = [word for word in text.split() if word in translation.options]
        return verdict._replace(
            text=_equals({name: translation.options.get(name) for name in names}) if names else text
        )
    final_values = {name: translation.options.get(name) for name in values if name in translation.options}
    if final_values == values:
        return verdict._replace(text=_equals(values))
    if key.is_default:
        effective = {name: value for name, value in values.items() if final_values.get(name) == value}
        return verdict._replace(text=_equals(effective)) if effective else None
    other_keys = [translation.options.key(name) for name in final_values if final_values[name] != values[name]]
    return _overridden(verdict, " ".join(dict.fromkeys(other_keys)), final_values)


def _overridden(verdict: Verdict, other_keys: str, values: ConfigTree) -> Verdict:
    """Return the verdict on a key that other keys override with these values."""
    text = f"{other_keys or 'another key'} overrides it"
    if values:
        text += f": {_equals(values)}"
    return verdict._replace(kind=BUILT_IN, text=text)


def _equals(values: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} = {_shown(value)}" for name, value in values.items())


def _shown(value: Any, name: str = "") -> str:
    """Return a value as JSON, without secrets, and shortened.

    Args:
        name: its key, which may show that it is a secret.
    """

    def masked(value: Any, name: str) -> Any:
        if SECRET.search(name) and value is not None and not isinstance(value, bool):
            return "***"
        if isinstance(value, dict):
            return {str(key): masked(inner, str(key)) for key, inner in value.items()}
        return [masked(inner, "") for inner in value] if isinstance(value, list | tuple) else value

    text = json.dumps(masked(value, name), default=str)
    return text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}..."


def _lines(verdicts: list[Verdict]) -> Iterator[str]:
    """Yield the verdicts as lines, by kind: one line for each text, with the keys that have it."""
    for kind in (SUPPORTED, BUILT_IN, NO_EQUIVALENT):
        together: dict[str, list[SourceKey]] = {}
        for verdict in verdicts:
            if verdict.kind == kind:
                together.setdefault(verdict.text, []).append(verdict.key)
        yield from ("", f"{kind} ({sum(map(len, together.values()))})")
        for text, keys in together.items():
            settings = [_setting(key) for key in keys]
            for start in range(0, len(settings), MAX_TOGETHER):
                yield f"  {', '.join(settings[start : start + MAX_TOGETHER])}: {text}"


def _setting(key: SourceKey) -> str:
    """Return a key with its value, and with its newer name if it has one."""
    name = json.dumps(key.name)[1:-1]
    default = " (default)" if key.is_default else ""
    now = f" (now {key.now})" if key.now else ""
    return f"{name}{default} = {_shown(key.raw, key.last)}{now}"


def _format_of(path: str, tree: ConfigTree) -> SourceConfig:
    """Return the tree in the format that has rows for the largest number of its keys.

    Raises:
        ConfigError: if no format has a row for any key.
    """
    files = [SourceConfig(name, tree) for name in FORMATS]
    known = {file.name: sum(file.row(key) is not None for key in file.iterate(defaults=False)) for file in files}
    best = max(files, key=lambda file: known[file.name])
    if not known[best.name]:
        titles = ", ".join(file.settings["title"] for file in files)
        raise ConfigError([f"{path!r} has no key of {titles}; give a configuration of one"])
    return best


def _launch(translation: Translation, world: int | None) -> str:
    """Return the command that starts the run."""
    nodes = translation.parts.get("nodes", 1)
    line = f"torchrun --nproc_per_node {'N' if world is None else world // nodes}"
    if nodes > 1:
        line += f" --nnodes {nodes} --node_rank {translation.parts.get('rank', 'R')}"
        line += f" --master_addr {translation.parts.get('address', 'HOST')}"
    if "port" in translation.parts:
        line += f" --master_port {translation.parts.get('port')}"
    return f"{line} -m megalite train --config run.toml"


def translate(path: str, gpus: int | None) -> tuple[str, bool]:
    """Translate a configuration file of another trainer.

    Args:
        gpus: the number of devices; None if the file has it.

    Returns:
        (text of a file for --config, with the verdicts and the launch command as comments; True if every key has an
        equivalent).

    Raises:
        ConfigError: if the file cannot be read, is of no known trainer, or contradicts itself.
        MissingPackageError: for YAML without PyYAML.
    """
    file = _format_of(path, read_mapping(path))
    translation = Translation(file.name, ValueStore(file.settings.get("enabled_by_any", ())))
    hints = list[str]()
    first_verdicts = [translate_key(file, key, translation, hints) for key in file.iterate()]
    set_features(translation)
    set_learning_rates(translation)
    world = set_layout(translation, gpus)
    values = dict(checked_values(translation))
    verdicts = [final for verdict in first_verdicts if (final := _final(verdict, translation)) is not None]
    preset = (
        f"{translation.parts.get('family')}-{translation.parts.get('flavor')}" if "flavor" in translation.parts else ""
    )
    problems = file.notes()
    problems += find_problems(build(apply_megatron_defaults(apply_preset(PRESETS.get(preset, {}), values))), world)
    lines = [f"Translation of each key of {file.settings['title']}", *_lines(verdicts)]
    lines += ["", f"to be given or corrected ({len(problems)})", *(f"  {line}" for line in problems)]
    lines += ["", _launch(translation, world)]
    comments = "".join(f"# {CONTROL.sub(' ', mask_url_secrets(line))}".rstrip() + "\n" for line in lines)
    first = f"preset = {json.dumps(preset)}\n\n" if preset else ""
    return f"{comments}\n{first}{dump_values(values)}", all(verdict.kind != NO_EQUIVALENT for verdict in verdicts)
