"""A configuration of another trainer as a file for --config, with a verdict for each of its keys.

translate/FORMAT.toml says what becomes of each key, by its sections (`top`: outside any). Keys share a row as "a b";
"*" is every other key at or below its section. A row is a text that begins with a mark, or a table of these by the
key's value, as text in lower case ("*": any other):

    + OPTION ...         acts: the options take the value, or one element each of a list
    + OPTION=VALUE ...   acts: they take these values
    > PART WHERE         acts: with other keys it gives WHERE (`_batch`, `_rates`, `_layout`)
    =ON,ON REASON        always so here; with a list, what is not in it has no equivalent
    !OFF,OFF REMEDY      no equivalent, unless it asks for nothing, as the values of the list do

[settings]: `title`; `whole`: sections that are not given have their defaults, too; `megatron`: a key without a row is
answered as Megatron-LM's flag of that name. [defaults.SECTION] are the other trainer's own.
"""

import json
import re
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from megalite.config.check import check
from megalite.config.field import base_type, convert, flag_of, masked
from megalite.config.foreign_config import read_mapping
from megalite.config.megatron_flags import REFUSED, WARNED, asked_for, first_of, known_flags, nearest
from megalite.config.options import ConfigError, build, completed, options, over_preset
from megalite.config.tables import table_beside
from megalite.config.toml import toml_of

FORMATS = ("deepspeed", "accelerate", "torchtitan", "nanotron", "bridge", "nemo")
ACTS, ALWAYS, NONE = "acts", "always so here", "no equivalent"
NOTHING = {"", "none", "no", "false", "off", "disabled", "0", "0.0", "[]", "{}"}
ASKS_NOTHING = "= asks for nothing"
Tree = dict[str, Any]
SWITCHES = ("enabled", "enable")  # of a section
SECRET = re.compile(r"key$|token$|passw", re.IGNORECASE)
FIELDS = {f.name: f for _, f in options()}


class Key(NamedTuple):
    """`name`: as in the file, with the numbers of list elements; `off`: its section is switched off."""

    name: str
    section: str
    last: str
    value: Any
    off: bool

    @property
    def text(self) -> str:
        return str(self.value).lower()


@cache
def table_of(name: str) -> dict[str, Tree]:
    """Section -> key -> row, and `defaults`, `settings`."""
    table = {"top": {}, "defaults": {}} | table_beside(str(Path(__file__).parent / "translate" / "x"), name)
    return {at: {key: row for keys, row in rows.items() for key in keys.split()} for at, rows in table.items()}


def _keys(tree: Tree, defaults: Tree, name: str = "", section: str = "top", off: bool = False) -> Iterator[Key]:
    own = {last: value for last, value in defaults.get(section, {}).items() if last not in tree}
    is_off = off or any(str({**own, **tree}.get(switch)).lower() == "false" for switch in SWITCHES)
    for last, value in {**tree, **own}.items():
        inner = f"{section}.{last}".removeprefix("top.")
        if isinstance(value, dict) and (value or inner in defaults):
            yield from _keys(value, defaults, f"{name}{last}.", inner, is_off)
        elif isinstance(value, list) and value and all(isinstance(item, dict) for item in value):
            for number, item in enumerate(value):
                yield from _keys(item, defaults, f"{name}{last}[{number}].", inner, is_off)
        else:
            named = f"{name}{last}{' (default)' * (last in own)}"
            yield Key(named, section, str(last), value, off or (is_off and last not in SWITCHES))


def _row_of(name: str, key: Key) -> Any:
    """Its row: a text, or a table of texts by values; None for an unknown key."""
    table, section = table_of(name), key.section
    if key.last in table.get(section, {}):
        return table[section][key.last]
    if table["settings"].get("megatron") and section != "top" and (row := _of_megatron(key)) is not None:
        return row
    inner = f"{section}.{key.last}.".removeprefix("top.")
    if key.text in NOTHING and any(f"{other}.".startswith(inner) for other in table):
        return ASKS_NOTHING
    while section and "*" not in table.get(section, {}):
        section = section.rpartition(".")[0]
    return table[section]["*"] if section else None


def _of_megatron(key: Key) -> str | None:
    if key.last in FIELDS:
        return f"+ {key.last}"
    for prefix in ("--", "--no-", "--disable-"):
        if (known := known_flags().get(prefix + flag_of(key.last)[2:])) is not None:
            asks = key.text not in NOTHING and asked_for(known, [key.text]) if prefix == "--" else key.text == "false"
            mark = "=never" if asks and known.verdict in (REFUSED, WARNED) else "="
            return f"{mark} {known.reason or f'only with {first_of(known.feature)}'}"
    return None


def _typed(option: str, value: Any) -> Any:
    """The value as the option's type. Raises ValueError, TypeError."""
    kind = base_type(FIELDS[option])
    value = {"true": True, "false": False}.get(value, value) if kind == "bool" else value
    return convert(FIELDS[option], _number(value) if kind in ("int", "float") else value)


def _number(value: Any) -> int | float:
    """YAML reads 1e-4 as a text, JSON 5e8 as a float. Raises TypeError, ValueError."""
    number = float("true" if isinstance(value, bool) else value)
    return int(number) if number.is_integer() else number


def _judge(name: str, key: Key, values: Tree, parts: Tree) -> tuple[str, str]:
    """(kind, what it sets, the reason or the remedy) of a key; it adds to `values`, option -> value, and to `parts`."""
    row = _row_of(name, key)
    if row is None:
        near = nearest(flag_of(key.last), map(flag_of, table_of(name).get(key.section, {})))
        return NONE, f"no key that is known; {f'did you mean {near[2:]}?' if near else 'remove it'}"
    if key.off:
        return ALWAYS, "its section is off"
    if isinstance(row, dict):
        rows = {"auto": next(iter(row.values())), "*": "=never there is no such value"} | row
        row = rows.get(key.text, rows["*"])
    head, _, rest = row.partition(" ")
    mark, listed, words = head[0], head[1:].split(",") if head[1:] else [], rest.split()
    if mark in "+>" and key.text == "auto":
        flags = [flag_of(word) for word in re.findall(r"\w+", rest) if word in FIELDS]
        return NONE, f"the script that reads the file fills it in; give {' '.join(flags)}"
    if (mark == "!" and key.text in {*NOTHING, *listed}) or (mark in "+>" and key.value is None):
        return ALWAYS, ASKS_NOTHING[2:]
    if mark in "=!":
        return ALWAYS if mark == "=" and key.text in (listed or [key.text]) else NONE, rest
    try:
        if mark == "+":
            return ACTS, _set(values, key.value, words)
        part, equals, value = words[0].partition("=")
        parts[part] = value if equals else key.value if part == "address" else _number(key.value)
        return ACTS, " ".join(words[1:])
    except (TypeError, ValueError, OverflowError) as error:
        return NONE, "it stands for the value of another key; write that" if "${" in str(key.value) else str(error)


def _set(values: Tree, value: Any, words: list[str]) -> str:
    """Sets the options of a row; says which. Raises ValueError."""
    bare = [word for word in words if "=" not in word]
    spread = len(bare) > 1 and isinstance(value, list)
    given = dict(zip(bare, value, strict=True)) if spread else dict.fromkeys(bare, value)
    given |= dict(word.split("=") for word in words if "=" in word)
    typed = {name: _typed(name, value) for name, value in given.items()}
    for name, value in typed.items():
        if values.setdefault(name, value) != value:
            raise ValueError(f"another key says {name} = {json.dumps(values[name])}; keep one")
    return ", ".join(f"{name} = {json.dumps(value)}" for name, value in typed.items())


def _batch(values: Tree, parts: Tree, dp: int | None) -> int | None:
    """Sets the batch sizes by DeepSpeed's rule, train batch = micro-batch x accumulation x dp, of which two give the
    third. Returns dp, where it follows. Raises ConfigError."""
    total, steps = parts.get("total", values.get("global_batch_size")), parts.get("accumulation")
    micro = values.get("micro_batch_size")
    if any(number is not None and number < 1 for number in (total, micro, steps)):
        raise ConfigError([f"batch sizes {total}, {micro}, {steps} are not all above 0; correct them"])
    if total and micro and steps:
        dp = total // (micro * steps) if dp is None and total % (micro * steps) == 0 else dp
        if total != micro * steps * (dp or 1):
            product = f"{micro} x {steps} x {dp or 'dp'}{f' = {micro * steps * dp}' if dp else ''}"
            why = f"the train batch size {total} is not micro-batch x accumulation x data-parallel size, {product}"
            raise ConfigError([f"{why}; correct one of them, or give --gpus N"])
    elif dp is None:
        if (total and not micro) or (micro and not total and steps):
            raise ConfigError(["the batch of a step depends on the number of devices; give --gpus N"])
    elif micro:
        values.setdefault("global_batch_size", micro * (steps or 1) * dp)
    elif total:
        values["micro_batch_size"], rest = divmod(total, (steps or 1) * dp)
        if rest:
            raise ConfigError([f"the train batch size {total} is no multiple of {steps or 1} x {dp} (dp); correct one"])
    values |= {"global_batch_size": total} if total else {}
    return dp


def _rates(values: Tree, parts: Tree) -> None:
    """Sets what a schedule's parts give; a decay that begins after the warm-up is WSD's."""
    for part, option in (("min_lr_factor", "min_lr"), ("warmup_ratio", "lr_warmup_init")):
        if part in parts and "lr" in values:
            values[option] = float(f"{values['lr'] * parts[part]:.12g}")
    if "scale_power" in parts:
        values["initial_loss_scale"] = 2.0 ** parts["scale_power"]
    style, warmup = parts.get("decay_style"), values.get("lr_warmup_iters", 0)
    start, end = parts.get("decay_start", warmup), parts.get("total_steps") or values.get("train_iters")
    if style is not None and end is not None:
        if "decay_ratio" in parts:
            start = max(warmup, end - round(end * parts["decay_ratio"]))
        end = start + parts["decay_steps"] if "decay_steps" in parts else end
        values["lr_decay_iters"] = end
        if start > warmup or style == "minus_sqrt":
            values |= {"lr_wsd_decay_style": style, "lr_wsd_decay_iters": end - start}
            style = "WSD"
    values |= {"lr_decay_style": style} if style else {}


def _layout(values: Tree, parts: Tree, gpus: int | None) -> int | None:
    """Sets what the number of devices gives; returns that, where it is known. Raises ConfigError."""
    shard, copies, model = parts.get("shard"), parts.get("replicate", 1), build(values).parallel.model_parallel_size
    dp = parts.get("dp") or max(0, shard or 0) * copies
    world = gpus or parts.get("gpus") or parts.get("devices", 0) * parts.get("nodes", 1) or dp * model or None
    if world is not None and (world < 1 or world % model):
        raise ConfigError([f"{world} devices are no multiple of tp x pp x cp = {model}; correct one, or give --gpus N"])
    dp = _batch(values, parts, world // model if world else None)
    if shard is not None:
        values["zero_stage"] = 0 if shard == 1 else 3
    copies = (dp or 0) // parts["group"] if "group" in parts else copies
    if copies > 1 and shard != 1:
        values["num_distributed_optimizer_instances"] = copies
    return world or (dp * model if dp else None)


def translate(path: str, gpus: int | None, presets: Mapping[str, Mapping[str, Any]]) -> tuple[str, bool]:
    """(a file for --config, whose comments are the verdicts and the launch line, whether every key has an equivalent).
    Raises ConfigError, MissingPackage."""
    tree, values, parts = read_mapping(path), {}, {}
    known = {name: sum(_row_of(name, key) is not None for key in _keys(tree, {})) for name in FORMATS}
    name = max(FORMATS, key=lambda name: known[name])
    titles = {name: table_of(name)["settings"]["title"] for name in FORMATS}
    if not known[name]:
        raise ConfigError([f"{path!r} has no key of {', '.join(titles.values())}; give a configuration of one"])
    defaults = table_of(name)["defaults"]
    tree = dict.fromkeys(defaults if table_of(name)["settings"].get("whole") else (), {}) | tree
    said = [(key, *_judge(name, key, values, parts)) for key in _keys(tree, defaults)]
    _rates(values, parts)
    world, nodes, far = _layout(values, parts, gpus), parts.get("nodes", 1), ""
    lines = [f"What becomes of each key of {titles[name]}"]
    for kind in (ACTS, ALWAYS, NONE):
        rows = [(key, text) for key, of, text in said if of == kind]
        lines += ["", f"{kind} ({len(rows)})"]
        for key, text in rows:
            shown = "***" if SECRET.search(key.last) else masked(json.dumps(key.value, default=str))
            lines.append(f"  {json.dumps(key.name)[1:-1]} = {shown}: {text}")
    preset = f"{parts.get('family')}-{parts['flavor']}" if "flavor" in parts else ""
    problems = check(build(completed(over_preset(presets.get(preset, {}), values))), world)
    lines += ["", f"to give or to correct ({len(problems)})", *(f"  {line}" for line in problems), ""]
    if nodes > 1:
        far = f" --nnodes {nodes} --node_rank {parts.get('rank', 'R')} --master_addr {parts.get('address', 'HOST')}"
    own = world // nodes if world else "N"
    lines.append(f"torchrun --nproc_per_node {own}{far} -m megalite train --config run.toml")
    comments = "".join(f"# {' '.join(line.splitlines())}".rstrip() + "\n" for line in lines)
    first = f"preset = {json.dumps(preset)}\n\n" if preset else ""
    return f"{comments}\n{first}{toml_of(values)}", all(kind != NONE for _, kind, _ in said)
