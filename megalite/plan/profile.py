"""The speed of each kind of work on a device, as shares of its peak rates, by default or calibrated; stored as JSON.

Sources of the defaults:

    H100, H200   docs/performance.md, "GPU", sustained at the card's power: matmuls 703 of 989 TFLOP/s, attention 0.8 of
                 its rate alone (598 to 620 forward, 463 to 544 backward at 4k and 32k), head and loss 647, copies 3,004
                 of 3,350 GB/s and norms 0.95 of that; `dispatch_s`: a GPT of 125 M without graphs, 38
                 launches per layer, reached an MFU of 7.0 %. `attention_half`: fits
                 rate S / (S + half) to both lengths. `sums`: dW added at 616 and begun at 657 TFLOP/s differ by 0.6 of
                 the time that reading 4 bytes a weight takes. `contention`: a guess, since measuring needs two cards
    A100, B200   the largest rate of a matmul of any shape, 271.2 of 312 and 1,745 of 2,250 TFLOP/s (H100: 794.5), by
                 github.com/stas00/ml-engineering, compute/accelerator/README.md, times 0.885, the share of its own that
                 the H100 sustains; attention: FlashAttention-2 on A100 (arXiv:2307.08691, fig. 5), on B200 as on H100
    V100         scaled from the A100; attention in blocks by Triton, since it has no fused kernel of the vendor
    cpu          shares of the peak measured here; better calibrate
"""

import dataclasses
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

from megalite.plan.cluster import Link


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
        values: dict[str, Any] = json.loads(path.read_text())
        links = {k: Link(**values[k]) for k in ("message", "collective") if values.get(k)}
        pairs = {k: tuple(map(float, values[k])) for k in ("attention", "attention_half")}
        blocks = {name: tuple(map(float, times)) for name, times in values["blocks"].items()}
        if any(len(pair) != 2 for pair in pairs.values()) or any(len(times) != 3 for times in blocks.values()):
            raise ValueError("a list has the wrong length")
        shares = [*(float(values[k]) for k in ("matmul", "head", "memory")), *pairs["attention"]]
        rates = [link.bytes_per_s for link in links.values()]
        amounts = [
            float(values.get(k, 0.0)) for k in ("kernel_s", "dispatch_s", "contention", "step_s", "sums", "tiles")
        ]
        amounts += [*pairs["attention_half"], *(t for block in blocks.values() for t in block)]
        if not all(0 < n < math.inf for n in (*shares, *rates)) or not all(0 <= n < math.inf for n in amounts):
            raise ValueError("a share or rate is not above 0, or a time is below 0")
        return Profile(**{**values, **links, **pairs, "blocks": blocks})
    except (TypeError, KeyError, AttributeError, ValueError, RecursionError) as error:
        raise ValueError(
            f"{path} is not a profile ({error}); make one with: tools/plan.py calibrate --out {path}"
        ) from error


_HOPPER = Profile(
    source="docs/performance.md, GPU, 2026-11-23",
    matmul=0.71,
    head=0.63,
    attention=(0.50, 0.45),
    attention_half=(170, 840),
    memory=0.86,
    tiles=264,
    kernel_s=3e-6,
    dispatch_s=99e-6,
    contention=0.15,
    step_s=1e-3,
)
_AMPERE = dataclasses.replace(
    _HOPPER,
    source="scaled by published rates of matmuls; attention: arXiv:2307.08691",
    matmul=0.77,
    head=0.70,
    attention=(0.58, 0.52),
    tiles=216,
)
DEFAULTS: Mapping[str, Profile] = MappingProxyType(
    {
        "h100": _HOPPER,
        "h200": _HOPPER,
        "a100": _AMPERE,
        "b200": dataclasses.replace(_HOPPER, source="scaled from the H100's", matmul=0.687, head=0.61, tiles=296),
        "v100": dataclasses.replace(
            _AMPERE, source="scaled from the A100's", matmul=0.70, head=0.62, attention=(0.3, 0.25), tiles=160
        ),
        "cpu": Profile("assumed; calibrate", matmul=0.9, head=0.7, attention=(0.4, 0.4), memory=0.6, step_s=2e-3),
    }
)


def default_profile(device: str) -> Profile:
    """The default of a device; the H100's for any other device, since shares differ less than peaks."""
    return DEFAULTS.get(device) or dataclasses.replace(_HOPPER, source=f"the H100's, since {device} is unknown")
