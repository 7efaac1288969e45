#!/usr/bin/env python
"""Training end to end: tokens/s, MFU, peak memory, where a step's time went and what to do about it; beside a peer.

    python tools/benchmark.py --bf16                                    a small Llama, the shape of docs/performance.md
    python tools/benchmark.py --preset llama3-8b --num-layers 16 ...    any flags of pretrain_gpt.py come last
    python tools/benchmark.py --peer transformers --nproc 2 --bf16 --json out.json
    python tools/benchmark.py --nproc 2 --sweep micro-batch-size=1,2 --sweep tensor-model-parallel-size=1,2 --out bench
    python tools/benchmark.py --scaling strong --nproc 1,2,4,8 --out bench

Every contender runs in processes of its own, in turns, --repeats times; a row is the median over the repeats of the
median step, and ratios are medians of the ratios of neighbouring runs, since machines are seldom quiet.

megalite           as pretrain_gpt.py runs it, on --mock-data
transformers       LlamaForCausalLM of the same shape, its own loss, torch.optim.AdamW, clipping (bench/peer.py); in
                   bf16 once with bf16 weights and once with autocast; on 2 processes DDP and FSDP2
+ allocator        on CPU, both sides with freed memory kept and huge pages (glibc tunables, THP_MEM_ALLOC_ENABLE)

--sweep measures every combination of its lists, as tools/sweep.py writes them. Flags that contradict each other, a run
that is out of memory or out of time are rows, too. --out DIR gets bench.json, bench.csv and pictures after every run;
typed again, the command goes on where it was. --scaling weak keeps the batch of a rank, strong that of all ranks; with
several numbers of ranks each rank has as many threads in all rows.

Parts are measured in further steps by the run's own clock and sum to 100 %. Idle: the wait for the other stages of the
pipeline, and at a step's end for the slowest rank. Peak memory: on CPU the largest resident sizes of all ranks, added
up. Exit codes: 0; 1 nothing of megalite's was measured; 2 usage; 130 interrupted.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from tools.bench import limited  # noqa: E402
from tools.bench.gpu_report_parts import write_whole  # noqa: E402
from tools.outputs import local_path  # noqa: E402

SHAPE = """--num-layers 6 --hidden-size 512 --num-attention-heads 8 --ffn-hidden-size 1408 --vocab-size 32000
 --seq-length 512 --micro-batch-size 2 --swiglu --normalization RMSNorm --position-embedding-type rope
 --disable-bias-linear --untie-embeddings-and-output-weights --hidden-dropout 0 --attention-dropout 0"""
RUN = "--mock-data --train-iters 1000 --lr 1e-4 --lr-decay-style constant --eval-iters 0"
ALLOCATOR = {
    "GLIBC_TUNABLES": "glibc.malloc.mmap_threshold=4294967296:glibc.malloc.trim_threshold=17179869184",
    "THP_MEM_ALLOC_ENABLE": "1",
}


def contenders(options: argparse.Namespace, half: bool) -> list[tuple[str, dict[str, str]]]:
    """(name, environment beside the usual one)."""
    names = ["megalite"]
    if options.peer:
        kinds = ["bf16", "autocast"] if half else ["fp32"]
        ways = [""] if options.nproc == 1 else [" ddp", " fsdp2"]
        names += [f"transformers {kind}{way}" for kind in kinds for way in ways]
    found: list[tuple[str, dict[str, str]]] = [(name, {}) for name in names]
    if options.allocator:
        found += [(f"{name} + allocator", ALLOCATOR) for name in names]
    return found


def measure(name: str, more: dict[str, str], options: argparse.Namespace, flags: list[str]) -> dict[str, Any]:
    """One contender, once, in processes of its own."""
    with tempfile.TemporaryDirectory(prefix="benchmark-") as folder:
        task = {
            "contender": name.removesuffix(" + allocator"),
            "flags": flags,
            "nproc": options.nproc,
            "warmup": options.warmup,
            "steps": options.steps,
            "folder": folder,
            "memory_bytes": options.memory_gib and int(options.memory_gib * 2**30),
        }
        command = [sys.executable, str(Path(__file__).with_name("benchmark_rank.py")), json.dumps(task)]
        log = options.json.with_suffix(".txt") if options.json else Path(folder) / "log.txt"
        status, said = limited.run(command, log, options.timeout, more)
        late = f"not done after {options.timeout:g} s; give more with --timeout" if status == "out of time" else None
        ranks = [json.loads(path.read_text()) for path in sorted(Path(folder).glob("rank*.json"))]
        lines = [late, *said] if late else said or [f"no message; {status}"]
        if len(ranks) < options.nproc:
            return {"error": late or lines[-1], "stderr": "\n".join(lines), "status": status}
        if status != "ok":  # after all ranks had told what they measured
            print(*lines, sep="\n", file=sys.stderr)
    steps = [max(times) for times in zip(*(rank["steps"] for rank in ranks), strict=True)]
    result = {**ranks[0], "step_s": statistics.median(steps), "memory": sum(rank["memory"] for rank in ranks)}
    return {**result, **{name: [rank.get(name) for rank in ranks] for name in ("parts", "axes")}}


def read_config(flags: list[str], options: argparse.Namespace) -> tuple[bool, list[str]]:
    """Whether the flags ask for bf16; and what is wrong with them."""
    from megalite.config import cli
    from megalite.config.check import check
    from megalite.config.options import ConfigError
    from megalite.models.families import PRESETS
    from megalite.train.run import choose_device
    from megalite.train.setup import SetupError

    try:
        config, _ = cli.read(flags, PRESETS)
        problems: list[str] = [*check(config, options.nproc)]
        if choose_device(config.parallel.device) == "cuda" and options.memory_gib is not None:
            problems.append(f"memory_gib={options.memory_gib:g} is of a CPU; drop it, or use --device cpu")
    except ConfigError as error:
        return False, error.problems
    except SetupError as error:
        return False, [str(error)]
    if options.peer == "megatron-core":
        problems.append("peer=megatron-core: nobody has tried how it runs here; use --peer transformers")
    elif options.peer and not problems:
        m = config.model
        is_llama = (m.activation, m.normalization, m.position_embedding_type) == ("swiglu", "RMSNorm", "rope")
        if not is_llama or m.add_bias_linear or config.data.vocab_size is None:
            problems = ["peer=transformers is a Llama; drop --peer, or the flags that make another model"]
    return config.precision.bf16, problems


def counts(text: str) -> list[int]:
    """
    >>> counts("1,2,4")
    [1, 2, 4]
    """
    return [int(number) for number in text.split(",")]


def parse(argv: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """Own options, and the rest. Raises SystemExit(2) where a value cannot be."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--peer", choices=["transformers", "megatron-core"])
    parser.add_argument("--allocator", action="store_true", help="also with the allocator's settings, on CPU")
    parser.add_argument("--nproc", type=counts, default=[1], metavar="N[,N...]", help="ranks, of --scaling several")
    parser.add_argument("--sweep", action="append", default=[], metavar="FLAG=A,B", help="may be given several times")
    parser.add_argument("--scaling", choices=["weak", "strong"], help="over the numbers of ranks in --nproc")
    parser.add_argument(
        "--out", type=local_path, metavar="DIR", help="of sweeps and scaling: files, and where to go on"
    )
    parser.add_argument("--steps", type=int, default=6, help="timed, after --warmup")
    parser.add_argument("--warmup", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--timeout", type=float, default=900, help="seconds for one run")
    parser.add_argument("--memory-gib", type=float, help="that a rank may hold on CPU; more is out of memory")
    parser.add_argument("--price-per-hour", type=float, help="of one device, for the cost of a sample")
    parser.add_argument("--json", type=Path, metavar="FILE", help="of one combination")
    options, rest = parser.parse_known_args(argv)
    if min(*options.nproc, options.steps, options.repeats) < 1 or options.warmup < 0:
        parser.error("nproc, steps and repeats are at least 1, warmup at least 0")
    for name in ("memory_gib", "price_per_hour", "timeout"):
        value = getattr(options, name)
        if value is not None and not 0 < value < float("inf"):
            parser.error(f"{name}={value:g} is no quantity; give a number above 0")
    if len(options.nproc) > 1 and not options.scaling:
        parser.error(f"nproc={options.nproc} is several numbers of ranks; give --scaling weak or strong, or one number")
    if len({*options.nproc}) < 2 and options.scaling:
        parser.error(f"scaling={options.scaling} needs several numbers of ranks; give --nproc 1,2,4")
    several = bool(options.sweep or options.scaling)
    if several and options.json:
        parser.error(f"json={options.json} is of one combination; give --out DIR")
    if options.out and not several:
        parser.error(f"out={options.out} is of --sweep and --scaling; give one of them, or --json FILE")
    return options, rest


def main(argv: list[str]) -> int:
    options, rest = parse(argv)
    shaped = any(flag in rest for flag in ("--preset", "--num-layers", "--config"))
    batch = [] if "--global-batch-size" in rest else ["--global-batch-size", "8"]
    flags = [*([] if shaped else SHAPE.split()), *RUN.split(), *batch, *rest]
    if options.sweep or options.scaling:
        from tools.bench import matrix

        return matrix.run(options, flags, Path(__file__).name)
    options.nproc = options.nproc[0]
    return run_one(options, flags)


def run_one(options: argparse.Namespace, flags: list[str]) -> int:
    """All contenders with one combination of flags."""
    half, problems = read_config(flags, options)
    if problems:
        print("\n".join(f"benchmark.py: {problem}" for problem in problems), file=sys.stderr)
        return 2

    runs: dict[str, list[dict[str, Any]]] = {}

    def save(complete: bool, **more: Any) -> None:
        if options.json:
            facts = {"machine": platform.platform(), "flags": flags, "nproc": options.nproc}
            write_whole(options.json, facts | {"runs": runs, "complete": complete} | more)

    try:
        save(False)  # before anything takes time, and after each run: an interrupted benchmark leaves what it has
    except OSError as error:
        print(f"benchmark.py: --json {options.json} cannot be written: {error.strerror}", file=sys.stderr)
        return 2
    interrupted = False
    try:
        for _ in range(options.repeats):
            for name, more in contenders(options, half):
                result = measure(name, more, options, flags)
                runs.setdefault(name, []).append(result)
                save(False)
                if "error" in result:
                    print(f"{name}: {result['stderr']}", file=sys.stderr)
        save(True)
    except KeyboardInterrupt:
        interrupted = True
        print("benchmark.py: interrupted", file=sys.stderr)
    good = {name: [one for one in some if "error" not in one] for name, some in runs.items()}
    if good.get("megalite"):
        report(good)
        save(not interrupted, breakdown=tell_breakdown(good["megalite"][-1], flags, options))
    return 130 if interrupted else 0 if good.get("megalite") else 1


def report(runs: dict[str, list[dict[str, Any]]]) -> None:
    head = runs["megalite"][0]
    print(f"{head['device']}, torch {head['torch']}; peak {head['peak_tflops'] or 0:.2f} TFLOP/s per device")
    print(f"{'':32}{'tokens/s':>10}{'TFLOP/s':>9}{'MFU':>8}{'GiB':>7}{'speed':>8}{'memory':>8}")
    for name, some in runs.items():
        base = runs.get("megalite + allocator" if name.endswith("allocator") else "megalite", [])
        if not some or not base:
            continue
        step = statistics.median(one["step_s"] for one in some)
        memory = statistics.median(one["memory"] for one in some)
        tflops = head["flops_per_step"] / step / 1e12
        mfu = f"{tflops / head['peak_tflops'] / head['devices']:.1%}" if head["peak_tflops"] else "n/a"
        pairs = list(zip(base, some, strict=False))
        speed = statistics.median(a["step_s"] / b["step_s"] for a, b in pairs)
        less = statistics.median(b["memory"] / a["memory"] for a, b in pairs)
        line = f"{head['tokens_per_step'] / step:10,.0f}{tflops:9.3f}{mfu:>8}{memory / 2**30:7.2f}"
        print(f"{name:32}{line}{speed:8.2f}{less:8.2f}")
    print("speed and memory: of the row, as a multiple of megalite's")
    for rank, parts in enumerate(runs["megalite"][-1]["parts"]):
        total = sum(parts.values())
        texts = [f"{part} {seconds / total:.1%}" for part, seconds in sorted(parts.items(), key=lambda item: -item[1])]
        print(f"rank {rank}: {', '.join(texts)}")


def tell_breakdown(run: dict[str, Any], flags: list[str], options: argparse.Namespace) -> dict[str, Any]:
    """Where its step went, printed, and as JSON has it."""
    from megalite.config import cli
    from megalite.models.families import PRESETS
    from megalite.train.arrangement import arrange
    from tools.bench.breakdown import break_down
    from tools.bench.tables import told

    made = arrange(cli.read(flags, PRESETS)[0], options.nproc, run["vocab_size"])
    found = break_down(run, made, run["peak_tflops"], options.price_per_hour)
    print("\n".join(told(found)))
    return found


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
