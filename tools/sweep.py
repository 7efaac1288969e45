#!/usr/bin/env python
"""Run one TOML file with every combination of lists of values, one run after another, and print a table of the runs.

python tools/sweep.py run.toml --lr 1e-4,3e-4,1e-3 --seed 1,2    six runs, in runs/sweep-run
python tools/sweep.py run.toml --lr 1e-4,3e-4 --nproc 4          a flag with one value applies to every run

The value "default" omits the flag, "1023 0" gives it two values, and "full --recompute-method uniform" adds another
flag. Each run has a directory that is named after the values that vary, like lr=1e-4,seed=2. All combinations are
checked before the first run starts. The same command, typed again, skips finished runs and continues with the rest. If
the file or the command saves checkpoints, an unfinished run resumes from its own. Exit codes: 0 all runs are done; 1
some are not; 2 usage; 130 interrupted.
"""

import argparse
import itertools
import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from megalite.common.console import print_err
from megalite.common.exit_codes import ExitCode
from megalite.config import cli
from megalite.config.config_file import read_config_file
from megalite.config.option import MODEL, TRAINING
from megalite.config.options import Config, ConfigError, training_options
from megalite.models.families import PRESETS
from megalite.training.logging.status import read_status
from tools import diff, runs
from tools.cli_common import exits_with, local_path, make_parser, run_program

ROOT = Path(__file__).resolve().parent.parent
DEFAULT = "default"  # a value that omits the flag
RESERVED = ("--run-dir", "--name", "--load")  # flags that the sweep sets for each run


def parse_sweeps(argv: list[str]) -> dict[str, list[str]]:
    """Return flag -> its values, which are empty for a switch without a value. Raises ConfigError."""
    flags: dict[str, list[str]] = {}
    last_flag = None
    for arg in argv:
        flag, equals, value = arg.partition("=")
        if arg.startswith("--"):
            if flag in RESERVED:
                raise ConfigError([f"{flag} is given by the sweep; leave it out"])
            if flag in flags:
                raise ConfigError([f"{flag} is given twice; leave it out"])
            flags[flag] = value.split(",") if equals else []
            last_flag = flag
        elif last_flag is None or flags[last_flag]:
            raise ConfigError([f"unexpected argument {arg!r}; write a list as --lr 1e-4,3e-4"])
        else:
            flags[last_flag] = arg.split(",")
    return flags


def combinations(flags: dict[str, list[str]]) -> list[tuple[str, list[str]]]:
    """Return (name of the directory, arguments) for each run."""
    runs: list[tuple[str, list[str]]] = []
    for values in itertools.product(*(values or [""] for values in flags.values())):
        args = []
        varying = []
        for flag, value in zip(flags, values, strict=True):
            args += flag_args(flag, value)
            if len(flags[flag]) > 1:
                varying.append(f"{flag.removeprefix('--')}={value.replace('/', '_')}")
        runs.append((",".join(varying) or "only", args))
    return runs


def flag_args(flag: str, value: str) -> list[str]:
    """Return the arguments for a flag and its value, which may consist of several words or contain further flags.

    >>> flag_args("--recompute-granularity", "full --recompute-method uniform"), flag_args("--lr", "default")
    (['--recompute-granularity=full', '--recompute-method', 'uniform'], [])
    >>> flag_args("--window-size", "1023 0")
    ['--window-size', '1023', '0']
    """
    first, *rest = value.split() or [""]
    if first == DEFAULT:
        return rest
    if rest and not rest[0].startswith("--"):
        return [flag, first, *rest]
    return [f"{flag}={first}" if first else flag, *rest]


def is_finished(run_dir: Path, config: Config) -> bool:
    """Return True if the directory has a finished run with the same training options."""
    try:
        is_done = read_status(run_dir).get("outcome") == "done"
        return is_done and training_options(diff.read_config(run_dir)) == training_options(config)
    except (OSError, ValueError):
        return False


def changed_options(run_dir: Path, config: Config) -> list[str]:
    """Return the options with which the run in this directory, if there is one, was a different training."""
    if not run_dir.is_dir():
        return []
    try:
        rows = diff.differences(diff.read_config(run_dir), config)
    except ConfigError:
        return []
    return [row["option"] for row in rows if row["changes"] in (diff.CHANGES[MODEL], diff.CHANGES[TRAINING])]


def command_line(toml: Path, flags: list[str], run_dir: Path) -> tuple[list[str], Config]:
    """Return the arguments of one run, and its configuration. Raises ConfigError."""
    argv = ["--config", str(toml), *flags, "--run-dir", str(run_dir)]
    config, _ = cli.read(argv, PRESETS)
    if config.checkpoint.save is not None or config.checkpoint.save_interval is not None:
        argv += ["--save", str(run_dir), "--load", str(run_dir)]
        config, _ = cli.read(argv, PRESETS)
    return argv, config


def run_command(argv: list[str]) -> int:
    """Run the training and return its exit code, or that of an interruption after Ctrl-C.

    The run gets Ctrl-C as well, and may take time to write a checkpoint; wait for it.
    """
    interrupted = False
    with subprocess.Popen([sys.executable, str(ROOT / "pretrain_gpt.py"), *argv]) as process:
        while True:
            try:
                code = process.wait()
                return ExitCode.INTERRUPTED if interrupted else code
            except KeyboardInterrupt:
                interrupted = True


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of this program's flags."""
    parser = make_parser(__doc__)
    parser.add_argument("toml", type=Path, help="a file like --config of a run")
    parser.add_argument(
        "--runs-dir", type=local_path, help="directory for the runs; default: runs/sweep-NAME, NAME.toml being the file"
    )
    return parser


@exits_with(2, ConfigError)
def main(argv: list[str]) -> int:
    """Run the program and return its exit code."""
    args, sweep_argv = build_parser().parse_known_args(argv)
    base_dir: Path = args.runs_dir or Path("runs") / f"sweep-{args.toml.stem}"
    plan: list[tuple[Path, list[str], Config]] = []
    problems = []
    read_config_file(str(args.toml))  # report its problems once, not for each combination
    for name, flags in combinations(parse_sweeps(sweep_argv)):
        run_dir = base_dir / name
        try:
            run_argv, config = command_line(args.toml, flags, run_dir)
        except ConfigError as error:
            problems += [f"{name}: {problem}" for problem in error.problems]
        else:
            plan.append((run_dir, run_argv, config))
    if problems:
        raise ConfigError([*dict.fromkeys(problems)])
    code = ExitCode.DONE
    conflicts: dict[Path, list[str]] = {}
    for number, (run_dir, run_argv, config) in enumerate(plan, 1):
        if is_finished(run_dir, config):
            print(f"{number} of {len(plan)}: {run_dir} is done already", flush=True)
            continue
        print(f"{number} of {len(plan)}: {run_dir}", flush=True)
        options = changed_options(run_dir, config)
        run_code = run_command(run_argv)
        if run_code in (ExitCode.REQUEUE, ExitCode.INTERRUPTED):
            print_err("sweep.py: interrupted; the same command resumes it")
            code = ExitCode.INTERRUPTED
            break
        if run_code:
            code = ExitCode.CRASH
            if options:
                conflicts[run_dir] = options
    if conflicts:
        names = ", ".join(dict.fromkeys(name for options in conflicts.values() for name in options))
        problem = f"not done, and the runs there have another {names}; give another --runs-dir for a new sweep"
        print_err(f"sweep.py: {', '.join(map(str, conflicts))}: {problem}")
    rows = [runs.summarize_run(run_dir) for run_dir, _, _ in plan if (run_dir / "status.json").is_file()]
    print(runs.table(rows, base_dir))
    return code


if __name__ == "__main__":
    run_program(main)
