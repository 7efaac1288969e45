"""Environment variables: reads them, and sets those that libraries read, for all of megalite.

Only the variables of launchers are read elsewhere (launch/rank_info.py).
"""

import contextlib
import os
import re
from collections.abc import Iterable, Iterator

from megalite.common.fault_injection import FAULT_VARIABLE

PLAIN_OUTPUT_VARIABLES = (  # any of these means plain output; all but the first are set by launchers
    "NO_COLOR",
    "RANK",
    "TORCHELASTIC_RUN_ID",
    "OMPI_COMM_WORLD_RANK",
    "MV2_COMM_WORLD_RANK",
    "PMI_RANK",
)
LIBRARY_PREFIXES = (  # of variables that change how libraries work
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
SAFE_PATH = "PYTHONSAFEPATH"  # equivalent to python -P
PER_RANK_VARIABLES = (  # may differ between ranks
    "CUDA_VISIBLE_DEVICES",
    "NCCL_SOCKET_IFNAME",
    "NCCL_IB_HCA",
    "GLOO_SOCKET_IFNAME",
    "MEGALITE_FAULT",
)


def getenv(name: str, default: str = "") -> str:
    return os.environ.get(name, default)


def set_env_defaults(**variables: str) -> None:
    """Set variables that a library reads when it is imported, unless the user has set them."""
    for name, value in variables.items():
        os.environ.setdefault(name, value)


@contextlib.contextmanager
def safe_path() -> Iterator[None]:
    """Keep Python processes that a library starts in this context from importing from the working directory."""
    before = os.environ.get(SAFE_PATH)
    os.environ[SAFE_PATH] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[SAFE_PATH]
        else:
            os.environ[SAFE_PATH] = before


def env_warnings() -> list[str]:
    """Return warnings about an injected fault and an invalid OMP_NUM_THREADS."""
    warnings = list[str]()
    fault = getenv(FAULT_VARIABLE)
    if fault:
        warnings.append(f"{FAULT_VARIABLE}={fault}: this run fails on purpose; unset it for a real run")
    threads = getenv("OMP_NUM_THREADS")
    if threads and threads_of(threads) is None:
        warnings.append(
            f"OMP_NUM_THREADS={threads} is not a number of threads, and has no effect: set a number of 1 or more"
        )
    return warnings


def threads_of(text: str) -> int | None:
    """Return the threads of a rank from the value of OMP_NUM_THREADS; None if it is invalid.

    The value is a number, or a list with a number for each level of nested parallel regions.
    """
    match = re.fullmatch(r"\s*([1-9][0-9]{0,5})\s*(,\s*[1-9][0-9]*\s*)*", text)
    return int(match[1]) if match else None


def wants_plain_output() -> bool:
    """Return True if output should have no colors and no line that changes.

    The user may request it, and a launcher that collects the output of ranks needs it.
    """
    # a step with one task may be the interactive shell of salloc
    is_slurm_rank = getenv("SLURM_PROCID") != "" and getenv("SLURM_STEP_NUM_TASKS") != "1"
    return is_slurm_rank or any(map(getenv, PLAIN_OUTPUT_VARIABLES)) or getenv("TERM", "dumb") == "dumb"


def set_variables(prefixes: tuple[str, ...]) -> list[str]:
    """Return the names of the variables that are set and begin with one of `prefixes`, sorted."""
    return sorted(name for name in os.environ if name.startswith(prefixes))


def format_set_variables(names: Iterable[str]) -> str:
    """Return "NAME=value NAME=value ..." for the variables that are set."""
    return " ".join(f"{name}={os.environ[name]}" for name in names if name in os.environ)


def library_variables() -> str:
    """Return a line NAME=value for each variable that changes how libraries work, except per-rank ones."""
    names = sorted(
        name for name in os.environ if name.startswith(LIBRARY_PREFIXES) and not name.startswith(PER_RANK_VARIABLES)
    )
    return "\n".join(f"{name}={os.environ[name]}" for name in names)
