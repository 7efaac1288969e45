"""The commands of tools/plan.py, which run once the flags are read."""

import argparse
import contextlib
import gc
from pathlib import Path
from typing import Any

import torch

from megalite.common.console import ProgressBar, print_err
from megalite.common.text_file import TextFileError
from megalite.config import cli
from megalite.config.config_file import dump_config
from megalite.config.options import ConfigError
from megalite.models.families import PRESETS
from megalite.planning import comm_time as links
from megalite.planning.cluster import DeviceProfile, read_profile
from megalite.planning.layer_kinds import flops_per_token
from megalite.planning.memory import rank_memory as memory_of
from megalite.planning.run_plan import RunPlan
from megalite.training.logging.log_format import aligned_table
from megalite.training.logging.plan_summary import stage_rows
from tools.cli_common import find_unwritable, write_json
from tools.planning import format_plan as show
from tools.planning import published_runs as published
from tools.planning import recommend as advice
from tools.planning import token_budget as rules
from tools.planning import wizard as ask
from tools.planning.calibrate import CalibrationError
from tools.planning.calibrate import calibrate as measure
from tools.planning.plan_request import Request, problems_of, read, with_options
from tools.planning.search import MOST, Found, Layout, applied, arranged, layout_of, search
from tools.planning.token_budget import Budget, chinchilla, quantity
from tools.plots.plan import picture
from tools.plots.style import save


def run(command: str, args: argparse.Namespace, words: list[str]) -> int:
    """The exit code. `words`: what the planner's own flags leave, for the trainer's. Raises ConfigError."""
    return {"": plan, "memory": memory, "sizes": sizes, "tokens": tokens, "calibrate": calibrate,
            "published": table}[command](args, words)  # fmt: skip


def _read(args: argparse.Namespace, words: list[str]) -> tuple[Request, DeviceProfile | None]:
    problems: list[str] = []
    profile = None
    try:
        profile = read_profile(args.profile) if args.profile is not None else None
    except TextFileError as error:
        problems.append(f"profile={args.profile} {error.reason}; make one with tools/plan.py calibrate")
    except ValueError as error:
        problems.append(str(error))
    try:
        request = read(args, words)
    except ConfigError as error:
        raise ConfigError([*problems, *error.problems]) from None
    device, half = request.cluster.device, request.config.precision
    try:
        device.peak_tflops(torch.bfloat16 if half.bf16 else torch.float16 if half.fp16 else torch.float32)
    except ValueError as error:
        problems.append(str(error))
    if profile is not None and profile.device not in ("", device.name):
        problems.append(f"profile={args.profile} was measured on {profile.device}, not on {device.name}; give another")
    if problems:
        raise ConfigError(problems)
    return request, profile


def _budget(args: argparse.Namespace, request: Request) -> tuple[Budget, int | None]:
    sizes, problems = {}, []
    for name in ("tokens", "data_tokens"):
        try:
            sizes[name] = quantity(text) if (text := getattr(args, name)) is not None else None
        except ValueError as error:
            problems.append(f"{name}={error}")
    if args.price_per_gpu_hour is not None and not 0 <= args.price_per_gpu_hour < float("inf"):
        problems.append(f"price_per_gpu_hour={args.price_per_gpu_hour} is not a price; give dollars, 0 or more")
    if problems:
        raise ConfigError(problems)
    m, t = request.config.model, request.config.train
    one = arranged(layout_of(request.config) if request.is_layout else Layout(), request)
    flops = flops_per_token(m, one.padded_vocab)
    named = 0 if "train_iters" in request.left_out else one.total_samples
    tokens = sizes["tokens"] or (t.train_samples or named) * m.seq_length or chinchilla(one.num_active_parameters)
    return Budget(one.num_active_parameters, tokens, flops), sizes["data_tokens"]


def plan(args: argparse.Namespace, words: list[str]) -> int:
    share, top = args.usable_memory, args.top
    _writable("out", json=args.json, out=args.out)
    words = [*ask.answers(args), *words] if args.ask else words
    request, profile = _read(args, words)
    t = request.config.train
    if not request.is_layout and t.global_batch_size is None and t.step_batch_size_schedule is None:
        unset = "global_batch_size is not set, and layouts of one batch are compared; give --global-batch-size"
        raise ConfigError([unset])
    budget, data_tokens = _budget(args, request)
    with contextlib.ExitStack() as at_last, ProgressBar("layouts", MOST, "simulated") as bar:
        gc.disable()  # it goes through a search's millions of live objects again and again and frees 12 MB of 456
        at_last.callback(gc.enable)
        tell = lambda done, best: bar.update(done, f"best {best:.3f} s")  # noqa: E731
        found = search(request, profile, wanted=top, usable=share, tell=tell)
        stays = request.is_layout or "optimizer_cpu_offload" in request.fixed or request.cluster.device.name == "cpu"
        if not (found.plans or stays):
            leaner = request._replace(config=with_options(request.config, optimizer_cpu_offload=True))
            if (fits := search(leaner, profile, wanted=top, usable=share, tell=tell)).plans:
                request, found = leaner, fits
                print("Nothing fits without --optimizer-cpu-offload; with it:\n")
    if not found.plans:
        reasons = "\n".join([*show.refusals(found), *advice.needs(request, found)])
        print_err(f"plan.py: none of {found.candidates:,} layouts can be built and fits; refused:\n{reasons}")
        return 2
    best = found.choices()[0].best
    _tell(request, found, budget, data_tokens, args)
    if args.ask:
        _section("why this one", [*ask.conclusion(args, found, budget, request.cluster.device)])
        if args.toml is not None:
            flags = show.command_words(request, best.layout, _steps(budget, best.made))
            args.toml.write_text(dump_config(cli.read(flags, PRESETS)[0]), "utf-8")
            print(f"\n{args.toml}: give it with --config, and the data with --data-path")
    if args.json is not None or args.out is not None:
        _write(args, request, found, budget)
    return 0 if best.peak <= found.limit else 1


def _writable(*pictures: str, **paths: Path | None) -> None:
    if wrong := list(find_unwritable(images=pictures, **paths)):
        raise ConfigError(wrong)


def _tell(request: Request, found: Found, budget: Budget, data_tokens: int | None, args: argparse.Namespace) -> None:
    shown, c = found.choices()[: args.top], request.cluster
    best = shown[0].best
    batch = best.made.batch_sizes.final * request.config.model.seq_length
    dtype = str(best.made.dtype).removeprefix("torch.")
    nodes = f"{c.num_nodes:,} node{'s' if c.num_nodes > 1 else ''} of {c.devices_per_node}"
    print(f"{c.world:,} x {c.device.name} ({nodes}), {dtype}, batch of {batch:,} tokens")
    _section("the usual questions", advice.path(request, found))
    print("\n".join(["", show.ranking(shown), *show.counts(found, len(shown))]))
    _section("refused", show.refusals(found))
    fits = f": {'fits' if best.peak <= found.limit else 'does not fit'} into {found.limit / 2**30:.1f} GiB"
    print(f"\n{'as given' if request.is_layout else 'the best'}: {best.layout}{fits}")
    print(aligned_table(show.memory_rows(best.memory, best.made)))
    if best.made.dp > 1:
        print(aligned_table(stage_rows(best.made)))
    _section("", [*advice.bound(best, c.devices_per_node)])
    _section("warnings", advice.warnings(request, best, found.limit, budget, data_tokens))
    price, speed = args.price_per_gpu_hour, best.time.tokens_per_s
    _section("the whole run", show.budget_lines(budget, best.made, speed, c, price, data_tokens, predicted=True))
    if c.world > 1:
        words = [line for text in links.explain(c) for line in show.wrapped(text)]
        _section("links", [*aligned_table(links.link_table(c)[: 1 + min(c.num_nodes, 2)]).splitlines(), *words])
    _section("NCCL", advice.nccl(request))
    print(f"\n{show.command(request, best.layout, _steps(budget, best.made))}")
    if "lr" in request.left_out or "--mock-data" in request.words:
        print("(--lr and the data are placeholders where you gave none)")


def _steps(budget: Budget, made: RunPlan) -> int:
    return budget.steps(made.batch_sizes, made.config.model.seq_length)


def _section(title: str, lines: list[str]) -> None:
    if lines:
        shown = [f"  {part}" for line in lines for part in show.wrapped(line, "    ")]
        if title:
            shown.insert(0, f"{title}:")
        print("\n" + "\n".join(shown))


def _write(args: argparse.Namespace, request: Request, found: Found, budget: Budget) -> None:
    c, shown = request.cluster, found.choices()[: args.top]
    best, plans = shown[0].best, [show.as_json(one.best) | {"fastest": show.as_json(one.fastest)} for one in shown]
    data: dict[str, Any] = {"cluster": {"device": c.device.name, "nodes": c.num_nodes, "per_node": c.devices_per_node}}
    data |= {
        "device_memory": c.device.memory_bytes,
        "usable_memory": found.limit,
        "parameters": best.made.num_parameters,
    }
    data |= {"active_parameters": budget.active, "tokens": budget.tokens, "plans": plans}
    data |= {"refused": [[count, found.examples[kind]] for kind, count in found.refused.most_common()]}
    data |= {"command": show.command_words(request, best.layout, _steps(budget, best.made))}
    try:
        if args.json is not None:
            write_json(args.json, data)
        if args.out is not None:
            save(picture(data), args.out)
    except (OSError, ValueError) as error:
        raise ConfigError([f"what was planned cannot be written: {error}"]) from None


def memory(args: argparse.Namespace, words: list[str]) -> int:
    request, _ = _read(args, words)
    layout = layout_of(request.config)
    if problems := problems_of(applied(layout, request.config), request.cluster.world):
        raise ConfigError(problems)
    arrangement = arranged(layout, request)
    held = memory_of(arrangement)
    print(f"{layout}, dp {arrangement.dp}, {arrangement.num_microbatches} micro-batches")
    print(aligned_table(show.memory_rows(held, arrangement)))
    if arrangement.dp > 1:
        print(aligned_table(stage_rows(arrangement)))
    limit = request.cluster.device.memory_bytes
    print(f"a {request.cluster.device.name} has {limit / 2**30:.1f} GiB, less what CUDA and NCCL take")
    return 0 if max(one.peak for one in held) <= limit else 1


def sizes(args: argparse.Namespace, _: list[str]) -> int:
    try:
        number = quantity(args.parameters)
    except ValueError:
        raise ConfigError([f"parameters={args.parameters} is not a size; write it as 7B"]) from None
    print(f"GB of state on each of {args.dp} devices, {number:,} parameters, AdamW:")
    print(aligned_table(rules.zero_rows(number, args.dp)))
    for dtype in (torch.float32, torch.bfloat16):
        print(f"\nGB of state on one device, {str(dtype).removeprefix('torch.')}:")
        print(aligned_table(rules.size_rows(dtype)))
    return 0


def tokens(args: argparse.Namespace, words: list[str]) -> int:
    request, _ = _read(args, words)
    budget, data_tokens = _budget(args, request)
    c, one = request.cluster, arranged(Layout(), request)
    speed = args.mfu * c.device.peak_tflops(one.dtype) * 1e12 * c.world / budget.flops_per_token
    print("\n".join(show.budget_lines(budget, one, speed, c, args.price_per_gpu_hour, data_tokens)))
    print(f"at an MFU of {args.mfu:.0%} of {c.world:,} x {c.device.name}, which is assumed; a plan finds it")
    return 0


def calibrate(args: argparse.Namespace, words: list[str]) -> int:
    _writable(out=args.out)
    place = {"cluster": None, "device": "cpu", "num_gpus": args.ranks, "gpus_per_node": args.ranks}
    request, _ = _read(argparse.Namespace(**place, hf=None, profile=None, precision=args.precision), words)
    try:
        measure(request.config, request.vocab_size, args.ranks, args.seconds).save(args.out)
    except (CalibrationError, OSError) as error:
        raise ConfigError([f"not calibrated: {error}"]) from None
    print(f"{args.out}: give it with --profile {args.out}")
    return 0


def table(_: argparse.Namespace, __: list[str]) -> int:
    head, *rows = published.table()
    print(aligned_table([(head[0], *head[2:5]), *((row[0], *row[2:5]) for row in rows)]))
    print("\nsources: " + "; ".join(dict.fromkeys(row[1] for row in rows)))
    for row in rows:
        if row[5]:
            print(f"{row[0]}: {row[5]}")
    return 0
