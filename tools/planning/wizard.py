"""plan.py --ask: questions whose answers are the flags of a plan, and what that plan does about them.

A line of stdin is an answer; an empty one, and the end of stdin, take the default; a wrong one is asked again, with the
rule. An answer is read as people write it (`16xH100`, `2x8xh100`, `128K`, `4M tokens`, `100 billion`), and where what
is read differs from what was typed, a line says so. Nothing is planned here.
"""

import argparse
import math
import re
import sys
from collections.abc import Callable, Iterator
from difflib import get_close_matches
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from megalite.common.tables import load_table
from megalite.config import cli
from megalite.config.option import to_argv
from megalite.models.families import PRESETS
from megalite.planning.cluster import DEVICES, Device, make_cluster
from tools.cli_common import positive, unwritable
from tools.planning.plan_request import of_hugging_face
from tools.planning.search import Found
from tools.planning.token_budget import NUMBER, Budget, quantity

T = TypeVar("T")
QUESTIONS = load_table(__file__, "ask")


def asked(name: str, read: Callable[[str], T], default: str = "", shown: Callable[[T], str] = str, unit: str = "") -> T:
    """Return an answer as `read` gives it, which raises ValueError with the rule. `shown`: what was read, to be said
    with its `unit` where it differs from what was typed."""
    question, usual = QUESTIONS[name][0], default or QUESTIONS[name][1]
    while True:
        print(f"{question} [{usual}]? ", end="", flush=True)
        answer = sys.stdin.readline().strip() or usual
        if not sys.stdin.isatty():  # a terminal has echoed it
            print(answer)
        try:
            found = read(answer)
        except (ValueError, OSError, argparse.ArgumentTypeError) as error:  # OSError: of a name that is too long
            print(f"  {error}")
            continue
        if answer != usual and (text := shown(found)).replace(",", "") != answer.replace(",", ""):
            print(f"  that is {text}{unit}")
        return found


class Devices(NamedTuple):
    """What an answer says of a cluster."""

    device: str
    number: int | None
    per_node: int | None = None


def answers(args: argparse.Namespace) -> list[str]:
    """Flags of the trainer; the planner's own are set in `args`, with `limit` and `toml`."""
    words = asked("model", model, shown=model_shown)
    usual = QUESTIONS["device"][1]
    found = asked("device", lambda text: devices(text, usual), shown=devices_shown)
    if found.number is None:
        device = found.device
        found = asked("gpus", lambda text: numbered(text, device), shown=devices_shown)
    args.device, args.num_gpus, args.gpus_per_node = found
    n, given = found.number or 1, cli.parse_args(words).values
    known = {**PRESETS.get(str(given.get("preset")), {}), **given}
    length = asked("length", length_of, str(known.get("seq_length", 4096)), thousands, " tokens")
    usual = str(max(1, 2**22 // length // n) * n)  # about 4 M tokens
    batch = asked("batch", lambda text: batch_of(text, length, n), usual, thousands, " sequences")
    tokens = asked("tokens", tokens_of, "", thousands, " tokens")
    args.tokens = None if tokens is None else str(tokens)
    args.limit = asked("limit", limit, shown=lambda most: f"{most[0]:g} {most[1]}" if most else "none")
    args.toml = asked("toml", file)
    if length > int(str(known.get("max_position_embeddings", length))):
        words += ["--max-position-embeddings", str(length)]
    return [*words, "--seq-length", str(length), "--global-batch-size", str(batch)]


def thousands(number: int | None) -> str:
    return f"{number:,}" if number is not None else QUESTIONS["tokens"][1]


def model(text: str) -> list[str]:
    """Flags. A preset is known without its hyphens and in any case, a Llama by its number of parameters, too."""
    squeezed = {squeeze(name): name for name in PRESETS}
    if name := squeezed.get(squeeze(text)):
        return ["--preset", name]
    if sizes := re.fullmatch(r"(\d+) *[x*] *(\d+) *[x*] *(\d+)", text.lower()):
        return llama(*map(positive, sizes.groups()))
    if Path(text).exists():
        return of_hugging_face(Path(text), [])
    if re.fullmatch(rf"{NUMBER} *([mbt]|(m|b|tr)illion)( parameters)?", text.lower()):
        return llama(*sizes_of(quantity(text)))
    near = get_close_matches(text.lower(), PRESETS, 1)
    meant = f"did you mean {near[0]}? There are" if near else "give a size such as 7B, or one of"
    raise ValueError(f"{text} is no file, and no preset; {meant} {', '.join(PRESETS)}")


def squeeze(name: str) -> str:
    """
    >>> squeeze("Llama 3 8B") == squeeze("llama3-8b")
    True
    """
    return re.sub(r"[\s_-]", "", name.lower())


def llama(layers: int, hidden: int, heads: int) -> list[str]:
    given: dict[str, Any] = {"num_layers": layers, "hidden_size": hidden, "num_attention_heads": heads}
    given |= {"ffn_hidden_size": 7 * hidden // 2, "num_query_groups": math.gcd(8, heads)}
    return ["--preset", "llama3-8b", *to_argv(given)]


def model_shown(words: list[str]) -> str:
    if len(words) == 2:
        return words[1]
    given = cli.parse_args(words).values
    sizes = [int(str(given[name])) for name in ("num_layers", "hidden_size", "num_attention_heads") if name in given]
    return f"a Llama of {'x'.join(map(str, sizes))}" if len(sizes) == 3 else "the model of that file"


HEAD = 128  # channels of a head
UNLIKE = 2.0  # times as deep, or as flat, as published models: then the vocabulary is most of the model


def sizes_of(parameters: int) -> tuple[int, int, int]:
    """(layers, hidden, heads) of a Llama of about so many parameters with the vocabulary of Llama 3, about as deep as
    published ones: hidden / layers near 128 (128 at 8 B, 102 at 70 B, 130 at 405 B).

    >>> sizes_of(8 * 10**9), sizes_of(100 * 10**9)
    ((32, 4096, 32), (72, 10240, 80))
    """
    vocabulary, found = PRESETS["llama3-8b"]["vocab_size"], []
    few = 8 if parameters >= 10**9 else 1  # heads that tp may divide
    for heads in range(few, 257, few):
        hidden, groups = heads * HEAD, math.gcd(8, heads)
        layer = 2 * hidden**2 + 2 * hidden * groups * HEAD + 3 * hidden * (7 * hidden // 2)
        whole = 4 if few > 1 else 1  # layers that pp may divide
        layers = round((parameters - 2 * vocabulary * hidden) / layer / whole) * whole
        if layers > 0:
            found.append((abs(math.log(layers * HEAD / hidden)), (layers, hidden, heads)))
    unlike, sizes = min(found, default=(math.inf, (0, 0, 0)))
    if unlike > math.log(UNLIKE):
        raise ValueError(f"a Llama of {parameters:,} parameters has no usual sizes; write LAYERSxHIDDENxHEADS")
    return sizes


BY = r"\s*[x*×:]?\s*"
NUMBER_FIRST = re.compile(rf"(?:(\d+)\s*[x*×]\s*)?(\d+)(?:{BY}([a-z]+\d*))?s?")
DEVICE_FIRST = re.compile(rf"([a-z]+\d*)(?:{BY}(\d+))?")


def devices(text: str, usual: str) -> Devices:
    """A device, `usual` where none is named, their number, or both, also by nodes: h100, 16, 16xh100, 2x8xH100, h100:8.

    >>> [tuple(devices(text, "a100")) for text in ("16xh100", "2 x 8 H100s", "h100:8", "1,024")]
    [('h100', 16, None), ('h100', 16, 8), ('h100', 8, None), ('a100', 1024, None)]
    """
    plain = re.sub(r"(?<=\d)[,_](?=\d{3}(?!\d))", "", text.strip().lower())
    if one := NUMBER_FIRST.fullmatch(plain):
        nodes, many, name = one.groups()
    elif one := DEVICE_FIRST.fullmatch(plain):
        nodes, name, many = None, *one.groups()
    else:
        raise ValueError(f"{text} is not a device and its number; write it as 16xh100, or as 2x8xh100 for 2 nodes of 8")
    device = name or usual
    number = positive(many) if many else None
    per_node = number if nodes else None
    if number is not None and nodes:
        number *= positive(nodes)
    found = Devices(device if device in DEVICES else device.removesuffix("s"), number, per_node)
    try:
        make_cluster(found.device, number or 1, per_node)
    except ValueError as error:
        raise ValueError(str(error).replace("num_devices", "number").replace("per_node=", "nodes of ")) from None
    return found


def numbered(text: str, usual: str) -> Devices:
    found = devices(text, usual)
    if found.number is None:
        raise ValueError(f"{text} is no number of devices; write it as 16")
    return found


def devices_shown(found: Devices) -> str:
    text = found.device if found.number is None else f"{found.number} x {found.device}"
    return text if found.per_node is None else f"{text} in nodes of {found.per_node}"


def length_of(text: str) -> int:
    """Tokens of a sequence: 8192, 8K (of 1,024), 1M.

    >>> length_of("8192"), length_of("128k"), length_of("8,192 tokens")
    (8192, 131072, 8192)
    """
    found = re.fullmatch(r"(\d[\d,_]*) *([km]?)( tokens)?", text.lower())
    if not found or not int(re.sub("[,_]", "", found[1])):
        raise ValueError(f"{text!r} is not a number above 0; write a length as 8192 or 8K")
    return int(re.sub("[,_]", "", found[1])) * {"": 1, "k": 2**10, "m": 2**20}[found[2]]


def batch_of(text: str, length: int, devices: int) -> int:
    """Sequences, or where the answer is of tokens (4M, 4M tokens), about as many that the devices can share."""
    lower = text.lower()
    if re.fullmatch(rf"{NUMBER} *(([kmbt]|thousand|(m|b|tr)illion)? *tokens|[mbt]|(m|b|tr)illion)", lower):
        return max(1, round(quantity(text) / length / devices)) * devices
    try:
        return length_of(lower.removesuffix("sequences").strip())
    except ValueError:
        raise ValueError(f"{text!r} is not a number above 0; write it as 512, or in tokens as 4M") from None


def tokens_of(text: str) -> int | None:
    """None: 20 per parameter."""
    return None if text == QUESTIONS["tokens"][1] else quantity(text)


def limit(text: str) -> tuple[float, str] | None:
    """A number alone is of days."""
    if text == "none":
        return None
    found = re.fullmatch(rf"(\$?) *({NUMBER}) *(k?) *(days?|d|weeks?|\$|dollars?|usd)?", text.lower())
    value = float(re.sub("[,_]", "", found[2])) * (1000 if found[3] else 1) if found else 0
    unit = (found[1] or found[4] or "days") if found else ""
    is_days = unit[0:1] in ("d", "w") and not unit.startswith("dollar")
    if not found or not value or (found[1] and found[4]) or (found[3] and is_days) or value == math.inf:
        raise ValueError(f"{text} is no limit; write it as 30 days, as 20000 $, or none")
    return (value * (7 if unit.startswith("w") else 1), "days") if is_days else (value, "$")


def file(text: str) -> Path | None:
    if wrong := list(unwritable(toml=Path(text))) if text != "none" else []:
        raise ValueError(wrong[0])
    return None if text == "none" else Path(text)


def conclusion(args: argparse.Namespace, found: Found, budget: Budget, device: Device) -> Iterator[str]:
    """Why this tp, pp and ZeRO stage: by the fastest plan with another; and whether the limit is kept."""
    best = found.choices()[0].best
    for axis in ("tp", "pp", "zero"):
        own = getattr(best.layout, axis)
        other = next((plan for plan in found.plans if getattr(plan.layout, axis) != own), None)
        slower = other and f"{other.layout} takes {other.time.seconds / best.time.seconds:.2f} times as long"
        yield f"{axis} {own}: {slower or 'nothing else was faster by its bound, or fits'}"
    days, price = budget.days(best.time.tokens_per_s), args.price_per_gpu_hour or device.price_per_hour
    if args.limit is not None:
        most, unit = args.limit
        took = days if unit == "days" else days * 24 * args.num_gpus * price
        more = f"about {math.ceil(args.num_gpus * took / most):,} devices" if unit == "days" else "fewer tokens"
        yield f"limit {most:g} {unit}: it takes {took:,.1f} {unit}" + (f", and needs {more}" if took > most else "")
