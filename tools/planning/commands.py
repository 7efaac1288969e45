"""The commands of tools/plan.py, which run once the flags are parsed."""

import argparse
import contextlib
import gc
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from megalite.common.console import ProgressBar, print_err
from megalite.common.text_file import TextFileError
from megalite.config import cli
from megalite.config.config_file import dump_config
from megalite.config.options import ConfigError, replace_options
from megalite.config.problems import options_set, shown
from megalite.models.families import PRESETS
from megalite.planning import comm_time
from megalite.planning.cluster import DeviceProfile, read_profile
from megalite.planning.layer_kinds import flops_per_token
from megalite.planning.memory import USABLE_MEMORY, rank_memory
from megalite.planning.run_plan import RunPlan
from megalite.training.logging.log_format import aligned_table
from megalite.training.logging.plan_summary import stage_rows
from tools.cli_common import find_unwritable, write_json
from tools.planning import format_plan, overlap, published_runs, recommend, token_budget, wizard
from tools.planning.calibrate import CalibrationError, calibrate
from tools.planning.plan_request import Request, plan_problems, read_request
from tools.planning.search import MAX_SIMULATED, Layout, SearchResult, apply_layout, layout_of, plan_for, search
from tools.planning.token_budget import TokenBudget, chinchilla_tokens, parse_quantity
from tools.plots.overlap import picture as overlap_picture
from tools.plots.plan import picture
from tools.plots.style import Picture, save


def run(command: str, args: argparse.Namespace, argv: list[str]) -> int:
    """Run a command and return the exit code.

    Args:
        args: The planner's own flags.
        argv: The remaining flags, which are the trainer's.

    Raises:
        ConfigError: with all problems.
    """
    commands = {
        "": run_plan,
        "memory": run_memory,
        "overlap": run_overlap,
        "sizes": run_sizes,
        "tokens": run_tokens,
        "calibrate": run_calibrate,
        "published": run_published,
    }
    return commands[command](args, argv)


def run_plan(args: argparse.Namespace, argv: list[str]) -> int:
    """Search for layouts, and print them with everything that follows from the best one."""
    _check_writable(["out"], json=args.json, out=args.out)
    if args.ask:
        argv = [*wizard.ask_all(args), *argv]
    request, profile = _read(args, argv)
    train = request.config.train
    if not request.is_single_layout and train.global_batch_size is None and train.step_batch_size_schedule is None:
        problem = "global_batch_size is not set, and layouts are compared at one batch size; give --global-batch-size"
        raise ConfigError([problem])
    budget, data_tokens = _budget(args, request)
    request, result = _search(args, request, profile)
    if not result.plans:
        reasons = "\n".join([*format_plan.refusal_lines(result), *recommend.what_would_fit(result)])
        print_err(f"plan.py: none of {result.num_candidates:,} layouts can be built and fits; refused:\n{reasons}")
        return 2
    best = result.choices()[0].best
    _print_plan(args, request, result, budget, data_tokens)
    if args.ask:
        _print_section("why this one", wizard.explain_choice(args, result, budget, request.cluster.device))
        if args.toml is not None:
            flags = format_plan.run_argv(request, best.layout, _steps(budget, best.plan))
            args.toml.write_text(dump_config(cli.read(flags, PRESETS)[0]), "utf-8")
            print(f"\n{args.toml}: give it with --config, and the data with --data-path")
    if args.json is not None or args.out is not None:
        data = _plan_as_json(args, request, result, budget)
        _write_files(args, data, lambda: picture(data))
    return 0 if best.peak <= result.limit else 1


def run_memory(args: argparse.Namespace, argv: list[str]) -> int:
    """Print the memory of one layout."""
    request, _ = _read(args, argv)
    layout = layout_of(request.config)
    if problems := plan_problems(apply_layout(layout, request.config), request.cluster.world):
        raise ConfigError(problems)
    plan = plan_for(layout, request)
    memory = rank_memory(plan)
    print(f"{layout}, dp {plan.shape.dp}, {plan.shape.num_microbatches} micro-batches")
    print(aligned_table(format_plan.memory_rows(memory, plan)))
    if plan.shape.dp > 1:
        print(aligned_table(stage_rows(plan)))
    device = request.cluster.device
    print(f"a {device.name} has {device.memory_bytes / 2**30:.1f} GiB, less what CUDA and NCCL take")
    return 0 if max(rank.peak for rank in memory) <= device.memory_bytes else 1


def run_overlap(args: argparse.Namespace, argv: list[str]) -> int:
    """Print the exposed communication of one layout by batch."""
    _check_writable(["out"], json=args.json, out=args.out)
    request, profile = _read(args, argv)
    batch_options = ("global_batch_size", "step_batch_size_schedule", "rampup_batch_size")
    for name in options_set(request.config, *batch_options):
        print_err(f"note: {shown(request.config, name)} is replaced by the batches that are compared")
        request = replace(request, config=replace_options(request.config, **{name: None}))
    limit = int(USABLE_MEMORY * request.cluster.device.memory_bytes)
    micro_batch = request.config.train.micro_batch_size
    layout = str(layout_of(request.config)).replace(f" mb {micro_batch}", "")
    print(f"exposed communication as a share of a step: {layout}")
    curves = dict[str, list[overlap.BatchPoint]]()
    for name, points in (
        ("larger micro-batches, one for each pipeline rank", overlap.by_micro_batch(request, profile)),
        (f"more micro-batches of {micro_batch} in a step", overlap.by_number(request, profile)),
    ):
        curves[name] = [*points]
        print(f"\n{name}:\n{aligned_table(overlap.overlap_rows(curves[name], limit))}")
    as_json = {name: [asdict(point) | {"fits": point.peak <= limit} for point in curves[name]] for name in curves}
    data = {"layout": layout, "usable_memory": limit, "curves": as_json}
    title = f"{layout} on {request.cluster.world:,} x {request.cluster.device.name}"
    _write_files(args, data, lambda: overlap_picture(title, as_json))
    return 0


def run_sizes(args: argparse.Namespace, _: list[str]) -> int:
    """Print the bytes of model state by ZeRO stage and by model size."""
    try:
        parameters = parse_quantity(args.parameters)
    except ValueError:
        raise ConfigError([f"parameters={args.parameters} is not a size; write it as 7B"]) from None
    print(f"GB of state on each of {args.dp} devices, {parameters:,} parameters, AdamW:")
    print(aligned_table(token_budget.zero_rows(parameters, args.dp)))
    for dtype in (torch.float32, torch.bfloat16):
        print(f"\nGB of state on one device, {str(dtype).removeprefix('torch.')}:")
        print(aligned_table(token_budget.size_rows(dtype)))
    return 0


def run_tokens(args: argparse.Namespace, argv: list[str]) -> int:
    """Print the length and cost of a run at an assumed MFU."""
    request, _ = _read(args, argv)
    budget, data_tokens = _budget(args, request)
    cluster, plan = request.cluster, plan_for(Layout(), request)
    flops = args.mfu * cluster.device.peak_tflops(plan.shape.dtype) * 1e12 * cluster.world
    speed = flops / budget.flops_per_token
    lines = format_plan.budget_lines(budget, plan, speed, cluster, args.price_per_gpu_hour, data_tokens)
    print("\n".join(lines))
    print(f"at an assumed MFU of {args.mfu:.0%} on {cluster.world:,} x {cluster.device.name}; a plan predicts it")
    return 0


def run_calibrate(args: argparse.Namespace, argv: list[str]) -> int:
    """Measure this device and write its profile."""
    _check_writable([], out=args.out)
    local_flags = argparse.Namespace(
        cluster=None,
        device="cpu",
        num_gpus=args.ranks,
        gpus_per_node=args.ranks,
        hf=None,
        profile=None,
        precision=args.precision,
    )
    request, _ = _read(local_flags, argv)
    try:
        calibrate(request.config, request.vocab_size, args.ranks, args.seconds).save(args.out)
    except (CalibrationError, OSError) as error:
        raise ConfigError([f"not calibrated: {error}"]) from None
    print(f"{args.out}: give it with --profile {args.out}")
    return 0


def run_published(_: argparse.Namespace, __: list[str]) -> int:
    """Print published step times with their predictions."""
    header, *rows = published_runs.table()
    print(aligned_table([(row[0], *row[2:5]) for row in (header, *rows)]))
    print("\nsources: " + "; ".join(dict.fromkeys(row[1] for row in rows)))
    for row in rows:
        if row[5]:
            print(f"{row[0]}: {row[5]}")
    return 0


def _read(args: argparse.Namespace, argv: list[str]) -> tuple[Request, DeviceProfile | None]:
    """Return the request and the profile of --profile. Raises ConfigError with all problems."""
    problems: list[str] = []
    profile = None
    try:
        profile = read_profile(args.profile) if args.profile is not None else None
    except TextFileError as error:
        problems.append(f"profile={args.profile} {error.reason}; make one with tools/plan.py calibrate")
    except ValueError as error:
        problems.append(str(error))
    try:
        request = read_request(args, argv)
    except ConfigError as error:
        raise ConfigError([*problems, *error.problems]) from None
    device, precision = request.cluster.device, request.config.precision
    dtype = torch.bfloat16 if precision.bf16 else torch.float16 if precision.fp16 else torch.float32
    try:
        device.peak_tflops(dtype)
    except ValueError as error:
        problems.append(str(error))
    if profile is not None and profile.device not in ("", device.name):
        problems.append(f"profile={args.profile} was measured on {profile.device}, not on {device.name}; give another")
    if problems:
        raise ConfigError(problems)
    return request, profile


def _budget(args: argparse.Namespace, request: Request) -> tuple[TokenBudget, int | None]:
    """Return the budget, and the tokens of the data if they are known."""
    quantities: dict[str, int | None] = {"tokens": None, "data_tokens": None}
    problems = []
    for name in quantities:
        try:
            if getattr(args, name) is not None:
                quantities[name] = parse_quantity(getattr(args, name))
        except ValueError as error:
            problems.append(f"{name}={error}")
    if args.price_per_gpu_hour is not None and not 0 <= args.price_per_gpu_hour < float("inf"):
        problems.append(f"price_per_gpu_hour={args.price_per_gpu_hour} is not a price; give dollars, 0 or more")
    if problems:
        raise ConfigError(problems)
    model = request.config.model
    plan = plan_for(layout_of(request.config) if request.is_single_layout else Layout(), request)
    samples = request.config.train.train_samples
    if not samples and "train_iters" not in request.placeholders:
        samples = plan.shape.total_samples
    tokens = (
        quantities["tokens"]
        or (samples or 0) * model.seq_length
        or chinchilla_tokens(plan.model_states.num_active_parameters)
    )
    flops = flops_per_token(model, plan.shape.padded_vocab)
    return TokenBudget(plan.model_states.num_active_parameters, tokens, flops), quantities["data_tokens"]


def _search(args: argparse.Namespace, request: Request, profile: DeviceProfile | None) -> tuple[Request, SearchResult]:
    """Return the result of a search and its request, which offloads the optimizer if nothing fits without it."""
    with contextlib.ExitStack() as stack, ProgressBar("layouts", MAX_SIMULATED, "simulated") as bar:
        gc.disable()  # it would traverse the millions of live objects of a search many times, to free 12 MB of 456
        stack.callback(gc.enable)

        def search_layouts(request: Request) -> SearchResult:
            return search(
                request,
                profile,
                min_rows=args.top,
                usable_memory=args.usable_memory,
                on_progress=lambda num_simulated, best_s: bar.update(num_simulated, f"best {best_s:.3f} s"),
            )

        result = search_layouts(request)
        may_offload = not (
            request.is_single_layout or "optimizer_cpu_offload" in request.fixed or request.cluster.device.name == "cpu"
        )
        if not result.plans and may_offload:
            with_offload = replace(request, config=replace_options(request.config, optimizer_cpu_offload=True))
            offload_result = search_layouts(with_offload)
            if offload_result.plans:
                print("Nothing fits without --optimizer-cpu-offload; with it:\n")
                return with_offload, offload_result
    return request, result


def _check_writable(images: Iterable[str], **paths: Path | None) -> None:
    if problems := list(find_unwritable(images=tuple(images), **paths)):
        raise ConfigError(problems)


def _print_plan(
    args: argparse.Namespace, request: Request, result: SearchResult, budget: TokenBudget, data_tokens: int | None
) -> None:
    choices, cluster = result.choices()[: args.top], request.cluster
    best = choices[0].best
    plan = best.plan
    batch = plan.shape.batch_sizes.final * request.config.model.seq_length
    dtype = str(plan.shape.dtype).removeprefix("torch.")
    nodes = f"{cluster.num_nodes:,} node{'s' if cluster.num_nodes > 1 else ''} of {cluster.devices_per_node}"
    print(f"{cluster.world:,} x {cluster.device.name} ({nodes}), {dtype}, batch of {batch:,} tokens")
    _print_section("sizing by hand", recommend.decision_path(request, result))
    print("\n".join(["", format_plan.layout_table(choices), *format_plan.summary_lines(result, len(choices))]))
    _print_section("refused", format_plan.refusal_lines(result))
    fits = "fits" if best.peak <= result.limit else "does not fit"
    title = "as given" if request.is_single_layout else "the best"
    print(f"\n{title}: {best.layout}: {fits} into {result.limit / 2**30:.1f} GiB")
    print(aligned_table(format_plan.memory_rows(best.memory, plan)))
    if plan.shape.dp > 1:
        print(aligned_table(stage_rows(plan)))
    _print_section("", recommend.bottleneck(best, cluster.devices_per_node))
    _print_section("warnings", recommend.warnings(request, best, result.limit, budget, data_tokens))
    price, speed = args.price_per_gpu_hour, best.time.tokens_per_s
    lines = format_plan.budget_lines(budget, plan, speed, cluster, price, data_tokens, is_predicted=True)
    _print_section("the whole run", lines)
    if cluster.world > 1:
        link_rows = comm_time.link_table(cluster)[: 1 + min(cluster.num_nodes, 2)]
        explanation = [line for paragraph in comm_time.explain(cluster) for line in format_plan.wrap(paragraph)]
        _print_section("links", [*aligned_table(link_rows).splitlines(), *explanation])
    _print_section("NCCL", recommend.nccl_variables(request))
    print(f"\n{format_plan.launch_script(request, best.layout, _steps(budget, plan))}")
    if "lr" in request.placeholders or "--mock-data" in request.argv:
        print("(--lr and the data are placeholders where you gave none)")


def _steps(budget: TokenBudget, plan: RunPlan) -> int:
    return budget.steps(plan.shape.batch_sizes, plan.config.model.seq_length)


def _print_section(title: str, lines: Iterable[str]) -> None:
    """Print wrapped, indented lines below a title; nothing if there are none."""
    wrapped = [f"  {part}" for line in lines for part in format_plan.wrap(line, "    ")]
    if not wrapped:
        return
    if title:
        wrapped.insert(0, f"{title}:")
    print("\n" + "\n".join(wrapped))


def _plan_as_json(
    args: argparse.Namespace, request: Request, result: SearchResult, budget: TokenBudget
) -> dict[str, Any]:
    """Return the plan as JSON."""
    cluster, choices = request.cluster, result.choices()[: args.top]
    best = choices[0].best
    plans = []
    for choice in choices:
        plans.append({**format_plan.as_json(choice.best), "fastest": format_plan.as_json(choice.fastest)})
    return {
        "cluster": {"device": cluster.device.name, "nodes": cluster.num_nodes, "per_node": cluster.devices_per_node},
        "device_memory": cluster.device.memory_bytes,
        "usable_memory": result.limit,
        "parameters": best.plan.model_states.num_parameters,
        "active_parameters": budget.active,
        "tokens": budget.tokens,
        "plans": plans,
        "refused": [[count, result.examples[kind]] for kind, count in result.refused.most_common()],
        "command": format_plan.run_argv(request, best.layout, _steps(budget, best.plan)),
    }


def _write_files(args: argparse.Namespace, data: Mapping[str, Any], draw: Callable[[], Picture]) -> None:
    """Write the data to the file of --json, and the picture to that of --out."""
    try:
        if args.json is not None:
            write_json(args.json, data)
        if args.out is not None:
            save(draw(), args.out)
    except (OSError, ValueError) as error:
        raise ConfigError([f"the plan cannot be written: {error}"]) from None
