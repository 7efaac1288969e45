"""Questions of plan.py --ask, whose answers become the flags of a plan, and an explanation of that plan.

An answer is one line of stdin. An empty line, or the end of stdin, takes the default. An invalid answer is asked for
again, after the rule that it breaks. Answers may be written in several ways (`16xH100`, `2x8xh100`, `128K`,
`4M tokens`, `100 billion`); if the value that was read looks different from the answer, it is printed.
"""

import argparse
import math
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import TypeVar

from megalite.config import cli
from megalite.config.option import to_argv
from megalite.models.families import PRESETS
from megalite.planning.cluster import DEVICES, Device, make_cluster
from tools.cli_common import find_unwritable, positive_int
from tools.planning.plan_request import flags_from_hf
from tools.planning.search import SearchResult
from tools.planning.token_budget import NUMBER, TokenBudget, parse_quantity

T = TypeVar("T")
DEFAULT_DEVICE = "h100"
DEFAULT_TOKENS = "20 per parameter"
DEFAULT_BATCH_TOKENS = 2**22
NO_ANSWER = "none"


def ask(
    question: str, default: str, parse: Callable[[str], T], describe: Callable[[T], str] = str, unit: str = ""
) -> T:
    """Ask a question until its answer is valid, and return the value of the answer.

    Args:
        parse: Returns the value of an answer, or raises ValueError with the rule.
        describe: Formats the value; printed if it differs from the answer.
        unit: Follows the formatted value.
    """
    while True:
        print(f"{question} [{default}]? ", end="", flush=True)
        answer = sys.stdin.readline().strip() or default
        if not sys.stdin.isatty():  # a terminal has echoed it
            print(answer)
        try:
            value = parse(answer)
        except (ValueError, OSError, argparse.ArgumentTypeError) as error:  # OSError: a file name that is too long
            print(f"  {error}")
            continue
        text = describe(value)
        if answer != default and text.replace(",", "") != answer.replace(",", ""):
            print(f"  that is {text}{unit}")
        return value


@dataclass(frozen=True)
class DeviceAnswer:
    """The part of a cluster that an answer describes; None: not given."""

    device: str
    number: int | None
    per_node: int | None = None

    def __str__(self) -> str:
        text = self.device if self.number is None else f"{self.number} x {self.device}"
        return text if self.per_node is None else f"{text} in nodes of {self.per_node}"


def ask_all(args: argparse.Namespace) -> list[str]:
    """Ask all questions and return the flags of the trainer.

    Flags of the planner are set in `args`, with the answers `limit` and `toml`.
    """
    question = "Which model: a preset, a config.json, a Llama by its size such as 7B, or LAYERSxHIDDENxHEADS"
    argv = ask(question, "llama3-8b", parse_model, describe_model)
    _ask_devices(args)
    num_gpus = args.num_gpus or 1
    values = cli.parse_args(argv).values
    model_options = {**PRESETS.get(str(values.get("preset")), {}), **values}

    default = str(model_options.get("seq_length", 4096))
    length = ask("How many tokens per sequence", default, parse_length, format_count, " tokens")
    default = str(max(1, DEFAULT_BATCH_TOKENS // length // num_gpus) * num_gpus)
    batch = ask(
        "How many sequences per batch (or tokens, as 4M)",
        default,
        lambda text: parse_batch(text, length, num_gpus),
        format_count,
        " sequences",
    )
    question = "How many tokens to train on (as 100B)"
    tokens = ask(question, DEFAULT_TOKENS, parse_tokens, format_count, " tokens")
    args.tokens = None if tokens is None else str(tokens)
    args.limit = ask("Limit of time or cost: DAYS days or DOLLARS $", NO_ANSWER, parse_limit, describe_limit)
    args.toml = ask("File to write the options to, for --config", NO_ANSWER, parse_file)

    if length > int(str(model_options.get("max_position_embeddings", length))):
        argv += ["--max-position-embeddings", str(length)]
    return [*argv, "--seq-length", str(length), "--global-batch-size", str(batch)]


def _ask_devices(args: argparse.Namespace) -> None:
    answer = ask(
        f"Which device (or with their number, as 16x{DEFAULT_DEVICE})",
        DEFAULT_DEVICE,
        lambda text: parse_devices(text, DEFAULT_DEVICE),
    )
    if answer.number is None:
        device = answer.device
        answer = ask("How many of them", "8", lambda text: parse_device_count(text, device))
    args.device, args.num_gpus, args.gpus_per_node = answer.device, answer.number, answer.per_node


def format_count(number: int | None) -> str:
    return DEFAULT_TOKENS if number is None else f"{number:,}"


def parse_model(text: str) -> list[str]:
    """Return the flags of a model: a preset in any spelling, a config.json, or a Llama by its shape or size."""
    presets = {_squeeze(name): name for name in PRESETS}
    if _squeeze(text) in presets:
        return ["--preset", presets[_squeeze(text)]]
    if shape := re.fullmatch(r"(\d+) *[x*] *(\d+) *[x*] *(\d+)", text.lower()):
        return llama_flags(*map(positive_int, shape.groups()))
    if Path(text).exists():
        return flags_from_hf(Path(text), [])
    if re.fullmatch(rf"{NUMBER} *([mbt]|(m|b|tr)illion)( parameters)?", text.lower()):
        return llama_flags(*llama_shape(parse_quantity(text)))
    matches = get_close_matches(text.lower(), PRESETS, 1)
    hint = f"did you mean {matches[0]}? There are" if matches else "give a size such as 7B, or one of"
    raise ValueError(f"{text} is not a file or a preset; {hint} {', '.join(PRESETS)}")


def _squeeze(name: str) -> str:
    """Return a name in lower case without spaces, hyphens and underscores.

    >>> _squeeze("Llama 3 8B") == _squeeze("llama3-8b")
    True
    """
    return re.sub(r"[\s_-]", "", name.lower())


def llama_flags(layers: int, hidden: int, heads: int) -> list[str]:
    """Return the flags of a Llama with this shape and the other options of Llama 3 8B."""
    options = {
        "num_layers": layers,
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "ffn_hidden_size": 7 * hidden // 2,
        "num_query_groups": math.gcd(8, heads),
    }
    return ["--preset", "llama3-8b", *to_argv(options)]


def describe_model(argv: list[str]) -> str:
    if len(argv) == 2:
        return argv[1]
    values = cli.parse_args(argv).values
    shape = [str(values[name]) for name in ("num_layers", "hidden_size", "num_attention_heads") if name in values]
    return f"a Llama of {'x'.join(shape)}" if len(shape) == 3 else "the model of that file"


HEAD_SIZE = 128
MAX_DEVIATION = 2.0  # factor between hidden / layers and that of published models; beyond, the vocabulary dominates


def llama_shape(parameters: int) -> tuple[int, int, int]:
    """Return the (layers, hidden size, heads) of a Llama with about this many parameters and Llama 3's vocabulary.

    Its hidden / layers is near 128, as in published models (128 at 8 B, 102 at 70 B, 130 at 405 B).

    >>> llama_shape(8 * 10**9), llama_shape(100 * 10**9)
    ((32, 4096, 32), (72, 10240, 80))
    """
    is_large = parameters >= 10**9
    heads_multiple = 8 if is_large else 1  # so that tp can divide the heads
    layers_multiple = 4 if is_large else 1  # so that pp can divide the layers
    vocab_size = PRESETS["llama3-8b"]["vocab_size"]
    shapes = []
    for heads in range(heads_multiple, 257, heads_multiple):
        hidden, kv_groups = heads * HEAD_SIZE, math.gcd(8, heads)
        attention = 2 * hidden**2 + 2 * hidden * kv_groups * HEAD_SIZE
        layer = attention + 3 * hidden * (7 * hidden // 2)
        layers = round((parameters - 2 * vocab_size * hidden) / layer / layers_multiple) * layers_multiple
        if layers > 0:
            deviation = abs(math.log(layers * HEAD_SIZE / hidden))
            shapes.append((deviation, (layers, hidden, heads)))
    deviation, shape = min(shapes, default=(math.inf, (0, 0, 0)))
    if deviation > math.log(MAX_DEVIATION):
        raise ValueError(f"a Llama of {parameters:,} parameters has no usual shape; write LAYERSxHIDDENxHEADS")
    return shape


_BY = r"\s*[x*×:]?\s*"
_NUMBER_FIRST = re.compile(rf"(?:(\d+)\s*[x*×]\s*)?(\d+)(?:{_BY}([a-z]+\d*))?s?")
_DEVICE_FIRST = re.compile(rf"([a-z]+\d*)(?:{_BY}(\d+))?")


def parse_devices(text: str, default: str) -> DeviceAnswer:
    """Return a device, its number, or both, also by nodes: h100, 16, 16xh100, 2x8xH100, h100:8.

    Args:
        default: The device if the answer names none.

    >>> [str(parse_devices(text, "a100")) for text in ("16xh100", "2 x 8 H100s", "h100:8", "1,024")]
    ['16 x h100', '16 x h100 in nodes of 8', '8 x h100', '1024 x a100']
    """
    plain = re.sub(r"(?<=\d)[,_](?=\d{3}(?!\d))", "", text.strip().lower())
    nodes_text = None
    if match := _NUMBER_FIRST.fullmatch(plain):
        nodes_text, number_text, name = match.groups()
    elif match := _DEVICE_FIRST.fullmatch(plain):
        name, number_text = match.groups()
    else:
        raise ValueError(f"{text} is not a device and its number; write it as 16xh100, or as 2x8xh100 for 2 nodes of 8")
    device = name or default
    if device not in DEVICES:
        device = device.removesuffix("s")
    number = positive_int(number_text) if number_text else None
    per_node = None
    if nodes_text and number is not None:
        per_node = number
        number *= positive_int(nodes_text)
    try:
        make_cluster(device, number or 1, per_node)
    except ValueError as error:
        raise ValueError(str(error).replace("num_devices", "number").replace("per_node=", "nodes of ")) from None
    return DeviceAnswer(device, number, per_node)


def parse_device_count(text: str, default: str) -> DeviceAnswer:
    """Return an answer that must have a number of devices."""
    answer = parse_devices(text, default)
    if answer.number is None:
        raise ValueError(f"{text} is not a number of devices; write it as 16")
    return answer


def parse_length(text: str) -> int:
    """Return the tokens of a sequence: 8192, 8K (1K is 1,024), 1M.

    >>> parse_length("8192"), parse_length("128k"), parse_length("8,192 tokens")
    (8192, 131072, 8192)
    """
    match = re.fullmatch(r"(\d[\d,_]*) *([km]?)( tokens)?", text.lower())
    number = int(re.sub("[,_]", "", match[1])) if match else 0
    if not match or not number:
        raise ValueError(f"{text!r} is not a number above 0; write a length as 8192 or 8K")
    return number * {"": 1, "k": 2**10, "m": 2**20}[match[2]]


def parse_batch(text: str, length: int, devices: int) -> int:
    """Return the sequences of a batch. For an answer in tokens (4M), round to a multiple of `devices`."""
    lower = text.lower()
    if re.fullmatch(rf"{NUMBER} *(([kmbt]|thousand|(m|b|tr)illion)? *tokens|[mbt]|(m|b|tr)illion)", lower):
        return max(1, round(parse_quantity(text) / length / devices)) * devices
    try:
        return parse_length(lower.removesuffix("sequences").strip())
    except ValueError:
        raise ValueError(f"{text!r} is not a number above 0; write it as 512, or in tokens as 4M") from None


def parse_tokens(text: str) -> int | None:
    """Return a number of tokens, or None for the default."""
    return None if text == DEFAULT_TOKENS else parse_quantity(text)


def parse_limit(text: str) -> tuple[float, str] | None:
    """Return a limit in days or dollars as (value, unit), or None. A number without a unit is in days."""
    if text == NO_ANSWER:
        return None
    match = re.fullmatch(rf"(\$?) *({NUMBER}) *(k?) *(days?|d|weeks?|\$|dollars?|usd)?", text.lower())
    if match is None:
        raise ValueError(_limit_rule(text))
    prefix, number, thousands, suffix = match.groups()
    value = float(re.sub("[,_]", "", number))
    if thousands:
        value *= 1000
    is_dollars = "$" in (prefix, suffix) or suffix in ("dollar", "dollars", "usd")
    has_two_units = bool(prefix and suffix)
    if not 0 < value < math.inf or has_two_units or (thousands and not is_dollars):
        raise ValueError(_limit_rule(text))
    if is_dollars:
        return value, "$"
    is_weeks = suffix in ("week", "weeks")
    return (7 * value if is_weeks else value), "days"


def _limit_rule(text: str) -> str:
    return f"{text} is not a limit; write it as 30 days, as 20000 $, or none"


def describe_limit(limit: tuple[float, str] | None) -> str:
    return f"{limit[0]:g} {limit[1]}" if limit else NO_ANSWER


def parse_file(text: str) -> Path | None:
    """Return a file that can be written, or None."""
    if text == NO_ANSWER:
        return None
    path = Path(text)
    for problem in find_unwritable(toml=path):
        raise ValueError(problem)
    return path


def explain_choice(
    args: argparse.Namespace, result: SearchResult, budget: TokenBudget, device: Device
) -> Iterator[str]:
    """Yield why the best layout has its tp, pp and ZeRO stage, and what the limit requires.

    The reason is the fastest layout with another value.
    """
    best = result.choices()[0].best
    for axis in ("tp", "pp", "zero"):
        size = getattr(best.layout, axis)
        reason = "no other value is faster by its bound, or fits"
        for plan in result.plans:
            if getattr(plan.layout, axis) != size:
                reason = f"{plan.layout} takes {plan.time.seconds / best.time.seconds:.2f} times as long"
                break
        yield f"{axis} {size}: {reason}"
    if args.limit is None:
        return
    limit, unit = args.limit
    days = budget.days(best.time.tokens_per_s)
    if unit == "days":
        needed = days
        remedy = f"about {math.ceil(args.num_gpus * days / limit):,} devices"
    else:
        needed = days * 24 * args.num_gpus * (args.price_per_gpu_hour or device.price_per_hour)
        remedy = "fewer tokens"
    text = f"limit {limit:g} {unit}: it takes {needed:,.1f} {unit}"
    yield f"{text}, and needs {remedy}" if needed > limit else text
