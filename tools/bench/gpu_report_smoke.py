"""Compare losses and gradient norms of tiny runs of the real commands with a reference.

    python tools/bench/gpu_report_smoke.py DIR --device cuda --seconds 55             one GPU, each way of training
    python tools/bench/gpu_report_smoke.py DIR --device cuda --seconds 55 --gpus 4    layouts, compared with one GPU

Each case is a process of its own. --jobs cases run at once, and DIR/smoke.json is written after each. References are in
fp32 with torch's kernels, on the CPU or, for layouts, on one GPU. Values may differ by the relative tolerance of the
case. Rounding alone moves a gradient norm by about 0.3 % in bf16, and by 0.1 % if fp32 matmuls run in tf32; a lost
gradient or a misplaced mask moves it by tens of percent.
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

from tools.bench import timeout
from tools.bench.gpu_report_runs import LLAMA
from tools.cli_common import make_parser, write_json

ROOT = Path(__file__).resolve().parent.parent.parent
NUM_STEPS = 6
NUM_TOKENS = 4  # of a generated text that are compared
SMOKE_RUN_FLAGS = (
    f"--train-iters {NUM_STEPS} --mock-data --tokenizer-type ByteTokenizer --lr 1e-3 --lr-decay-style constant"
    " --eval-iters 0 --log-interval 1 --micro-batch-size 1 --global-batch-size 8 --clip-grad 1000"
)
FP32_TOLERANCE, BF16_TOLERANCE = 5e-3, 4e-2
STOPPED = "failed (exit code 75)"  # the status of a run that stops at --exit-interval


@dataclass
class SmokeCase:
    """A run of pretrain_gpt.py or of tools/generate.py, and its results.

    Attributes:
        name: its name.
        flags: the flags of pretrain_gpt.py; if empty, tools/generate.py runs.
        reference: the name of the case whose values it must have.
        tolerance: the largest relative difference from the reference.
        checkpoint_from: the name of the case whose checkpoint it loads.
        device: the device of tools/generate.py.
        status: "ok", or the reason of the failure.
        max_difference: the largest relative difference, if it was compared.
        seconds: the time that it took.
        values: loss and gradient norm of each step, or token IDs.
        tail: the decisive lines of its output, if it failed.
    """

    name: str
    flags: str = ""
    reference: str = ""
    tolerance: float = BF16_TOLERANCE
    checkpoint_from: str = ""
    device: str = ""
    status: str = "not run: no time was left"
    max_difference: float | None = None
    seconds: float = 0.0
    values: list[list[float]] = field(default_factory=list)
    tail: list[str] = field(default_factory=list)


def file_name(case_name: str) -> str:
    """Return the name of a case's run directory and, with a suffix, of its log."""
    return case_name.replace(", ", "-").replace(" ", "-")


def single_gpu_cases(tiny: bool, device: str) -> list[SmokeCase]:
    """Return a case for every way of training on one device. Some need a GPU, as a CPU would be its own reference."""
    if tiny:
        shape = "--num-layers 2 --seq-length 32 --hidden-size 64 --num-attention-heads 4"
    else:
        shape = "--num-layers 4 --seq-length 256 --hidden-size 256 --num-attention-heads 4"
    llama = f"{shape} {LLAMA} --group-query-attention --num-query-groups 2 --ffn-hidden-size 192"
    on_cpu, on_device = "--device cpu --kernels torch", f"--device {device}"
    save_flags = "--async-save --exit-interval 3"
    saving = SmokeCase("asynchronous save", f"{llama} {on_device} {save_flags}", "cpu", FP32_TOLERANCE)
    cases = [SmokeCase("cpu", f"{llama} {on_cpu}"), SmokeCase("bf16", f"{llama} {on_device} --bf16", "cpu"), saving]
    if device == "cuda":
        cases += [
            SmokeCase("fp32, torch", f"{llama} {on_device} --kernels torch", "cpu", FP32_TOLERANCE),
            SmokeCase("cpu, GPT, dropout", f"{shape} {on_cpu}"),
            SmokeCase("bf16, GPT, dropout", f"{shape} {on_device} --bf16", "cpu, GPT, dropout"),
            SmokeCase("fp16", f"{llama} {on_device} --fp16 --initial-loss-scale 1024", "cpu"),
            SmokeCase("CUDA graphs", f"{llama} {on_device} --bf16 --cuda-graph-impl local", "cpu"),
            SmokeCase("compiled", f"{llama} {on_device} --bf16 --compile --kernels torch", "cpu"),
        ]
    cases += [
        SmokeCase("resumed", f"{llama} {on_device}", "cpu", FP32_TOLERANCE, checkpoint_from=saving.name),
        SmokeCase("generated text, cpu", checkpoint_from=saving.name, device="cpu"),
    ]
    if device == "cuda":
        cases.append(
            SmokeCase(
                "generated text",
                reference="generated text, cpu",
                tolerance=0,
                checkpoint_from=saving.name,
                device=device,
            )
        )
    return cases


def layout_cases(tiny: bool, device: str, num_gpus: int) -> list[SmokeCase]:
    """Return a case for every axis with 2, 4 and 8 GPUs, and for all axes together."""
    sizes = "--hidden-size 64 --seq-length 32" if tiny else "--hidden-size 512 --seq-length 256"
    model = (
        f"{sizes} --num-layers {max(4, num_gpus)} --num-attention-heads 8 --ffn-hidden-size 256 --device {device}"
        f" {LLAMA} --untie-embeddings-and-output-weights"
    )
    flags = {"tp": "--tensor-model-parallel-size", "pp": "--pipeline-model-parallel-size", "dp": "--dp"}
    layouts = [{axis: size} for size in (2, 4, 8) if size <= num_gpus for axis in flags]
    if num_gpus >= 4:
        layouts.append({"tp": 2, "pp": 2, "dp": num_gpus // 4})
    base = SmokeCase("one GPU", f"{model} --kernels torch")
    cases = [base]
    if not tiny:
        cases.append(SmokeCase(f"{base.name}, bf16", f"{model} --bf16", base.name))
    for layout in layouts:
        name = " ".join(f"{axis} {size}" for axis, size in layout.items())
        layout_flags = " ".join(f"{flags[axis]} {size}" for axis, size in layout.items())
        layout_flags += f" --nproc {math.prod(layout.values())}"
        cases.append(SmokeCase(name, f"{model} --kernels torch {layout_flags}", base.name, FP32_TOLERANCE))
        if not tiny:
            cases.append(SmokeCase(f"{name}, bf16", f"{model} --bf16 {layout_flags}", base.name))
    return cases


def run(case: SmokeCase, directory: Path, seconds: float) -> None:
    """Run a case, and set its results except those of the comparison."""
    if seconds < 1:
        return
    start = time.monotonic()
    run_dir = directory / file_name(case.name)
    checkpoint_dir = directory / file_name(case.checkpoint_from)
    saves = "--exit-interval" in case.flags
    if case.flags:
        command = ["pretrain_gpt.py", *SMOKE_RUN_FLAGS.split(), *case.flags.split(), "--run-dir", str(run_dir)]
        if saves:
            command += ["--save", str(run_dir)]
        if case.checkpoint_from:
            command += ["--load", str(checkpoint_dir)]
    else:
        command = ["tools/generate.py", "--load", str(checkpoint_dir), "--prompt", "abc", "--max-new-tokens", "12"]
        command += ["--json", "--temperature", "0", "--device", case.device]
    log = run_dir.with_suffix(".txt")
    args = [sys.executable, str(ROOT / command[0]), *command[1:]]
    case.status, case.tail = timeout.run(args, log, seconds, {"OMP_NUM_THREADS": "1"})
    if case.status == STOPPED and saves:
        case.status = "ok"
    case.seconds = time.monotonic() - start
    if case.status != "ok":
        return
    case.tail = []
    if case.flags:
        rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
        case.values = [[row["train/loss"], row["train/grad_norm"]] for row in rows if "train/loss" in row]
    else:
        token_ids = json.loads(log.read_text().splitlines()[-1])["new_ids"]
        case.values = [[float(token_id)] for token_id in token_ids[:NUM_TOKENS]]


def compare(case: SmokeCase, reference: SmokeCase) -> None:
    """Set the largest relative difference, and the status if it is too large. A resumed run has only the last steps."""
    if not reference.values:
        case.status = f"failed (nothing to compare with: {reference.name} has no result)"
        return
    count = len(case.values)
    is_resumed = case.checkpoint_from and case.flags
    expected = reference.values[-count:] if is_resumed else reference.values[:count]
    differences = [
        abs(a - b) / max(abs(b), 1e-9)
        for values, expected_values in zip(case.values, expected, strict=True)
        for a, b in zip(values, expected_values, strict=True)
    ]
    case.max_difference = max(differences, default=float("inf"))
    if not case.max_difference <= case.tolerance:  # also if it is NaN
        difference = f"{case.max_difference:.2g}, at most {case.tolerance:g}"
        case.status = f"failed (differs from {reference.name} by {difference})"


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of this program's flags."""
    parser = make_parser(__doc__, allow_abbrev=True)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--gpus", type=int, default=1)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=60)
    return parser


def main(argv: list[str]) -> int:
    """Run the program, and return its exit code."""
    args = build_parser().parse_args(argv)
    deadline = time.monotonic() + args.seconds
    tiny = args.tiny or args.device == "cpu"
    if args.gpus == 1:
        cases = single_gpu_cases(tiny, args.device)
    else:
        cases = layout_cases(tiny, args.device, args.gpus)
    cases_by_name = {case.name: case for case in cases}

    def save() -> None:
        """Compare what can be compared now, and write the results."""
        for case in cases:
            if case.status == "ok" and case.max_difference is None and case.reference:
                reference = cases_by_name[case.reference]
                if reference.seconds:
                    compare(case, reference)
        write_json(args.directory / "smoke.json", {"cases": [asdict(case) for case in cases]})

    save()
    from_scratch = [case for case in cases if not case.checkpoint_from]
    from_checkpoint = [case for case in cases if case.checkpoint_from]
    with ThreadPoolExecutor(args.jobs) as pool:
        for group in (from_scratch, from_checkpoint):  # the first group saves the checkpoint
            futures = {pool.submit(run, case, args.directory, deadline - time.monotonic()): case for case in group}
            for future in as_completed(futures):
                case = futures[future]
                if (error := future.exception()) is not None:
                    case.status = f"failed ({type(error).__name__}: {error})"
                save()
                print(f"{case.name}: {case.status}", *case.tail, sep="\n", flush=True)
    print()
    for case in cases:  # again, because the report shows the end of the output
        difference = ""
        if case.max_difference is not None:
            difference = f", at most {case.max_difference:.1e} from {case.reference}"
        print(f"{case.name}: {case.status}, {case.seconds:.0f} s{difference}", flush=True)
    return int(any(case.status != "ok" for case in cases))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
