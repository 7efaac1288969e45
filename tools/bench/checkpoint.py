#!/usr/bin/env python
"""How fast checkpoints are written and read, against the same bytes written and read raw in the same run.

python tools/bench/checkpoint.py                                           # in a new folder here, half a minute
python tools/bench/checkpoint.py --dir /data/new --mib 4096 --ranks 1 2 4 8

Every round does, on all ranks at once and one after the other: raw write of the state with fsync and save; a step of
training alone and one beside a save in the background; raw read into the state and load, hashes included, both from
the disk. Which of a pair goes first changes by round.
The step is simulated by products of matrices, as many as take 0.1 s or four times a copy of the rank's state, whichever
is longer: a real one with so much state takes longer. The stall is what training waits: in the call, and before the
update for what is left of the copy. `step_beside` is how much longer the products take while the copy and the begin of
the writing use the same processors and memory.
Before each the last file of its kind is deleted and cached pages are dropped, since a write into memory that was just
freed is several times faster. So all see the same disk at nearly the same time; a fraction is the median over rounds
of one round's, as is every figure.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))

from megalite.parallel.launch import Ranks, process_group, start_local  # noqa: E402

_CHUNK = 1 << 22  # bytes per raw write and read


def _drop_cache(folder: Path) -> None:
    for path in list(folder.rglob("*")):
        if path.is_file():
            number = os.open(path, os.O_RDONLY)
            os.fsync(number)
            os.posix_fadvise(number, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(number)


def _peak_bytes(reset: bool) -> int:
    if reset:
        Path("/proc/self/clear_refs").write_text("5")
    line = next(x for x in Path("/proc/self/status").read_text().splitlines() if x.startswith("VmHWM"))
    return int(line.split()[1]) * 1024


def measure(ranks: Ranks, directory: str, mib: int, rounds: int, out: str) -> None:
    """`mib` of state over all ranks; rank 0 writes the rounds' seconds and bytes to the JSON file `out`."""
    import torch
    import torch.distributed as dist

    from megalite.checkpoint.format import reader
    from megalite.checkpoint.run.saver import Saver
    from megalite.parallel.comm import all_reduce_
    from megalite.parallel.mesh import build_mesh
    from megalite.parallel.spec import Box, Piece

    with process_group(ranks, device="cpu", startup_timeout=datetime.timedelta(minutes=10)) as device:
        mesh = build_mesh(tp=1, pp=1, device=device, timeout=datetime.timedelta(minutes=10))
        rows = (mib << 20) // 4 // (1 << 18) // ranks.world
        tensors = min(8, rows)
        torch.manual_seed(ranks.rank)
        pieces = []
        for n in range(tensors):
            height = rows // tensors
            shape = (height * ranks.world, 1 << 18)
            box = Box((height * ranks.rank, 0), (height * (ranks.rank + 1), 1 << 18))
            pieces.append(Piece(f"model/{n}", shape, box, range(box.numel), torch.randn(box.numel)))
        mine = sum(p.data.numel() * 4 for p in pieces)
        folder = Path(directory)
        raw = folder / "raw" / f"{ranks.rank}"

        def seconds(do: Callable[[], object]) -> float:
            if mesh.world.group is not None:
                dist.barrier()
            begin = time.perf_counter()
            do()
            took = torch.tensor(time.perf_counter() - begin, dtype=torch.float64)
            return float(all_reduce_(took, mesh.world, dist.ReduceOp.MAX))

        def raw_write() -> None:
            with open(raw, "wb", buffering=0) as file:
                for piece in pieces:
                    view = memoryview(piece.data.view(torch.uint8).numpy())  # type: ignore[arg-type]
                    for begin in range(0, len(view), _CHUNK):
                        file.write(view[begin : begin + _CHUNK])
                os.fsync(file.fileno())

        def raw_read() -> None:
            with open(raw, "rb", buffering=0) as file:
                for piece in pieces:
                    view = memoryview(piece.data.view(torch.uint8).numpy())  # type: ignore[arg-type]
                    for begin in range(0, len(view), _CHUNK):
                        if file.readinto(view[begin : begin + _CHUNK]) != min(_CHUNK, len(view) - begin):
                            raise OSError(f"{raw} is shorter than what was written")

        def load() -> None:
            found = reader.load(folder / "saved", mesh, lambda *_: reader.Wanted(pieces, exact=True))
            assert found is not None

        left = torch.randn(512, 512)
        spare = torch.empty_like(pieces[0].data).fill_(0)

        def products(number: int) -> float:
            begin = time.perf_counter()
            for _ in range(number):
                torch.mm(left, left)
            return time.perf_counter() - begin

        begin = time.perf_counter()
        for piece in pieces:
            spare.copy_(piece.data)
        needed = max(0.1, 4 * (time.perf_counter() - begin))
        products(10)
        number = torch.tensor(int(needed / products(20) * 20) + 1)
        all_reduce_(number, mesh.world, dist.ReduceOp.MAX)

        raw.parent.mkdir(parents=True, exist_ok=True)
        saver = Saver.open(folder / "saved", mesh, mine)
        table: list[dict[str, float]] = []
        for step in range(1, rounds + 2):
            row: dict[str, float] = {"bytes": float(mine * ranks.world), "rank_bytes": float(mine)}

            def clear(what: str) -> None:
                """Delete the last files of a kind and drop all from memory; rank 0, while the others wait."""
                if mesh.world.is_first:
                    for path in [*folder.glob("saved/iter_*")] if what == "saved" else [raw.parent] * (what == "raw"):
                        shutil.rmtree(path, ignore_errors=True)
                    raw.parent.mkdir(exist_ok=True)
                    _drop_cache(folder)
                if mesh.world.group is not None:
                    dist.barrier()

            def timed_raw(row: dict[str, float] = row, clear: Callable[[str], None] = clear) -> None:
                clear("raw")
                row["raw_write_s"] = seconds(raw_write)

            def timed_save(row: dict[str, float] = row, clear: Callable[[str], None] = clear, n: int = step) -> None:
                clear("saved")
                before, saver.background = _peak_bytes(reset=True), False
                row["save_s"] = seconds(lambda: saver.save(3 * n, pieces, {}))
                row["save_extra_bytes"] = float(max(0, _peak_bytes(reset=False) - before))

            for do in (timed_raw, timed_save) if step % 2 else (timed_save, timed_raw):
                do()

            def timed_step(row: dict[str, float] = row) -> None:
                row["step_s"] = seconds(lambda: products(int(number)))

            def timed_beside(row: dict[str, float] = row, clear: Callable[[str], None] = clear, n: int = step) -> None:
                clear("saved")
                saver.background = True
                call_s = seconds(lambda: saver.save(3 * n + 1, pieces, {}))
                row["beside_s"] = seconds(lambda: products(int(number)))
                row["stall_s"] = call_s + seconds(saver.before_update)
                saver.wait()

            for do in (timed_step, timed_beside) if step % 2 else (timed_beside, timed_step):
                do()

            def timed_read(row: dict[str, float] = row, clear: Callable[[str], None] = clear) -> None:
                clear("")
                row["raw_read_s"] = seconds(raw_read)

            def timed_load(row: dict[str, float] = row, clear: Callable[[str], None] = clear) -> None:
                clear("")
                row["load_s"] = seconds(load)

            for do in (timed_read, timed_load) if step % 2 else (timed_load, timed_read):
                do()
            if step > 1:  # the first warms up: it also makes the host copy
                table.append(row)
        saver.close()
        if ranks.rank == 0:
            Path(out).write_text(json.dumps(table), encoding="utf-8")


def summary(world: int, rows: list[dict[str, float]]) -> dict[str, float]:
    def median(of: Callable[[dict[str, float]], float]) -> float:
        return round(statistics.median(of(row) for row in rows), 4)

    gib = rows[0]["bytes"] / 2**30
    return {
        "ranks": world,
        "gib": round(gib, 3),
        "raw_write_gib_s": median(lambda r: gib / r["raw_write_s"]),
        "save_gib_s": median(lambda r: gib / r["save_s"]),
        "save_of_raw": median(lambda r: r["raw_write_s"] / r["save_s"]),
        "raw_read_gib_s": median(lambda r: gib / r["raw_read_s"]),
        "load_gib_s": median(lambda r: gib / r["load_s"]),
        "load_of_raw": median(lambda r: r["raw_read_s"] / r["load_s"]),
        "save_extra_of_state": median(lambda r: r["save_extra_bytes"] / r["rank_bytes"]),
        "step_s": median(lambda r: r["step_s"]),
        "step_beside": median(lambda r: r["beside_s"] / r["step_s"]),
        "stall_s": median(lambda r: r["stall_s"]),
        "stall_of_save": median(lambda r: r["stall_s"] / r["save_s"]),
    }


# of summary(): what is wanted, and whether a figure is as good
GOALS: dict[str, tuple[str, Callable[[float], bool]]] = {
    "save_of_raw": ("at least 0.85", lambda value: value >= 0.85),
    "load_of_raw": ("at least 0.85", lambda value: value >= 0.85),
    "save_extra_of_state": ("at most 0.10", lambda value: value <= 0.10),
    "stall_of_save": ("at most 0.05", lambda value: value <= 0.05),
}


def table(figures: dict[str, float]) -> str:
    lines = [f"{figures['ranks']:.0f} ranks, {figures['gib']:.3f} GiB"]
    for name, value in figures.items():
        if name not in ("ranks", "gib"):
            wanted, good = GOALS.get(name, ("", lambda _: True))
            verdict = f"{wanted}: {'yes' if good(value) else 'NO'}" if wanted else ""
            lines.append(f"  {name:22} {value:10.4f}  {verdict}".rstrip())
    return "\n".join(lines)


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--dir", type=Path, help="an empty or new directory on the disk to measure")
    parser.add_argument("--mib", type=int, default=256, help="state over all ranks, MiB (default 256)")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", action="store_true", help="one JSON object per line instead of tables")
    a = parser.parse_args(argv)
    if a.mib < 8 * max(a.ranks) or min(a.ranks) < 1 or a.rounds < 1:
        parser.error(
            f"--mib {a.mib} is too small for {max(a.ranks)} ranks, or a number is below 1; give 8 MiB per rank"
        )
    if a.dir is None:
        a.dir = Path(tempfile.mkdtemp(prefix="benchmark_checkpoint_", dir=Path.cwd()))
    if a.dir.exists() and any(a.dir.iterdir()):
        parser.error(f"--dir {a.dir} is not empty; it is deleted afterwards: give a new one")
    a.dir.mkdir(parents=True, exist_ok=True)
    try:
        for world in a.ranks:
            place, out = a.dir / f"{world}", a.dir / f"{world}.json"
            arguments = (str(place), a.mib, a.rounds, str(out))
            code = start_local(world, measure, arguments) if world > 1 else measure(Ranks(), *arguments)
            if code:
                return 3
            figures = summary(world, json.loads(out.read_text(encoding="utf-8")))
            print(json.dumps(figures) if a.json else table(figures), flush=True)
            shutil.rmtree(place)
    finally:
        shutil.rmtree(a.dir, ignore_errors=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
