"""Recipes: complete configurations of common runs, each with the planner's estimate.

megalite recipe                     list the recipes
megalite recipe NAME > mine.toml    print one; its first lines show how to start it and what it needs
"""

import argparse

from megalite.common.console import print_err, print_out
from megalite.common.exits import Parser
from megalite.config.example_files import example_dir


def recipes() -> dict[str, str]:
    """Return name -> TOML text of all recipes; the first line of each is a comment that describes it."""
    return {path.stem: path.read_text("utf-8") for path in sorted(example_dir("recipes").glob("*.toml"))}


def main(argv: list[str]) -> int:
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", nargs="?", help="the recipe to print; without it, all recipes are listed")
    name = parser.parse_args(argv).name
    texts = recipes()
    if name is None:
        width = max(map(len, texts))
        titles = {recipe: text.splitlines()[0].lstrip("# ") for recipe, text in texts.items()}
        print_out("\n".join(f"{recipe:<{width}}  {title}" for recipe, title in titles.items()))
    elif name in texts:
        print_out(texts[name].rstrip("\n"))
    else:
        print_err(f"megalite recipe: {name!r} is not the name of one; megalite recipe lists them")
        return 2
    return 0
