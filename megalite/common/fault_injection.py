"""Injected faults for tests and drills: MEGALITE_FAULT="POINT:RANK:STEP:KIND", several separated by commas.

    MEGALITE_FAULT="step.after_reduce:1:3:kill"       rank 1 dies in step 3
    MEGALITE_FAULT="data.get:*:5:sleep=2.5"           every rank waits in step 5

RANK and STEP may be *. fault_points.toml lists the points, and the values that nan, inf and bitflip change there. A
fault occurs once per process, unless STEP is *. With MEGALITE_FAULT_ONCE=DIR it occurs once per run, restarts included,
which a file in DIR records. Without faults, a point costs one dictionary lookup.
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
    """The exception that the kind `raise` raises."""


class FaultInjector:
    """The faults of the environment variable. Raises ValueError for one that cannot be parsed."""

    def __init__(self, env: Mapping[str, str] = os.environ):
        self._faults_by_point: dict[str, list[re.Match[str]]] = {}
        self._injected: set[str] = set()
        self._once_dir = env.get(FAULT_ONCE_VARIABLE)
        if self._once_dir is not None and not os.path.isdir(self._once_dir):
            raise ValueError(
                f"{FAULT_ONCE_VARIABLE}={self._once_dir!r} is not a directory; make it, or unset {FAULT_ONCE_VARIABLE}"
            )
        for text in filter(None, env.get(FAULT_VARIABLE, "").split(",")):
            if (match := FORM.fullmatch(text)) is None:
                raise ValueError(
                    f"{FAULT_VARIABLE}={text!r} is not POINT:RANK:STEP:KIND with a KIND of {', '.join(FAULT_KINDS)}"
                )
            if match["point"] not in POINTS:
                raise ValueError(f"{FAULT_VARIABLE}={text!r} names no known point: {', '.join(POINTS)}")
            self._faults_by_point.setdefault(match["point"], []).append(match)

    def __call__(self, point: str, rank: int, step: int, tensor: Any = None) -> None:
        """Inject the faults for this point, rank and step.

        nan, inf and bitflip change `tensor`, or the tensor that it returns if it is a function.
        """
        for fault in self._faults_by_point.get(point, ()):
            matches = fault["rank"] in ("*", str(rank)) and fault["step"] in ("*", str(step))
            if matches and self._is_due(fault, rank):
                _inject(fault["kind"], float(fault["value"] or 3600), f"{point} on rank {rank}, step {step}", tensor)

    def _is_due(self, fault: re.Match[str], rank: int) -> bool:
        """Return True, and record it, if a fault that occurs once has not occurred yet."""
        if self._once_dir is not None:
            try:
                (Path(self._once_dir) / f"{fault[0].replace('*', 'any')}.{rank}").touch(exist_ok=False)
                return True
            except FileExistsError:
                return False
        is_due = fault[0] not in self._injected or fault["step"] == "*"
        self._injected.add(fault[0])
        return is_due


def _inject(kind: str, value: float, where: str, tensor: Any = None) -> None:
    """Inject a fault of this kind; `value` is the duration of a sleep in seconds."""
    print(f"{FAULT_VARIABLE}: {kind} at {where}", file=sys.stderr, flush=True)
    match kind:
        case "kill" | "stop" | "term":
            os.kill(os.getpid(), {"kill": signal.SIGKILL, "stop": signal.SIGSTOP, "term": signal.SIGTERM}[kind])
        case "raise":
            raise InjectedFault(f"requested by {FAULT_VARIABLE} at {where}")
        case "eio":
            raise OSError(errno.EIO, f"{os.strerror(errno.EIO)} (requested by {FAULT_VARIABLE} at {where})")
        case "full":  # like a full disk: no file can grow beyond 4 kB
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            resource.setrlimit(resource.RLIMIT_FSIZE, (4096, resource.RLIM_INFINITY))
        case "exit0":
            os._exit(0)
        case "sleep":
            time.sleep(value)
        case "nan" | "inf":
            _flat(tensor)[0] = float(kind)
        case "bitflip":
            import torch

            raw = _flat(tensor).view(torch.uint8)
            raw[0] = raw[0] ^ 1


def _flat(tensor: Any) -> Any:
    """Return the tensor, or the one that it returns, as a flat view."""
    if tensor is None:
        raise ValueError("there is no tensor at this point")
    value: Any = tensor() if callable(tensor) else tensor
    return value.view(-1)


try:
    inject_fault = FaultInjector()
except ValueError:  # config/env_overrides.py refuses it
    inject_fault = FaultInjector({})
