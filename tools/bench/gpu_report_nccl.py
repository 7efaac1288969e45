"""Bandwidth between the cards of this machine, by kind of message and size; what tools/gpu_report.py runs and reads.

    python tools/bench/gpu_report_nccl.py FILE --cards 4

Bus bandwidth is what one link must carry, whatever the number of ranks, so it can be held against the hardware's:
bytes / time x 2 (n - 1) / n for all_reduce, (n - 1) / n for all_gather and reduce_scatter, whose bytes are those of the
whole tensor, and 1 for a message from each even rank to the next (doc/PERFORMANCE.md of github.com/NVIDIA/nccl-tests).
FILE is written after each row.
"""

from __future__ import annotations

import argparse
import datetime
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path.insert(0, str(ROOT))

from megalite.parallel.launch import Ranks, prepare_cuda, process_group  # noqa: E402
from megalite.parallel.local_ranks import start_local  # noqa: E402

SIZES = (1 << 20, 1 << 24, 1 << 28)  # bytes
FACTORS: dict[str, Callable[[int], float]] = {
    "all_reduce": lambda n: 2 * (n - 1) / n,
    "all_gather": lambda n: (n - 1) / n,
    "reduce_scatter": lambda n: (n - 1) / n,
    "send_recv": lambda n: 1,
}


def message(kind: str, whole: Any, part: Any, ranks: Ranks) -> Callable[[], None]:
    """`whole` is `part` of every rank."""
    import torch.distributed as dist

    def pair() -> None:
        if ranks.rank ^ 1 < ranks.world:
            (dist.recv if ranks.rank % 2 else dist.send)(whole, ranks.rank ^ 1)

    calls = {
        "all_reduce": lambda: dist.all_reduce(whole),
        "all_gather": lambda: dist.all_gather_into_tensor(whole, part),
        "reduce_scatter": lambda: dist.reduce_scatter_tensor(part, whole),
        "send_recv": pair,
    }
    return calls[kind]


def measure(call: Callable[[], None], device: Any, times: int) -> float:
    """Seconds of one call, of `times` in a row."""
    import torch

    for _ in range(3):
        call()
    if device.type == "cpu":
        begin = time.perf_counter()
        for _ in range(times):
            call()
        return (time.perf_counter() - begin) / times
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(times):
        call()
    end.record()
    torch.cuda.synchronize(device)
    return begin.elapsed_time(end) / 1e3 / times


def rank_of(ranks: Ranks, args: argparse.Namespace) -> None:
    import torch

    from tools.bench.gpu_report_parts import write_whole

    rows: list[dict[str, Any]] = []
    with process_group(ranks, device=args.device, startup_timeout=datetime.timedelta(minutes=1)) as device:
        for size in (1 << 12,) if args.tiny else SIZES:
            count = size // 2 // ranks.world
            whole = torch.zeros(count * ranks.world, dtype=torch.bfloat16, device=device)
            part = torch.zeros(count, dtype=torch.bfloat16, device=device)
            for kind, factor in FACTORS.items():
                took = measure(message(kind, whole, part, ranks), device, 2 if args.tiny else 20)
                rate = size / took / 1e9
                rows.append({"kind": kind, "bytes": size, "us": took * 1e6, "gb_s": rate})
                rows[-1]["bus_gb_s"] = rate * factor(ranks.world)
                if ranks.rank == 0:
                    print(rows[-1], flush=True)
                    write_whole(args.file, {"cards": ranks.world, "rows": rows})


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--cards", type=int, default=2)
    parser.add_argument("--tiny", action="store_true")
    args = parser.parse_args(argv)
    if args.device == "cuda":
        prepare_cuda(1, args.file.parent)
    return start_local(args.cards, rank_of, (args,))


if __name__ == "__main__":
    from tools.bench import gpu_report_nccl  # by its own name, so that other processes can import what they run

    sys.exit(gpu_report_nccl.main(sys.argv[1:]))
