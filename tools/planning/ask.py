"""plan.py --ask: questions whose answers are the flags of a plan, and what that plan does about them.

A line of stdin is an answer; an empty one, and the end of stdin, take the default; a wrong one is asked again, with the
rule. Nothing is planned here.
"""

import argparse
import math
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

from megalite.config import cli
from megalite.config.field import words_of
from megalite.config.tables import table_beside
from megalite.models.families import PRESETS
from megalite.plan.cluster import Device, cluster
from tools.planning.request import of_hugging_face
from tools.planning.rules import Budget, quantity
from tools.planning.search import Found
from tools.program import positive, unwritable

T = TypeVar("T")
QUESTIONS = table_beside(__file__, "ask")


def asked(name: str, read: Callable[[str], T], default: str = "") -> T:
    """`read`: of an answer, or a ValueError with the rule."""
    question, usual = QUESTIONS[name][0], default or QUESTIONS[name][1]
    while True:
        print(f"{question} [{usual}]? ", end="", flush=True)
        answer = sys.stdin.readline().strip() or usual
        print(answer if not sys.stdin.isatty() else "", end="\n" * (not sys.stdin.isatty()))
        try:
            return read(answer)
        except (ValueError, OSError, argparse.ArgumentTypeError) as error:  # OSError: of a name that is too long
            print(f"  {error}")


def answers(args: argparse.Namespace) -> list[str]:
    """Flags of the trainer; the planner's own are set in `args`, with `limit` and `toml`."""
    words = asked("model", model)
    args.device = asked("device", lambda text: cluster(text, 1).device.name)
    args.num_gpus = n = asked("gpus", lambda text: cluster(args.device, positive(text)).world)
    given = cli.take_apart(words).given
    usual = {**PRESETS.get(str(given.get("preset")), {}), **given}.get("seq_length", 4096)
    length = asked("length", positive, str(usual))
    usual = max(1, 2**22 // length // n) * n  # about 4 M tokens
    batch = asked("batch", positive, str(usual))
    args.tokens = asked("tokens", lambda text: None if text == QUESTIONS["tokens"][1] else str(quantity(text)))
    args.limit, args.toml = asked("limit", limit), asked("toml", file)
    return [*words, "--seq-length", str(length), "--global-batch-size", str(batch)]


def model(text: str) -> list[str]:
    if text in PRESETS:
        return ["--preset", text]
    if sizes := re.fullmatch(r"(\d+)x(\d+)x(\d+)", text):
        names = ("num_layers", "hidden_size", "num_attention_heads")
        given: dict[str, Any] = dict(zip(names, map(positive, sizes.groups()), strict=True))
        given |= {"ffn_hidden_size": 7 * given["hidden_size"] // 2, "num_query_groups": math.gcd(8, int(sizes[3]))}
        return ["--preset", "llama3-8b", *words_of(given)]
    if Path(text).exists():
        return of_hugging_face(Path(text), [])
    raise ValueError(f"{text} is no file, and no preset; give one of {', '.join(PRESETS)}")


def limit(text: str) -> tuple[float, str] | None:
    found = re.fullmatch(r"(\d+\.?\d*) *(days|\$)", text)
    if text != "none" and not (found and float(found[1])):
        raise ValueError(f"{text} is no limit; write it as 30 days, as 20000 $, or none")
    return (float(found[1]), found[2]) if found else None


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
