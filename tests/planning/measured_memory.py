"""Bytes alive at the peak of a step on each rank, counted by torch's own operations: every storage from the operation
that makes it to its last reference.

What a card's kernels keep is planned, and the references for a CPU keep more. So the Triton kernels' own functions run,
which make all tensors, and the launches alone do nothing: in Triton's interpreter three of these layouts gave the same
bytes to 0.01 %. No number that comes out is looked at.

    TRITON_INTERPRET=1 MEGALITE_KERNELS=triton python tests/planning/measured_memory.py 'JSON list of [world, flags]'
"""

import gc
import json
import sys
import weakref
from contextlib import suppress
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from megalite.config import cli  # noqa: E402
from megalite.kernels import dispatch, weight_grad  # noqa: E402
from megalite.launch.ranks import Ranks  # noqa: E402
from megalite.models.families import PRESETS  # noqa: E402
from megalite.optim.flat_storage import listening  # noqa: E402
from megalite.train.setup import build_run  # noqa: E402
from megalite.train.step import train_step  # noqa: E402


def storages(tree: Any) -> list[torch.UntypedStorage]:
    return [x.untyped_storage() for x in tree_leaves(tree) if isinstance(x, torch.Tensor)]


class Live(TorchDispatchMode):
    """`peak`: bytes of storages made under this mode that were alive at once, and of memory that came and went."""

    def __init__(self) -> None:
        super().__init__()
        self.live = self.peak = 0
        self.sizes: dict[int, int] = {}

    def _gone(self, key: int) -> None:
        self.live -= self.sizes.pop(key)

    def came(self, flat: torch.Tensor) -> None:
        self.live += flat.nbytes
        self.peak = max(self.peak, self.live)

    def goes(self, flat: torch.Tensor) -> None:
        self.live -= flat.nbytes

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        given = {s._cdata for s in storages((args, kwargs))}
        for storage in storages(out):
            if storage._cdata not in given and storage._cdata not in self.sizes:
                self.sizes[storage._cdata] = storage.nbytes()
                self.live += storage.nbytes()
                weakref.finalize(storage, self._gone, storage._cdata)
        self.peak = max(self.peak, self.live)
        return out


class Done(Exception):
    """The update is over: what comes after it takes nothing more."""


def launches_nothing(kernel: Any, grid: Any) -> Any:
    return lambda *args, **options: None


def measure(flags: str) -> tuple[int, int, int]:
    """Of this rank: pipeline rank, bytes of state, most bytes beside it."""
    weight_grad.BLOCK_BYTES = 1  # of what a CPU needs for a weight's gradient, and a card does not
    ranks = Ranks(dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else Ranks()
    run = build_run(cli.read(flags.split(), PRESETS)[0], ranks, torch.device("cpu"))
    held = [t for state in run.optimizer.state for t in state.values()]
    for storage in (run.buffer.weights, run.buffer.grads):  # what comes and goes is away now
        held += [*storage.flats, *(storage.held(b) for b in run.buffer.layout.buckets if not storage.stays(b))]
    held += [] if run.optimizer.same else run.optimizer.main

    def update(*_: Any) -> Any:  # whatever the numbers are
        run.optimizer.step(lr=0.0, weight_decay=0.0, scale=1.0)
        raise Done

    gc.collect()
    gc.freeze()  # what is there by now need not be looked at again
    with Live() as live, listening(live), patch.object(dispatch.Kernel, "__getitem__", launches_nothing):
        with patch("megalite.train.step._agree", update), suppress(Done):
            train_step(run)
    run.close()
    return run.mesh.pp.rank, sum(t.untyped_storage().nbytes() for t in held), live.peak


def measure_all(cases: list[str]) -> list[tuple[int, int, int]]:
    return [measure(flags) for flags in cases]


def main() -> None:
    from ranks import run_ranks

    cases = json.loads(sys.argv[1])
    for world in sorted({world for world, _ in cases}):
        some = [flags for n, flags in cases if n == world]
        found = run_ranks(world, measure_all, some, timeout=200) if world > 1 else [measure_all(some)]
        for flags, *of_ranks in zip(some, *found, strict=True):
            print(json.dumps([world, flags, of_ranks]), flush=True)


if __name__ == "__main__":
    main()
