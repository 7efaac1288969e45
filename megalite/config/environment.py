"""Reads the environment, and sets variables for libraries, for the whole package; launch/rank_info.py alone reads who a
rank is. A variable of OVERRIDES wins over its option: for tests, and for programs that have no options."""

import contextlib
import os
import re
from collections.abc import Iterable, Iterator
from dataclasses import fields
from functools import partial
from typing import TypeVar

from megalite.common.fault_injection import FAULT_VARIABLE, FaultInjector
from megalite.config.option import option_spec
from megalite.config.run_options import ParallelConfig

T = TypeVar("T", str, bool)
OVERRIDES = dict(kernels="MEGALITE_KERNELS", attention_kernel="MEGALITE_ATTENTION")
OVERRIDES["shared_memory"] = "MEGALITE_SHARED_MEMORY"
PLAIN_OUTPUT_VARIABLES = (
    "NO_COLOR",
    "RANK",
    "TORCHELASTIC_RUN_ID",
    "OMPI_COMM_WORLD_RANK",
    "MV2_COMM_WORLD_RANK",
    "PMI_RANK",
)
LIBRARY_PREFIXES = (
    "NCCL_",
    "CUDA_",
    "CUBLAS_",
    "TORCH_",
    "PYTORCH_",
    "GLOO_",
    "OMP_",
    "ONEDNN_",
    "TRITON_",
    "NVIDIA_TF32",
    "MEGALITE_",
)
SAFE_PATH = "PYTHONSAFEPATH"  # as python -P
PER_RANK_VARIABLES = (
    "CUDA_VISIBLE_DEVICES",
    "NCCL_SOCKET_IFNAME",
    "NCCL_IB_HCA",
    "GLOO_SOCKET_IFNAME",
    "MEGALITE_FAULT",
)


def getenv(name: str, default: str = "") -> str:
    return os.environ.get(name, default)


def set_env_defaults(**variables: str) -> None:
    """Set variables that a library reads when it is loaded, unless the user has set them."""
    for name, value in variables.items():
        os.environ.setdefault(name, value)


@contextlib.contextmanager
def safe_path() -> Iterator[None]:
    """Keep interpreters that a library starts within from importing from the working directory."""
    before = os.environ.get(SAFE_PATH)
    os.environ[SAFE_PATH] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[SAFE_PATH]
        else:
            os.environ[SAFE_PATH] = before


def env_override(option: str, value: T) -> T:
    """`value`, unless the option's variable is set (a switch: on or off). Raises ValueError."""
    text = getenv(OVERRIDES[option])
    facts = next(option_spec(f) for f in fields(ParallelConfig) if f.name == option)
    known = {"on": True, "off": False} if isinstance(value, bool) else {choice: choice for choice in facts.choices}
    if text and text not in known:
        *others, last = known
        raise ValueError(f"{OVERRIDES[option]}={text} is unknown; use {', '.join(others)} or {last}")
    return known[text] if text else value  # pyright: ignore[reportReturnType]


def setting_name(option: str) -> str:
    """The name of the variable that decides the option, or else the option's own."""
    return OVERRIDES[option] if getenv(OVERRIDES[option]) else option


def env_problems() -> list[str]:
    """Problems of the variables above and of MEGALITE_FAULT, all at once."""
    errors = []
    for read in (
        FaultInjector,
        *(partial(env_override, option, getattr(ParallelConfig(), option)) for option in OVERRIDES),
    ):
        try:
            read()
        except ValueError as error:
            errors.append(str(error))
    return errors


def env_warnings() -> list[str]:
    asked, threads, found = getenv(FAULT_VARIABLE), getenv("OMP_NUM_THREADS"), list[str]()
    if asked:
        found.append(f"{FAULT_VARIABLE}={asked}: this run is made to fail; unset it for a run that counts")
    if threads and threads_of(threads) is None:
        found.append(f"OMP_NUM_THREADS={threads} is no number of threads, and has no effect: set a number from 1 on")
    return found


def threads_of(text: str) -> int | None:
    """The threads of a rank, of OMP_NUM_THREADS: a number, or a list with one for each level of nested regions."""
    match = re.fullmatch(r"\s*([1-9][0-9]{0,5})\s*(,\s*[1-9][0-9]*\s*)*", text)
    return int(match[1]) if match else None


def wants_plain_output() -> bool:
    """Whether the user, or a launcher that collects what ranks print, wants no colours and no line that changes."""
    of_a_step = getenv("SLURM_PROCID") != "" and getenv("SLURM_STEP_NUM_TASKS") != "1"  # 1: maybe salloc's shell
    return of_a_step or any(map(getenv, PLAIN_OUTPUT_VARIABLES)) or getenv("TERM", "dumb") == "dumb"


def format_set_variables(names: Iterable[str]) -> str:
    """NAME=value of each that is set."""
    return " ".join(f"{name}={os.environ[name]}" for name in names if name in os.environ)


def library_variables() -> str:
    """NAME=value, a line each, of variables that change how libraries work, except those of one rank."""
    chosen = sorted(
        name for name in os.environ if name.startswith(LIBRARY_PREFIXES) and not name.startswith(PER_RANK_VARIABLES)
    )
    return "\n".join(f"{name}={os.environ[name]}" for name in chosen)
