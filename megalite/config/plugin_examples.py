"""Plugin examples: a file that registers a part of your own, to be changed into the part that you want.

megalite plugin                              the kinds of parts, a line each
megalite plugin activation                   write activation.py, an example of this kind, and say how to try it
megalite plugin activation --out my/gelu.py  write it there

A file that is there already is never overwritten. What each kind gets and gives: docs/extending.md.
"""

import argparse
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

from megalite.config.console import print_err, print_out
from megalite.config.example_files import example_dir
from megalite.config.exits import Parser
from megalite.config.registry import REGISTRIES

PLACE = "examples/plugins/{}"  # by which an example's docstring names its own file
PLAIN = re.compile(r"[\w./-]+")  # a path that neither a shell nor a docstring reads as anything else


def main(argv: list[str]) -> int:
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", nargs="?", help="the kind of part; without one all kinds are listed")
    parser.add_argument("--out", metavar="FILE.py", help="where to write it (default: in this folder, by its own name)")
    args = parser.parse_args(argv)
    if args.kind is None and args.out is None:
        width = max(map(len, REGISTRIES))
        lines = [f"  {kind:<{width}}  {registry.description}" for kind, registry in REGISTRIES.items()]
        print_out("\n".join(["megalite plugin KIND writes an example of", *lines]))
        return 0
    kind = (args.kind or "").replace("-", "_")
    if kind not in REGISTRIES:
        wrong = "a kind is missing" if args.kind is None else f"{args.kind!r} is no kind of part"
        print_err(f"megalite plugin: {wrong}; give one of {', '.join(REGISTRIES)}")
        return 2
    example = example_dir("plugins") / REGISTRIES[kind].example
    path = args.out if args.out is not None else example.name
    text, place = example.read_text("utf-8"), PLACE.format(example.name)
    if problem := _written(path, text.replace(place, path if PLAIN.fullmatch(path) else "FILE.py")):
        print_err(f"megalite plugin: {problem}")
        return 2
    commands = "\n".join(_commands(text)).replace(place, shlex.quote(path))
    print_out(f"{path} is an example of {kind}. It can be tried as it stands:\n\n{commands}")
    return 0


def _written(path: str, text: str) -> str:
    """Write a new file; say why it cannot be, "" where it is there."""
    if "://" in path:
        return f"out={path} is a URL; give a local path"
    if not path.endswith(".py"):
        return f"out={path} does not end in .py, by which --plugin knows a file; give {path.rstrip('/')}.py"
    try:
        with open(path, "x", encoding="utf-8") as file:  # which follows no link
            try:
                file.write(text)
                file.flush()
            except OSError:
                Path(path).unlink()
                raise
    except FileExistsError:
        return f"out={path} is there already; give another name, or remove it"
    except (OSError, ValueError) as error:
        return f"out={path} cannot be written: {getattr(error, 'strerror', None) or error}; give another path"
    return ""


def _commands(text: str) -> Iterator[str]:
    """The command lines of an example's docstring, continued ones too, indented."""
    goes_on = False
    for line in text.partition('\n"""')[0].splitlines():
        if goes_on or line.startswith("megalite "):
            yield f"  {line}"
            goes_on = line.endswith("\\")
