"""The command `megalite`: pretrain_gpt.py and the programs in tools/ under one name, wherever it is installed.

megalite train FLAGS                                  as python pretrain_gpt.py FLAGS
torchrun --nproc_per_node 8 -m megalite train FLAGS   the same under torchrun; srun megalite train FLAGS under SLURM

A wheel holds these programs as a clone does, below megalite/programs (setup.py puts them there). The folder that they
are in becomes the first of sys.path, as it is when they are started by their files, and what they start finds them
there. Nothing but the command that is asked for is imported. Exit codes are the programs' own; 2: no such command.
"""

import importlib
import os
import sys
import tomllib
from difflib import get_close_matches
from pathlib import Path
from typing import NoReturn

from megalite import __version__

_HERE = Path(__file__).resolve().parent
PROGRAMS = _HERE / "programs" if (_HERE / "programs").is_dir() else _HERE.parent
COMMANDS = tomllib.loads((_HERE / "commands.toml").read_text("utf-8"))  # name: [module below PROGRAMS, what it does]


def command_list(group: str = "") -> str:
    """The help of all commands, or of those that begin with `group`, which ends in a space."""
    names = [name for name in COMMANDS if name.startswith(group)]
    words = ",".join(dict.fromkeys(name.removeprefix(group).partition(" ")[0] for name in names))
    lines = [f"  {name:<14}{COMMANDS[name][1]}" for name in names]
    return "\n".join([f"usage: megalite {group}{{{words}}} ...", "", *lines, "", "megalite COMMAND --help: its flags"])


def run(words: list[str]) -> int:
    """What `megalite WORDS` does, to its exit code. SystemExit as programs raise it."""
    name = next((name for name in (" ".join(words[:2]), *words[:1]) if name in COMMANDS), None)
    if name is None:
        return _unknown_command(words)
    rest, module = words[len(name.split()) :], COMMANDS[name][0]
    if not module:
        return _completion(rest)
    sys.argv = [f"megalite {name}", *rest]  # what programs call themselves
    sys.path.insert(0, str(PROGRAMS))
    from megalite.config.console import as_commands

    program = importlib.import_module(module)
    program.__doc__ = as_commands(program.__doc__ or "")  # which their --help prints
    return program.main(rest) or 0


def _completion(words: list[str]) -> int:
    """One script serves both shells, and asks which one reads it."""
    if words in (["bash"], ["zsh"]):
        print((_HERE / "completion.sh").read_text("utf-8"), end="")
        return 0
    wants_help = bool({"-h", "--help"} & {*words})
    usage = "usage: megalite completion {bash,zsh} ..."
    print(usage, file=sys.stdout if wants_help else sys.stderr)
    return 0 if wants_help else 2


def _unknown_command(words: list[str]) -> int:
    first, *rest = words or [""]
    group = f"{first} " if any(name.startswith(f"{first} ") for name in COMMANDS) else ""
    if first == "--version":
        print(f"megalite {__version__}")
    elif first in ("-h", "--help") or (group and {"-h", "--help"} & {*rest}):
        print(command_list(group))
    else:
        near = get_close_matches(" ".join(words[:2] if group else words[:1]), COMMANDS, 1)
        meant = f"; did you mean {near[0]}?" if near else ""
        wrong = f"no command {' '.join(words[: 2 if group else 1])!r}{meant}" if words else "no command is given"
        print(f"megalite: {wrong}\n{command_list(group)}", file=sys.stderr)
        return 2
    return 0


def main() -> NoReturn:
    try:
        from megalite.config.exits import run_cli
        from megalite.launch.rank_info import exit_process
    except KeyboardInterrupt:
        os._exit(130)
    exit_process(lambda: run_cli(lambda: run(sys.argv[1:]), prints=sys.argv[1:2] != ["train"]))


if __name__ == "__main__":
    main()
