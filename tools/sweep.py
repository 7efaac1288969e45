#!/usr/bin/env python
"""One TOML file over lists of values: each combination is a run, one after the other, and a table ends it.

python tools/sweep.py run.toml --lr 1e-4,3e-4,1e-3 --seed 1,2          six runs, in runs/sweep-run
python tools/sweep.py run.toml --lr 1e-4,3e-4 --nproc 4 --folder out   a flag with one value is every run's

The value "default" leaves the flag out; "full --recompute-method uniform" brings another one with it.
Each run has a folder, named for what varies, as lr=1e-4,seed=2. Typed again, the same command skips what is done and
goes on with the rest, from its checkpoints where the file or the command saves some. All combinations are checked
before the first one starts. Exit codes: 0 all are done; 1 some are not; 2 usage; 130 interrupted.
"""

import argparse
import itertools
import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from megalite.common.console import print_err
from megalite.config import cli
from megalite.config.config_file import read_config_file
from megalite.config.option import MODEL, TRAINING
from megalite.config.options import Config, ConfigError, training_options
from megalite.models.families import PRESETS
from megalite.training.logging.status import read_status
from tools import diff, runs
from tools.cli_common import exits_with, local_path, make_parser, run_program

ROOT = Path(__file__).resolve().parent.parent
DEFAULT = "default"  # a value: the flag is left out
OWN = ("--run-dir", "--name", "--load")  # which each run has for itself


def lists_of(words: list[str]) -> dict[str, list[str]]:
    """Flag -> its values, none of a switch alone. Raises ConfigError."""
    flags: dict[str, list[str]] = {}
    for word in words:
        flag, equals, value = word.partition("=")
        if word.startswith("--"):
            if flag in flags or flag in OWN:
                why = "is given by the sweep" if flag in OWN else "is given twice"
                raise ConfigError([f"{flag} {why}; leave it out"])
            flags[flag] = value.split(",") if equals else []
        elif not flags or next(reversed(flags.values())):
            raise ConfigError([f"unexpected word {word!r}; write a list as --lr 1e-4,3e-4"])
        else:
            flags[next(reversed(flags))] = word.split(",")
    return flags


def combinations(flags: dict[str, list[str]]) -> list[tuple[str, list[str]]]:
    """(the folder's name, flags) of each run."""
    runs: list[tuple[str, list[str]]] = []
    for values in itertools.product(*(given or [""] for given in flags.values())):
        pairs = list(zip(flags, values, strict=True))
        name = ",".join(f"{flag[2:]}={value.replace('/', '_')}" for flag, value in pairs if len(flags[flag]) > 1)
        runs.append((name or "only", [word for flag, value in pairs for word in words_of(flag, value)]))
    return runs


def words_of(flag: str, value: str) -> list[str]:
    """
    >>> words_of("--recompute-granularity", "full --recompute-method uniform"), words_of("--lr", "default")
    (['--recompute-granularity=full', '--recompute-method', 'uniform'], [])
    """
    first, *rest = value.split() or [""]
    if first == DEFAULT:
        return rest
    return [f"{flag}={first}" if first else flag, *rest]


def finished(folder: Path, config: Config) -> bool:
    """Whether this same training is done there."""
    try:
        done = read_status(folder).get("outcome") == "done"
        return done and training_options(diff.config_of(folder)) == training_options(config)
    except (OSError, ValueError):
        return False


def changed(folder: Path, config: Config) -> list[str]:
    """Options that make another training of it than the one there, if there is one."""
    try:
        rows = diff.differences(diff.config_of(folder), config) if folder.is_dir() else []
    except ConfigError:
        return []
    return [row["option"] for row in rows if row["changes"] in (diff.CHANGES[MODEL], diff.CHANGES[TRAINING])]


def line_of(toml: Path, flags: list[str], folder: Path) -> tuple[list[str], Config]:
    """The command line of one run, and what it comes to. Raises ConfigError."""
    line = ["--config", str(toml), *flags, "--run-dir", str(folder)]
    config, _ = cli.read(line, PRESETS)
    if config.checkpoint.save is not None or config.checkpoint.save_interval is not None:
        line += ["--save", str(folder), "--load", str(folder)]
        config, _ = cli.read(line, PRESETS)
    return line, config


def run_to_its_end(line: list[str]) -> int:
    """Its exit code; 130 after Ctrl-C, which it gets, too, and may answer with a checkpoint that takes its time."""
    interrupted = False
    with subprocess.Popen([sys.executable, str(ROOT / "pretrain_gpt.py"), *line]) as process:
        while True:
            try:
                code = process.wait()
                return 130 if interrupted else code
            except KeyboardInterrupt:
                interrupted = True


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of this program's flags."""
    parser = make_parser(__doc__)
    parser.add_argument("toml", type=Path, help="a file like --config of a run")
    parser.add_argument(
        "--folder", type=local_path, help="directory for the runs; default: runs/sweep-NAME, NAME.toml being the file"
    )
    return parser


@exits_with(2, ConfigError)
def main(argv: list[str]) -> int:
    args, words = build_parser().parse_known_args(argv)
    folder = args.folder or Path("runs") / f"sweep-{args.toml.stem}"
    planned, problems = [], []
    read_config_file(str(args.toml))  # what is wrong with it is told once
    for name, flags in combinations(lists_of(words)):
        try:
            planned.append((folder / name, *line_of(args.toml, flags, folder / name)))
        except ConfigError as error:
            problems += [f"{name}: {problem}" for problem in error.problems]
    if problems:
        raise ConfigError([*dict.fromkeys(problems)])
    code, others = 0, {}
    for number, (place, line, config) in enumerate(planned, 1):
        if finished(place, config):
            print(f"{number} of {len(planned)}: {place} is done already", flush=True)
            continue
        print(f"{number} of {len(planned)}: {place}", flush=True)
        options = changed(place, config)
        ended = run_to_its_end(line)
        code = code or (1 if ended else 0)
        if ended and ended not in (75, 130) and options:
            others[place] = options
        if ended in (75, 130):
            print_err("sweep.py: interrupted; the same command resumes it")
            code = 130
            break
    if others:
        names = ", ".join(dict.fromkeys(name for options in others.values() for name in options))
        why = f"not done, and the runs there have another {names}; give another --folder for a new sweep"
        print_err(f"sweep.py: {', '.join(map(str, others))}: {why}")
    rows = [runs.row_of(place) for place, _, _ in planned if (place / "status.json").is_file()]
    print(runs.table(rows, folder))
    return code


if __name__ == "__main__":
    run_program(main)
