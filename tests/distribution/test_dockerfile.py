"""The commands of the Dockerfile run in an empty environment. Docker itself is not needed."""

import fnmatch
import importlib.metadata
import os
import re
import shlex
import shutil
import subprocess
import sysconfig
import venv
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch_range
from packaging.requirements import Requirement
from train_cases import SMALL_RUN

ROOT = Path(__file__).resolve().parents[2]
RUN = [*SMALL_RUN, "--train-iters", "2", "--tensor-model-parallel-size", "2", "--device", "cpu"]
TEXT, IGNORED = ((ROOT / name).read_text() for name in ("Dockerfile", ".dockerignore"))


@dataclass(frozen=True)
class Instruction:
    """An instruction such as `RUN` and the text after it, its lines joined."""

    name: str
    text: str

    @property
    def sources_and_target(self) -> tuple[list[str], str]:
        """The sources and the target of COPY."""
        *sources, target = self.text.split()
        return sources, target


def instructions() -> list[Instruction]:
    """Return the instructions of the Dockerfile in order, without comments."""
    lines = "\n".join(line for line in TEXT.splitlines() if not line.lstrip().startswith("#")).replace("\\\n", " ")
    return [Instruction(*line.split(maxsplit=1)) for line in lines.splitlines() if line.strip()]


def is_sent(path: str) -> bool:
    """Return whether .dockerignore leaves a path in the context.

    The last line that matches it, or a directory that it is in, decides.
    """
    parts = path.split("/")
    decision = True
    for line in IGNORED.splitlines():
        pattern = line.lstrip("!").removesuffix("/")
        if not pattern or line.startswith("#"):
            continue
        heads = ["/".join(parts[: n + 1]) for n in range(len(parts))]
        names = parts if pattern.startswith("**/") else heads
        if any(fnmatch.fnmatchcase(name, pattern.removeprefix("**/")) for name in names):
            decision = line.startswith("!")
    return decision


def test_base_image_has_the_lowest_torch_of_the_range() -> None:
    lowest = re.escape(torch_range.lowest_version((ROOT / "pyproject.toml").read_text()))
    assert re.search(rf'BASE="?pytorch/pytorch:{lowest}\.\d+-cuda\d+\.\d+-cudnn\d+-devel', TEXT)


def test_context_sends_no_private_files_and_all_copied_ones() -> None:
    """Test .dockerignore here, because hadolint (.ci/run) does not read it."""
    private = (".git/config", ".venv/bin/python", "runs/last/log.txt", "data/a.bin", "megalite/nn/__pycache__/a.pyc")
    assert not any(map(is_sent, private))
    copied = [source for step in instructions() if step.name == "COPY" for source in step.sources_and_target[0]]
    assert copied and all((ROOT / source).exists() and is_sent(source) for source in copied)


def base_image(directory: Path) -> Path:
    """Make a stand-in for the base image and return its interpreter's directory of programs.

    It has pip, and this environment's torch with its dependencies, outside the stand-in, so that pip sees them
    and cannot remove them.
    """
    venv.create(directory / "env", with_pip=True)
    packages, pending, seen = directory / "base", ["torch"], set[str]()
    packages.mkdir()
    while pending:
        name = pending.pop()
        distribution = importlib.metadata.distribution(name)
        if distribution.name in seen:
            continue
        seen.add(distribution.name)
        requirements = [Requirement(line) for line in distribution.requires or []]
        pending += [r.name for r in requirements if r.marker is None or r.marker.evaluate({"extra": ""})]
        for top in {Path(str(file)).parts[0] for file in distribution.files or []} - {"..", "__pycache__"}:
            if not (packages / top).is_symlink():  # CUDA's libraries share a directory, nvidia
                (packages / top).symlink_to(Path(str(distribution.locate_file(top))))
    paths = {"base": str(directory / "env"), "platbase": str(directory / "env")}
    site = Path(sysconfig.get_path("purelib", vars=paths))
    (site / "base.pth").write_text(str(packages))
    programs = directory / "env" / "bin"
    run = "from torch.distributed.run import main\nmain()\n"
    (programs / "torchrun").write_text(f"#!{programs / 'python'}\n{run}")
    (programs / "torchrun").chmod(0o755)
    return programs


def copy(step: Instruction, work: Path) -> None:
    """Run COPY for the files of the checkout that .dockerignore sends."""
    sources, target = step.sources_and_target
    for source in sources:
        paths = [ROOT / source] if (ROOT / source).is_file() else [p for p in (ROOT / source).rglob("*") if p.is_file()]
        for path in paths:
            name = path.relative_to(ROOT)
            if not is_sent(str(name)):
                continue
            relative = Path(path.name) if path == ROOT / source else path.relative_to(ROOT / source)
            (work / target / relative).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(path, work / target / relative)


def without_write_access(work: Path) -> list[str]:
    """Make `work` read-only and return a command prefix that drops root's right to write there.

    A user of the image owns nothing.
    """
    for path in [work, *work.rglob("*")]:
        if not path.is_symlink() and path.name not in ("runs", "data", "home"):
            path.chmod(path.stat().st_mode & ~0o222)
    drop = "--bounding-set=-dac_override,-dac_read_search"
    return ["setpriv", drop, "--inh-caps=-dac_override,-dac_read_search"] if os.geteuid() == 0 else []


@pytest.mark.nightly(guards=("Dockerfile", ".dockerignore", "pyproject.toml", "constraints.txt"))
@pytest.mark.timeout(900)
def test_dockerfile_commands_make_an_environment_that_trains(tmp_path: Path) -> None:
    programs, work = base_image(tmp_path), tmp_path / "opt" / "megalite"
    work.mkdir(parents=True)
    env = {name: os.environ[name] for name in os.environ if name.startswith("PIP_") or name == "LANG"}
    env |= {"PATH": f"{programs}:{os.environ['PATH']}", "OMP_NUM_THREADS": "1"}
    steps = instructions()
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

    env["HOME"] = str(tmp_path / "home")  # /tmp is shared here
    (tmp_path / "home").mkdir()
    prefix = without_write_access(work)
    refused = subprocess.run([*prefix, "touch", "megalite/new"], cwd=work, env=env, capture_output=True)
    assert refused.returncode != 0, "the check can write what a user cannot"
    command = shlex.split(steps[-1].text.strip("[]").replace(",", " "))
    env["NPROC"] = "2"  # for the script, which Kubernetes starts
    launches = ("torchrun --standalone --nproc_per_node 2 pretrain_gpt.py", "bash examples/launch/torchrun.sh runs/job")
    for argv in (command, ["megalite", "--version"], *(launch.split() + RUN for launch in launches)):
        done = subprocess.run([*prefix, *argv], cwd=work, env=env, capture_output=True, text=True, timeout=200)
        assert done.returncode == 0, f"{argv}\n{done.stdout[-2000:]}{done.stderr[-2000:]}"
        assert argv[-2:] != RUN[-2:] or "reached the last step" in done.stdout
    assert (work / "runs/last/metrics.jsonl").is_file() and (work / "runs/job/iter_0000002").is_dir()
