"""Run the tests with the lowest or the highest torch that pyproject.toml allows: `bash .ci/range [lowest|highest|VERSION]`.

A virtual environment in a temporary directory gets that torch as the package index serves it, which on Linux is a build
for CUDA with the triton that it pins, and the dev extras within their ranges: constraints.txt without its torch. The
tests run in it, docs/testing.md gets a row, and the directory is removed. Without a version, the end of the range with
the older newest row is tested.

This needs 12 GiB of disk while it runs, and nothing but Python's own library. Exit codes: 0 if all tests passed; 1 if
not all; 2 for wrong arguments; 3 if the index, the disk or the installation cannot provide this version.
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
TABLE_BEGIN, TABLE_END = "<!-- rows -->\n", "<!-- end of rows -->\n"
DISK_BYTES = 12 << 30
LIMIT_S = 4 * 3600
MARKS = "not presubmit and not nightly"  # like tests/run.sh
QUICK = "distribution/test_torch_api.py kernels/test_compiling.py optim pipeline nn parallel layouts/test_layouts.py".split()
PRINT_VERSIONS = """import json, platform, torch, triton
gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"
build = "CUDA " + torch.version.cuda if torch.version.cuda else "CPU"
print(json.dumps([torch.__version__, triton.__version__, platform.python_version(), f"{build}, {gpu}"]))"""


class Unavailable(Exception):
    """The index, the disk or the installation cannot provide this version."""


@dataclass(frozen=True)
class Row:
    """The result of one run, a row of docs/testing.md.

    Attributes:
        date: YYYY-MM-DD.
        build: CUDA or CPU, of torch, and the GPU.
        tests: "quick" or "all".
        failed: the number of failures and errors.
        time: m:ss.
    """

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
    def identity(self) -> tuple[str, ...]:
        """The values that a newer run has in common with the row that it replaces."""
        return self.torch, self.triton, self.python, self.build, self.tests


# ---- pure: versions and rows


def version_key(version: str) -> tuple[int, ...]:
    """Return the sort key of a release: 2.9.1 < 2.11.0."""
    return tuple(int(part) for part in version.split("+")[0].split("."))


def lowest_version(pyproject: str) -> str:
    """Return the lowest torch of the range."""
    (version,) = re.findall(r'"torch>=([\d.]+)"', json.dumps(tomllib.loads(pyproject)["project"]["dependencies"]))
    return version


def releases(listing: str, lowest: str) -> list[str]:
    """Return the releases from `lowest` on, oldest first, that `pip index versions torch` lists.

    Local versions such as 2.13.0+cpu, a wheel on one machine, are left out.
    """
    line = next((line for line in listing.splitlines() if line.startswith("Available versions:")), ":")
    versions = [v for v in line.partition(":")[2].replace(",", " ").split() if re.fullmatch(r"\d+(\.\d+)+", v)]
    return sorted((v for v in versions if version_key(v) >= version_key(lowest)), key=version_key)


def choose(which: str, served: list[str]) -> str:
    """Return the lowest or highest release of `served`, or the one with this version."""
    matches = {"lowest": served[:1], "highest": served[-1:]}.get(which, [v for v in served if v == which])
    if not matches:
        available = ", ".join(served) or "none of it"
        raise Unavailable(f"the package index has no torch {which} in the range; it has {available}")
    return matches[0]


def turn(rows: list[Row], served: list[str]) -> str:
    """Return the end of the range whose newest row is older, or that has no row."""
    newest = {v: max((r.date for r in rows if r.torch.split("+")[0] == v), default="") for v in (served[0], served[-1])}
    return min(newest, key=lambda v: (newest[v], version_key(v)))


def pins(constraints: str, version: str) -> str:
    """Return the constraints without torch, which is tested, and triton, which torch pins.

    Triton 3.6, which torch 2.11 pins, converts an array of one element to an int when it interprets a loop. numpy 2.4
    refuses that. Triton 3.7 does not do it.
    """
    lines = [line for line in constraints.splitlines() if not re.match(r"(torch|triton)\b", line)]
    if version_key(version) < (2, 12):
        lines = ["numpy<2.4" if line.startswith("numpy==") else line for line in lines]
    return "".join(f"{line}\n" for line in lines)


def read_rows(page: str) -> list[Row]:
    """Return the rows of the table between the markers."""
    table = page.partition(TABLE_BEGIN)[2].partition(TABLE_END)[0].splitlines()[2:]
    return [Row(*(cell.strip() for cell in line.strip("|").split("|"))) for line in table]


def add_row(page: str, row: Row) -> str:
    """Return the page with `row` in its table, which replaces an older row of the same kind. The newest torch is first."""
    rows = [row, *(old for old in read_rows(page) if old.identity != row.identity)]
    rows.sort(key=lambda r: (version_key(r.torch), r.date), reverse=True)
    names = [field.name for field in fields(Row)]
    lines = [names, ["---"] * len(names), *(astuple(r) for r in rows)]
    table = "".join("| " + " | ".join(line) + " |\n" for line in lines)
    before, _, rest = page.partition(TABLE_BEGIN)
    return before + TABLE_BEGIN + table + TABLE_END + rest.partition(TABLE_END)[2]


def counts(report: str) -> tuple[int, int, int]:
    """Return (passed, failed, skipped) from the XML that pytest writes."""
    suites = list(ElementTree.fromstring(report).iter("testsuite"))
    names = ("tests", "failures", "errors", "skipped")
    total, failures, errors, skipped = (sum(int(s.get(k, 0)) for s in suites) for k in names)
    return total - failures - errors - skipped, failures + errors, skipped


# ---- the run


def build(directory: Path, which: str, python: str) -> Path:
    """Create the environment, and return its interpreter. A copy is installed, so nothing is left in the checkout."""
    free = shutil.disk_usage(directory).free
    if free < DISK_BYTES:
        need = f"{DISK_BYTES >> 30} are needed: set TMPDIR to a directory on another disk"
        raise Unavailable(f"{free >> 30} GiB are free at {directory}; {need}")
    subprocess.run([python, "-m", "venv", str(directory / "env")], check=True)
    (directory / "constraints.txt").touch()
    pip(directory, "install", "--quiet", "--upgrade", "pip")  # older ones try a hundred versions of botocore
    served = releases(
        pip(directory, "index", "versions", "torch"), lowest_version((ROOT / "pyproject.toml").read_text())
    )
    version = choose(which or turn(read_rows(PAGE.read_text()), served or [""]), served)
    (directory / "constraints.txt").write_text(pins((ROOT / "constraints.txt").read_text(), version))
    print(f"torch {version} of {', '.join(served)}: installing into {directory}", flush=True)
    source = directory / "source"
    source.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    shutil.copytree(ROOT / "megalite", source / "megalite", ignore=shutil.ignore_patterns("__pycache__"))
    pip(directory, "install", "--quiet", f"torch=={version}", f"{source}[dev]")
    return directory / "env" / "bin" / "python"


def pip(directory: Path, *args: str) -> str:
    """Run pip, and return what it prints. It ignores the machine's own constraints, which may exclude this torch."""
    environment = {"PIP_CONSTRAINT": str(directory / "constraints.txt"), "PIP_NO_CACHE_DIR": "1"}
    command = [str(directory / "env" / "bin" / "python"), "-m", "pip", *args, "--disable-pip-version-check"]
    result = subprocess.run(command, env=os.environ | environment, cwd=directory, capture_output=True, text=True)
    if result.returncode:
        raise Unavailable(f"pip {' '.join(args)}: {result.stderr.strip()[-2000:]}")
    return result.stdout


def run_tests(python: Path, directory: Path, quick: bool) -> Row:
    """Run the tests, whose output goes to the terminal, and return the row of their results."""
    versions = json.loads(
        subprocess.run([str(python), "-c", PRINT_VERSIONS], check=True, capture_output=True, text=True).stdout
    )
    print(*versions, flush=True)
    files = [f"tests/{name}" for name in QUICK] if quick else []
    report, workers = directory / "report.xml", os.environ.get("MEGALITE_TEST_WORKERS", "2")
    args = ["-m", MARKS, "-n", workers, "--dist", "worksteal", "--junitxml", str(report), *files]
    env = os.environ | {"OMP_NUM_THREADS": "1", "PATH": f"{python.parent}{os.pathsep}{os.environ.get('PATH', '')}"}
    start = time.monotonic()
    code = subprocess.run([str(python), "-m", "pytest", *args], cwd=ROOT, env=env, timeout=LIMIT_S).returncode
    minutes, seconds = divmod(round(time.monotonic() - start), 60)
    if not report.exists():
        sys.exit(f".ci/range: pytest ended with {code} and no report; no row is written")
    passed, failed, skipped = map(str, counts(report.read_text()))
    tests = "quick" if quick else "all"
    return Row(datetime.date.today().isoformat(), *versions, tests, passed, failed, skipped, f"{minutes}:{seconds:02d}")


def make_parser() -> argparse.ArgumentParser:
    result = argparse.ArgumentParser(prog=".ci/range", description=(__doc__ or "").split("\n")[0])
    result.add_argument("which", nargs="?", default="", help="lowest, highest or a version; default: by turns")
    result.add_argument("--quick", action="store_true", help=f"only {', '.join(QUICK)}")
    result.add_argument("--python", default=sys.executable, metavar="PATH", help="the interpreter of the environment")
    return result


def main(argv: list[str]) -> int:
    args = make_parser().parse_args(argv)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # removes the directory, too
    with tempfile.TemporaryDirectory(prefix="torch-range-") as name:
        try:
            python = build(Path(name), args.which, args.python)
        except Unavailable as error:
            print(f".ci/range: {error}", file=sys.stderr)
            return 3
        row = run_tests(python, Path(name), args.quick)
    PAGE.write_text(add_row(PAGE.read_text(), row))
    print(f"torch {row.torch}: {row.passed} passed, {row.failed} failed, {row.skipped} skipped")
    return int(row.failed != "0" or row.passed == "0")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
