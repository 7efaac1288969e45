"""A configuration of another trainer as a file for --config, with a verdict for each of its keys.

translate/FORMAT.toml has a row for each key (translate_keys.py explains them), translate_rules.py what keys give
together.
"""

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from megalite.config.config_file import dump_values
from megalite.config.foreign_config import read_mapping
from megalite.config.megatron_flags import closest_match
from megalite.config.option import flag_name, mask_url_secrets
from megalite.config.options import ConfigError, apply_megatron_defaults, apply_preset, build
from megalite.config.translate_keys import (
    FILLED_IN,
    NOOP_VALUES,
    NOOP_VERDICT,
    TABLES,
    ConfigTree,
    File,
    SourceKey,
    key_of,
)
from megalite.config.translate_rules import (
    BESIDE,
    BUILT_IN,
    FIELDS,
    NO_EQUIVALENT,
    SUPPORTED,
    Sayings,
    Translation,
    checked,
    layout,
    part_of,
    rates,
    switches,
    typed,
)
from megalite.config.validation import find_problems

FORMATS = ("deepspeed", "accelerate", "torchtitan", "nanotron", "bridge", "nemo")
SECRET = re.compile(r"key$|token$|passw|secret", re.IGNORECASE)
CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029]+")  # TOML takes none in a comment, or they end a line
MAX_SHOWN = 200  # characters of a value
MAX_HINTS = 40  # unknown keys that are compared with those that are known
MAX_TOGETHER = 20  # keys in one line


class Verdict(NamedTuple):
    """`gives`: option -> value; `part`: of the rules. A text of "" is made of what they come to."""

    key: SourceKey
    kind: str
    text: str
    gives: Mapping[str, Any] = {}
    part: str = ""


def judge(file: File, key: SourceKey, t: Translation, hints: list[str]) -> Verdict:
    """What becomes of a key, which adds to what the options and the parts are said to be."""
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
    mark, listed, words = head[0], head[1:].split(",") if head[1:] else [], rest.split()
    sets = mark in "+>~"
    if sets and key.text in FILLED_IN:
        why = "the script that reads the file fills it in" if key.text == "auto" else "the file leaves it to be given"
        flags = [flag_name(word) for word in re.findall(r"\w+", rest) if word in FIELDS]
        return Verdict(key, NO_EQUIVALENT, f"{why}; give {' '.join(flags) or 'it as a flag'}")
    if (mark == "!" and key.text in {*NOOP_VALUES, *listed}) or (sets and key.value is None):
        return Verdict(key, BUILT_IN, NOOP_VERDICT[2:])
    if sets and "${" in str(key.value):
        return Verdict(key, NO_EQUIVALENT, "it is computed from other values; write its value")
    if not sets:
        always = mark == "=" and key.text in (listed or [key.text])
        return Verdict(key, BUILT_IN if always else NO_EQUIVALENT, rest)
    try:
        return _set(file, key, t, mark, words)
    except ValueError as error:
        return Verdict(key, NO_EQUIVALENT, str(error))


def _row_of_value(row: Mapping[str, str], key: SourceKey) -> str:
    """The text of a table of texts by the key's value."""
    if key.text in row:
        return row[key.text]
    if key.is_true and "true" in row:
        return row["true"]
    if key.text in FILLED_IN or "${" in key.text:  # it may be any of them
        return min(row.values(), key=lambda text: "+>~!=".index(text[0]))
    if "*" in row and (row["*"] != NOOP_VERDICT or key.text in NOOP_VALUES):
        return row["*"]
    return f"! there is no such value there; give one of {', '.join(other for other in row if other != '*')}"


def _unknown(file: File, key: SourceKey, hints: list[str]) -> str:
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


def _set(file: File, key: SourceKey, t: Translation, mark: str, words: list[str]) -> Verdict:
    """Say what a row's options or part are. Raises ValueError."""
    if mark == ">":
        part, equals, value = words[0].partition("=")
        t.parts.say(part, value if equals else part_of(part, key.value), key.name, file.weight(key))
        return Verdict(key, SUPPORTED, " ".join(words[1:]), part=part)
    if mark == "~":
        gives = {words[0]: typed(words[0], key.value)}
        t.options.say(words[0], gives[words[0]], key.name, BESIDE)
        return Verdict(key, SUPPORTED, " ".join(words[1:]), gives, part="beside")
    bare = [word for word in words if "=" not in word]
    given: ConfigTree = dict.fromkeys(bare, key.value)
    if len(bare) > 1 and isinstance(key.value, list):
        if len(key.value) != len(bare):
            raise ValueError(f"{len(key.value)} values, where there are {len(bare)}: {', '.join(bare)}; write as many")
        given = dict(zip(bare, key.value, strict=True))
    given |= dict(word.split("=") for word in words if "=" in word)
    gives = {name: typed(name, value) for name, value in given.items()}
    for name, value in gives.items():
        t.options.say(name, value, key.name, file.weight(key))
    return Verdict(key, SUPPORTED, "", gives)


def _final(verdict: Verdict, t: Translation) -> Verdict | None:
    """The verdict, when all keys have said theirs; None for a default that a key replaces."""
    key, kind, text, gives, part = verdict
    if kind != SUPPORTED:
        return verdict
    if part == "beside":
        (name, value), *_ = gives.items()
        if t.options.get(name) != value:
            return verdict._replace(kind=NO_EQUIVALENT)
        return verdict._replace(text=f"{name} = {_shown(value)}")
    if part:
        saying = t.parts.said[part]
        if saying.key != key.name:
            return None if key.is_default else _overridden(verdict, saying.key, {})
        if part in t.told:
            kind, text = t.told[part]
            return None if key.is_default and kind == BUILT_IN else verdict._replace(kind=kind, text=text)
        names = [word for word in text.split() if word in t.options]
        return verdict._replace(text=_equals({name: t.options.get(name) for name in names}) if names else text)
    values = {name: t.options.get(name) for name in gives if name in t.options}
    if values == gives:
        return verdict._replace(text=_equals(gives))
    if key.is_default:
        kept = {name: value for name, value in gives.items() if values.get(name) == value}
        return verdict._replace(text=_equals(kept)) if kept else None
    by = [t.options.key(name) for name in values if values[name] != gives[name]]
    return _overridden(verdict, " ".join(dict.fromkeys(by)), values)


def _overridden(verdict: Verdict, by: str, values: ConfigTree) -> Verdict:
    text = f"{by or 'another key'} overrides it" + f": {_equals(values)}" * bool(values)
    return verdict._replace(kind=BUILT_IN, text=text)


def _equals(values: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} = {_shown(value)}" for name, value in values.items())


def _shown(value: Any, name: str = "") -> str:
    """As JSON, without secrets, and shortened."""

    def plain(value: Any, name: str) -> Any:
        if SECRET.search(name) and value is not None and not isinstance(value, bool):
            return "***"
        if isinstance(value, dict):
            return {str(key): plain(inner, str(key)) for key, inner in value.items()}
        return [plain(inner, "") for inner in value] if isinstance(value, list | tuple) else value

    text = json.dumps(plain(value, name), default=str)
    return text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}..."


def _lines(verdicts: list[Verdict]) -> Iterator[str]:
    """One line for each text, with the keys that it is about."""
    for kind in (SUPPORTED, BUILT_IN, NO_EQUIVALENT):
        together: dict[str, list[SourceKey]] = {}
        for verdict in verdicts:
            if verdict.kind == kind:
                together.setdefault(verdict.text, []).append(verdict.key)
        yield from ("", f"{kind} ({sum(map(len, together.values()))})")
        for text, keys in together.items():
            named = [f"{_name(key)} = {_shown(key.raw, key.last)}{_now(key)}" for key in keys]
            for start in range(0, len(named), MAX_TOGETHER):
                yield f"  {', '.join(named[start : start + MAX_TOGETHER])}: {text}"


def _now(key: SourceKey) -> str:
    return f" (now {key.now})" * bool(key.now)


def _name(key: SourceKey) -> str:
    return json.dumps(key.name)[1:-1] + " (default)" * key.is_default


def _format_of(path: str, tree: ConfigTree) -> File:
    """The tree as the format that has rows for most of its keys. Raises ConfigError."""
    files = [File(name, tree) for name in FORMATS]
    known = {file.name: sum(file.row(key) is not None for key in file.iterate(defaults=False)) for file in files}
    best = max(files, key=lambda file: known[file.name])
    if not known[best.name]:
        titles = ", ".join(file.settings["title"] for file in files)
        raise ConfigError([f"{path!r} has no key of {titles}; give a configuration of one"])
    return best


def _launch(t: Translation, world: int | None) -> str:
    nodes = t.parts.get("nodes", 1)
    line = f"torchrun --nproc_per_node {'N' if world is None else world // nodes}"
    if nodes > 1:
        line += f" --nnodes {nodes} --node_rank {t.parts.get('rank', 'R')}"
        line += f" --master_addr {t.parts.get('address', 'HOST')}"
    if "port" in t.parts:
        line += f" --master_port {t.parts.get('port')}"
    return f"{line} -m megalite train --config run.toml"


def translate(path: str, gpus: int | None, presets: Mapping[str, Mapping[str, Any]]) -> tuple[str, bool]:
    """(a file for --config, whose comments are the verdicts and the launch line, whether every key has an equivalent).
    Raises ConfigError, MissingPackage."""
    file = _format_of(path, read_mapping(path))
    t, hints = Translation(file.name, Sayings(file.settings.get("either", ()))), list[str]()
    judged = [judge(file, key, t, hints) for key in file.iterate()]
    switches(t)
    rates(t)
    world = layout(t, gpus)
    values = dict(checked(t))
    verdicts = [final for verdict in judged if (final := _final(verdict, t)) is not None]
    preset = f"{t.parts.get('family')}-{t.parts.get('flavor')}" if "flavor" in t.parts else ""
    problems = file.notes()
    problems += find_problems(build(apply_megatron_defaults(apply_preset(presets.get(preset, {}), values))), world)
    lines = [f"What becomes of each key of {file.settings['title']}", *_lines(verdicts)]
    lines += ["", f"to give or to correct ({len(problems)})", *(f"  {line}" for line in problems)]
    lines += ["", _launch(t, world)]
    comments = "".join(f"# {CONTROL.sub(' ', mask_url_secrets(line))}".rstrip() + "\n" for line in lines)
    first = f"preset = {json.dumps(preset)}\n\n" if preset else ""
    return f"{comments}\n{first}{dump_values(values)}", all(verdict.kind != NO_EQUIVALENT for verdict in verdicts)
