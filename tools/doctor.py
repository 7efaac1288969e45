#!/usr/bin/env python
"""Check whether a run can start on this machine, and what would slow it down.

python tools/doctor.py                                                        checks the storage of this directory
python tools/doctor.py --save runs/mine --data-path data/mine_text_document   that of a run, and its data
python tools/doctor.py --json                                                 prints the results as objects

Each line is ok, warn or bad, with a remedy. The checks cover software, GPU, clocks, environment variables, network,
memory, storage (a file is written, synced and deleted) and data. The last lines say what to find out before paying for
hours of many GPUs. The program is one process without a group: for links between ranks, use tools/check_cluster.py.
Exit codes: 0; 3 something would stop a run.
"""

import argparse
import json
import os
import shutil
import sys
import time
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from megalite.checkpoint.storage.location import CheckpointError, parse_location
from megalite.checkpoint.storage.storage import storage_of
from megalite.common.console import escape_control_chars
from megalite.data.errors import DataError
from megalite.data.files.indexed_dataset import IndexedDataset
from megalite.launch.system_checks import (
    BAD,
    GIB,
    MIB,
    OK,
    WARN,
    CheckResult,
    check_clock,
    check_memory,
    check_network,
    check_packages,
    check_variables,
    result_if,
)
from tools.cli_common import make_parser, run_program

# what to find out before paying for hours of many GPUs -> the command or page that answers it
COSTS = {
    "does it fit, how long, for how much": "megalite plan --ask",
    "does the layout train as one process does": "megalite verify FLAGS, without a GPU",
    "do the options and the data hold": "the run's own command with --dry-run, on one machine",
    "is every link as fast as its neighbors": "megalite cluster, on the machines that the run will have",
    "what a failure costs": "the steps since the last --save-interval, on all devices: see docs/fault_tolerance.md",
    "what the disk must hold": "the size of a checkpoint, which a run prints, times --keep-last",
}
# limits of the storage test
MAX_BYTES = 256 * MIB
MAX_SECONDS = 2.0
MIN_BYTES_PER_S = 200e6  # a slower disk delays checkpoints


def check_gpu() -> Iterator[CheckResult]:
    """Check the GPUs that torch sees, and their clocks."""
    import torch  # here, because a failing import is a result

    from megalite.training.monitoring.gpu_monitor import THROTTLED, GpuMonitor, read_sensors
    from tools.bench import gpu_report_probe as probe

    facts = probe.facts()
    driver_facts = probe.query_gpus()
    if not facts["gpus"]:
        if driver_facts:
            message = f"torch {facts['torch']} sees none of {len(driver_facts)} GPUs"
        else:
            message = "none: a run takes the CPU"
        remedy = f"install torch's build for the driver's CUDA, or correct CUDA_VISIBLE_DEVICES ({facts.get('why')})"
        yield result_if("gpu", not driver_facts, message, remedy, BAD)
        return
    drivers = ", ".join({gpu["driver_version"] for gpu in driver_facts}) or "unknown"
    versions = f"capability {facts['capability']}, driver {drivers}, CUDA {facts['cuda']}"
    memory = f"{facts['memory'] / GIB:.1f} GiB"
    yield CheckResult(OK, "gpu", f"{facts['gpus']} x {facts['device']}, {memory}, {versions}")
    for warning in probe.warnings_of(facts):
        message, _, reason = warning.partition(": ")
        yield CheckResult(BAD if "(ECC)" in message else WARN, "gpu", message, reason)
    for index in range(facts["gpus"]):
        sensors = read_sensors(GpuMonitor(torch.device("cuda", index)).sensors)  # empty without nvidia-ml-py
        reasons = [reason for bit, reason in THROTTLED.items() if sensors.get("throttled", 0) & bit]
        message = f"GPU {index} at {sensors.get('clock_mhz', '?')} MHz"
        remedy = f"it is throttled ({', '.join(reasons)}): check its cooling and power"
        yield result_if("clocks", not reasons, message, remedy)


def check_storage(save: str) -> Iterator[CheckResult]:
    """Check that checkpoints can be written, and how fast, with the code that writes them."""
    try:
        location = parse_location(save)
        if isinstance(location, Path):  # use the nearest directory that exists, to leave no new one behind
            parents = (location, *location.absolute().parents)
            location = next(directory for directory in parents if directory.exists())
        storage_of(location).check_writable(location, 0)
        if not isinstance(location, Path):
            yield CheckResult(OK, "storage", f"{save} can be written; its speed is not measured")
            return
        num_bytes, seconds = _write_test_file(location)
        rate = num_bytes / seconds
        message = f"save={save!r} takes {rate / 1e6:,.0f} MB/s with fsync, {num_bytes / MIB:.0f} MiB"
        message = f"{message}; {shutil.disk_usage(location).free / GIB:,.1f} GiB are free"
        yield result_if("storage", rate >= MIN_BYTES_PER_S, message, "use a faster disk, or save less often")
    except CheckpointError as error:
        yield CheckResult(BAD, "storage", str(error))
    except OSError as error:
        message = f"save={save!r} does not take {MAX_BYTES / MIB:.0f} MiB ({error.strerror})"
        yield CheckResult(BAD, "storage", message, "make room there, or give --save another disk")


def _write_test_file(directory: Path) -> tuple[int, float]:
    """Write, sync and delete a file, and return (bytes, seconds)."""
    chunk = os.urandom(4 * MIB)
    num_bytes = 0
    path = directory / f".doctor-{os.getpid()}"
    start = time.perf_counter()
    try:
        with storage_of(directory).open_new(path) as append:
            while num_bytes < MAX_BYTES and time.perf_counter() - start < MAX_SECONDS:
                append(chunk)
                num_bytes += len(chunk)
        return num_bytes, time.perf_counter() - start
    finally:
        path.unlink(missing_ok=True)


def check_data(prefixes: list[str]) -> Iterator[CheckResult]:
    """Check that token files can be opened."""
    for prefix in prefixes:
        try:
            dataset = IndexedDataset(prefix)
            counts = f"{len(dataset):,} documents, {dataset.num_tokens:,} tokens"
            size = f"{dataset.num_tokens * dataset.dtype.itemsize / 1e9:.3g} GB"
            yield CheckResult(OK, "data", f"{prefix}: {counts}, {size}")
        except (DataError, OSError) as error:
            yield CheckResult(BAD, "data", str(error))


def run_checks(save: str, prefixes: list[str]) -> Iterator[CheckResult]:
    """Yield the results of all checks."""
    checks = {
        "software": check_packages(),
        "gpu": check_gpu(),
        "clocks": check_clock(),
        "variables": check_variables(),
        "network": check_network(),
        "memory": check_memory(),
        "storage": check_storage(save),
        "data": check_data(prefixes),
    }
    for subject, results in checks.items():
        try:
            yield from results
        except Exception as error:  # noqa: BLE001  a broken torch or a missing /proc must not stop the other checks
            status = BAD if isinstance(error, ImportError) else WARN
            yield CheckResult(status, subject, f"cannot be checked: {type(error).__name__}: {error}")
    for question, answer in COSTS.items():
        yield CheckResult(OK, "costs", f"{question}: {answer}")


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of this program's flags."""
    parser = make_parser(__doc__)
    parser.add_argument(
        "--save", default=".", metavar="DIR", help="directory for checkpoints; default: the current directory"
    )
    parser.add_argument(
        "--data-path", nargs="+", default=[], metavar="PREFIX", help="token files, without their suffix"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    return parser


def main(argv: list[str]) -> int:
    """Run the program and return its exit code."""
    args = build_parser().parse_args(argv)
    results: list[CheckResult] = []
    for result in run_checks(args.save, args.data_path):
        results.append(result)
        if not args.json:
            remedy = f"; {result.remedy}" if result.remedy else ""
            line = f"{result.status:5}{result.subject:14}{result.message}{remedy}"
            print(escape_control_chars(line), flush=True)
    num_bad = sum(result.status == BAD for result in results)
    num_warnings = sum(result.status == WARN for result in results)
    code = 3 if num_bad else 0
    if args.json:
        lines = [dict(zip(("mark", "about", "fact", "remedy"), result, strict=True)) for result in results]
        print(json.dumps({"lines": lines, "exit": code}, indent=1))
    else:
        verdict = "a run would be stopped" if num_bad else "a run can start"
        print(f"{num_bad} bad, {num_warnings} to look at: {verdict}")
    return code


if __name__ == "__main__":
    run_program(main)
