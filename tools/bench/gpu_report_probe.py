"""What tools/gpu_report.py must know before it starts: the machine, and how many layers of a model fit on its card.

In a process of its own, so that the one that waits for the others holds no memory of the card.
"""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path.insert(0, str(ROOT))

from megalite.config import cli  # noqa: E402
from megalite.models.families import PRESETS  # noqa: E402
from tools.memory_estimate import estimate  # noqa: E402

DATA = "--mock-data --train-iters 1000 --eval-iters 0 --lr 1e-4 --lr-decay-style constant"
BF16_MOMENTS = ["--exp-avg-dtype", "bf16", "--exp-avg-sq-dtype", "bf16"]
USABLE = 0.93  # of the card's memory: the rest is the driver's, the libraries' and the allocator's gaps
SMALLER = 0.85  # of an estimate that turned out to be too small


def facts() -> dict[str, Any]:
    import torch

    found: dict[str, Any] = {"python": platform.python_version(), "machine": platform.platform()}
    found |= {"torch": torch.__version__, "cuda": torch.version.cuda}
    for name in ("triton", "numpy"):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = None
    if torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(0)
        found |= {"device": properties.name, "memory": properties.total_memory}
        found |= {"cudnn": torch.backends.cudnn.version(), "driver": driver()}
    else:
        found |= {"device": "CPU", "memory": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")}
    return found


def driver() -> str | None:
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return None
    words = [tool, "--query-gpu=driver_version", "--format=csv,noheader"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=20)
    return done.stdout.split("\n")[0].strip() or None


def choose(flags: list[str], memory: float) -> dict[str, Any]:
    """The most layers whose estimated peak fits (at least one); moments in fp32 if all layers fit with them, else in
    bf16."""
    config, _ = cli.read([*DATA.split(), *flags], PRESETS)
    layers, vocab = config.model.num_layers, config.data.vocab_size
    assert layers and vocab
    tried = [(layers, []), *((n, BF16_MOMENTS) for n in range(layers, 0, -1))]
    for count, moments in tried:
        more = ["--num-layers", str(count), *moments]
        config, _ = cli.read([*DATA.split(), *flags, *more], PRESETS)
        found = estimate(config, vocab)
        if found.peak <= memory:
            break
    return {
        "flags": [*flags, *more],
        "layers": count,
        "of_layers": layers,
        "moments": "bf16" if moments else "fp32",
        "seq_length": config.model.seq_length,
        "estimate": {"peak": found.peak, "state": found.state, "activations": found.activations},
    }


def main(shapes: dict[str, str], file: Path) -> int:
    """`shapes`: flags by name."""
    made = facts()
    plans = {name: choose(flags.split(), USABLE * made["memory"]) for name, flags in shapes.items()}
    for name, plan in plans.items():  # for where the estimate was wrong
        plan["smaller"] = choose(shapes[name].split(), SMALLER * min(plan["estimate"]["peak"], made["memory"]))
    file.write_text(json.dumps(made | {"plans": plans}, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main(json.loads(sys.argv[1]), Path(sys.argv[2])))
