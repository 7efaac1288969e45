#!/usr/bin/env python
"""Evaluate a model with lm-evaluation-harness, or write the questions of its tasks to a file for --eval-requests.

    python tools/evaluate.py --load runs/quickstart --tasks hellaswag,arc_easy --output results.json
    python tools/evaluate.py --load runs/large --nproc 4 --tensor-model-parallel-size 2 \\
        --pipeline-model-parallel-size 2 --tasks hellaswag         or the same under torchrun, without --nproc
    python tools/evaluate.py --write-requests requests.jsonl --tasks hellaswag,arc_easy --limit 500

It needs the package lm-eval, and the data sets of the tasks on this machine (or --download). --output has the results
as JSON, in lm-evaluation-harness's format. A task may name Python code, which it runs: give --include-path only
directories that you trust.
"""

import argparse
import datetime
import importlib.util
import math
import os
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from megalite.common.console import print_err
from megalite.common.exit_codes import ExitCode
from megalite.common.exits import exit_now, run_cli
from megalite.common.optional_packages import MissingPackageError, missing_package_message
from megalite.launch.local_launcher import launch_local
from megalite.launch.process_group import exit_process, process_group
from megalite.launch.rank_info import LaunchError, RankInfo, nproc_error, read_environment
from tools.cli_common import find_unwritable, local_path, make_parser, number_in_range, positive_int, write_json
from tools.generate import add_rank_flags, flag_conflicts

START_TIMEOUT = datetime.timedelta(minutes=10)  # for other ranks
# for rank 0, which prepares the tasks; a launcher notices dead ranks earlier
TIMEOUT = datetime.timedelta(hours=12)
RESULT_KEYS = ("results", "groups", "group_subtasks", "versions", "n-shot", "n-samples", "higher_is_better")


def run(ranks: RankInfo, args: argparse.Namespace) -> None:
    """Evaluate on one rank. Exits with code 3 if the model, the device or the tasks cannot be used."""
    from megalite.checkpoint.storage.location import CheckpointError, OtherRankError
    from megalite.data.errors import DataError
    from megalite.training.job.preflight import choose_device
    from megalite.training.setup import SetupError

    try:
        device = choose_device(args.device)
        with process_group(ranks, device=device, startup_timeout=START_TIMEOUT) as rank_device:
            evaluate(args, rank_device, is_first=ranks.rank == 0)
    except (SetupError, DataError, LaunchError) as error:
        if ranks.local_rank == getattr(error, "local_rank", 0):  # one line, since every rank has the same error
            print_err(f"evaluate.py: {error}")
        sys.exit(3)
    except CheckpointError as error:
        if not isinstance(error, OtherRankError):
            print_err(f"evaluate.py: {error}")
        sys.exit(3)


class TasksError(Exception):
    """The tasks cannot be used; `code` is the exit code."""

    def __init__(self, message: str, code: ExitCode = ExitCode.PREFLIGHT):
        super().__init__(message)
        self.code = code


def evaluate(args: argparse.Namespace, device: Any, is_first: bool) -> None:
    """Load the tasks and the model, and evaluate it on rank 0, for which the others work. Collective over the world."""
    import torch

    from megalite.generate.generation import load_model
    from megalite.generate.model_ranks import ModelRanks
    from megalite.parallel.comm import broadcast_int
    from megalite.parallel.mesh import build_mesh

    tp, pp = args.tensor_model_parallel_size, args.pipeline_model_parallel_size
    mesh = build_mesh(tp=tp, pp=pp, device=device, timeout=TIMEOUT)
    tasks = None
    code = ExitCode.DONE
    if is_first:
        try:
            tasks = load_tasks(args)
        except TasksError as error:
            print_err(f"evaluate.py: {error}")
            code = error.code
    if code := broadcast_int(code, mesh):
        sys.exit(code)
    ranks = ModelRanks(load_model(args.load, mesh, getattr(torch, args.dtype)))
    if not is_first:
        ranks.serve()
        return
    try:
        report_results(args, tasks, ranks)
    except TasksError as error:
        print_err(f"evaluate.py: {error}")
        sys.exit(error.code)
    finally:
        ranks.close()


def load_tasks(args: argparse.Namespace) -> Any:
    """Return the tasks of lm-evaluation-harness, with those of --tasks loaded. Raises TasksError."""
    if not args.download:
        for name in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE"):
            os.environ[name] = "1"  # read when the libraries are imported
    from tools.evaluation.harness_tasks import HarnessError, HarnessTasks

    tasks = HarnessTasks(args.include_path)
    if unknown := tasks.find_unknown(args.tasks):
        raise TasksError(
            f"tasks={unknown[0]} is not a task of lm-evaluation-harness; `lm_eval ls tasks` lists them, and "
            "--include-path DIR adds those in a directory of your own",
            ExitCode.USAGE,
        )
    try:
        tasks.load(args.tasks)
    except HarnessError as error:
        raise TasksError(str(error)) from error
    return tasks


def report_results(args: argparse.Namespace, tasks: Any, ranks: Any) -> None:
    """Evaluate the model, print a table, and write --output. Raises TasksError."""
    import lm_eval
    from lm_eval.utils import make_table

    from tools.evaluation.harness_model import HarnessModel
    from tools.evaluation.harness_tasks import HarnessError

    simple_evaluate: Any = lm_eval.simple_evaluate
    try:
        results = simple_evaluate(
            HarnessModel(ranks, args.batch_size),
            tasks=args.tasks,
            task_manager=tasks,
            num_fewshot=args.num_fewshot,
            limit=args.limit,
            log_samples=False,
        )
    except HarnessError as error:
        raise TasksError(str(error)) from error
    if args.output is not None:
        facts = {"load": str(args.load), "step": ranks.model.step, "dtype": args.dtype}
        content = {key: results[key] for key in RESULT_KEYS if key in results}
        write_json(args.output, _finite({"model": facts, **content}))
    print(make_table(results))
    if results.get("groups"):
        print(make_table(results, "groups"))


def _finite(value: Any) -> Any:
    """Return a value for JSON, in which numbers that are not finite are null, and unknown objects are texts."""
    if isinstance(value, dict):
        return {str(key): _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    if isinstance(value, bool | int | str) or value is None:
        return value
    try:
        number = float(value)
    except (TypeError, ValueError):
        return str(value)
    return number if math.isfinite(number) else None


def write_requests(args: argparse.Namespace) -> int:
    """Write the questions of the tasks to a file, and return the exit code."""
    try:
        tasks = load_tasks(args)
        from tools.evaluation import harness_tasks

        options = {"num_fewshot": args.num_fewshot, "limit": args.limit}
        try:
            count = harness_tasks.write_requests(args.write_requests, tasks, args.tasks, **options)
        except harness_tasks.HarnessError as error:
            raise TasksError(str(error)) from error
    except TasksError as error:
        print_err(f"evaluate.py: {error}")
        return error.code
    print(f"wrote {count:,} questions to {args.write_requests}; train with --eval-requests {args.write_requests}")
    return ExitCode.DONE


def names(text: str) -> list[str]:
    """Return the names in a text with commas, as a type of argparse."""
    result = [name.strip() for name in text.split(",")]
    if not all(result):
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of names as in hellaswag,arc_easy")
    return list(dict.fromkeys(result))


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of this program's flags."""
    parser = make_parser(__doc__)
    action = parser.add_mutually_exclusive_group(required=True)
    action.add_argument("--load", metavar="DIR", help="directory of checkpoints, or Hugging Face model, to evaluate")
    action.add_argument(
        "--write-requests", metavar="FILE", type=local_path, help="write the questions, and evaluate no model"
    )
    parser.add_argument("--tasks", required=True, type=names, help="tasks, groups and tags, separated by commas")
    parser.add_argument("--include-path", metavar="DIR", type=local_path, help="directory of more tasks, as YAML files")
    parser.add_argument(
        "--num-fewshot",
        metavar="N",
        type=number_in_range(int, "[0, inf)"),
        help="examples in each context; default: the task's",
    )
    parser.add_argument("--limit", metavar="N", type=positive_int, help="first questions of each task; default: all")
    parser.add_argument("--download", action="store_true", help="let lm-eval fetch data sets that are not here")
    parser.add_argument("--output", metavar="FILE", type=local_path, help="file for the results as JSON")
    parser.add_argument("--batch-size", type=positive_int, default=16, help="texts per batch (default 16)")
    add_rank_flags(parser)
    return parser


def main(argv: list[str]) -> int:
    """Run the program and return its exit code."""
    parser = build_parser()
    args = parser.parse_args(argv)
    try:
        ranks = read_environment(os.environ)
    except LaunchError as error:
        parser.error(str(error))
    nproc = args.nproc or 1
    include_path = args.include_path
    problems = [
        nproc_error(ranks, args.nproc) or flag_conflicts(args, nproc if ranks is None else ranks.world_size),
        *find_unwritable(output=args.output, write_requests=args.write_requests),
    ]
    if include_path is not None and not include_path.is_dir():
        problems.append(f"--include-path {include_path} is not a directory; give one")
    if args.output is not None and args.load is None:
        problems.append("--output is for the results of --load; leave it out")
    if problem := next(filter(None, problems), None):
        parser.error(problem)
    if importlib.util.find_spec("lm_eval") is None:
        raise MissingPackageError(missing_package_message("megalite eval", "lm-eval"))
    if args.write_requests is not None:
        return write_requests(args)
    if ranks is None and nproc > 1:
        return launch_local(nproc, run, (args,))
    run(ranks or RankInfo(), args)
    return 0


if __name__ == "__main__":
    try:
        exit_process(lambda: run_cli(lambda: main(sys.argv[1:])))
    except KeyboardInterrupt:
        exit_now(ExitCode.INTERRUPTED)
