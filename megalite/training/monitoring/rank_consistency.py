"""Compare all ranks before the first step: hashes first, and the texts only if hashes differ.

    MUST_MATCH     code, Python, torch, Triton, numpy, options, training data; otherwise the run ends with exit code 3
    SHOULD_MATCH   GPU, driver, NCCL, kernel of the host, dtypes that a CPU multiplies in fp32, environment variables;
                   otherwise a warning

A rank with another option would start other collectives than its peers. A rank with other data or another version of
the code would train another model, without any sign of it in the log.
"""

import contextlib
import hashlib
import platform
import socket
from collections import defaultdict
from importlib import metadata
from pathlib import Path

import numpy as np
import torch

import megalite
from megalite.common import environment
from megalite.config.config_file import non_default_options
from megalite.config.options import Config
from megalite.config.plugins import plugin_hashes
from megalite.data.datasets.ledger import DataLedger
from megalite.kernels.dispatch import upcast_dtypes
from megalite.launch.rank_info import LaunchError
from megalite.parallel.comm import all_gather_strings
from megalite.parallel.mesh import Axis
from megalite.training.monitoring.gpu_monitor import GpuMonitor, read_sensors

MUST_MATCH = ("megalite", "python", "torch", "triton", "numpy", "options", "data")
SHOULD_MATCH = ("gpu", "driver", "nccl", "kernel", "in fp32", "environment")
MAX_LINES = 12  # lines of a fact that a message shows
HOST_NAME_BYTES = 64  # maximum length of a host name
Facts = dict[str, str]  # name -> text of one or more lines


def check_ranks_match(
    config: Config, ledger: DataLedger | None, world: Axis, device: torch.device
) -> tuple[list[str], list[str]]:
    """Compare the ranks' machine, options and data; returns and raises as `compare_facts`."""
    if world.size == 1:
        return [socket.gethostname()], []
    options = [
        f"{name}={value!r}" for section in non_default_options(config).values() for name, value in section.items()
    ]
    options += [f"plugin {name}: sha256 {sha256[:16]}" for name, sha256 in plugin_hashes().items()]
    sources = [] if ledger is None else ledger.eras[-1].sources
    facts = machine_facts(device)
    facts["options"] = "\n".join(options)
    facts["data"] = "\n".join(f"{source.name} {source.digest} {source.weight:g}" for source in sources)
    return compare_facts(facts, world, device)


def machine_facts(device: torch.device) -> Facts:
    """Return facts about this rank's machine and packages."""
    return {
        "megalite": f"{megalite.__version__}, sources {source_code_hash()}",
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "triton": _installed("triton", "pytorch-triton", "triton-rocm"),
        "numpy": np.__version__,
        "nccl": _installed("nvidia-nccl-cu12", "nvidia-nccl-cu13"),
        "kernel": platform.release(),
        "in fp32": "\n".join(map(str, upcast_dtypes(device.type))),
        "environment": environment.library_variables(),
        **{name: str(fact) for name, fact in read_sensors(GpuMonitor(device).facts).items()},
    }


def source_code_hash() -> str:
    """Return a hash of the package's files, which detects edited files, unlike a git revision."""
    root = Path(megalite.__file__).parent
    digest = hashlib.sha256()
    for path in sorted(root.rglob("*.py")):
        digest.update(path.relative_to(root).as_posix().encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:16]


def _installed(*packages: str) -> str:
    versions = []
    for package in packages:
        with contextlib.suppress(metadata.PackageNotFoundError):
            versions.append(f"{package} {metadata.version(package)}")
    return "\n".join(versions)


def compare_facts(facts: Facts, world: Axis, device: torch.device) -> tuple[list[str], list[str]]:
    """Compare the facts of all ranks and return (host names by rank, warnings); collective, one gather if all match.

    Raises:
        LaunchError: if a fact of MUST_MATCH differs.
    """
    names = (*MUST_MATCH, *SHOULD_MATCH)
    hashes = [hashlib.sha256(facts.get(name, "").encode()).hexdigest()[:16] for name in names]
    rows = all_gather_strings(
        "\n".join([*hashes, socket.gethostname()]), world, device, max_bytes=17 * len(names) + HOST_NAME_BYTES
    )
    *columns, hosts = (list(column) for column in zip(*(row.split("\n") for row in rows), strict=True))
    mismatches: Facts = {}
    for name, column in zip(names, columns, strict=True):
        if len(set(column)) > 1:
            mismatches[name] = describe(name, all_gather_strings(facts.get(name, ""), world, device), hosts)
    errors = [text for name, text in mismatches.items() if name in MUST_MATCH]
    if errors:
        raise LaunchError("\n".join(["the ranks of this run differ:", *errors]))
    return hosts, list(mismatches.values())


def describe(name: str, texts: list[str], hosts: list[str]) -> str:
    """Describe how the texts of all ranks differ, without the lines that all have.

    >>> describe("torch", ["2.13", "2.13", "2.12"], ["a", "a", "b"])
    "torch differs: '2.13' on a (rank 0 and 1 more); '2.12' on b (rank 2)"
    """
    common = set.intersection(*(set(text.splitlines()) for text in texts))
    ranks_by_difference: dict[str, list[int]] = defaultdict(list)
    for rank, text in enumerate(texts):
        difference = [line for line in text.splitlines() if line not in common]
        ranks_by_difference[", ".join(difference[:MAX_LINES])].append(rank)
    clauses = []
    for difference_text, (first, *others) in ranks_by_difference.items():
        nodes = dict.fromkeys(hosts[rank] for rank in (first, *others))
        ranks = f"rank {first}{f' and {len(others)} more' if others else ''}"
        clauses.append(f"{repr(difference_text) if difference_text else 'not'} on {', '.join(nodes)} ({ranks})")
    return f"{name} differs: {'; '.join(clauses)}"
