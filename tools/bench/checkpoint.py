#!/usr/bin/env python
"""Measure how fast checkpoints are saved and loaded, compared with raw writes and reads of the same bytes.

python tools/bench/checkpoint.py                                           # in a new directory here, half a minute
python tools/bench/checkpoint.py --dir /data/new --mib 4096 --ranks 1 2 4 8

Every round runs three pairs, on all ranks at once and one after the other: a raw write of the state with fsync, and a
save; a step of training alone, and a step during an asynchronous save; a raw read into the state, and a load with its
hashes, both from the disk. The order within a pair alternates by round.
A step is simulated by matmuls that take 0.1 s or four times a copy of the rank's state, whichever is longer; a real
step with so much state takes longer. `stall_s` is the time that training waits: in the call, and before the update for
the rest of the copy. `step_beside` is the duration of the matmuls during the save, relative to their duration alone;
the copy and the first writes use the same processors and memory.
Before each measurement the previous file of its kind is deleted and cached pages are dropped, because a write into
memory that was just freed is several times faster. So all measurements find the disk in nearly the same state. A ratio
is the median of the ratios of the rounds, and all other values are medians over rounds, too.
"""

import argparse
import datetime
import json
import os
import shutil
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from timeit import timeit

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))

import torch
import torch.distributed as dist

from megalite.checkpoint.manager import loader
from megalite.checkpoint.manager.saver import CheckpointSaver
from megalite.launch.local_launcher import launch_local
from megalite.launch.process_group import process_group
from megalite.launch.rank_info import RankInfo
from megalite.parallel.comm import all_reduce_
from megalite.parallel.mesh import build_mesh
from megalite.parallel.spec import Box, TensorShard
from tools.bench.data import peak_bytes
from tools.cli_common import make_parser, positive_int

_CHUNK = 1 << 22  # bytes per raw write and read
_COLUMNS = 1 << 18  # of every tensor of the state
_MAX_TENSORS = 8
_TIMEOUT = datetime.timedelta(minutes=10)


class CheckpointBench:
    """The state of one rank, and the measurements that use it. Methods are collective.

    Args:
        ranks: this rank and the number of ranks.
        device: the CPU.
        directory: the directory for raw files and checkpoints.
        mib: MiB of state over all ranks.
    """

    def __init__(self, ranks: RankInfo, device: torch.device, directory: Path, mib: int):
        self.mesh = build_mesh(tp=1, pp=1, device=device, timeout=_TIMEOUT)
        rows = (mib << 20) // 4 // _COLUMNS // ranks.world_size
        num_tensors = min(_MAX_TENSORS, rows)
        height = rows // num_tensors
        torch.manual_seed(ranks.rank)
        self.shards: list[TensorShard] = []
        for n in range(num_tensors):
            box = Box((height * ranks.rank, 0), (height * (ranks.rank + 1), _COLUMNS))
            shape = (height * ranks.world_size, _COLUMNS)
            values = torch.randn(box.numel)
            self.shards.append(TensorShard(f"model/{n}", shape, box, range(box.numel), values))
        self.bytes = sum(shard.data.numel() * 4 for shard in self.shards)
        self.directory, self.raw_file = directory, directory / "raw" / f"{ranks.rank}"
        self._matrix = torch.randn(512, 512)
        self._num_matmuls = self._matmuls_to_fill()
        self.raw_file.parent.mkdir(parents=True, exist_ok=True)
        self.saver = CheckpointSaver(directory / "saved", self.mesh, self.bytes)

    def _matmuls_to_fill(self) -> int:
        """Return the number of matmuls that take 0.1 s, or four times a copy of the state if that is longer."""
        buffer = torch.empty_like(self.shards[0].data).fill_(0)
        copy_seconds = timeit(lambda: [buffer.copy_(shard.data) for shard in self.shards], number=1)
        seconds = max(0.1, 4 * copy_seconds)
        self._run_matmuls(10)  # warm up
        seconds_per_matmul = timeit(lambda: self._run_matmuls(20), number=1) / 20
        return int(self._max_over_ranks(int(seconds / seconds_per_matmul) + 1))

    def _run_matmuls(self, number: int) -> None:
        for _ in range(number):
            self._matrix.mm(self._matrix)

    def _barrier(self) -> None:
        if self.mesh.world.group is not None:
            dist.barrier()

    def _seconds(self, call: Callable[[], object]) -> float:
        """Return the seconds that the slowest rank takes for a call."""
        self._barrier()
        return self._max_over_ranks(timeit(call, number=1))

    def _max_over_ranks(self, value: float) -> float:
        return float(all_reduce_(torch.tensor(value, dtype=torch.float64), self.mesh.world, dist.ReduceOp.MAX))

    def _chunks(self) -> Iterator[memoryview]:
        """Yield the state in the chunks of a raw write or read."""
        for shard in self.shards:
            view = memoryview(shard.data.numpy()).cast("B")
            for start in range(0, len(view), _CHUNK):
                yield view[start : start + _CHUNK]

    def _clear(self, kind: str = "") -> None:
        """Delete the previous files of a kind ("saved" or "raw"), and drop all files from the page cache.

        Rank 0 does this while the other ranks wait.
        """
        if self.mesh.world.is_first:
            paths: list[Path] = []
            if kind == "saved":
                paths = list(self.directory.glob("saved/iter_*"))
            elif kind == "raw":
                paths = [self.raw_file.parent]
            for path in paths:
                shutil.rmtree(path, ignore_errors=True)
            self.raw_file.parent.mkdir(exist_ok=True)
            for path in filter(Path.is_file, list(self.directory.rglob("*"))):
                descriptor = os.open(path, os.O_RDONLY)
                os.fsync(descriptor)
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
                os.close(descriptor)
        self._barrier()

    def write(self) -> dict[str, float]:
        """Time a raw write with fsync."""

        def write() -> None:
            with open(self.raw_file, "wb", buffering=0) as file:
                for chunk in self._chunks():
                    file.write(chunk)
                os.fsync(file.fileno())

        self._clear("raw")
        return {"raw_write_s": self._seconds(write)}

    def save(self, step: int) -> dict[str, float]:
        """Time a synchronous save, and measure its additional memory."""
        self._clear("saved")
        Path("/proc/self/clear_refs").write_text("5")  # reset the memory peak
        memory_before, self.saver.background = peak_bytes(), False
        seconds = self._seconds(lambda: self.saver.save(3 * step, self.shards, {}))
        return {"save_s": seconds, "save_extra_bytes": float(max(0, peak_bytes() - memory_before))}

    def step(self) -> dict[str, float]:
        """Time the simulated step alone."""
        return {"step_s": self._seconds(lambda: self._run_matmuls(self._num_matmuls))}

    def step_during_save(self, step: int) -> dict[str, float]:
        """Time the simulated step during an asynchronous save, and the stall of training."""
        self._clear("saved")
        self.saver.background = True
        call_s = self._seconds(lambda: self.saver.save(3 * step + 1, self.shards, {}))
        step_s = self._seconds(lambda: self._run_matmuls(self._num_matmuls))
        stall_s = call_s + self._seconds(self.saver.before_update)
        self.saver.wait()
        return {"beside_s": step_s, "stall_s": stall_s}

    def read(self) -> dict[str, float]:
        """Time a raw read into the state."""

        def read() -> None:
            with open(self.raw_file, "rb", buffering=0) as file:
                for chunk in self._chunks():
                    if file.readinto(chunk) != len(chunk):
                        raise OSError(f"{self.raw_file} is shorter than what was written")

        self._clear()
        return {"raw_read_s": self._seconds(read)}

    def load(self) -> dict[str, float]:
        """Time the load of the newest checkpoint."""

        def load() -> None:
            plan = loader.LoadPlan(self.shards, exact_dtype=True)
            assert loader.load_newest(self.directory / "saved", self.mesh, lambda *_: plan) is not None

        self._clear()
        return {"load_s": self._seconds(load)}


def measure(ranks: RankInfo, directory: str, mib: int, rounds: int, out: str) -> None:
    """Measure on one rank with `mib` MiB of state over all ranks. Rank 0 writes the rounds to the JSON file `out`."""
    with process_group(ranks, device="cpu", startup_timeout=_TIMEOUT) as device:
        bench = CheckpointBench(ranks, device, Path(directory), mib)
        table: list[dict[str, float]] = []
        for step in range(1, rounds + 2):
            row = {"bytes": float(bench.bytes * ranks.world_size), "rank_bytes": float(bench.bytes)}
            pairs: list[tuple[Callable[[], dict[str, float]], Callable[[], dict[str, float]]]] = [
                (bench.write, partial(bench.save, step)),
                (bench.step, partial(bench.step_during_save, step)),
                (bench.read, bench.load),
            ]
            for first, second in pairs:
                if step % 2 == 0:
                    first, second = second, first
                row |= first()
                row |= second()
            if step > 1:  # the first round is the warmup; it also allocates the host buffer
                table.append(row)
        bench.saver.close()
        if ranks.rank == 0:
            Path(out).write_text(json.dumps(table), encoding="utf-8")


def metrics(row: dict[str, float]) -> dict[str, float]:
    """Return the rates, ratios and times of one round."""
    gib = row["bytes"] / 2**30
    return {
        "raw_write_gib_s": gib / row["raw_write_s"],
        "save_gib_s": gib / row["save_s"],
        "save_of_raw": row["raw_write_s"] / row["save_s"],
        "raw_read_gib_s": gib / row["raw_read_s"],
        "load_gib_s": gib / row["load_s"],
        "load_of_raw": row["raw_read_s"] / row["load_s"],
        "save_extra_of_state": row["save_extra_bytes"] / row["rank_bytes"],
        "step_s": row["step_s"],
        "step_beside": row["beside_s"] / row["step_s"],
        "stall_s": row["stall_s"],
        "stall_of_save": row["stall_s"] / row["save_s"],
    }


GOALS = {
    "save_of_raw": ("at least", 0.85),
    "load_of_raw": ("at least", 0.85),
    "save_extra_of_state": ("at most", 0.10),
    "stall_of_save": ("at most", 0.05),
}


def format_metric(name: str, value: float) -> str:
    """Format a metric and, if there is one, its goal."""
    line = f"  {name:22} {value:10.4f}"
    if name not in GOALS:
        return line
    relation, goal = GOALS[name]
    is_reached = value >= goal if relation == "at least" else value <= goal
    return f"{line}  {relation} {goal}: {'yes' if is_reached else 'NO'}"


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of this program's flags."""
    parser = make_parser(__doc__)
    parser.add_argument("--dir", type=Path, help="an empty or new directory on the disk to measure")
    parser.add_argument("--mib", type=int, default=256, help="MiB of state over all ranks (default 256)")
    parser.add_argument("--ranks", type=positive_int, nargs="+", default=[1, 2])
    parser.add_argument("--rounds", type=positive_int, default=3)
    return parser


def main(argv: list[str]) -> int:
    """Run the program, and return its exit code."""
    parser = build_parser()
    args = parser.parse_args(argv)
    if args.mib < 8 * max(args.ranks):
        parser.error(f"--mib {args.mib} is too small for {max(args.ranks)} ranks; give 8 MiB per rank")
    if args.dir is None:
        args.dir = Path(tempfile.mkdtemp(prefix="benchmark_checkpoint_", dir=Path.cwd()))
    if args.dir.exists() and any(args.dir.iterdir()):
        parser.error(f"--dir {args.dir} is not empty; it is deleted afterwards: give a new one")
    args.dir.mkdir(parents=True, exist_ok=True)
    try:
        for world_size in args.ranks:
            directory, out = args.dir / f"{world_size}", args.dir / f"{world_size}.json"
            arguments = (str(directory), args.mib, args.rounds, str(out))
            if world_size > 1:
                exit_code = launch_local(world_size, measure, arguments)
                if exit_code:
                    return 3
            else:
                measure(RankInfo(), *arguments)
            rounds = json.loads(out.read_text(encoding="utf-8"))
            metrics_by_round = [metrics(row) for row in rounds]
            print(f"{world_size} ranks, {rounds[0]['bytes'] / 2**30:.3f} GiB")
            for name in metrics_by_round[0]:
                median = statistics.median(row[name] for row in metrics_by_round)
                print(format_metric(name, median), flush=True)
            shutil.rmtree(directory)
    finally:
        shutil.rmtree(args.dir, ignore_errors=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
