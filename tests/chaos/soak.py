"""A run with random faults ends like a run without: with the same losses, weights, moments and samples.

    python tests/chaos/soak.py 30 runs/soak --seed 1

First an undisturbed run, for a third of the time, determines the number of steps. Then the same run gets a fault every now
and then. The same command restarts it until it has all its steps, as a scheduler would. The faults:

    kill      kill -9 of a rank, or of all processes of the run, at any moment
    term      SIGTERM to one rank: it saves and ends with the outcome requeue
    corrupt   kill -9, then one bit of the newest checkpoint is flipped
    full      a rank's files are limited to 4 kB from a step on: its next save fails
    freeze    SIGSTOP of a rank: the others give up after the timeout
    nan       a reduced gradient of one rank is NaN, once

It writes soak.md, a table with a row per fault, to the directory. The exit code is 0 if the last checkpoint has the same
hashes, every step is logged once with the same loss, at least 85 % of the trained steps were of use, and no start was
without a step.
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
sys.path[:0] = [str(ROOT), str(ROOT / "tests/support")]  # as in pytest's configuration

import programs  # noqa: E402
from checkpoint_loads import invert_bit  # noqa: E402
from token_files import write_documents  # noqa: E402
from train_cases import read_metric  # noqa: E402

RANKS, INTERVAL, KEEP, FROZEN_S = 2, 5, 4, 8
KINDS = ("kill", "term", "corrupt", "full", "freeze", "nan")
POINTS = {"full": "step.begin", "nan": "step.after_reduce"}  # fault points: the program injects these faults itself
GOODPUT = 0.85
PATIENCE_S = 240.0  # between two lines of a run, on any machine
MODEL = f"""--num-layers 4 --hidden-size 32 --num-attention-heads 4 --seq-length 16 --max-position-embeddings 16
 --micro-batch-size 2 --global-batch-size 8 --lr 0.003 --lr-decay-style constant --train-iters 1000000
 --vocab-size 93 --make-vocab-size-divisible-by 8 --hidden-dropout 0.1 --log-interval 1 --eval-iters 0 --split 1,0,0
 --save-interval {INTERVAL} --keep-last {KEEP} --async-save --nproc {RANKS} --device cpu
 --distributed-timeout-seconds-after-init {FROZEN_S}""".split()
STEP = re.compile(r"^[0-9:]+ +step +([0-9,]+)/")


@dataclass
class Fault:
    """A fault after the run has logged `step`, and its effect."""

    kind: str
    step: int
    victim: int  # a rank
    delay_s: float  # within the step
    whole_node: bool  # also the other ranks and the launcher, as if the node died
    code: int | None = None
    outcome: str = ""
    last_step: int = 0  # the last step logged
    resumed_step: int = 0  # the first one after
    back_s: float = 0.0  # from the end of the run to that step
    ended_s: float = 0.0  # from the fault to the end of the run

    @property
    def lost(self) -> int:
        return self.last_step - self.resumed_step + 1

    def row(self) -> str:
        target = "all" if self.whole_node else f"rank {self.victim}"
        cells = (self.kind, target, self.last_step, f"{self.code} {self.outcome}", self.lost)
        return f"| {' | '.join(map(str, cells))} | {self.ended_s:.1f} | {self.back_s:.1f} |"


def draw_faults(rng: random.Random, number: int, steps: int) -> list[Fault]:
    """Draw `number` faults, evenly over kinds and steps, in random order."""
    kinds = [KINDS[i % len(KINDS)] for i in range(number)]
    rng.shuffle(kinds)
    width, faults = steps / (number + 1), []
    for i, kind in enumerate(kinds):
        step = round((i + 0.75 + 0.5 * rng.random()) * width)
        victim, delay_s = rng.randrange(RANKS), rng.uniform(0, 0.05)
        faults.append(Fault(kind, step, victim, delay_s, kind == "kill" and rng.random() < 0.3))
    return faults


class Attempt(programs.ProgramOutput):
    """One start of the program. Each of its lines must come within PATIENCE_S."""

    def __init__(self, args: Sequence[str], env: dict[str, str]):
        options = dict(stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=ROOT, start_new_session=True)
        super().__init__(programs.Popen([sys.executable, str(ROOT / "pretrain_gpt.py"), *args], env=env, **options))
        self.begin, self.steps, self._seen = time.monotonic(), list[int](), 0
        self.first_s = 0.0

    def wait_for_step(self, step: int | None) -> bool:
        """Wait for the line of `step`, or with None for the end, and return whether the line has come."""
        last_line_s = time.monotonic()
        while True:
            has_ended, new_lines = not self._reader.is_alive(), self.lines[self._seen :]
            self._seen += len(new_lines)
            if steps := [int(line[1].replace(",", "")) for line in map(STEP.match, new_lines) if line]:
                last_line_s = time.monotonic()
                self.first_s = self.first_s or last_line_s - self.begin
                self.steps += steps
            is_reached = step is not None and self.steps[-1:] >= [step]
            if is_reached or has_ended:
                return is_reached
            if time.monotonic() - last_line_s > PATIENCE_S:
                raise TimeoutError(f"no line for {PATIENCE_S:.0f} s after step {self.steps[-1:]}")
            time.sleep(0.01)

    def ranks(self) -> list[int]:
        """Return the process ids of ranks 0, 1, ... The resource tracker is a child of the launcher itself."""
        return sorted(pid for child in children(self.process.pid) for pid in children(child))


def children(pid: int) -> list[int]:
    with suppress(OSError):
        return [int(p) for p in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    return []


@contextmanager
def started(args: Sequence[str], env: dict[str, str], log: Path) -> Iterator[Attempt]:
    attempt = Attempt(args, env)
    try:
        yield attempt
    finally:
        with suppress(ProcessLookupError):
            os.killpg(attempt.process.pid, signal.SIGKILL)
        with log.open("a", encoding="utf-8") as file:
            file.write(attempt.output)


def flip_bit(save_dir: Path, rng: random.Random) -> None:
    """Flip a bit of the newest checkpoint, in one of its files with tensors."""
    newest = max(p for p in save_dir.glob("iter_*") if (p / "COMPLETE").is_file())
    file = rng.choice(sorted(newest.glob("*.safetensors")))
    size = file.stat().st_size
    invert_bit(file, rng.randrange(4 * size, 8 * size))


def inject(fault: Fault, attempt: Attempt, save_dir: Path, rng: random.Random) -> None:
    """Inject a fault from outside. The program injects the faults of POINTS itself."""
    time.sleep(fault.delay_s)
    ranks = attempt.ranks()
    pid = ranks[fault.victim % len(ranks)] if ranks else attempt.process.pid
    with suppress(ProcessLookupError):
        match fault.kind:
            case "kill" if fault.whole_node:
                os.killpg(attempt.process.pid, signal.SIGKILL)
            case "kill" | "corrupt":
                os.kill(pid, signal.SIGKILL)
            case "term":
                os.kill(pid, signal.SIGTERM)
            case "freeze":
                os.kill(pid, signal.SIGSTOP)
    if fault.kind == "corrupt":
        attempt.wait_for_step(None)
        flip_bit(save_dir, rng)


def environment(faults: Sequence[Fault], once: Path) -> dict[str, str]:
    points = [f"{POINTS[f.kind]}:{f.victim}:{f.step + 1}:{f.kind}" for f in faults if f.kind in POINTS]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "MEGALITE_FAULT_ONCE": str(once)}
    return env | ({"MEGALITE_FAULT": ",".join(points)} if points else {})


def disturbed(args: list[str], faults: list[Fault], steps: int, out: Path, rng: random.Random) -> tuple[int, float]:
    """Run through all faults to the last step, and return the number of trained steps and the seconds."""
    run_dir, once_dir, log = out / "disturbed", out / "struck", out / "disturbed.log"
    once_dir.mkdir()
    env, remaining, num_trained, begin_s = environment(faults, once_dir), list(faults), 0, time.monotonic()
    last: Fault | None = None
    while True:
        with started(args, env, log) as attempt:
            struck_s = time.monotonic()
            fault = None
            while remaining and fault is None and attempt.wait_for_step(remaining[0].step):
                fault, struck_s = remaining.pop(0), time.monotonic()
                inject(fault, attempt, run_dir, rng)
                if fault.kind == "nan" and attempt.wait_for_step(fault.step + 3):  # the step was recomputed
                    fault.code, fault.outcome = 0, "goes on"
                    fault.last_step, fault.resumed_step = fault.step, fault.step + 1
                    fault = None
            attempt.wait_for_step(None)
            code, ended_s = attempt.wait(PATIENCE_S), time.monotonic()
        if not attempt.steps:
            raise RuntimeError(f"a start without a step, exit code {code}: see {log}")
        num_trained += len(attempt.steps)
        if last is not None:
            last.resumed_step, last.back_s = attempt.steps[0], attempt.first_s
        if attempt.steps[-1] == steps and code == 75:
            return num_trained, time.monotonic() - begin_s
        if fault is None:
            raise RuntimeError(f"ended at step {attempt.steps[-1]} with exit code {code} and no fault: see {log}")
        fault.code, fault.last_step, fault.ended_s = code, attempt.steps[-1], ended_s - struck_s
        with suppress(OSError, ValueError):
            fault.outcome = json.loads((run_dir / "status.json").read_text())["outcome"]
        last = fault
        seconds = time.monotonic() - begin_s
        print(f"{seconds:6.0f} s  step {fault.last_step:6d} of {steps}  {fault.kind}: {code}", flush=True)


def undisturbed(args: list[str], out: Path) -> int:
    """Run without faults and return the number of steps."""
    with started(args, environment([], out), out / "undisturbed.log") as attempt:
        attempt.wait_for_step(None)
        code = attempt.wait(PATIENCE_S)
    if code != 75 or attempt.steps[:1] != [1]:
        raise RuntimeError(f"the undisturbed run ended with exit code {code}: see {out / 'undisturbed.log'}")
    return attempt.steps[-1]


def make_data(prefix: Path) -> None:
    """Write documents with a pattern that can be learned."""
    rng = np.random.default_rng(3)
    rows = ((rng.integers(0, 93), rng.integers(1, 5), rng.integers(5, 60)) for _ in range(2000))
    write_documents(prefix, [((first + stride * np.arange(length)) % 93).tolist() for first, stride, length in rows])


def differences(out: Path, steps: int) -> list[str]:
    """Return the differences between the two runs, in their logs and in their last checkpoints."""
    names, kinds = ("undisturbed", "disturbed"), ("step", "train/loss", "train/grad_norm")
    rows = {name: list(zip(*(read_metric(out / name, kind) for kind in kinds), strict=True)) for name in names}
    last = {name: json.loads((out / name / f"iter_{steps:07d}/manifest.json").read_text("utf-8")) for name in names}
    for manifest in last.values():
        manifest["state"].pop("config")
    problems = []
    for name, run_rows in rows.items():
        if [row[0] for row in run_rows] != list(range(1, steps + 1)):
            problems.append(f"not every step of the {name} run is logged once, in order")
    differing_steps = [a[0] for a, b in zip(rows["undisturbed"], rows["disturbed"], strict=False) if a != b]
    if differing_steps:
        problems.append(f"losses or gradient norms differ from step {differing_steps[0]} on")
    for key in ("files", "tensors", "state"):
        if last["undisturbed"][key] != last["disturbed"][key]:
            problems.append(f"the last checkpoints differ in {key}")
    return problems


def soak(
    out: Path, seed: int, minutes: float | None = None, steps: int | None = None, number: int | None = None
) -> str:
    """Run without and with faults, and return the table. Give `minutes`, or `steps` and the `number` of faults.

    Raises:
        RuntimeError: there are problems; the message is the table.
    """
    out.mkdir(parents=True)
    make_data(out / "data")
    rng = random.Random(seed)
    data = ["--data-path", str(out / "data")]
    run = {n: [*MODEL, *data, "--save", str(out / n), "--load", str(out / n)] for n in ("undisturbed", "disturbed")}
    limit = ["--exit-duration-in-mins", str(minutes / 3)] if minutes else ["--exit-interval", str(steps)]
    begin = time.monotonic()
    steps = undisturbed([*run["undisturbed"], *limit], out)
    straight_s = time.monotonic() - begin
    if number is None:  # each costs about ten seconds, and at most twice the interval of saves
        number = min(max(round((minutes or 0) * 60 * 0.5 / 10), len(KINDS)), int(steps * 0.1 / INTERVAL))
    faults = draw_faults(rng, number, steps)
    num_trained, took_s = disturbed([*run["disturbed"], "--exit-interval", str(steps)], faults, steps, out, rng)
    problems, injected = differences(out, steps), [f for f in faults if f.code is not None]
    goodput = steps / num_trained
    if goodput < GOODPUT:
        problems.append(f"only {goodput:.1%} of the steps that were trained were of use")
    if len(injected) < len(faults):
        problems.append(f"{len(faults) - len(injected)} faults came too late to strike")
    table = "\n".join(
        [
            f"seed {seed}: {steps:,} steps, {len(injected)} faults, {num_trained:,} steps trained: goodput {goodput:.1%}; "
            f"{took_s / 60:.1f} minutes, undisturbed {straight_s / 60:.1f}",
            "",
            "| fault | of | after step | exit code, outcome | steps lost | until its end, s | until the next step, s |",
            "|---|---|---|---|---|---|---|",
            *(f.row() for f in injected),
            "",
            "; ".join(problems)
            or "Losses, gradient norms, weights, moments and the data's ledger: bit for bit the same.",
        ]
    )
    (out / "soak.md").write_text(table + "\n", "utf-8")
    if problems:
        raise RuntimeError(table)
    return table


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("minutes", type=float)
    parser.add_argument("out", type=Path, help="a new directory")
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # the run in progress ends, too
    try:
        print(soak(args.out.resolve(), args.seed, args.minutes))
    except (RuntimeError, TimeoutError) as error:
        print(error)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
