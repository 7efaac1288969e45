"""Parsers of option values with a syntax of their own: layer patterns, splits and batch-size schedules.

    "4"                every 4th layer is 0, the others 1
    "[1,1,0]*4+[1]"    a list; + joins lists, * repeats one, parentheses group
    "0:768 250B:1536"  768 samples per step, and 1536 from 250 billion tokens on

The syntax is Megatron-LM's. It evaluates the lists as Python; this module only parses them.
"""

import ast
import math
import re
from collections.abc import Sequence
from itertools import groupby

MAX_LAYERS_IN_PATTERN = 100_000  # a text of 20 characters could describe more layers than memory can hold


def parse_layer_pattern(text: str, layers: int) -> tuple[bool, ...]:
    """Return a bit for each of `layers` layers. Raises ValueError with the reason and a remedy.

    >>> parse_layer_pattern("3", 4), parse_layer_pattern("[1,0]*2", 4)
    ((True, True, False, True), (True, False, True, False))
    """
    try:
        period = int(text)
    except ValueError:
        pass
    else:
        if period < 1:
            raise ValueError("is below 1; give the distance in layers, or a list")
        return tuple((layer + 1) % period != 0 for layer in range(layers))
    try:
        bits = _list(ast.parse(text.strip(), mode="eval").body)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise ValueError("is neither a number nor a list of 0 and 1; give one, as 4 or [1,1,1,0]*8") from None
    if len(bits) != layers:
        raise ValueError(f"has {len(bits)} numbers for {layers} layers; give one for each")
    return tuple(bits)


def parse_split(text: str) -> list[float]:
    """Return three weights >= 0; missing ones are 0. Raises ValueError with the reason and a remedy.

    Quotes are ignored, because Megatron-LM's scripts pass '99,1,0' with them.

    >>> parse_split("'99,1,0'"), parse_split("3, 1")
    ([99.0, 1.0, 0.0], [3.0, 1.0, 0.0])
    """
    try:
        parts = [float(part) for part in re.split(r"[,/\s'\"]+", text) if part]
    except ValueError:
        parts = []
    if not 1 <= len(parts) <= 3 or min(parts) < 0 or not 0 < sum(parts) < float("inf"):
        raise ValueError("is not up to three numbers >= 0, comma-separated; use for example 969,30,1")
    return parts + [0.0] * (3 - len(parts))


def format_layer_pattern(bits: Sequence[bool], periods: bool = True) -> str:
    """Return a short text that `parse_layer_pattern` parses as these bits.

    Args:
        periods: a number may describe the bits; otherwise the text is always a list.

    >>> format_layer_pattern([True, True, False] * 4), format_layer_pattern([False] * 28 + [True] * 2)
    ('3', '[0]*28+[1,1]')
    """
    for period in range(1, len(bits) + 1) if periods else ():
        if tuple(bits) == parse_layer_pattern(str(period), len(bits)):
            return str(period)
    for period in range(1, len(bits) // 2 + 1):
        if len(bits) % period == 0 and list(bits) == list(bits[:period]) * (len(bits) // period):
            return f"[{','.join(str(int(bit)) for bit in bits[:period])}]*{len(bits) // period}"
    parts: list[str] = []
    for bit, run in groupby(bits):
        count = len(list(run))
        parts.append(f"[{int(bit)}]*{count}" if count > 2 else f"[{','.join(str(int(bit)) * count)}]")
    return "+".join(parts)


SUFFIXES = {"K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}


def parse_batch_schedule(text: str, seq_length: int) -> tuple[tuple[int, int], ...]:
    """Return (samples at its start, global batch size) for each step of "TOKENS:SIZE TOKENS:SIZE ...".

    Raises ValueError with the reason and a remedy.

    >>> parse_batch_schedule("0:768 1M:1536", seq_length=1000)
    ((0, 768), (1000, 1536))
    """
    steps = []
    for entry in text.replace(",", " ").split():
        try:
            tokens, size = map(_count, entry.split(":"))
        except ValueError:
            raise ValueError(f"has {entry!r}; write TOKENS:SIZE, as 0:768 250B:1536") from None
        steps.append((tokens // seq_length, size))
    steps.sort(key=lambda step: step[0])
    if not steps or steps[0][0] != 0:
        raise ValueError("does not start at 0 tokens; write 0:SIZE first")
    if len({start for start, _ in steps}) < len(steps):
        raise ValueError(f"has two sizes within one sample of {seq_length} tokens; remove one")
    if min(size for _, size in steps) < 1:
        raise ValueError("has a batch without samples; give sizes of 1 or more")
    return tuple(steps)


def _count(text: str) -> int:
    """Parse a number >= 0, with or without one of SUFFIXES. Raises ValueError."""
    unit = SUFFIXES.get(text[-1:].upper(), 1)
    number = float(text[:-1] if unit > 1 else text) * unit
    if not 0 <= number < math.inf:
        raise ValueError
    return int(number)


def _list(node: ast.expr) -> list[bool]:
    """Return the bits that a list expression describes. Raises ValueError for any other expression."""
    if isinstance(node, ast.List):
        return [bool(_number(item, maximum=1)) for item in node.elts]
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return _list(node.left) + _list(node.right)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult):
        repeated, times = (node.right, node.left) if isinstance(node.left, ast.Constant) else (node.left, node.right)
        bits, count = _list(repeated), _number(times)
        if len(bits) * count <= MAX_LAYERS_IN_PATTERN:
            return bits * count
    raise ValueError


def _number(node: ast.expr, maximum: int = MAX_LAYERS_IN_PATTERN) -> int:
    if not isinstance(node, ast.Constant) or type(node.value) is not int or not 0 <= node.value <= maximum:
        raise ValueError
    return node.value
