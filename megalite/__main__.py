"""The command `megalite`: pretrain_gpt.py and the programs in tools/ under one name, wherever it is installed.

megalite train FLAGS                                  as python pretrain_gpt.py FLAGS
torchrun --nproc_per_node 8 -m megalite train FLAGS   the same under torchrun; srun megalite train FLAGS under SLURM

A wheel contains these programs below megalite/programs (setup.py copies them). Their directory becomes the first entry
of sys.path, as if they were started by their files, so their child processes find them too. Only the requested command
is imported. Exit codes are those of the programs; 2 if the command does not exist.
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
COMMANDS = tomllib.loads((_HERE / "commands.toml").read_text("utf-8"))  # name: [module below PROGRAMS, description]


def command_list(group: str = "") -> str:
    """Return the help of all commands, or of the commands that start with `group` (which ends in a space)."""
    names = [name for name in COMMANDS if name.startswith(group)]
    choices = ",".join(dict.fromkeys(name.removeprefix(group).partition(" ")[0] for name in names))
    lines = [f"  {name:<14}{COMMANDS[name][1]}" for name in names]
    return "\n".join(
        [f"usage: megalite {group}{{{choices}}} ...", "", *lines, "", "megalite COMMAND --help: its flags"]
    )


def run(argv: list[str]) -> int:
    """Run `megalite ARGV` and return its exit code. Programs may raise SystemExit."""
    name = next((name for name in (" ".join(argv[:2]), *argv[:1]) if name in COMMANDS), None)
    if name is None:
        return _unknown_command(argv)
    rest, module = argv[len(name.split()) :], COMMANDS[name][0]
    if not module:
        return _completion(rest)
    sys.argv = [f"megalite {name}", *rest]  # the name that programs show in their messages
    sys.path.insert(0, str(PROGRAMS))
    from megalite.common.console import as_commands

    program = importlib.import_module(module)
    program.__doc__ = as_commands(program.__doc__ or "")  # printed by --help
    return program.main(rest) or 0


def _completion(argv: list[str]) -> int:
    """Print the completion script, which serves both shells, and return the exit code."""
    if argv in (["bash"], ["zsh"]):
        print((_HERE / "completion.sh").read_text("utf-8"), end="")
        return 0
    wants_help = bool({"-h", "--help"} & {*argv})
    usage = "usage: megalite completion {bash,zsh} ..."
    print(usage, file=sys.stdout if wants_help else sys.stderr)
    return 0 if wants_help else 2


def _unknown_command(argv: list[str]) -> int:
    """Print the version, help, or an error about an unknown command; return the exit code."""
    first, *rest = argv or [""]
    group = f"{first} " if any(name.startswith(f"{first} ") for name in COMMANDS) else ""
    if first == "--version":
        print(f"megalite {__version__}")
    elif first in ("-h", "--help") or (group and {"-h", "--help"} & {*rest}):
        print(command_list(group))
    else:
        near = get_close_matches(" ".join(argv[:2] if group else argv[:1]), COMMANDS, 1)
        suggestion = f"; did you mean {near[0]}?" if near else ""
        name = " ".join(argv[: 2 if group else 1])
        error = f"no command {name!r}{suggestion}" if argv else "no command is given"
        print(f"megalite: {error}\n{command_list(group)}", file=sys.stderr)
        return 2
    return 0


def main() -> NoReturn:
    """Run the command of sys.argv and exit."""
    try:
        from megalite.common.exits import run_cli
        from megalite.launch.process_group import exit_process
    except KeyboardInterrupt:
        os._exit(130)
    exit_process(lambda: run_cli(lambda: run(sys.argv[1:]), prints=sys.argv[1:2] != ["train"]))


if __name__ == "__main__":
    main()
