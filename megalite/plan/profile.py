"""The speed of each kind of work on a device, as shares of its peak rates, by default or calibrated; stored as JSON.
The defaults and their sources are in devices.toml.
"""

import dataclasses
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

from megalite.plan.cluster import TABLE, Link


@dataclass(frozen=True)
class Profile:
    """Shares are of the device's peaks (megalite/plan/cluster.py).

    matmul         large matmuls, sustained; `head`: head and loss together
    tiles          number of 128 x 128 tiles of a result that fill the device; with fewer a matmul is slower by as much
    attention      forward and backward of very long sequences; `attention_half`: keys at which half of it is reached
    fused          whether attention keeps no scores in memory; otherwise all S x S are written and read
    memory         share of the memory's rate that elementwise kernels and the optimizer reach
    sums           share of the time of reading and writing the gradients' sums that shows in a weight gradient
    kernel_s       seconds of any kernel on the device beyond its work; `dispatch_s`: of the host, each launch
    contention     share of a collective's time by which it slows down a matmul that it hides behind
    step_s         seconds of any step beyond all that is counted
    device         the device of the table where it was measured; "": a default
    blocks         calibrated seconds of F, B and W of the parts of a stage, for layers of this `shape` and their ends
    message, collective    calibrated links; None: the cluster's
    """

    source: str
    matmul: float
    head: float
    attention: tuple[float, float]
    memory: float
    attention_half: tuple[float, float] = (0.0, 0.0)
    fused: bool = True
    tiles: int = 0
    sums: float = 0.6
    kernel_s: float = 0.0
    dispatch_s: float = 0.0
    contention: float = 0.0
    step_s: float = 0.0
    shape: str = ""
    device: str = ""
    blocks: Mapping[str, tuple[float, float, float]] = field(default_factory=dict)
    message: Link | None = None
    collective: Link | None = None

    def save(self, path: Path) -> None:
        path.write_text(json.dumps(dataclasses.asdict(self), indent=1) + "\n")


def read_profile(path: Path) -> Profile:
    """Raises ValueError if the file is not a profile, OSError if it cannot be read."""
    try:
        return _profile(json.loads(path.read_text()))
    except (TypeError, KeyError, AttributeError, ValueError, RecursionError) as error:
        remedy = f"make one with: tools/plan.py calibrate --out {path}"
        raise ValueError(f"{path} is not a profile ({error}); {remedy}") from error


def _profile(values: dict[str, Any]) -> Profile:
    """Raises any of the errors above where these are no values of a profile."""
    links = {k: Link(**values[k]) for k in ("message", "collective") if values.get(k)}
    pairs = {k: tuple(map(float, values[k])) for k in ("attention", "attention_half")}
    blocks = {name: tuple(map(float, times)) for name, times in values["blocks"].items()}
    if any(len(pair) != 2 for pair in pairs.values()) or any(len(times) != 3 for times in blocks.values()):
        raise ValueError("a list has the wrong length")
    made = Profile(**{**values, **links, **pairs, "blocks": blocks})
    shares = (made.matmul, made.head, made.memory, *made.attention, *(link.bytes_per_s for link in links.values()))
    amounts = (made.kernel_s, made.dispatch_s, made.contention, made.step_s, made.sums, made.tiles)
    times = (*amounts, *made.attention_half, *(t for block in blocks.values() for t in block))
    if not all(0 < n < math.inf for n in shares) or not all(0 <= n < math.inf for n in times):
        raise ValueError("a share or rate is not above 0, or a time is below 0")
    return made


DEFAULTS: Mapping[str, Profile] = MappingProxyType(
    {name: _profile({"blocks": {}, **known["profile"]}) for name, known in TABLE["devices"].items()}
)


def default_profile(device: str) -> Profile:
    """The default of a device; the H100's for any other device, since shares differ less than peaks."""
    other = dataclasses.replace(DEFAULTS["h100"], source=f"the H100's, since {device} is unknown")
    return DEFAULTS.get(device, other)
