"""The process in which the kernels of flash-linear-attention run in Triton's interpreter (test_delta_rule_fla.py)."""

import builtins
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from megalite.kernels import delta_rule_fla
from megalite.kernels.dispatch import kernel_option

# the directory in which tests/run.sh --all installs the package, so that transformers cannot import it
DIRECTORY = Path(__file__).resolve().parents[2] / ".venv/fla"


def use_interpreter() -> None:
    """Let Triton's interpreter (3.9) run the package's kernels on a CPU if they are selected.

    The interpreter has two gaps. Triton's tuner asks the driver of a GPU for times; here each tile takes no time, so
    the first one is used. Loops pass ints, where compiled kernels get tensors, whose methods these kernels call.
    """
    torch.set_num_threads(1)
    sys.path.append(str(DIRECTORY))
    from triton.runtime.autotuner import Autotuner

    Autotuner.do_bench = lambda self, call, quantiles: [0.0, 0.0, 0.0]  # type: ignore[assignment,misc]
    import fla.ops.gated_delta_rule
    import fla.ops.kda  # noqa: F401

    for name, module in list(sys.modules.items()):
        if name.startswith(("fla.ops.", "fla.modules.")):
            module.range = tensor_range  # type: ignore[attr-defined]
    delta_rule_fla.runs_fla = lambda device_type: kernel_option("linear_attention_kernel") == "fla"  # type: ignore[assignment]


def tensor_range(*bounds: Any) -> Iterator[Any]:
    """Yield the numbers of a range: as Triton's tensors if a bound is one, otherwise as ints."""
    import numpy as np
    import triton.language as tl
    from triton.runtime.interpreter import TensorHandle

    if not any(isinstance(bound, tl.tensor) for bound in bounds):
        yield from builtins.range(*bounds)
        return
    numbers = (int(bound.handle.data.item()) if isinstance(bound, tl.tensor) else int(bound) for bound in bounds)
    for i in builtins.range(*numbers):
        yield tl.tensor(TensorHandle(np.array([i], dtype=np.int32), tl.int32), tl.int32)
