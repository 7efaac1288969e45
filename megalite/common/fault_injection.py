"""Faults on demand, for tests and drills: MEGALITE_FAULT="POINT:RANK:STEP:KIND", several separated by commas.

    MEGALITE_FAULT="step.after_reduce:1:3:kill"       rank 1 dies in step 3
    MEGALITE_FAULT="data.get:*:5:sleep=2.5"           every rank waits in step 5

RANK and STEP may be *. faults.toml says where each POINT is, and which value nan, inf and bitflip change there. A fault
strikes once per process, except where STEP is *; with MEGALITE_FAULT_ONCE=FOLDER once per run, restarts included, as a
file in FOLDER records. Where none is set, a point costs one look-up in a dictionary.
"""

import errno
import os
import re
import resource
import signal
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megalite.common.tables import load_table

FAULT_VARIABLE, FAULT_ONCE_VARIABLE = "MEGALITE_FAULT", "MEGALITE_FAULT_ONCE"
POINTS: Mapping[str, str] = load_table(__file__, "fault_points")
FAULT_KINDS = ("kill", "stop", "term", "raise", "exit0", "sleep", "nan", "inf", "bitflip", "eio", "full")
FORM = re.compile(
    rf"(?P<point>[a-z_.]+):(?P<rank>\d+|\*):(?P<step>\d+|\*):(?P<kind>{'|'.join(FAULT_KINDS)})"
    r"((?<=sleep)=(?P<value>\d+(\.\d+)?))?"
)


class InjectedFault(RuntimeError):
    """Raised by the kind `raise`."""


class FaultInjector:
    """The faults that `env` asks for. Raises ValueError for one that is not of the form."""

    def __init__(self, env: Mapping[str, str] = os.environ):
        self._of: dict[str, list[re.Match[str]]] = {}
        self._struck: set[str] = set()
        self._once = env.get(FAULT_ONCE_VARIABLE)
        if self._once is not None and not os.path.isdir(self._once):
            raise ValueError(
                f"{FAULT_ONCE_VARIABLE}={self._once!r} is not a directory; make it, or unset {FAULT_ONCE_VARIABLE}"
            )
        for text in filter(None, env.get(FAULT_VARIABLE, "").split(",")):
            if (match := FORM.fullmatch(text)) is None:
                raise ValueError(
                    f"{FAULT_VARIABLE}={text!r} is not POINT:RANK:STEP:KIND with a KIND of {', '.join(FAULT_KINDS)}"
                )
            if match["point"] not in POINTS:
                raise ValueError(f"{FAULT_VARIABLE}={text!r} names no known point: {', '.join(POINTS)}")
            self._of.setdefault(match["point"], []).append(match)

    def __call__(self, point: str, rank: int, step: int, tensor: Any = None) -> None:
        """Strike, if a fault was asked for here. nan, inf and bitflip change `tensor`, or the one that it returns."""
        for inject_fault in self._of.get(point, ()):
            if (
                inject_fault["rank"] in ("*", str(rank))
                and inject_fault["step"] in ("*", str(step))
                and self._first(inject_fault, rank)
            ):
                _inject(
                    inject_fault["kind"],
                    float(inject_fault["value"] or 3600),
                    f"{point} on rank {rank}, step {step}",
                    tensor,
                )

    def _first(self, inject_fault: re.Match[str], rank: int) -> bool:
        if self._once is not None:
            try:
                (Path(self._once) / f"{inject_fault[0].replace('*', 'any')}.{rank}").touch(exist_ok=False)
                return True
            except FileExistsError:
                return False
        first = inject_fault[0] not in self._struck or inject_fault["step"] == "*"
        self._struck.add(inject_fault[0])
        return first


def _inject(kind: str, value: float, where: str, tensor: Any = None) -> None:
    """`value`: seconds of sleep."""
    print(f"{FAULT_VARIABLE}: {kind} at {where}", file=sys.stderr, flush=True)
    match kind:
        case "kill" | "stop" | "term":
            os.kill(os.getpid(), {"kill": signal.SIGKILL, "stop": signal.SIGSTOP, "term": signal.SIGTERM}[kind])
        case "raise":
            raise InjectedFault(f"asked for by {FAULT_VARIABLE} at {where}")
        case "eio":
            raise OSError(errno.EIO, f"{os.strerror(errno.EIO)} (asked for by {FAULT_VARIABLE} at {where})")
        case "full":  # as a disk is: every file ends at 4 kB
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            resource.setrlimit(resource.RLIMIT_FSIZE, (4096, resource.RLIM_INFINITY))
        case "exit0":
            os._exit(0)
        case "sleep":
            time.sleep(value)
        case "nan" | "inf":
            _first_of(tensor)[0] = float(kind)
        case "bitflip":
            import torch

            raw = _first_of(tensor).view(torch.uint8)
            raw[0] = raw[0] ^ 1


def _first_of(tensor: Any) -> Any:
    if tensor is None:
        raise ValueError("there is no tensor at this point")
    value: Any = tensor() if callable(tensor) else tensor
    return value.view(-1)


try:
    inject_fault = FaultInjector()
except ValueError:  # config/environment.py refuses it
    inject_fault = FaultInjector({})
