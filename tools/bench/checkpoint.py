#!/usr/bin/env python
"""How fast checkpoints are written and read, against the same bytes written and read raw in the same run.

python tools/bench/checkpoint.py                                           # in a new folder here, half a minute
python tools/bench/checkpoint.py --dir /data/new --mib 4096 --ranks 1 2 4 8

Every round does, on all ranks at once and one after the other: raw write of the state with fsync and save; a step of
training alone and one beside a save in the background; raw read into the state and load, hashes included, both from
the disk. Which of a pair goes first changes by round.
The step is simulated by products of matrices, as many as take 0.1 s or four times a copy of the rank's state, whichever
is longer: a real one with so much state takes longer. The stall is what training waits: in the call, and before the
update for what is left of the copy. `step_beside` is how much longer the products take while the copy and the start of
the writing use the same processors and memory.
Before each the last file of its kind is deleted and cached pages are dropped, since a write into memory that was just
freed is several times faster. So all see the same disk at nearly the same time; a fraction is the median over rounds
of one round's, as is every figure.
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
from megalite.launch.rank_info import RankInfo, process_group
from megalite.parallel.comm import all_reduce_
from megalite.parallel.mesh import build_mesh
from megalite.parallel.spec import Box, TensorShard
from tools.bench.data import peak_bytes
from tools.cli_common import parser_of, positive

_CHUNK = 1 << 22  # bytes per raw write and read


class Bench:
    """`mib` of state over all ranks, and what is timed with it; methods are collective."""

    def __init__(self, ranks: RankInfo, device: torch.device, folder: Path, mib: int):
        self.mesh = build_mesh(tp=1, pp=1, device=device, timeout=datetime.timedelta(minutes=10))
        rows = (mib << 20) // 4 // (1 << 18) // ranks.world_size
        height = rows // min(8, rows)
        torch.manual_seed(ranks.rank)
        self.pieces: list[TensorShard] = []
        for n in range(min(8, rows)):
            box = Box((height * ranks.rank, 0), (height * (ranks.rank + 1), 1 << 18))
            values = torch.randn(box.numel)
            self.pieces.append(
                TensorShard(f"model/{n}", (height * ranks.world_size, 1 << 18), box, range(box.numel), values)
            )
        self.bytes = sum(p.data.numel() * 4 for p in self.pieces)
        self.folder, self.raw = folder, folder / "raw" / f"{ranks.rank}"
        self._left = torch.randn(512, 512)
        self._number = self._enough_products()
        self.raw.parent.mkdir(parents=True, exist_ok=True)
        self.saver = CheckpointSaver(folder / "saved", self.mesh, self.bytes)

    def _enough_products(self) -> int:
        """For 0.1 s, or four times a copy of the state."""
        spare = torch.empty_like(self.pieces[0].data).fill_(0)
        needed = max(0.1, 4 * timeit(lambda: [spare.copy_(piece.data) for piece in self.pieces], number=1))
        self._multiply(10)
        return int(self._most(int(needed / timeit(lambda: self._multiply(20), number=1) * 20) + 1))

    def _multiply(self, number: int) -> None:
        for _ in range(number):
            self._left.mm(self._left)

    def _wait(self) -> None:
        if self.mesh.world.group is not None:
            dist.barrier()

    def _seconds(self, do: Callable[[], object]) -> float:
        """The seconds that the slowest rank takes for `do`."""
        self._wait()
        return self._most(timeit(do, number=1))

    def _most(self, value: float) -> float:
        """The largest value of any rank."""
        return float(all_reduce_(torch.tensor(value, dtype=torch.float64), self.mesh.world, dist.ReduceOp.MAX))

    def _views(self) -> Iterator[memoryview]:
        """The state, in parts of a raw write or read."""
        for piece in self.pieces:
            view = memoryview(piece.data.numpy()).cast("B")
            for begin in range(0, len(view), _CHUNK):
                yield view[begin : begin + _CHUNK]

    def _clear(self, what: str = "") -> None:
        """Delete the last files of a kind and drop all from memory; rank 0, while the others wait."""
        if self.mesh.world.is_first:
            kinds = {"saved": [*self.folder.glob("saved/iter_*")], "raw": [self.raw.parent]}
            for path in kinds.get(what, []):
                shutil.rmtree(path, ignore_errors=True)
            self.raw.parent.mkdir(exist_ok=True)
            for path in filter(Path.is_file, list(self.folder.rglob("*"))):
                number = os.open(path, os.O_RDONLY)
                os.fsync(number)
                os.posix_fadvise(number, 0, 0, os.POSIX_FADV_DONTNEED)
                os.close(number)
        self._wait()

    def write(self) -> dict[str, float]:
        def write() -> None:
            with open(self.raw, "wb", buffering=0) as file:
                for view in self._views():
                    file.write(view)
                os.fsync(file.fileno())

        self._clear("raw")
        return {"raw_write_s": self._seconds(write)}

    def save(self, step: int) -> dict[str, float]:
        self._clear("saved")
        Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
        before, self.saver.background = peak_bytes(), False
        took = self._seconds(lambda: self.saver.save(3 * step, self.pieces, {}))
        return {"save_s": took, "save_extra_bytes": float(max(0, peak_bytes() - before))}

    def step(self) -> dict[str, float]:
        return {"step_s": self._seconds(lambda: self._multiply(self._number))}

    def step_beside(self, step: int) -> dict[str, float]:
        self._clear("saved")
        self.saver.background = True
        call_s = self._seconds(lambda: self.saver.save(3 * step + 1, self.pieces, {}))
        beside_s = self._seconds(lambda: self._multiply(self._number))
        stall_s = call_s + self._seconds(self.saver.before_update)
        self.saver.wait()
        return {"beside_s": beside_s, "stall_s": stall_s}

    def read(self) -> dict[str, float]:
        def read() -> None:
            with open(self.raw, "rb", buffering=0) as file:
                for view in self._views():
                    if file.readinto(view) != len(view):
                        raise OSError(f"{self.raw} is shorter than what was written")

        self._clear()
        return {"raw_read_s": self._seconds(read)}

    def load(self) -> dict[str, float]:
        def load() -> None:
            wanted = loader.LoadPlan(self.pieces, exact_dtype=True)
            assert loader.load_newest(self.folder / "saved", self.mesh, lambda *_: wanted) is not None

        self._clear()
        return {"load_s": self._seconds(load)}


def measure(ranks: RankInfo, directory: str, mib: int, rounds: int, out: str) -> None:
    """`mib` of state over all ranks; rank 0 writes the rounds' seconds and bytes to the JSON file `out`."""
    with process_group(ranks, device="cpu", startup_timeout=datetime.timedelta(minutes=10)) as device:
        bench = Bench(ranks, device, Path(directory), mib)
        table: list[dict[str, float]] = []
        for step in range(1, rounds + 2):
            row = {"bytes": float(bench.bytes * ranks.world_size), "rank_bytes": float(bench.bytes)}
            pairs = [(bench.write, partial(bench.save, step)), (bench.step, partial(bench.step_beside, step))]
            for raw, ours in (*pairs, (bench.read, bench.load)):
                for do in (raw, ours) if step % 2 else (ours, raw):
                    row |= do()
            if step > 1:  # the first warms up: it also makes the host copy
                table.append(row)
        bench.saver.close()
        if ranks.rank == 0:
            Path(out).write_text(json.dumps(table), encoding="utf-8")


def figures(row: dict[str, float]) -> dict[str, float]:
    """Of one round."""
    gib = row["bytes"] / 2**30
    found = {}
    for raw, ours in (("raw_write", "save"), ("raw_read", "load")):
        found |= {f"{name}_gib_s": gib / row[f"{name}_s"] for name in (raw, ours)}
        found[f"{ours}_of_raw"] = row[f"{raw}_s"] / row[f"{ours}_s"]
    found["save_extra_of_state"] = row["save_extra_bytes"] / row["rank_bytes"]
    found |= {"step_s": row["step_s"], "step_beside": row["beside_s"] / row["step_s"]}
    return found | {"stall_s": row["stall_s"], "stall_of_save": row["stall_s"] / row["save_s"]}


GOALS = {"save_of_raw": ("at least", 0.85), "load_of_raw": ("at least", 0.85)}
GOALS |= {"save_extra_of_state": ("at most", 0.10), "stall_of_save": ("at most", 0.05)}


def line(name: str, value: float) -> str:
    sign, bound = GOALS.get(name, ("", 0.0))
    good = value >= bound if sign == "at least" else value <= bound
    return f"  {name:22} {value:10.4f}" + (f"  {sign} {bound}: {'yes' if good else 'NO'}" if sign else "")


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of this program's flags."""
    parser = parser_of(__doc__)
    parser.add_argument("--dir", type=Path, help="an empty or new directory on the disk to measure")
    parser.add_argument("--mib", type=int, default=256, help="MiB of state over all ranks (default 256)")
    parser.add_argument("--ranks", type=positive, nargs="+", default=[1, 2])
    parser.add_argument("--rounds", type=positive, default=3)
    return parser


def main(argv: list[str]) -> int:
    parser = build_parser()
    a = parser.parse_args(argv)
    if a.mib < 8 * max(a.ranks):
        parser.error(f"--mib {a.mib} is too small for {max(a.ranks)} ranks; give 8 MiB per rank")
    if a.dir is None:
        a.dir = Path(tempfile.mkdtemp(prefix="benchmark_checkpoint_", dir=Path.cwd()))
    if a.dir.exists() and any(a.dir.iterdir()):
        parser.error(f"--dir {a.dir} is not empty; it is deleted afterwards: give a new one")
    a.dir.mkdir(parents=True, exist_ok=True)
    try:
        for world in a.ranks:
            place, out = a.dir / f"{world}", a.dir / f"{world}.json"
            arguments = (str(place), a.mib, a.rounds, str(out))
            code = launch_local(world, measure, arguments) if world > 1 else measure(RankInfo(), *arguments)
            if code:
                return 3
            rounds = json.loads(out.read_text(encoding="utf-8"))
            each = [figures(row) for row in rounds]
            print(f"{world} ranks, {rounds[0]['bytes'] / 2**30:.3f} GiB")
            for name in each[0]:
                print(line(name, statistics.median(one[name] for one in each)), flush=True)
            shutil.rmtree(place)
    finally:
        shutil.rmtree(a.dir, ignore_errors=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
