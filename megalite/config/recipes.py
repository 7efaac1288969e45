"""Recipes: configurations of runs that people do, each with what the planner says of it.

megalite recipe                     their names, a line each
megalite recipe NAME > mine.toml    one of them: its top says how to start it, and what it takes
"""

import argparse

from megalite.config.console import print_err, print_out
from megalite.config.example_files import example_dir
from megalite.config.exits import Parser


def recipes() -> dict[str, str]:
    """Name -> TOML, whose first line says what it is."""
    return {path.stem: path.read_text("utf-8") for path in sorted(example_dir("recipes").glob("*.toml"))}


def main(argv: list[str]) -> int:
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", nargs="?", help="which one to print")
    name, known = parser.parse_args(argv).name, recipes()
    if name is None:
        width = max(map(len, known))
        print_out(
            "\n".join(f"{each:<{width}}  {text.partition(chr(10))[0].lstrip('# ')}" for each, text in known.items())
        )
    elif name in known:
        print_out(known[name].rstrip("\n"))
    else:
        print_err(f"megalite recipe: {name!r} is not the name of one; megalite recipe lists them")
        return 2
    return 0
