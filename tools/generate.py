#!/usr/bin/env python
"""Continue prompts with the newest checkpoint of a run, written under any layout, or with a Hugging Face model.

    python tools/generate.py --load runs/quickstart --prompt 'def main(' --max-new-tokens 60
    python tools/generate.py --load models/Qwen3-8B --prompts-file prompts.txt --temperature 0 --json
    python tools/generate.py --load runs/large --nproc 4 --tensor-model-parallel-size 2 \\
        --pipeline-model-parallel-size 2 --prompt 'Once'                   or the same under torchrun, without --nproc

Without --json, each text is printed after [step N], with its prompt. With --json, each line is an object with number,
prompt, text (without the prompt), ids, new_ids, stop ("eod" or "length") and step.
"""

import argparse
import datetime
import json
import os
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from megalite.common.console import escape_control_chars, print_err
from megalite.common.exit_codes import ExitCode
from megalite.common.exits import exit_now
from megalite.common.text_file import TextFileError, read_small_text
from megalite.launch.local_launcher import launch_local
from megalite.launch.process_group import exit_process, process_group
from megalite.launch.rank_info import LaunchError, RankInfo, nproc_error, read_environment
from tools.cli_common import PluginAction, make_parser, number_in_range, positive_int

TIMEOUT = datetime.timedelta(minutes=10)  # for other ranks


def add_rank_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of how the ranks that share a model compute it, which `flag_conflicts` checks."""
    parser.add_argument(
        "--dtype", choices=["float32", "bfloat16"], default="float32", help="dtype of weights and arithmetic"
    )
    parser.add_argument(
        "--device", choices=["auto", "cpu", "cuda"], default="auto", help="auto: cuda if it is available"
    )
    parser.add_argument("--nproc", type=positive_int, help="local processes to start, without a launcher")
    parser.add_argument("--plugin", action=PluginAction)
    parser.add_argument("--tensor-model-parallel-size", type=positive_int, default=1, metavar="TP")
    parser.add_argument("--pipeline-model-parallel-size", type=positive_int, default=1, metavar="PP")


def flag_conflicts(args: argparse.Namespace, world_size: int) -> str | None:
    """Return a message if the layout does not fit the number of ranks, otherwise None."""
    tp, pp = args.tensor_model_parallel_size, args.pipeline_model_parallel_size
    if tp * pp != world_size:
        processes = "1 process" if world_size == 1 else f"{world_size} processes"
        return f"{processes} for tp {tp} x pp {pp} = {tp * pp}; start as many (--nproc {tp * pp})"
    return None


def read_prompts(prompt_args: list[str], path: Path | None) -> list[str]:
    """Return the prompts of the command line and then of the file, or [""] if there are none. Raises ValueError."""
    prompts = list(prompt_args)
    if path is not None:
        try:
            lines = read_small_text(path, "a text file").splitlines()
        except TextFileError as error:
            raise ValueError(f"--prompts-file {error}") from None
        for line_number, line in enumerate(lines, 1):
            if path.suffix != ".jsonl":
                prompts.append(line)
                continue
            try:
                value = json.loads(line)
            except (ValueError, RecursionError) as error:
                raise ValueError(
                    f"{path}, line {line_number}: not JSON ({error}); write a string on each line"
                ) from None
            value = value.get("text") if isinstance(value, dict) else value
            if not isinstance(value, str):
                raise ValueError(f"{path}, line {line_number}: neither a string nor an object with a text; write one")
            prompts.append(value)
        if not prompts:
            raise ValueError(f"--prompts-file {path} is empty; write a prompt on each line")
    return prompts or [""]


def run(ranks: RankInfo, args: argparse.Namespace, prompts: list[str]) -> None:
    """Generate on one rank. Exits with code 3 if the checkpoint or the device cannot be used."""
    from megalite.checkpoint.storage.location import CheckpointError, OtherRankError
    from megalite.data.errors import DataError
    from megalite.training.job.preflight import choose_device
    from megalite.training.setup import SetupError

    try:
        device = choose_device(args.device)
        with process_group(ranks, device=device, startup_timeout=TIMEOUT) as rank_device:
            generate(args, prompts, rank_device, is_printing_rank=ranks.rank == 0)
    except (SetupError, DataError, LaunchError) as error:
        if ranks.local_rank == getattr(error, "local_rank", 0):  # one line, since every rank has the same error
            print_err(f"generate.py: {error}")
        sys.exit(3)
    except CheckpointError as error:
        if not isinstance(error, OtherRankError):
            print_err(f"generate.py: {error}")
        sys.exit(3)


def generate(args: argparse.Namespace, prompts: list[str], device: Any, is_printing_rank: bool) -> None:
    """Load the model, and print the continuations on the printing rank. Collective over the world."""
    import torch

    from megalite.generate.generation import Sampling, generate_batches, load_model
    from megalite.parallel.mesh import build_mesh

    tp, pp = args.tensor_model_parallel_size, args.pipeline_model_parallel_size
    mesh = build_mesh(tp=tp, pp=pp, device=device, timeout=TIMEOUT)
    model = load_model(args.load, mesh, getattr(torch, args.dtype))
    sampling = Sampling(args.temperature, args.top_k, args.top_p, args.seed)
    texts = generate_batches(model, prompts, args.max_new_tokens, sampling, args.batch_size)
    for index, text in enumerate(texts):  # collective, so every rank iterates
        if not is_printing_rank:
            continue
        new_ids = text.ids[text.prompt_length :]
        row = {
            "number": index,
            "prompt": prompts[index],
            "text": model.tokenizer.decode(new_ids),
            "ids": text.ids,
            "new_ids": new_ids,
            "stop": text.finish_reason,
            "step": model.step,
        }
        print(format_completion(row, model.tokenizer.decode(text.ids), args.json), flush=True)


def format_completion(row: dict[str, Any], full_text: str, as_json: bool) -> str:
    """Return a line of JSON, or the text with its prompt. A model may have learned control characters."""
    return json.dumps(row) if as_json else f"[step {row['step']}] {escape_control_chars(full_text)}"


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of this program's flags."""
    parser = make_parser(__doc__)
    parser.add_argument("--load", required=True, metavar="DIR", help="directory of checkpoints, or Hugging Face model")
    parser.add_argument("--prompt", action="append", default=[], help="text to continue; may be given several times")
    parser.add_argument(
        "--prompts-file", type=Path, help="one prompt per line; .jsonl: strings, or objects with the key text"
    )
    parser.add_argument(
        "--max-new-tokens", type=positive_int, default=60, help="maximum number of new tokens per prompt (default 60)"
    )
    parser.add_argument(
        "--temperature",
        type=number_in_range(float, "[0, inf)"),
        default=0.8,
        help="0: always the most likely token (default 0.8)",
    )
    parser.add_argument(
        "--top-k",
        type=number_in_range(int, "[0, inf)"),
        default=40,
        help="sample from the K most likely tokens; 0: all (default 40)",
    )
    parser.add_argument(
        "--top-p",
        type=number_in_range(float, "(0, 1]"),
        default=1.0,
        help="sample from the smallest set of tokens with this total probability (default 1)",
    )
    parser.add_argument(
        "--seed", type=number_in_range(int, "[0, inf)"), default=1234, help="random seed for sampling (default 1234)"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object per prompt, one per line")
    parser.add_argument("--batch-size", type=positive_int, default=16, help="prompts per batch (default 16)")
    add_rank_flags(parser)
    return parser


def main(argv: list[str]) -> int:
    """Run the program and return its exit code."""
    parser = build_parser()
    args = parser.parse_args(argv)
    try:
        ranks = read_environment(os.environ)
        prompts = read_prompts(args.prompt, args.prompts_file)
    except (LaunchError, ValueError) as error:
        parser.error(str(error))
    nproc = args.nproc or 1
    problem = nproc_error(ranks, args.nproc) or flag_conflicts(args, nproc if ranks is None else ranks.world_size)
    if problem is not None:
        parser.error(problem)
    if ranks is None and nproc > 1:
        return launch_local(nproc, run, (args, prompts))
    run(ranks or RankInfo(), args, prompts)
    return 0


if __name__ == "__main__":
    try:
        exit_process(lambda: main(sys.argv[1:]))
    except KeyboardInterrupt:
        exit_now(ExitCode.INTERRUPTED)
