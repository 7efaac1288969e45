"""Does it train here as it does on a CPU? Tiny runs of the real commands, losses and gradient norms beside a reference.

    python tools/bench/gpu_report_smoke.py FOLDER --device cuda --seconds 55              one card, each way of running
    python tools/bench/gpu_report_smoke.py FOLDER --device cuda --seconds 55 --cards 4    layouts, beside one card

Each case is a process of its own, --jobs at once, and FOLDER/smoke.json is written after each. References are in fp32
with torch's kernels: on the CPU, or for layouts on one card. Figures may differ by the case's tolerance, relative: by
rounding alone a gradient norm moves about 0.3 % in bf16 and 0.1 % where fp32 matmuls run in tf32; a lost gradient or
a mask at the wrong place moves it by tens of percent.
"""

import argparse
import json
import math
import sys
import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))

from tools.bench import timeout as limited
from tools.bench.gpu_report_goals import TABLE
from tools.cli_common import parser_of, write_json

ROOT = Path(__file__).resolve().parent.parent.parent
STEPS, LEAST_TOKENS = 6, 4
RUN = f"--train-iters {STEPS} --mock-data --tokenizer-type ByteTokenizer --lr 1e-3 --lr-decay-style constant"
RUN += " --eval-iters 0 --log-interval 1 --micro-batch-size 1 --global-batch-size 8 --clip-grad 1000"
FP32, BF16 = 5e-3, 4e-2
WORDS = TABLE["words"]


@dataclass
class Case:
    """`flags` of pretrain_gpt.py; `like` names the case whose losses it must have; `after` one that saved a checkpoint,
    which this one loads (tools/generate.py where it has no flags)."""

    name: str
    flags: str
    like: str = ""
    within: float = BF16
    after: str = ""
    status: str = "not run: no time was left"
    worst: float | None = None
    seconds: float = 0.0
    values: list[list[float]] = field(default_factory=list)  # loss and gradient norm by step, or tokens
    tail: list[str] = field(default_factory=list)


def one_card(tiny: bool, device: str) -> list[Case]:
    shape = "--num-layers 2 --seq-length 32" if tiny else "--num-layers 4 --seq-length 256"
    shape += " --hidden-size 64 --num-attention-heads 4" if tiny else " --hidden-size 256 --num-attention-heads 4"
    model = f"{shape} {WORDS['llama']} --group-query-attention --num-query-groups 2 --ffn-hidden-size 192"
    words = {**WORDS, "shape": shape, "model": model, "here": f"--device {device}"}
    cases = []
    for row in TABLE["cases"]:
        if not row.get("card") or device == "cuda":
            known = {name: value for name, value in row.items() if name != "card"}
            cases.append(Case(**known | {"flags": row.get("flags", "").format_map(words)}))
    return cases


def layouts(tiny: bool, device: str, cards: int) -> list[Case]:
    """Every axis alone with 2, 4 and 8 cards, and all of them together."""
    shape = "--hidden-size 64 --seq-length 32" if tiny else "--hidden-size 512 --seq-length 256"
    shape += f" --num-layers {max(4, cards)} --num-attention-heads 8 --ffn-hidden-size 256 --device {device}"
    shape += f" {WORDS['llama']} --untie-embeddings-and-output-weights"
    long = {"tp": "tensor-model-parallel-size", "pp": "pipeline-model-parallel-size", "dp": "dp"}
    ways = [{axis: n} for n in (2, 4, 8) if n <= cards for axis in long]
    ways += [{"tp": 2, "pp": 2, "dp": cards // 4}] if cards >= 4 else []  # of 4: dp 1
    cases = [Case("one card", f"{shape} --kernels torch")]
    if not tiny:
        cases.append(Case("one card, bf16", f"{shape} --bf16", "one card"))
    for way in ways:
        name = " ".join(f"{axis} {n}" for axis, n in way.items())
        sizes = " ".join(f"--{long[axis]} {n}" for axis, n in way.items()) + f" --nproc {math.prod(way.values())}"
        cases.append(Case(name, f"{shape} --kernels torch {sizes}", "one card", FP32))
        if not tiny:
            cases.append(Case(f"{name}, bf16", f"{shape} --bf16 {sizes}", "one card"))
    return cases


def run(case: Case, folder: Path, device: str, seconds: float) -> None:
    """Fills in what became of it, but for the comparison."""
    begin, where = time.monotonic(), folder / case.name.replace(", ", "-").replace(" ", "-")
    saved = folder / case.after.replace(" ", "-")
    if seconds < 1:
        return
    if case.flags:
        command = ["pretrain_gpt.py", *RUN.split(), *case.flags.split(), "--run-dir", str(where)]
        command += ["--save", str(where)] if "--exit-interval" in case.flags else []
        command += ["--load", str(saved)] if case.after else []
    else:
        command = ["tools/generate.py", "--load", str(saved), "--prompt", "abc", "--max-new-tokens", "12", "--json"]
        command += ["--temperature", "0", "--device", "cpu" if "cpu" in case.name else device]
    log = where.with_suffix(".txt")
    words = [sys.executable, str(ROOT / command[0]), *command[1:]]
    case.status, case.tail = limited.run(words, log, seconds, {"OMP_NUM_THREADS": "1"})
    if case.status == "failed (exit code 75)" and "--exit-interval" in case.flags:
        case.status = "ok"  # it stopped where it was told to
    case.seconds = time.monotonic() - begin
    if case.status == "ok":
        case.tail = []
        if case.flags:
            rows = [json.loads(line) for line in (where / "metrics.jsonl").read_text().splitlines()]
            case.values = [[row["train/loss"], row["train/grad_norm"]] for row in rows if "train/loss" in row]
        else:
            ids = json.loads(log.read_text().splitlines()[-1])["new_ids"]
            case.values = [[float(token)] for token in ids[:LEAST_TOKENS]]


def compare(case: Case, expected: Case) -> None:
    """Sets the largest relative difference, and the status where it is too large. Of a resumed run the last steps."""
    if not expected.values:
        case.status = f"failed (nothing to compare with: {expected.name} has no result)"
        return
    count = len(case.values)
    same = expected.values[-count:] if case.after and case.flags else expected.values[:count]
    pairs = [(a, b) for mine, other in zip(case.values, same, strict=True) for a, b in zip(mine, other, strict=True)]
    case.worst = max((abs(a - b) / max(abs(b), 1e-9) for a, b in pairs), default=float("inf"))
    if not case.worst <= case.within:  # NaN neither
        case.status = f"failed (differs from {expected.name} by {case.worst:.2g}, at most {case.within:g})"


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of this program's flags."""
    parser = parser_of(__doc__, allow_abbrev=True)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--cards", type=int, default=1)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=60)
    return parser


def main(argv: list[str]) -> int:
    args = build_parser().parse_args(argv)
    end = time.monotonic() + args.seconds
    tiny = args.tiny or args.device == "cpu"
    cases = one_card(tiny, args.device) if args.cards == 1 else layouts(tiny, args.device, args.cards)
    by_name = {case.name: case for case in cases}

    def save() -> None:
        for case in cases:
            if case.status == "ok" and case.worst is None and case.like and by_name[case.like].seconds:
                compare(case, by_name[case.like])
        write_json(args.folder / "smoke.json", {"cases": [asdict(case) for case in cases]})

    save()
    first, second = ([case for case in cases if bool(case.after) == late] for late in (False, True))
    with ThreadPoolExecutor(args.jobs) as pool:
        for some in (first, second):  # what loads a checkpoint comes after what saves it
            running = {pool.submit(run, c, args.folder, args.device, end - time.monotonic()): c for c in some}
            for done in as_completed(running):
                case = running[done]
                if (error := done.exception()) is not None:
                    case.status = f"failed ({type(error).__name__}: {error})"
                save()
                print(f"{case.name}: {case.status}", *case.tail, sep="\n", flush=True)
    print()
    for case in cases:  # the report shows the end of what is printed
        apart = "" if case.worst is None else f", at most {case.worst:.1e} from {case.like}"
        print(f"{case.name}: {case.status}, {case.seconds:.0f} s{apart}", flush=True)
    return int(any(case.status != "ok" for case in cases))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
