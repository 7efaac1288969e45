"""Plugin examples: files that register a component, to be edited into your own plugins.

megalite plugin                              list the kinds of components
megalite plugin activation                   write activation.py, an example of this kind, and print how to try it
megalite plugin activation --out my/gelu.py  write the example to another file

Existing files are never overwritten. The interface of each kind: docs/plugins.md.
"""

import argparse
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

from megalite.common.console import print_err, print_out
from megalite.common.exits import Parser
from megalite.config.example_files import example_dir
from megalite.config.registry import REGISTRIES

EXAMPLE_PATH = "examples/plugins/{}"  # the path of an example in its own docstring
PLAIN_PATH = re.compile(r"[\w./-]+")  # a path that needs no quotes in a shell or a docstring


def main(argv: list[str]) -> int:
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", nargs="?", help="the kind of component; without it, all kinds are listed")
    parser.add_argument(
        "--out", metavar="FILE.py", help="file to write (default: the name of the example, in the current directory)"
    )
    args = parser.parse_args(argv)
    if args.kind is None and args.out is None:
        width = max(map(len, REGISTRIES))
        lines = [f"  {kind:<{width}}  {registry.description}" for kind, registry in REGISTRIES.items()]
        print_out("\n".join(["megalite plugin KIND writes an example of", *lines]))
        return 0
    kind = (args.kind or "").replace("-", "_")
    if kind not in REGISTRIES:
        wrong = "a kind is missing" if args.kind is None else f"{args.kind!r} is not a kind of component"
        print_err(f"megalite plugin: {wrong}; give one of {', '.join(REGISTRIES)}")
        return 2
    example = example_dir("plugins") / REGISTRIES[kind].example
    path = args.out if args.out is not None else example.name
    text = example.read_text("utf-8")
    example_path = EXAMPLE_PATH.format(example.name)
    problem = _write(path, text.replace(example_path, path if PLAIN_PATH.fullmatch(path) else "FILE.py"))
    if problem:
        print_err(f"megalite plugin: {problem}")
        return 2
    commands = "\n".join(_commands(text)).replace(example_path, shlex.quote(path))
    print_out(f"{path} is an example of {kind}. It can be tried as it is:\n\n{commands}")
    return 0


def _write(path: str, text: str) -> str:
    """Write a new file. Return a message if that is not possible, otherwise ""."""
    if "://" in path:
        return f"out={path} is a URL; give a local path"
    if not path.endswith(".py"):
        return f"out={path} does not end in .py, by which --plugin recognizes a file; give {path.rstrip('/')}.py"
    try:
        with open(path, "x", encoding="utf-8") as file:  # mode x follows no symbolic link
            try:
                file.write(text)
                file.flush()
            except OSError:
                Path(path).unlink()
                raise
    except FileExistsError:
        return f"out={path} already exists; give another name, or remove it"
    except (OSError, ValueError) as error:
        return f"out={path} cannot be written: {getattr(error, 'strerror', None) or error}; give another path"
    return ""


def _commands(text: str) -> Iterator[str]:
    """Yield the lines of the commands in an example's docstring, indented, with their continuation lines."""
    is_continuation = False
    for line in text.partition('\n"""')[0].splitlines():
        if is_continuation or line.startswith("megalite "):
            yield f"  {line}"
            is_continuation = line.endswith("\\")
