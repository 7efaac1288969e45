"""The Dockerfile: what can be said of its text, and its commands run in an empty environment. Docker itself is not needed."""

from __future__ import annotations

import importlib.metadata
import os
import re
import shlex
import shutil
import subprocess
import sysconfig
import venv
from pathlib import Path

import pytest
from dockerfile import Instruction, faults, instructions, sent
from packaging.requirements import Requirement
from train_cases import SMALL

ROOT = Path(__file__).resolve().parents[1]
TEXT, PYPROJECT, IGNORED = ((ROOT / name).read_text() for name in ("Dockerfile", "pyproject.toml", ".dockerignore"))


def test_nothing_is_wrong_with_it() -> None:
    assert list(faults(TEXT, PYPROJECT, IGNORED, ROOT)) == []


PLANTED = {
    "lowest torch": (TEXT.replace("pytorch:2.11.0", "pytorch:2.12.0"), IGNORED),
    "a compiler": (TEXT.replace("-devel", "-runtime"), IGNORED),
    "not of the versions": (TEXT.replace("-c constraints.txt ", ""), IGNORED),
    "without its torch": (TEXT.replace("sed -i '/^torch==/d' constraints.txt && ", ""), IGNORED),
    "no extra plot": (TEXT.replace("plots", "plot"), IGNORED),
    "megalite is copied before": (
        TEXT.replace("COPY megalite/__init__.py megalite/", "COPY megalite megalite"),
        IGNORED,
    ),
    "tools is not copied": (TEXT.replace("COPY tools tools\n", ""), IGNORED),
    "examples is copied, and": (TEXT, IGNORED.replace("!examples\n", "")),
    "lets .git/config through": (TEXT, IGNORED.replace("*\n", "", 1)),
    "lets megalite/nn/__pycache__": (TEXT, IGNORED.replace("**/__pycache__", "")),
    "root": (TEXT.replace("USER 1000:1000\n", ""), IGNORED),
    "without a number": (TEXT.replace("USER 1000:1000\n", "USER ubuntu\n"), IGNORED),
    "--entrypoint": (TEXT.replace("CMD [", 'ENTRYPOINT ["python"]\nCMD ['), IGNORED),
    "does not end": (TEXT + "USER 1000\n", IGNORED),
    "one commit": (re.sub("[0-9a-f]{40}", "master", TEXT), IGNORED),
    "packaging beside": (TEXT.replace("packaging==25.0", ""), IGNORED),
    "the torch of the image": (TEXT.replace("--no-build-isolation ", ""), IGNORED),
    "not optional": (TEXT.replace("ARG APEX=0", "ARG APEX=1"), IGNORED),
}


@pytest.mark.parametrize("word", PLANTED)
def test_each_fault_is_found(word: str) -> None:
    text, ignored = PLANTED[word]
    found = list(faults(text, PYPROJECT, ignored, ROOT))
    assert len(found) >= 1 and any(word in line for line in found), found


def base_image(folder: Path) -> Path:
    """What stands for the base image: an interpreter with pip, and the torch that is installed here, with what it needs,
    outside the environment, so that pip sees it and cannot remove it. The interpreter's folder of programs."""
    venv.create(folder / "env", with_pip=True)
    packages, wanted, seen = folder / "base", ["torch"], set[str]()
    packages.mkdir()
    while wanted:
        name = wanted.pop()
        found = importlib.metadata.distribution(name)
        if found.name in seen:
            continue
        seen.add(found.name)
        needed = [Requirement(line) for line in found.requires or []]
        wanted += [r.name for r in needed if r.marker is None or r.marker.evaluate({"extra": ""})]
        for top in {Path(str(file)).parts[0] for file in found.files or []} - {"..", "__pycache__"}:
            if not (packages / top).is_symlink():  # CUDA's libraries share a folder, nvidia
                (packages / top).symlink_to(Path(str(found.locate_file(top))))
    paths = {"base": str(folder / "env"), "platbase": str(folder / "env")}
    site = Path(sysconfig.get_path("purelib", vars=paths))
    (site / "base.pth").write_text(str(packages))
    programs = folder / "env" / "bin"
    run = "from torch.distributed.run import main\nmain()\n"
    (programs / "torchrun").write_text(f"#!{programs / 'python'}\n{run}")
    (programs / "torchrun").chmod(0o755)
    return programs


def copy(step: Instruction, work: Path) -> None:
    """COPY from the checkout, as far as .dockerignore sends it."""
    sources, target = step.copied
    for source in sources:
        paths = [ROOT / source] if (ROOT / source).is_file() else [p for p in (ROOT / source).rglob("*") if p.is_file()]
        for path in paths:
            name = path.relative_to(ROOT)
            if not sent(IGNORED, str(name)):
                continue
            inside = Path(path.name) if path == ROOT / source else path.relative_to(ROOT / source)
            (work / target / inside).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(path, work / target / inside)


def as_nobody(work: Path) -> list[str]:
    """Words before a command that take root's right to write what nobody may write: a user of the image owns nothing."""
    for path in [work, *work.rglob("*")]:
        if not path.is_symlink() and path.name not in ("runs", "data", "home"):
            path.chmod(path.stat().st_mode & ~0o222)
    drop = "--bounding-set=-dac_override,-dac_read_search"
    return ["setpriv", drop, "--inh-caps=-dac_override,-dac_read_search"] if os.geteuid() == 0 else []


@pytest.mark.long
@pytest.mark.timeout(900)
def test_its_commands_make_an_environment_that_trains(tmp_path: Path) -> None:
    programs, work = base_image(tmp_path), tmp_path / "opt" / "megalite"
    work.mkdir(parents=True)
    env = {name: os.environ[name] for name in os.environ if name.startswith("PIP_") or name == "LANG"}
    env |= {"PATH": f"{programs}:{os.environ['PATH']}", "OMP_NUM_THREADS": "1"}
    steps = instructions(TEXT)
    shell = next(shlex.split(s.text.strip("[]").replace(",", " ")) for s in steps if s.name == "SHELL")
    torch = [str(programs / "python"), "-c", "import torch; print(torch.__version__, torch.__file__)"]
    before = subprocess.run(torch, env=env, check=True, capture_output=True, text=True).stdout

    for step in steps[steps.index(Instruction("WORKDIR", "/opt/megalite")) :]:
        if step.name in ("ARG", "ENV"):
            env |= {name: value for name, _, value in (word.partition("=") for word in shlex.split(step.text))}
        elif step.name == "COPY":
            copy(step, work)
        elif step.name == "RUN":
            done = subprocess.run([*shell, step.text], cwd=work, env=env, capture_output=True, text=True, timeout=600)
            assert done.returncode == 0, f"{step.text}\n{done.stdout[-2000:]}{done.stderr[-4000:]}"
    assert subprocess.run(torch, env=env, check=True, capture_output=True, text=True).stdout == before  # not replaced

    env["HOME"] = str(tmp_path / "home")  # /tmp is everybody's here
    (tmp_path / "home").mkdir()
    nobody = as_nobody(work)
    refused = subprocess.run([*nobody, "touch", "megalite/new"], cwd=work, env=env, capture_output=True)
    assert refused.returncode != 0, "the check can write what a user cannot"
    command = shlex.split(steps[-1].text.strip("[]").replace(",", " "))
    env["NPROC"] = "2"  # of the script, which Kubernetes starts
    ways = ("torchrun --standalone --nproc_per_node 2 pretrain_gpt.py", "bash examples/launch/torchrun.sh runs/job")
    for words in (command, ["megalite", "--version"], *(way.split() + run_flags() for way in ways)):
        done = subprocess.run([*nobody, *words], cwd=work, env=env, capture_output=True, text=True, timeout=200)
        assert done.returncode == 0, f"{words}\n{done.stdout[-2000:]}{done.stderr[-2000:]}"
        assert words[-2:] != run_flags()[-2:] or "reached the last step" in done.stdout
    assert (work / "runs/last/metrics.jsonl").is_file() and (work / "runs/job/iter_0000002").is_dir()


def run_flags() -> list[str]:
    return [*SMALL, "--train-iters", "2", "--tensor-model-parallel-size", "2", "--device", "cpu"]
