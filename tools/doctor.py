#!/usr/bin/env python
"""Would a run start on this machine, and what would slow it down? One page, each line ok, warn or bad, with its remedy.

python tools/doctor.py                                                        and the storage of this folder
python tools/doctor.py --save runs/mine --data-path data/mine_text_document   that of a run, and its data
python tools/doctor.py --json                                                 the lines as objects

Software, card, clocks, variables, network, memory, storage (a file is written, synced and deleted), data; and what to
look at before hours are paid. One process, no group: links between ranks are for tools/check_cluster.py. Exit codes: 0;
3 something would stop a run.
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
from megalite.common.tables import load_table
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

COSTS = load_table(__file__, "doctor")
WRITTEN, SECONDS, SLOW = 256 * MIB, 2.0, 200e6  # of a test file at most; bytes/s that checkpoints need


def card() -> Iterator[CheckResult]:
    import torch  # which may be what is wrong

    from megalite.training.monitoring.rank_consistency import THROTTLED, GpuMonitor, read_sensors
    from tools.bench import gpu_report_probe as probe

    found, told = probe.facts(), probe.ask_driver()
    if not found["cards"]:
        remedy = f"install torch's build for the driver's CUDA, or correct CUDA_VISIBLE_DEVICES ({found.get('why')})"
        seen = f"torch {found['torch']} sees none of {len(told)} cards" if told else "none: a run takes the CPU"
        yield result_if("card", not told, seen, remedy, BAD)
        return
    drivers = ", ".join({one["driver_version"] for one in told}) or "not told"
    which = f"capability {found['capability']}, driver {drivers}, CUDA {found['cuda']}"
    yield CheckResult(OK, "card", f"{found['cards']} x {found['device']}, {found['memory'] / GIB:.1f} GiB, {which}")
    for fact, _, why in (text.partition(": ") for text in probe.warnings_of(found)):
        yield CheckResult(BAD if "(ECC)" in fact else WARN, "card", fact, why)
    for number in range(found["cards"]):
        now = read_sensors(GpuMonitor(torch.device("cuda", number)).figures)  # needs nvidia-ml-py
        held = ", ".join(why for bit, why in THROTTLED.items() if now.get("throttled", 0) & bit)
        clock = f"card {number} at {now.get('clock_mhz', '?')} MHz"
        yield result_if("clocks", not held, clock, f"it is held back ({held}): look at its cooling and power")


def storage(save: str) -> Iterator[CheckResult]:
    """How fast it takes bytes, by the code that writes checkpoints."""
    part, written = os.urandom(4 * MIB), 0
    try:
        if isinstance(
            place := parse_location(save), Path
        ):  # the folder that is to hold it, as no new one is left behind
            place = next(folder for folder in (place, *place.absolute().parents) if folder.exists())
        storage_of(place).check_writable(place, 0)
        if not isinstance(place, Path):
            yield CheckResult(OK, "storage", f"{save} can be written; its speed is not measured")
            return
        file, begin = place / f".doctor-{os.getpid()}", time.perf_counter()
        try:
            with storage_of(place).open_new(file) as append:
                while written < WRITTEN and time.perf_counter() - begin < SECONDS:
                    append(part)
                    written += len(part)
            rate = written / (time.perf_counter() - begin)
        finally:
            file.unlink(missing_ok=True)
        fact = f"save={save!r} takes {rate / 1e6:,.0f} MB/s with fsync, {written / MIB:.0f} MiB"
        fact = f"{fact}; {shutil.disk_usage(place).free / GIB:,.1f} GiB are free"
        yield result_if("storage", rate >= SLOW, fact, "use a faster disk, or save less often")
    except CheckpointError as error:
        yield CheckResult(BAD, "storage", str(error))
    except OSError as error:
        fact = f"save={save!r} does not take {WRITTEN / MIB:.0f} MiB ({error.strerror})"
        yield CheckResult(BAD, "storage", fact, "make room there, or give --save another disk")


def data(prefixes: list[str]) -> Iterator[CheckResult]:
    for prefix in prefixes:
        try:
            pair = IndexedDataset(prefix)
            size = f"{len(pair):,} documents, {pair.num_tokens:,} tokens"
            yield CheckResult(OK, "data", f"{prefix}: {size}, {pair.num_tokens * pair.dtype.itemsize / 1e9:.3g} GB")
        except (DataError, OSError) as error:
            yield CheckResult(BAD, "data", str(error))


def examine(save: str, prefixes: list[str]) -> Iterator[CheckResult]:
    parts = {"software": check_packages(), "card": card(), "clocks": check_clock(), "variables": check_variables()}
    parts |= {"network": check_network(), "memory": check_memory()}
    for about, part in {**parts, "storage": storage(save), "data": data(prefixes)}.items():
        try:
            yield from part
        except Exception as error:  # noqa: BLE001  a broken torch, no /proc: the other parts are told
            mark = BAD if isinstance(error, ImportError) else WARN
            yield CheckResult(mark, about, f"cannot be looked at: {type(error).__name__}: {error}")
    yield from (CheckResult(OK, "costs", f"{what}: {how}") for what, how in COSTS.items())


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
    args = build_parser().parse_args(argv)
    lines: list[CheckResult] = []
    for line in examine(args.save, args.data_path):
        lines.append(line)
        if not args.json:
            remedy = f"; {line.remedy}" if line.remedy else ""
            print(escape_control_chars(f"{line.status:5}{line.subject:14}{line.message}{remedy}"), flush=True)
    bad, warned = (sum(line.status == mark for line in lines) for mark in (BAD, WARN))
    told = [dict(zip(("mark", "about", "fact", "remedy"), line, strict=True)) for line in lines]
    found = {"lines": told, "exit": 3 if bad else 0}
    end = f"{bad} bad, {warned} to look at: {'a run would be stopped' if bad else 'a run can start'}"
    print(json.dumps(found, indent=1) if args.json else end)
    return found["exit"]


if __name__ == "__main__":
    run_program(main)
