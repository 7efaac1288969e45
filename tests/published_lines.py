"""The command lines of published_lines.toml, in full or with small sizes in their place."""

import shlex

import tables

TABLES = tables.read("published_lines")
LINES, SMALLER = TABLES["lines"], TABLES["smaller"]


def words(name: str, places: dict[str, str], small: bool = True) -> list[str]:
    """The line as the shell would pass it; `places`: what $NAME stands for. pp 2 is added where the script has none."""
    found = [places.get(word, word) for word in shlex.split(LINES[name])]
    for flag, value in (SMALLER["all"] | SMALLER[name]).items() if small else ():
        for i in reversed([i for i, word in enumerate(found) if word == flag]):
            found[i + 1] = value
    if small and "--pipeline-model-parallel-size" not in found:
        found += ["--pipeline-model-parallel-size", "2"]
    if small and "--fp16" in found:
        found += ["--initial-loss-scale", "65536"]  # from 2^32 all six steps would only halve it
    return found
