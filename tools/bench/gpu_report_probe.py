"""Find out for tools/gpu_report.py which machine this is, and how many layers of a model fit on its card.

This is a process of its own, so that the one that waits for the others holds no memory of the card.
"""

import json
import os
import platform
import re
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))

import torch

from megalite.config import cli
from megalite.models.families import PRESETS
from megalite.planning.memory import rank_memory as memory_of
from megalite.planning.run_plan import make_run_plan
from tools.cli_common import write_json

DATA = "--mock-data --train-iters 1000 --eval-iters 0 --lr 1e-4 --lr-decay-style constant"
BF16_MOMENTS = ["--exp-avg-dtype", "bf16", "--exp-avg-sq-dtype", "bf16"]
USABLE = 0.93  # of the card's memory: the rest is the driver's, the libraries' and the allocator's gaps
QUERY = ("name", "driver_version", "compute_mode", "mig.mode.current", "ecc.errors.uncorrected.volatile.total",
         "utilization.gpu", "memory.used", "temperature.gpu", "power.limit", "power.default_limit")  # fmt: skip


def facts() -> dict[str, Any]:
    known: dict[str, Any] = {"python": platform.python_version(), "machine": platform.platform()}
    known |= {"torch": torch.__version__, "cuda": torch.version.cuda}
    for name in ("triton", "numpy", "pytest"):
        try:
            known[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            known[name] = None
    known |= {"device": "CPU", "memory": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"), "cards": 0}
    if not torch.cuda.is_available():
        try:
            torch.cuda.init()
        except (AssertionError, RuntimeError) as error:  # which say what is wrong with the build or the driver
            known["why"] = " ".join(str(error).split())
        return known
    properties = torch.cuda.get_device_properties(0)
    known |= {"device": properties.name, "memory": properties.total_memory, "cards": torch.cuda.device_count()}
    known |= {"cudnn": torch.backends.cudnn.version(), "capability": f"{properties.major}.{properties.minor}"}
    free = min(torch.cuda.mem_get_info(card)[0] for card in range(known["cards"]))
    return known | {"free": free, "cards_told": ask_driver()}


def ask_driver(query: tuple[str, ...] = QUERY) -> list[dict[str, str]]:
    """`query` of each card, as nvidia-smi tells it; nothing where it cannot."""
    words = ["nvidia-smi", f"--query-gpu={','.join(query)}", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.SubprocessError):
        return []
    lines = done.stdout.splitlines() if done.returncode == 0 else []
    return [dict(zip(query, map(str.strip, line.split(",")), strict=False)) for line in lines if line.strip()]


def warnings_of(machine: dict[str, Any]) -> list[str]:
    """The reasons why this machine's figures mean less than they seem to, or why some parts cannot run."""
    lines = []
    if machine["triton"] is None:
        lines.append("triton is not installed: everything runs torch's kernels")
    if machine.get("free", machine["memory"]) < 0.9 * machine["memory"]:
        held = (machine["memory"] - machine["free"]) / 2**30
        lines.append(f"others hold {held:.1f} GiB of a card's memory: it is not quiet")
    for number, card in enumerate(machine.get("cards_told", [])):
        name = f"card {number}"
        if card.get("mig.mode.current") == "Enabled" or "MIG" in card.get("name", ""):
            lines.append(f"{name} is divided (MIG): rates are those of a slice, goals those of a whole card")
        if card.get("ecc.errors.uncorrected.volatile.total", "0") not in ("0", "[N/A]", "N/A"):
            lines.append(f"{name} has uncorrected memory errors (ECC): no result can be trusted")
        if card.get("utilization.gpu", "0").isdigit() and int(card["utilization.gpu"]) > 5:
            lines.append(f"{name} is {card['utilization.gpu']} % busy with the work of others")
        if card.get("compute_mode", "Default") not in ("Default", "[N/A]"):
            lines.append(f"{name} takes one process at a time ({card['compute_mode']}): parts do not share it")
        watts = [card.get(limit, "") for limit in ("power.limit", "power.default_limit")]
        if all(re.fullmatch(r"[\d.]+", text) for text in watts) and float(watts[0]) < float(watts[1]):
            lines.append(f"{name} may take {watts[0]} W of its {watts[1]}: its clock is lower under load")
    return lines


def answers() -> None:
    """A small computation on every card comes out right; raises where it does not."""
    for card in range(torch.cuda.device_count() or 1):
        x = torch.arange(4096.0, device=f"cuda:{card}").view(64, 64)
        total, expected = (x @ x).sum().item(), 1104700047360.0
        if not abs(total / expected - 1) < 1e-3:
            raise RuntimeError(f"card {card} computes {total:g} in place of {expected:g}")


def choose(flags: list[str], memory: float) -> dict[str, Any]:
    """The most layers whose estimated peak fits (at least one); moments in fp32 if all layers fit with them, else in
    bf16."""
    config, _ = cli.read([*DATA.split(), *flags], PRESETS)
    layers, vocab = config.model.num_layers, config.data.vocab_size
    assert layers and vocab
    tried = [(layers, []), *((n, BF16_MOMENTS) for n in range(layers, 0, -1))]
    for count, moments in tried:
        sizes = ["--num-layers", str(count), *moments]
        config, _ = cli.read([*DATA.split(), *flags, *sizes], PRESETS)
        (held,) = memory_of(make_run_plan(config, 1, vocab))
        if held.peak <= memory:
            break
    sizes_of = {"layers": count, "of_layers": layers, "moments": "bf16" if moments else "fp32"}
    return {"flags": [*flags, *sizes], **sizes_of, "seq_length": config.model.seq_length, "estimate": held.peak}


def main(shapes: dict[str, str], file: Path) -> int:
    """`shapes`: flags by name. What is known of the machine is written before plans are made: one may fail."""
    machine = facts()
    machine["warnings"] = warnings_of(machine)
    write_json(file, machine)
    free = min(USABLE * machine["memory"], machine.get("free", machine["memory"]))
    machine["plans"] = {name: choose(flags.split(), free) for name, flags in shapes.items()}
    write_json(file, machine)
    return 0


if __name__ == "__main__":
    if sys.argv[1:] == ["--answers"]:
        answers()
        sys.exit()
    sys.exit(main(json.loads(sys.argv[1]), Path(sys.argv[2])))
