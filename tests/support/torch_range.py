"""The suite on the lowest and the highest torch that pyproject.toml allows: `bash .ci/range [lowest|highest|VERSION]`.

A virtual environment in a temporary folder gets that torch as the package index serves it, which on Linux is a build
for CUDA, with the triton that it pins, and the dev extras within their ranges: constraints.txt without its torch. The
tests run in it, docs/testing.md gets a row, and the folder is removed. Without a version it is the end of the range
whose newest row is the older one.

Needs 12 GiB of disk while it runs, and nothing but Python's own library. Exit codes: 0 all passed; 1 not all; 2 bad
words; 3 the index, the disk or the installation cannot serve this version.
"""

import argparse
import datetime
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
import xml.etree.ElementTree as ElementTree
from dataclasses import astuple, dataclass, fields
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "testing.md"
BEGIN, END = "<!-- rows -->\n", "<!-- end of rows -->\n"
DISK_BYTES = 12 << 30
LIMIT_S = 4 * 3600
MARKS = "not presubmit and not nightly"  # as tests/run.sh
QUICK = "distribution/test_torch_api.py kernels/test_compiling.py optim pipeline nn parallel layouts/test_layouts.py".split()
ASK = """import json, platform, torch, triton
gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"
build = "CUDA " + torch.version.cuda if torch.version.cuda else "CPU"
print(json.dumps([torch.__version__, triton.__version__, platform.python_version(), f"{build}, {gpu}"]))"""


class Unavailable(Exception):
    """This version cannot be had here."""


@dataclass(frozen=True)
class Row:
    """One run. date: YYYY-MM-DD; build: of torch, and the card; tests: quick or all; failed: with errors; time: m:ss."""

    date: str
    torch: str
    triton: str
    python: str
    build: str
    tests: str
    passed: str
    failed: str
    skipped: str
    time: str

    @property
    def what(self) -> tuple[str, ...]:
        """What a newer run of the same takes the place of."""
        return self.torch, self.triton, self.python, self.build, self.tests


# ---- pure: versions and rows


def key(version: str) -> tuple[int, ...]:
    """Of a release: 2.9.1 < 2.11.0."""
    return tuple(int(part) for part in version.split("+")[0].split("."))


def floor(pyproject: str) -> str:
    """The lowest torch of the range."""
    (found,) = re.findall(r'"torch>=([\d.]+)"', json.dumps(tomllib.loads(pyproject)["project"]["dependencies"]))
    return found


def releases(listing: str, lowest: str) -> list[str]:
    """Releases from `lowest` on, oldest first, of what `pip index versions torch` prints. 2.13.0+cpu, a wheel that lies
    on one machine, is none."""
    line = next((line for line in listing.splitlines() if line.startswith("Available versions:")), ":")
    found = [word for word in line.partition(":")[2].replace(",", " ").split() if re.fullmatch(r"\d+(\.\d+)+", word)]
    return sorted((v for v in found if key(v) >= key(lowest)), key=key)


def choose(which: str, served: list[str]) -> str:
    """A release of `served` by the name of its end, or by its version."""
    wanted = {"lowest": served[:1], "highest": served[-1:]}.get(which, [v for v in served if v == which])
    if not wanted:
        there = ", ".join(served) or "none of it"
        raise Unavailable(f"the package index has no torch {which} in the range; it has {there}")
    return wanted[0]


def turn(rows: list[Row], served: list[str]) -> str:
    """The end of the range whose newest row is older, or that has none."""
    newest = {v: max((r.date for r in rows if r.torch.split("+")[0] == v), default="") for v in (served[0], served[-1])}
    return min(newest, key=lambda v: (newest[v], key(v)))


def pins(constraints: str, version: str) -> str:
    """Those of everything else: torch is what is tried, and it pins its own triton. 3.6, which torch 2.11 pins, makes
    an int of an array of one element where it interprets a loop, which numpy 2.4 refuses; 3.7 does not."""
    lines = [line for line in constraints.splitlines() if not re.match(r"(torch|triton)\b", line)]
    if key(version) < (2, 12):
        lines = ["numpy<2.4" if line.startswith("numpy==") else line for line in lines]
    return "".join(f"{line}\n" for line in lines)


def read_rows(page: str) -> list[Row]:
    """Of the table between the markers."""
    table = page.partition(BEGIN)[2].partition(END)[0].splitlines()[2:]
    return [Row(*(cell.strip() for cell in line.strip("|").split("|"))) for line in table]


def with_row(page: str, row: Row) -> str:
    """The page with `row` in its table, in the place of an older one of the same; newest torch first."""
    rows = [row, *(old for old in read_rows(page) if old.what != row.what)]
    rows.sort(key=lambda r: (key(r.torch), r.date), reverse=True)
    names = [field.name for field in fields(Row)]
    lines = [names, ["---"] * len(names), *(astuple(one) for one in rows)]
    table = "".join("| " + " | ".join(line) + " |\n" for line in lines)
    before, _, rest = page.partition(BEGIN)
    return before + BEGIN + table + END + rest.partition(END)[2]


def counts(report: str) -> tuple[int, int, int]:
    """(passed, failed, skipped) of the XML that pytest writes."""
    suites = list(ElementTree.fromstring(report).iter("testsuite"))
    names = ("tests", "failures", "errors", "skipped")
    total, failures, errors, skipped = (sum(int(s.get(k, 0)) for s in suites) for k in names)
    return total - failures - errors - skipped, failures + errors, skipped


# ---- the run


def build(folder: Path, which: str, python: str) -> Path:
    """Make the environment; its interpreter. What is installed is a copy, so nothing is left in the checkout."""
    free = shutil.disk_usage(folder).free
    if free < DISK_BYTES:
        need = f"{DISK_BYTES >> 30} are needed: set TMPDIR to a folder on another disk"
        raise Unavailable(f"{free >> 30} GiB are free at {folder}; {need}")
    subprocess.run([python, "-m", "venv", str(folder / "env")], check=True)
    (folder / "constraints.txt").touch()
    pip(folder, "install", "--quiet", "--upgrade", "pip")  # older ones try a hundred versions of botocore
    served = releases(pip(folder, "index", "versions", "torch"), floor((ROOT / "pyproject.toml").read_text()))
    version = choose(which or turn(read_rows(PAGE.read_text()), served or [""]), served)
    (folder / "constraints.txt").write_text(pins((ROOT / "constraints.txt").read_text(), version))
    print(f"torch {version} of {', '.join(served)}: installing into {folder}", flush=True)
    source = folder / "source"
    source.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    shutil.copytree(ROOT / "megalite", source / "megalite", ignore=shutil.ignore_patterns("__pycache__"))
    pip(folder, "install", "--quiet", f"torch=={version}", f"{source}[dev]")
    return folder / "env" / "bin" / "python"


def pip(folder: Path, *words: str) -> str:
    """What pip prints. Its constraints are ours alone: a machine's own cap on torch is not one of the range."""
    ours = {"PIP_CONSTRAINT": str(folder / "constraints.txt"), "PIP_NO_CACHE_DIR": "1"}
    command = [str(folder / "env" / "bin" / "python"), "-m", "pip", *words, "--disable-pip-version-check"]
    done = subprocess.run(command, env=os.environ | ours, cwd=folder, capture_output=True, text=True)
    if done.returncode:
        raise Unavailable(f"pip {' '.join(words)}: {done.stderr.strip()[-2000:]}")
    return done.stdout


def run_tests(python: Path, folder: Path, quick: bool) -> Row:
    """What they came to. Their output goes to the terminal."""
    versions = json.loads(subprocess.run([str(python), "-c", ASK], check=True, capture_output=True, text=True).stdout)
    print(*versions, flush=True)
    chosen = [f"tests/{name}" for name in QUICK] if quick else []
    report, workers = folder / "report.xml", os.environ.get("MEGALITE_TEST_WORKERS", "2")
    words = ["-m", MARKS, "-n", workers, "--dist", "worksteal", "--junitxml", str(report), *chosen]
    env = os.environ | {"OMP_NUM_THREADS": "1", "PATH": f"{python.parent}{os.pathsep}{os.environ.get('PATH', '')}"}
    began = time.monotonic()
    code = subprocess.run([str(python), "-m", "pytest", *words], cwd=ROOT, env=env, timeout=LIMIT_S).returncode
    minutes, seconds = divmod(round(time.monotonic() - began), 60)
    if not report.exists():
        sys.exit(f".ci/range: pytest ended with {code} and no report; no row is written")
    passed, failed, skipped = map(str, counts(report.read_text()))
    what = "quick" if quick else "all"
    return Row(datetime.date.today().isoformat(), *versions, what, passed, failed, skipped, f"{minutes}:{seconds:02d}")


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(prog=".ci/range", description=(__doc__ or "").split("\n")[0])
    made.add_argument("which", nargs="?", default="", help="lowest, highest or a version; default: by turns")
    made.add_argument("--quick", action="store_true", help=f"only {', '.join(QUICK)}")
    made.add_argument("--python", default=sys.executable, metavar="PATH", help="the interpreter of the environment")
    return made


def main(words: list[str]) -> int:
    given = parser().parse_args(words)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # the folder is removed then, too
    with tempfile.TemporaryDirectory(prefix="torch-range-") as name:
        try:
            python = build(Path(name), given.which, given.python)
        except Unavailable as error:
            print(f".ci/range: {error}", file=sys.stderr)
            return 3
        row = run_tests(python, Path(name), given.quick)
    PAGE.write_text(with_row(PAGE.read_text(), row))
    print(f"torch {row.torch}: {row.passed} passed, {row.failed} failed, {row.skipped} skipped")
    return int(row.failed != "0" or row.passed == "0")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
