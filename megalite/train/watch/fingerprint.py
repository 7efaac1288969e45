"""What must be alike on all nodes, compared before the first step: hashes travel first, texts only where they differ.

    EQUAL   code, Python, torch, Triton, numpy, options, training data     the run ends with exit code 3
    ALIKE   card, driver, NCCL, host's kernel, environment variables       a warning: slower, or hard to explain later

A rank with another option would be at another collective than its neighbours; one with other data or another version of
the code would train another model, and no number of the log would show it.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import platform
import socket
from collections import defaultdict
from importlib import metadata
from pathlib import Path

import numpy as np
import torch

import megalite
from megalite.config import environment
from megalite.config.options import Config
from megalite.config.toml import differences
from megalite.data.samples.ledger import Ledger
from megalite.parallel.comm import all_reduce_, gather_texts
from megalite.parallel.launch import LaunchError
from megalite.parallel.mesh import Axis, world_axis
from megalite.train.watch.cards import open_card

EQUAL = ("megalite", "python", "torch", "triton", "numpy", "options", "data")
ALIKE = ("card", "driver", "nccl", "kernel", "environment")
FAMILIES = ("NCCL_", "CUDA_", "CUBLAS_", "TORCH_", "PYTORCH_", "GLOO_", "OMP_", "TRITON_", "NVIDIA_TF32", "MEGALITE_")
OF_A_RANK = ("CUDA_VISIBLE_DEVICES", "NCCL_SOCKET_IFNAME", "NCCL_IB_HCA", "GLOO_SOCKET_IFNAME", "MEGALITE_FAULT")
SHOWN = 12  # lines of a fact

Facts = dict[str, str]  # name -> text, of a line or more


@functools.cache
def sources_hash() -> str:
    """Of the package's own files: an edited checkout has no revision."""
    root, found = Path(megalite.__file__).parent, hashlib.sha256()
    for path in sorted(root.rglob("*.py")):
        found.update(path.relative_to(root).as_posix().encode() + b"\0" + path.read_bytes())
    return found.hexdigest()[:16]


def facts_of_machine(device: torch.device) -> Facts:
    """Of this rank; nothing of it takes part in a collective."""
    facts = {
        "megalite": f"{megalite.__version__}, sources {sources_hash()}",
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "triton": _installed("triton", "pytorch-triton", "triton-rocm"),
        "nccl": _installed("nvidia-nccl-cu12", "nvidia-nccl-cu13"),
        "numpy": np.__version__,
        "kernel": platform.release(),
        "environment": environment.families(FAMILIES, OF_A_RANK),
    }
    card = open_card(device)
    return facts if card is None else facts | card.facts()


def _installed(*packages: str) -> str:
    found = []
    for package in packages:
        with contextlib.suppress(metadata.PackageNotFoundError):
            found.append(f"{package} {metadata.version(package)}")
    return "\n".join(found)


def facts_of_run(config: Config, ledger: Ledger | None) -> Facts:
    chosen = [f"{name}={value!r}" for section in differences(config).values() for name, value in section.items()]
    sources = [] if ledger is None else ledger.eras[-1].sources
    return {
        "options": "\n".join(chosen),
        "data": "\n".join(f"{s.name} {s.digest} weight {s.weight:g}" for s in sources),
    }


def compare_ranks(config: Config, ledger: Ledger | None, device: torch.device) -> tuple[list[str], list[str]]:
    """`compare`, of all that a run has; of one that is alone nothing is asked."""
    world = world_axis()
    if world.size == 1:
        return [socket.gethostname()], []
    return compare(facts_of_machine(device) | facts_of_run(config, ledger), world, device)


def compare(facts: Facts, world: Axis, device: torch.device) -> tuple[list[str], list[str]]:
    """Collective over `world`: one all-reduce where all agree. Returns each rank's host, and what to warn of. Raises
    LaunchError on all ranks where something of EQUAL differs."""
    names = (*EQUAL, *ALIKE)
    host = socket.gethostname().encode()[:64].ljust(64, b"\0")
    hashes = [hashlib.sha256(facts.get(name, "").encode()).digest()[:8] for name in names]
    table = torch.zeros(world.size, len(names) + 8, dtype=torch.int64, device=device)
    mine = np.frombuffer(b"".join(hashes) + host, dtype=np.int64)
    table[world.rank] = torch.from_numpy(mine.copy())
    rows = all_reduce_(table, world).cpu()
    hosts = [row[len(names) :].numpy().tobytes().rstrip(b"\0").decode(errors="replace") for row in rows]
    differing = [name for i, name in enumerate(names) if len(rows[:, i].unique()) > 1]
    if not differing:
        return hosts, []
    told = {name: describe(name, gather_texts(facts.get(name, ""), world, device), hosts) for name in differing}
    if wrong := [told[name] for name in differing if name in EQUAL]:
        raise LaunchError("\n".join(["the ranks of this run are not alike:", *wrong]))
    return hosts, list(told.values())


def describe(name: str, texts: list[str], hosts: list[str]) -> str:
    """Who has what, without the lines that all have.

    >>> print(describe("torch", ["2.13", "2.13", "2.12"], ["a", "a", "b"]))
    torch differs: '2.13' on a (ranks 0-1); '2.12' on b (ranks 2)
    """
    common = set.intersection(*(set(text.splitlines()) for text in texts))
    ranks: dict[str, list[int]] = defaultdict(list)
    for rank, text in enumerate(texts):
        ranks[", ".join([line for line in text.splitlines() if line not in common][:SHOWN])].append(rank)
    parts = []
    for text, group in sorted(ranks.items(), key=lambda item: -len(item[1])):
        nodes = list(dict.fromkeys(hosts[rank] for rank in group))
        where = ", ".join(nodes[:8]) + (f" and {len(nodes) - 8} more" if len(nodes) > 8 else "")
        parts.append(
            f"{text!r} on {where} (ranks {spans(group)})" if text else f"not on {where} (ranks {spans(group)})"
        )
    return f"{name} differs: {'; '.join(parts)}"


def spans(numbers: list[int]) -> str:
    """
    >>> spans([0, 1, 2, 5, 7, 8])
    '0-2,5,7-8'
    """
    parts: list[list[int]] = []
    for n in numbers:
        if parts and parts[-1][-1] == n - 1:
            parts[-1] = [parts[-1][0], n]
        else:
            parts.append([n])
    return ",".join("-".join(map(str, part)) for part in parts)
