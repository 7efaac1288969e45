"""A run among random faults ends as the run that nothing happened to: the same losses, weights, moments and samples.

    python tests/chaos/soak.py 30 runs/soak --seed 1

First an undisturbed run, for a third of the time; it says how many steps there are. Then the same run with a fault every
now and then, started again by the same command until it has all its steps, as a scheduler would:

    kill      kill -9 of a rank, or of all that belongs to the run, at any moment
    term      SIGTERM to one rank: it saves and says requeue
    corrupt   kill -9, then one bit of the newest checkpoint is turned
    full      a rank's files end at 4 kB from a step on: its next save fails
    freeze    SIGSTOP of a rank: the others give up after the time-out
    nan       a reduced gradient of one rank is NaN, once

Writes soak.md, a table with a row per fault, into the folder. Exit code 0 if all of it holds: the last checkpoint has the
same hashes, every step is logged once with the same loss, at least 85 % of the steps that were trained were of use,
and no start was without a step.
"""

import argparse
import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests/support")]  # as pytest has it

import programs  # noqa: E402
from checkpoint_loads import flip  # noqa: E402
from token_files import write  # noqa: E402
from train_cases import logged  # noqa: E402

RANKS, INTERVAL, KEEP, FROZEN_S = 2, 5, 4, 8
KINDS = ("kill", "term", "corrupt", "full", "freeze", "nan")
BY_VARIABLE = {"full": "step.begin", "nan": "step.after_reduce"}  # the program does these to itself
GOODPUT = 0.85
PATIENCE_S = 240.0  # between two lines of a run, on whatever machine
MODEL = f"""--num-layers 4 --hidden-size 32 --num-attention-heads 4 --seq-length 16 --max-position-embeddings 16
 --micro-batch-size 2 --global-batch-size 8 --lr 0.003 --lr-decay-style constant --train-iters 1000000
 --vocab-size 93 --make-vocab-size-divisible-by 8 --hidden-dropout 0.1 --log-interval 1 --eval-iters 0 --split 1,0,0
 --save-interval {INTERVAL} --keep-last {KEEP} --async-save --nproc {RANKS} --device cpu
 --distributed-timeout-seconds-after-init {FROZEN_S}""".split()
STEP = re.compile(r"^[0-9:]+ +step +([0-9,]+)/")


@dataclass
class Fault:
    """What happens once the run has logged `step`, and what became of it."""

    kind: str
    step: int
    victim: int  # a rank
    delay_s: float  # within the step
    all: bool  # with it the other ranks and the launcher: what a node that dies takes along
    code: int | None = None
    outcome: str = ""
    struck: int = 0  # the last step logged
    resumed: int = 0  # the first one after
    back_s: float = 0.0  # from the end of the run to that
    ended_s: float = 0.0  # from the fault to the end of the run

    @property
    def lost(self) -> int:
        return self.struck - self.resumed + 1

    def row(self) -> str:
        who = "all" if self.all else f"rank {self.victim}"
        cells = (self.kind, who, self.struck, f"{self.code} {self.outcome}", self.lost)
        return f"| {' | '.join(map(str, cells))} | {self.ended_s:.1f} | {self.back_s:.1f} |"


def draw(rng: random.Random, number: int, steps: int) -> list[Fault]:
    """As many of each kind as there can be, in any order, about evenly over the steps."""
    kinds = [KINDS[i % len(KINDS)] for i in range(number)]
    rng.shuffle(kinds)
    width, found = steps / (number + 1), []
    for i, kind in enumerate(kinds):
        step = round((i + 0.75 + 0.5 * rng.random()) * width)
        victim, delay_s = rng.randrange(RANKS), rng.uniform(0, 0.05)
        found.append(Fault(kind, step, victim, delay_s, kind == "kill" and rng.random() < 0.3))
    return found


class Attempt(programs.Talk):
    """One start of the program, of which no line is waited for longer than PATIENCE_S."""

    def __init__(self, words: Sequence[str], env: dict[str, str]):
        how = dict(stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=ROOT, start_new_session=True)
        super().__init__(programs.Popen([sys.executable, str(ROOT / "pretrain_gpt.py"), *words], env=env, **how))
        self.begin, self.steps, self._seen = time.monotonic(), list[int](), 0
        self.first_s = 0.0

    def until(self, step: int | None) -> bool:  # type: ignore[override]
        """Wait for the line of `step`, or (None) for the end; whether that line has come."""
        since = time.monotonic()
        while True:
            ended, new = not self._reader.is_alive(), self.lines[self._seen :]
            self._seen += len(new)
            if found := [int(line[1].replace(",", "")) for line in map(STEP.match, new) if line]:
                since = time.monotonic()
                self.first_s = self.first_s or since - self.begin
                self.steps += found
            come = step is not None and self.steps[-1:] >= [step]
            if come or ended:
                return come
            if time.monotonic() - since > PATIENCE_S:
                raise TimeoutError(f"no line for {PATIENCE_S:.0f} s after step {self.steps[-1:]}")
            time.sleep(0.01)

    def ranks(self) -> list[int]:
        """Process ids, the oldest first: rank 0, 1, ... The resource tracker is a child of the launcher itself."""
        return sorted(pid for child in children(self.process.pid) for pid in children(child))


def children(pid: int) -> list[int]:
    with suppress(OSError):
        return [int(p) for p in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    return []


@contextmanager
def started(words: Sequence[str], env: dict[str, str], log: Path) -> Iterator[Attempt]:
    attempt = Attempt(words, env)
    try:
        yield attempt
    finally:
        with suppress(ProcessLookupError):
            os.killpg(attempt.process.pid, signal.SIGKILL)
        with log.open("a", encoding="utf-8") as file:
            file.write(attempt.said)


def turn_a_bit(folder: Path, rng: random.Random) -> None:
    """Of the newest checkpoint, in one of its files with tensors."""
    found = max(p for p in folder.glob("iter_*") if (p / "COMPLETE").is_file())
    file = rng.choice(sorted(found.glob("*.safetensors")))
    size = file.stat().st_size
    flip(file, rng.randrange(4 * size, 8 * size))


def strike(fault: Fault, attempt: Attempt, folder: Path, rng: random.Random) -> None:
    """From outside, while it runs. What it does to itself comes by itself."""
    time.sleep(fault.delay_s)
    ranks = attempt.ranks()
    pid = ranks[fault.victim % len(ranks)] if ranks else attempt.process.pid
    with suppress(ProcessLookupError):
        match fault.kind:
            case "kill" if fault.all:
                os.killpg(attempt.process.pid, signal.SIGKILL)
            case "kill" | "corrupt":
                os.kill(pid, signal.SIGKILL)
            case "term":
                os.kill(pid, signal.SIGTERM)
            case "freeze":
                os.kill(pid, signal.SIGSTOP)
    if fault.kind == "corrupt":
        attempt.until(None)
        turn_a_bit(folder, rng)


def environment(faults: Sequence[Fault], once: Path) -> dict[str, str]:
    points = [f"{BY_VARIABLE[f.kind]}:{f.victim}:{f.step + 1}:{f.kind}" for f in faults if f.kind in BY_VARIABLE]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "MEGALITE_FAULT_ONCE": str(once)}
    return env | ({"MEGALITE_FAULT": ",".join(points)} if points else {})


def disturbed(words: list[str], faults: list[Fault], steps: int, out: Path, rng: random.Random) -> tuple[int, float]:
    """Through all faults to the last step. Returns the number of steps that were trained, and seconds."""
    folder, once, log = out / "disturbed", out / "struck", out / "disturbed.log"
    once.mkdir()
    env, left, trained, begin = environment(faults, once), list(faults), 0, time.monotonic()
    last: Fault | None = None
    while True:
        with started(words, env, log) as attempt:
            struck = time.monotonic()
            fault = None
            while left and fault is None and attempt.until(left[0].step):
                fault, struck = left.pop(0), time.monotonic()
                strike(fault, attempt, folder, rng)
                if fault.kind == "nan" and attempt.until(fault.step + 3):  # the step was computed again
                    fault.code, fault.outcome, fault.struck, fault.resumed = 0, "goes on", fault.step, fault.step + 1
                    fault = None
            attempt.until(None)
            code, ended = attempt.end(PATIENCE_S), time.monotonic()
        if not attempt.steps:
            raise RuntimeError(f"a start without a step, exit code {code}: see {log}")
        trained += len(attempt.steps)
        if last is not None:
            last.resumed, last.back_s = attempt.steps[0], attempt.first_s
        if attempt.steps[-1] == steps and code == 75:
            return trained, time.monotonic() - begin
        if fault is None:
            raise RuntimeError(f"ended at step {attempt.steps[-1]} with exit code {code} and no fault: see {log}")
        fault.code, fault.struck, fault.ended_s = code, attempt.steps[-1], ended - struck
        with suppress(OSError, ValueError):
            fault.outcome = json.loads((folder / "status.json").read_text())["outcome"]
        last = fault
        print(f"{time.monotonic() - begin:6.0f} s  step {fault.struck:6d} of {steps}  {fault.kind}: {code}", flush=True)


def undisturbed(words: list[str], out: Path) -> int:
    """The number of steps."""
    with started(words, environment([], out), out / "undisturbed.log") as attempt:
        attempt.until(None)
        code = attempt.end(PATIENCE_S)
    if code != 75 or attempt.steps[:1] != [1]:
        raise RuntimeError(f"the undisturbed run ended with exit code {code}: see {out / 'undisturbed.log'}")
    return attempt.steps[-1]


def make_data(prefix: Path) -> None:
    """Documents that have something to learn."""
    rng = np.random.default_rng(3)
    rows = ((rng.integers(0, 93), rng.integers(1, 5), rng.integers(5, 60)) for _ in range(2000))
    write(prefix, [((first + stride * np.arange(length)) % 93).tolist() for first, stride, length in rows])


def differences(out: Path, steps: int) -> list[str]:
    """Between the two runs: what they logged, and what their last checkpoints hold."""
    names, kinds = ("undisturbed", "disturbed"), ("step", "train/loss", "train/grad_norm")
    rows = {name: list(zip(*(logged(out / name, kind) for kind in kinds), strict=True)) for name in names}
    last = {name: json.loads((out / name / f"iter_{steps:07d}/manifest.json").read_text("utf-8")) for name in names}
    for manifest in last.values():
        manifest["state"].pop("config")
    found = []
    for name, of_run in rows.items():
        if [row[0] for row in of_run] != list(range(1, steps + 1)):
            found.append(f"not every step of the {name} run is logged once, in order")
    unlike = [a[0] for a, b in zip(rows["undisturbed"], rows["disturbed"], strict=False) if a != b]
    if unlike:
        found.append(f"losses or gradient norms differ from step {unlike[0]} on")
    for what in ("files", "tensors", "state"):
        if last["undisturbed"][what] != last["disturbed"][what]:
            found.append(f"the last checkpoints differ in {what}")
    return found


def soak(
    out: Path, seed: int, minutes: float | None = None, steps: int | None = None, number: int | None = None
) -> str:
    """The table. Raises RuntimeError if something does not hold. Either `minutes`, or `steps` and `number` of faults."""
    out.mkdir(parents=True)
    make_data(out / "data")
    rng = random.Random(seed)
    data = ["--data-path", str(out / "data")]
    run = {n: [*MODEL, *data, "--save", str(out / n), "--load", str(out / n)] for n in ("undisturbed", "disturbed")}
    whole = ["--exit-duration-in-mins", str(minutes / 3)] if minutes else ["--exit-interval", str(steps)]
    begin = time.monotonic()
    steps = undisturbed([*run["undisturbed"], *whole], out)
    straight_s = time.monotonic() - begin
    if number is None:  # each costs about ten seconds, and at most twice the interval of saves
        number = min(max(round((minutes or 0) * 60 * 0.5 / 10), len(KINDS)), int(steps * 0.1 / INTERVAL))
    faults = draw(rng, number, steps)
    trained, took_s = disturbed([*run["disturbed"], "--exit-interval", str(steps)], faults, steps, out, rng)
    found, struck = differences(out, steps), [f for f in faults if f.code is not None]
    goodput = steps / trained
    if goodput < GOODPUT:
        found.append(f"only {goodput:.1%} of the steps that were trained were of use")
    if len(struck) < len(faults):
        found.append(f"{len(faults) - len(struck)} faults came too late to strike")
    table = "\n".join(
        [
            f"seed {seed}: {steps:,} steps, {len(struck)} faults, {trained:,} steps trained: goodput {goodput:.1%}; "
            f"{took_s / 60:.1f} minutes, undisturbed {straight_s / 60:.1f}",
            "",
            "| fault | of | after step | exit code, outcome | steps lost | until its end, s | until the next step, s |",
            "|---|---|---|---|---|---|---|",
            *(f.row() for f in struck),
            "",
            "; ".join(found) or "Losses, gradient norms, weights, moments and the data's ledger: bit for bit the same.",
        ]
    )
    (out / "soak.md").write_text(table + "\n", "utf-8")
    if found:
        raise RuntimeError(table)
    return table


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("minutes", type=float)
    parser.add_argument("folder", type=Path, help="one that is not there yet")
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # the run that is under way is ended, too
    try:
        print(soak(args.folder.resolve(), args.seed, args.minutes))
    except (RuntimeError, TimeoutError) as error:
        print(error)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
