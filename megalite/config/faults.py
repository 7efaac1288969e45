"""Faults on demand, for tests and drills: MEGALITE_FAULT="POINT:RANK:STEP:KIND", several with commas between.

    MEGALITE_FAULT="step.after_backward:1:3:kill"     rank 1 dies in step 3
    MEGALITE_FAULT="data.get:*:5:sleep=2.5"           every rank waits in step 5

RANK and STEP may be *. A fault strikes once per process, except where STEP is *. With MEGALITE_FAULT_ONCE=FOLDER it
strikes once per run: a file in FOLDER remembers it, so that a run that was restarted gets past it. Off unless set:
then a point costs one look at a dictionary.
"""

from __future__ import annotations

import errno
import os
import re
import signal
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

VARIABLE, ONCE = "MEGALITE_FAULT", "MEGALITE_FAULT_ONCE"
KINDS = ("kill", "stop", "term", "raise", "exit0", "sleep", "nan", "inf", "bitflip", "eio")
FORM = re.compile(
    rf"(?P<point>[a-z_.]+):(?P<rank>\d+|\*):(?P<step>\d+|\*):(?P<kind>{'|'.join(KINDS)})((?<=sleep)=(?P<value>\d+(\.\d+)?))?"
)


class InjectedFault(RuntimeError):
    """What the kind `raise` raises."""


class Faults:
    """Those that `env` asks for, by point. Raises ValueError for one that is not of the form."""

    def __init__(self, env: Mapping[str, str] = os.environ):
        self._of: dict[str, list[re.Match[str]]] = {}
        self._struck: set[str] = set()
        self._once = env.get(ONCE)
        if self._once is not None and not os.path.isdir(self._once):
            raise ValueError(f"{ONCE}={self._once!r} is no directory; make it, or unset {ONCE}")
        for text in filter(None, env.get(VARIABLE, "").split(",")):
            if (match := FORM.fullmatch(text)) is None:
                raise ValueError(f"{VARIABLE}={text!r} is not POINT:RANK:STEP:KIND with a KIND of {', '.join(KINDS)}")
            self._of.setdefault(match["point"], []).append(match)

    def __call__(self, point: str, rank: int, step: int, tensor: Any = None) -> None:
        """Strike, if one was asked for here. `tensor`: what nan, inf and bitflip change, its first element."""
        for fault in self._of.get(point, ()):
            if fault["rank"] in ("*", str(rank)) and fault["step"] in ("*", str(step)) and self._first(fault, rank):
                strike(fault["kind"], float(fault["value"] or 3600), f"{point} on rank {rank}, step {step}", tensor)

    def _first(self, fault: re.Match[str], rank: int) -> bool:
        if self._once is not None:
            try:
                (Path(self._once) / f"{fault[0].replace('*', 'any')}.{rank}").touch(exist_ok=False)
            except FileExistsError:
                return False
            return True
        first = fault[0] not in self._struck or fault["step"] == "*"
        self._struck.add(fault[0])
        return first


def strike(kind: str, value: float, where: str, tensor: Any = None) -> None:
    """`value`: seconds of sleep."""
    print(f"{VARIABLE}: {kind} at {where}", file=sys.stderr, flush=True)
    match kind:
        case "kill" | "stop" | "term":
            os.kill(os.getpid(), {"kill": signal.SIGKILL, "stop": signal.SIGSTOP, "term": signal.SIGTERM}[kind])
        case "raise":
            raise InjectedFault(f"asked for by {VARIABLE} at {where}")
        case "eio":
            raise OSError(errno.EIO, f"{os.strerror(errno.EIO)} (asked for by {VARIABLE} at {where})")
        case "exit0":
            os._exit(0)
        case "sleep":
            time.sleep(value)
        case "nan" | "inf":
            tensor.view(-1)[0] = float(kind)
        case "bitflip":
            import torch

            raw = tensor.view(-1).view(torch.uint8)
            raw[0] = raw[0] ^ 1


try:
    fault, PROBLEM = Faults(), ""
except ValueError as wrong:  # told with all else that is wrong with a command line (environment.py)
    fault, PROBLEM = Faults({}), str(wrong)
