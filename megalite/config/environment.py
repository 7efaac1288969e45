"""What the package reads of the environment, and sets there for libraries; nothing but parallel/launch.py, which reads
who a rank is, does either.

A variable of OVERRIDES wins over its option: for tests, and for programs that have no options.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import fields
from typing import TypeVar

from megalite.config.faults import VARIABLE, Faults
from megalite.config.field import facts_of
from megalite.config.run_options import ParallelConfig

T = TypeVar("T", str, bool)
OVERRIDES = dict(
    kernels="MEGALITE_KERNELS", attention_kernel="MEGALITE_ATTENTION", shared_memory="MEGALITE_SHARED_MEMORY"
)
PLAIN = ("NO_COLOR", "RANK", "SLURM_PROCID", "TORCHELASTIC_RUN_ID", "OMPI_COMM_WORLD_RANK", "PMI_RANK")
FAMILIES = ("NCCL_", "CUDA_", "CUBLAS_", "TORCH_", "PYTORCH_", "GLOO_", "OMP_", "TRITON_", "NVIDIA_TF32", "MEGALITE_")
OF_A_RANK = ("CUDA_VISIBLE_DEVICES", "NCCL_SOCKET_IFNAME", "NCCL_IB_HCA", "GLOO_SOCKET_IFNAME", "MEGALITE_FAULT")


def variable(name: str, default: str = "") -> str:
    return os.environ.get(name, default)


def set_defaults(**variables: str) -> None:
    """What a library reads when it is loaded; what the user has set stays."""
    for name, value in variables.items():
        os.environ.setdefault(name, value)


def override(option: str, value: T) -> T:
    """`value`, unless the option's variable is set (a switch: on or off). Raises ValueError."""
    text = variable(OVERRIDES[option])
    facts = next(facts_of(f) for f in fields(ParallelConfig) if f.name == option)
    known = {"on": True, "off": False} if isinstance(value, bool) else {choice: choice for choice in facts.choices}
    if text and text not in known:
        *others, last = known
        raise ValueError(f"{OVERRIDES[option]}={text} is unknown; use {', '.join(others)} or {last}")
    return known[text] if text else value  # pyright: ignore[reportReturnType]


def source(option: str) -> str:
    """Where its value is from: the variable's name, or its own."""
    return OVERRIDES[option] if variable(OVERRIDES[option]) else option


def problems() -> list[str]:
    """Of the variables above and of faults on demand, all at once."""
    found = []
    try:
        Faults()
    except ValueError as error:
        found.append(str(error))
    for option in OVERRIDES:
        try:
            override(option, getattr(ParallelConfig(), option))
        except ValueError as error:
            found.append(str(error))
    return found


def warnings() -> list[str]:
    """What of the environment nobody may miss who reads the log."""
    asked = variable(VARIABLE)
    return [f"{VARIABLE}={asked}: this run is made to fail; unset it for a run that counts"] if asked else []


def wants_plain_lines() -> bool:
    """No colours and no line that changes: the user says so, or a launcher collects what ranks write."""
    return any(map(variable, PLAIN)) or variable("TERM", "dumb") == "dumb"


def values_of(names: Iterable[str]) -> str:
    """NAME=value of those that are set."""
    return " ".join(f"{name}={os.environ[name]}" for name in names if name in os.environ)


def of_libraries() -> str:
    """NAME=value, a line each, of what changes how libraries compute and communicate, and may be alike on all ranks."""
    chosen = sorted(name for name in os.environ if name.startswith(FAMILIES) and not name.startswith(OF_A_RANK))
    return "\n".join(f"{name}={os.environ[name]}" for name in chosen)
