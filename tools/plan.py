#!/usr/bin/env python
"""Plan a run before it costs anything: which layouts fit a cluster, how fast a step is, what it takes and costs.

python tools/plan.py --preset llama3-405b --num-gpus 16384 --seq-length 8192 --global-batch-size 2048
python tools/plan.py --hf config.json --device a100 --num-gpus 64 --global-batch-size 256 --tokens 300B
python tools/plan.py memory --preset llama3-8b --num-gpus 8 --tp 2 --pp 2        of one layout, without its time
python tools/plan.py sizes --dp 64                      bytes of state by size and ZeRO stage
python tools/plan.py tokens --preset llama3-8b          tokens, FLOPs, steps, days
python tools/plan.py calibrate --out profile.json       measure this device, for --profile
python tools/plan.py compare RUN                        predicted beside measured, of a run's directory
python tools/plan.py published                          predicted beside published step times

The model: --preset, --hf, --config, or any flags of pretrain_gpt.py. Where they name tp or pp, that layout alone is
planned; else layouts are searched, with micro-batch, recompute and split backward as far as they are left open. What a
layout is refused for are the run's own checks. Times are simulated, memory is counted. Layouts are called by tp, pp,
chunks per rank (vpp) and micro-batch; selective, full: recompute (selective: norms and the MLP); split: backward; ends:
embedding and head each take the place of a layer; ddp: the optimizer is not sharded. A row is the plainest layout of
its tp, pp and sharding that cannot be told from the fastest, as published steps were mostly within 15 % of their
prediction. Shares are of what shows: a collective behind a matmul takes nothing. Exit code 2: the question is wrong, or
nothing fits; 1: the given layout does not.
"""

from __future__ import annotations

import argparse
import json
import sys
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING, Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from megalite.train.tell.figures import columns  # noqa: E402

if TYPE_CHECKING:
    from megalite.plan.arrangement import Arrangement
    from megalite.plan.profile import Profile
    from tools.planning.request import Request
    from tools.planning.search import Found
    from tools.planning.tokens import Budget


def _parser(what: str = "") -> argparse.ArgumentParser:
    shape = argparse.RawDescriptionHelpFormatter
    name = f"{Path(sys.argv[0]).name} {what}" if what else None
    return argparse.ArgumentParser(name, description=__doc__, formatter_class=shape, allow_abbrev=False)


def _model_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--hf", type=Path, metavar="FILE", help="the model: a config.json, or the folder that it is in")
    parser.add_argument("--device", help="a100, h100, h200, b200, v100 or cpu; default h100")
    parser.add_argument("--num-gpus", type=int, metavar="N", help="devices of the cluster; default 8")
    parser.add_argument("--gpus-per-node", type=int, metavar="N", help="default: as the device usually comes")
    parser.add_argument("--cluster", type=Path, metavar="FILE", help="a TOML file in place of these three")
    parser.add_argument("--precision", choices=("bf16", "fp16", "fp32"), help="default bf16, or as --bf16, --fp16 say")
    parser.add_argument("--profile", type=Path, metavar="FILE", help="how fast the device is, of `calibrate`")


def _budget_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--tokens", metavar="N", help="to train on, as 300B or 15.6T; default 20 per parameter")
    parser.add_argument("--data-tokens", metavar="N", help="that there are: tells the epochs")
    parser.add_argument(
        "--price-per-gpu-hour", type=float, metavar="DOLLARS", help="default: an example of the device's"
    )


class Wrong(Exception):
    """What is wrong with the question: lines."""


def _read(args: argparse.Namespace, words: list[str]) -> tuple[Request, Profile | None]:
    import torch

    from megalite.config.options import ConfigError
    from megalite.plan.profile import read_profile
    from tools.planning.request import read

    problems: list[str] = []
    profile = None
    if args.profile is not None:
        try:
            profile = read_profile(args.profile)
        except OSError as error:
            problems.append(
                f"profile={args.profile} cannot be read ({error.strerror}); make one with plan.py calibrate"
            )
        except ValueError as error:
            problems.append(str(error))
    try:
        request = read(args, words)
    except ConfigError as error:
        raise Wrong("\n".join([*problems, *error.problems])) from None
    device, half = request.cluster.device, request.config.precision
    try:
        device.peak_tflops(torch.bfloat16 if half.bf16 else torch.float16 if half.fp16 else torch.float32)
    except ValueError as error:
        problems.append(str(error))
    if profile is not None and profile.device not in ("", device.name):
        problems.append(f"profile={args.profile} was measured on {profile.device}, not on {device.name}; give another")
    if problems:
        raise Wrong("\n".join(problems))
    return request, profile


def _budget(args: argparse.Namespace, request: Request) -> tuple[Budget, int | None]:
    from megalite.plan.kinds import model_flops
    from tools.planning.search import Layout, arranged, layout_of
    from tools.planning.tokens import Budget, chinchilla, quantity

    sizes, problems = {}, []
    for name in ("tokens", "data_tokens"):
        try:
            sizes[name] = quantity(text) if (text := getattr(args, name)) is not None else None
        except ValueError as error:
            problems.append(f"{name}={error}")
    if args.price_per_gpu_hour is not None and not 0 <= args.price_per_gpu_hour < float("inf"):
        problems.append(f"price_per_gpu_hour={args.price_per_gpu_hour} is no price; give dollars, 0 or more")
    if problems:
        raise Wrong("\n".join(problems))
    m, t = request.config.model, request.config.train
    one = arranged(layout_of(request.config) if request.is_layout else Layout(), request)
    flops = model_flops(m, one.padded_vocab)
    named = 0 if "train_iters" in request.left_out else one.samples
    tokens = sizes["tokens"] or (t.train_samples or named) * m.seq_length or chinchilla(one.parameters)
    return Budget(one.parameters, tokens, flops), sizes["data_tokens"]


def plan(argv: list[str]) -> int:
    parser = _parser()
    _model_arguments(parser)
    _budget_arguments(parser)
    parser.add_argument("--usable-memory", type=float, default=0.9, metavar="SHARE", help="of a device's; default 0.9")
    parser.add_argument("--top", type=int, default=10, help="rows of layouts to show; default 10")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--out", type=Path, metavar="FILE", help="a picture; the suffix is the format")
    args, words = parser.parse_known_args(argv)
    if not 0 < args.usable_memory <= 1 or args.top < 1:
        raise Wrong(
            f"usable_memory={args.usable_memory} is a share up to 1, and top={args.top} at least 1; correct them"
        )
    _writable("out", json=args.json, out=args.out)
    request, profile = _read(args, words)
    t = request.config.train
    if not request.is_layout and t.global_batch_size is None and t.step_batch_size_schedule is None:
        raise Wrong("global_batch_size is not set, and layouts of one batch are compared; give --global-batch-size")
    budget, data_tokens = _budget(args, request)
    found = _search(request, profile, args)
    if not found.plans:
        _nothing_fits(request, found)
        return 2
    best = found.choices()[0].best
    _tell(request, found, budget, data_tokens, args)
    if args.json is not None or args.out is not None:
        _write(args, request, found, budget)
    return 0 if best.peak <= found.limit else 1


def _writable(*pictures: str, **paths: Path | None) -> None:
    from tools.outputs import unwritable

    if wrong := list(unwritable(pictures=pictures, **paths)):
        raise Wrong("\n".join(wrong))


def _search(request: Request, profile: Profile | None, args: argparse.Namespace) -> Found:
    from megalite.config.console import Bar
    from tools.planning.search import MOST, search

    with Bar("layouts", MOST, "simulated") as bar:
        return search(
            request,
            profile,
            wanted=args.top,
            usable=args.usable_memory,
            tell=lambda done, best: bar.at(done, f"best {best:.3f} s"),
        )


def _nothing_fits(request: Request, found: Found) -> None:
    from tools.planning import advice, show

    print(f"plan.py: none of {found.candidates:,} layouts can be built and fits; refused:", file=sys.stderr)
    print("\n".join(show.refusals(found)), file=sys.stderr)
    print("\n".join(advice.needs(request, found)), file=sys.stderr)


def _tell(request: Request, found: Found, budget: Budget, data_tokens: int | None, args: argparse.Namespace) -> None:
    from megalite.plan import links
    from tools.planning import advice, show

    shown, c = found.choices()[: args.top], request.cluster
    best = shown[0].best
    price = c.device.price_per_hour if args.price_per_gpu_hour is None else args.price_per_gpu_hour
    batch = best.made.batch_sizes.final * request.config.model.seq_length
    dtype = str(best.made.dtype).removeprefix("torch.")
    nodes = f"{c.nodes:,} node{'s' * (c.nodes > 1)} of {c.per_node}"
    print(f"{c.world:,} x {c.device.name} ({nodes}), {dtype}, batch of {batch:,} tokens")
    _section("the usual questions", advice.path(request, found))
    print("\n".join(["", show.ranking(shown), *show.counts(found, len(shown))]))
    _section("refused", show.refusals(found))
    fits = f": {'fits' if best.peak <= found.limit else 'does not fit'} into {found.limit / 2**30:.1f} GiB"
    print(f"\n{'as given' if request.is_layout else 'the best'}: {best.layout}{fits}")
    print(columns(show.memory_rows(best.memory, best.made)))
    _section("", [*advice.bound(best)])
    _section("warnings", advice.warnings(request, best, found.limit, budget, data_tokens))
    rows = show.budget_rows(budget, best.made, best.time.tokens_per_s, c.world, price, predicted=True)
    if data_tokens is not None:
        rows.append(("epochs", f"{budget.epochs(data_tokens):.2f} over {data_tokens:,} tokens"))
    _section("the whole run", [f"{name:<15} {text}" for name, text in rows])
    if c.world > 1:
        words = [line for text in links.in_words(c) for line in textwrap.wrap(text, 116)]
        _section("links", [*columns(links.table(c)[: 1 + min(c.nodes, 2)]).splitlines(), *words])
    _section("NCCL", advice.nccl(request))
    print(f"\n{show.command(request, best.layout, _steps(budget, best.made))}")
    if "lr" in request.left_out or "--mock-data" in request.words:
        print("(--lr and the data are placeholders where you gave none)")


def _steps(budget: Budget, made: Arrangement) -> int:
    return budget.steps(made.batch_sizes, made.config.model.seq_length)


def _section(title: str, lines: list[str]) -> None:
    if lines:
        print("\n" + "\n".join([f"{title}:"] * bool(title) + [f"  {line}" for line in lines]))


def _write(args: argparse.Namespace, request: Request, found: Found, budget: Budget) -> None:
    from tools.planning import show

    c, shown = request.cluster, found.choices()[: args.top]
    data: dict[str, Any] = {
        "cluster": {"device": c.device.name, "nodes": c.nodes, "per_node": c.per_node},
        "device_memory": c.device.memory_bytes,
        "usable_memory": found.limit,
        "parameters": budget.parameters,
        "tokens": budget.tokens,
        "plans": [show.as_json(one.best) | {"fastest": show.as_json(one.fastest)} for one in shown],
        "refused": [[count, found.examples[kind]] for kind, count in found.refused.most_common()],
        "command": show.command_words(request, shown[0].best.layout, _steps(budget, shown[0].best.made)),
    }
    try:
        if args.json is not None:
            args.json.write_text(json.dumps(data, indent=1) + "\n")
    except OSError as error:
        raise Wrong(f"json={args.json} cannot be written: {error.strerror}; give another path") from None
    if args.out is not None:
        from tools.pictures.canvas import save
        from tools.pictures.plan import picture

        try:
            save(picture(data), args.out)
        except (OSError, ValueError) as error:
            raise Wrong(f"out={args.out}: {error}") from None


def memory(argv: list[str]) -> int:
    from tools.planning import show
    from tools.planning.search import applied, arranged, layout_of

    parser = _parser("memory")
    _model_arguments(parser)
    args, words = parser.parse_known_args(argv)
    request, _ = _read(args, words)
    from megalite.plan.memory import memory as count
    from tools.planning.request import problems_of

    layout = layout_of(request.config)
    if problems := problems_of(applied(layout, request.config), request.cluster.world):
        raise Wrong("\n".join(problems))
    made = arranged(layout, request)
    held = count(made)
    print(f"{layout}, dp {made.dp}, {made.microbatches} micro-batches")
    print(columns(show.memory_rows(held, made)))
    limit = request.cluster.device.memory_bytes
    print(f"a {request.cluster.device.name} has {limit / 2**30:.1f} GiB, less what CUDA and NCCL take")
    return 0 if max(one.peak for one in held) <= limit else 1


def sizes(argv: list[str]) -> int:
    parser = _parser("sizes")
    parser.add_argument("--dp", type=int, default=4, help="devices that share the state; default 4")
    parser.add_argument("--parameters", default="7B", help="as 7B; default 7B")
    args = parser.parse_args(argv)
    import torch

    from tools.planning import sizes as rules
    from tools.planning.tokens import quantity

    try:
        number = quantity(args.parameters)
    except ValueError:
        raise Wrong(f"parameters={args.parameters} is no size; write it as 7B") from None
    if args.dp < 1:
        raise Wrong(f"dp={args.dp} is not positive; give 1 or more")
    print(f"GB of state on each of {args.dp} devices, {number:,} parameters, AdamW:")
    print(columns(rules.zero_rows(number, args.dp)))
    for dtype in (torch.float32, torch.bfloat16):
        print(f"\nGB of state on one device, {str(dtype).removeprefix('torch.')}:")
        print(columns(rules.size_rows(dtype)))
    return 0


def tokens(argv: list[str]) -> int:
    parser = _parser("tokens")
    _model_arguments(parser)
    _budget_arguments(parser)
    parser.add_argument(
        "--mfu", type=float, default=0.4, help="share of the devices' peak that is reached; default 0.4"
    )
    args, words = parser.parse_known_args(argv)
    if not 0 < args.mfu <= 1:
        raise Wrong(f"mfu={args.mfu} is no share; give more than 0, up to 1")
    request, _ = _read(args, words)
    from tools.planning import show
    from tools.planning.search import Layout, arranged

    budget, data_tokens = _budget(args, request)
    c, one = request.cluster, arranged(Layout(), request)
    speed = args.mfu * c.device.peak_tflops(one.dtype) * 1e12 * c.world / budget.flops_per_token
    price = c.device.price_per_hour if args.price_per_gpu_hour is None else args.price_per_gpu_hour
    for name, text in show.budget_rows(budget, one, speed, c.world, price):
        print(f"{name:<15} {text}")
    if data_tokens is not None:
        print(f"{'epochs':<15} {budget.epochs(data_tokens):.2f} over {data_tokens:,} tokens")
    print(f"at an MFU of {args.mfu:.0%} of {c.world:,} x {c.device.name}, which is assumed; a plan finds it")
    return 0


def calibrate(argv: list[str]) -> int:
    parser = _parser("calibrate")
    parser.add_argument("--out", type=Path, default=Path("profile.json"), help="default profile.json")
    parser.add_argument("--precision", choices=("bf16", "fp16", "fp32"), help="default bf16, or as --bf16, --fp16 say")
    from tools.planning.calibrate import CalibrationError, add_arguments
    from tools.planning.calibrate import calibrate as measure

    add_arguments(parser)
    args, words = parser.parse_known_args(argv)
    if args.ranks < 1 or not 0 < args.seconds < 3600:
        raise Wrong(f"ranks={args.ranks} is at least 1, and seconds={args.seconds:g} more than 0; correct them")
    _writable(out=args.out)
    place = {"cluster": None, "device": "cpu", "num_gpus": args.ranks, "gpus_per_node": args.ranks}
    request, _ = _read(argparse.Namespace(**place, hf=None, profile=None, precision=args.precision), words)
    try:
        measure(request.config, request.vocab_size, args.ranks, args.seconds).save(args.out)
    except (CalibrationError, OSError) as error:
        raise Wrong(f"not calibrated: {error}") from None
    print(f"{args.out}: give it with --profile {args.out}")
    return 0


def published(argv: list[str]) -> int:
    _parser("published").parse_args(argv)
    from tools.planning.published import table

    head, *rows = table()
    print(columns([(head[0], *head[2:5]), *((row[0], *row[2:5]) for row in rows)]))
    print("\nsources: " + "; ".join(dict.fromkeys(row[1] for row in rows)))
    for row in rows:
        if row[5]:
            print(f"{row[0]}: {row[5]}")
    return 0


def compare(argv: list[str]) -> int:
    from tools.planning.compare import main as compared

    return compared(argv)


COMMANDS = {
    "compare": compare,
    "--compare": compare,
    "memory": memory,
    "sizes": sizes,
    "tokens": tokens,
    "calibrate": calibrate,
    "published": published,
}


def main(argv: list[str]) -> int:
    what, rest = (COMMANDS[argv[0]], argv[1:]) if argv and argv[0] in COMMANDS else (plan, argv)
    try:
        return what(rest)
    except Wrong as error:
        print("\n".join(f"plan.py: {line}" for line in str(error).splitlines()), file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("plan.py: interrupted", file=sys.stderr)
        return 130


if __name__ == "__main__":
    from megalite.config.console import as_command

    sys.exit(as_command(lambda: main(sys.argv[1:])))
