"""A Dockerfile read as text: its instructions, the context that a builder is sent, and what is wrong with them."""

from __future__ import annotations

import fnmatch
import re
import shlex
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch_range

SOURCES = ("megalite", "pretrain_gpt.py", "tools")


@dataclass(frozen=True)
class Instruction:
    """`RUN` and what follows it, its lines joined."""

    name: str
    text: str

    @property
    def copied(self) -> tuple[list[str], str]:
        """Of COPY: the sources, and where they go."""
        *sources, target = self.text.split()
        return sources, target


def instructions(text: str) -> list[Instruction]:
    """In their order, without comments."""
    lines = "\n".join(line for line in text.splitlines() if not line.lstrip().startswith("#")).replace("\\\n", " ")
    return [Instruction(*line.split(maxsplit=1)) for line in lines.splitlines() if line.strip()]


def sent(ignored: str, path: str) -> bool:
    """Whether .dockerignore leaves a path in the context: the last line that names it, or a folder it is in, decides."""
    parts = path.split("/")
    decision = True
    for line in ignored.splitlines():
        pattern = line.lstrip("!").removesuffix("/")
        if not pattern or line.startswith("#"):
            continue
        heads = ["/".join(parts[: n + 1]) for n in range(len(parts))]
        names = parts if pattern.startswith("**/") else heads
        if any(fnmatch.fnmatchcase(name, pattern.removeprefix("**/")) for name in names):
            decision = line.startswith("!")
    return decision


def faults(text: str, pyproject: str, ignored: str, root: Path) -> Iterator[str]:
    """What is wrong, a line each."""
    steps = instructions(text)
    yield from base_faults(steps, pyproject)
    yield from layer_faults(steps, pyproject)
    yield from context_faults(steps, ignored, root)
    yield from start_faults(steps)
    yield from apex_faults(steps)


def arguments(steps: list[Instruction]) -> dict[str, str]:
    """ARG's names and their defaults."""
    return {name: shlex.split(value)[0] for s in steps if s.name == "ARG" for name, _, value in [s.text.partition("=")]}


def base_faults(steps: list[Instruction], pyproject: str) -> Iterator[str]:
    base, lowest = arguments(steps)["BASE"], torch_range.floor(pyproject)
    if not re.match(rf"pytorch/pytorch:{re.escape(lowest)}\.\d+-cuda\d+\.\d+-cudnn\d+-devel$", base):
        yield f"{base} is not an image of the lowest torch, {lowest}, with a compiler for CUDA"


def layer_faults(steps: list[Instruction], pyproject: str) -> Iterator[str]:
    """Packages before sources, all of the versions in constraints.txt but torch."""
    known = tomllib.loads(pyproject)["project"]["optional-dependencies"]
    installs = [i for i, s in enumerate(steps) if s.name == "RUN" and re.search(r'pip install .*"\.\[', s.text)]
    if len(installs) != 1:
        yield f"{len(installs)} steps install what megalite needs"
        return
    (packages,) = installs
    run = steps[packages].text
    if "-c constraints.txt" not in run or "/^torch==/d" not in run:
        yield "packages are not of the versions in constraints.txt without its torch"
    (extras,) = re.findall(r'"\.\[(.*?)\]"', run)
    yield from (f"pyproject.toml has no extra {name}" for name in extras.split(",") if name not in known)
    early = {source for s in steps[:packages] if s.name == "COPY" for source in s.copied[0]}
    early -= {"pyproject.toml", "constraints.txt", "megalite/__init__.py"}
    yield from (
        f"{name} is copied before the packages are installed: each change would install them anew" for name in early
    )
    late = {source for s in steps[packages:] if s.name == "COPY" for source in s.copied[0]}
    yield from (f"{name} is not copied" for name in SOURCES if name not in late)


def context_faults(steps: list[Instruction], ignored: str, root: Path) -> Iterator[str]:
    """What is copied exists and is sent; what is large or private is not."""
    for source in (source for s in steps if s.name == "COPY" for source in s.copied[0]):
        if not (root / source).exists() or not sent(ignored, source):
            yield f"{source} is copied, and is not there or not sent"
    for path in (".git/config", ".venv/bin/python", "runs/last/log.txt", "data/a.bin", "megalite/nn/__pycache__/a.pyc"):
        if sent(ignored, path):
            yield f".dockerignore lets {path} through"


def start_faults(steps: list[Instruction]) -> Iterator[str]:
    users = [s.text for s in steps if s.name == "USER"]
    if not users or not re.match(
        r"[1-9]\d*(:\d+)?$", users[-1]
    ):  # a number: Kubernetes' runAsNonRoot cannot look up a name
        yield "runs as root, or as a user without a number"
    if any(s.name == "ENTRYPOINT" for s in steps):
        yield "an ENTRYPOINT: torchrun would need --entrypoint"
    if steps[-1].name != "CMD" or "pretrain_gpt.py" not in steps[-1].text:
        yield "does not end with the command that it runs"


def apex_faults(steps: list[Instruction]) -> Iterator[str]:
    """apex's setup.py (July 2026) imports torch and packaging, takes APEX_*=1 and builds with the torch it finds."""
    given = arguments(steps)
    run = next(s.text for s in steps if "NVIDIA/apex" in s.text)
    if not re.fullmatch(r"[0-9a-f]{40}", given.get("APEX_COMMIT", "")):
        yield "apex is not of one commit"
    before, _, build = run.partition("APEX_CPP_EXT=1 APEX_CUDA_EXT=1")
    if "packaging==" not in before or "--no-build-isolation" not in build:
        yield "apex needs packaging beside it and the torch of the image"
    if given.get("APEX") != "0" or 'if [ "$APEX" = 1 ]' not in run:
        yield "apex is not optional"
