"""Run every combination of flags for tools/benchmark.py in turns, and write the results after each run into a folder
from which an interrupted benchmark continues."""

import argparse
import os
import platform
import sys
from typing import Any

import torch

from megalite.common.optional_packages import MissingPackageError
from megalite.config import cli
from megalite.config.console import ProgressBar, print_err
from megalite.config.options import ConfigError
from megalite.launch.local_launcher import cpu_count
from megalite.models.families import PRESETS
from tools.bench import format_results as tables
from tools.bench import systems as contender
from tools.bench.results import REFUSED, Row, Table, combinations_of
from tools.plots import bench
from tools.plots.style import save


def batch_flags(options: argparse.Namespace, flags: list[str], nproc: int) -> list[str]:
    """The global batch of weak scaling, where a rank's share is that of the fewest ranks. Raises ConfigError."""
    if options.scaling != "weak":
        return []
    batch, fewest = cli.read(flags, PRESETS)[0].train.global_batch_size, min(options.nproc)
    if batch is None:
        return []  # micro_batch_size x dp, which is weak
    if batch * nproc % fewest:
        whole = f"global_batch_size={batch} of {fewest} ranks is not a whole number for {nproc}"
        raise ConfigError([f"{whole}; give a multiple"])
    return ["--global-batch-size", str(batch * nproc // fewest)]


def rows_of(options: argparse.Namespace, flags: list[str]) -> list[Row]:
    """Every contender under every combination. Raises ConfigError where a list, or all of them, cannot be read."""
    threads = {}
    if len(options.nproc) > 1 and "OMP_NUM_THREADS" not in os.environ:
        threads = {"OMP_NUM_THREADS": str(max(1, cpu_count() // max(options.nproc)))}
    rows, reasons = [], {}
    for values, words, nproc in combinations_of(options.sweep, options.nproc):
        line, asked = [*flags, *words], argparse.Namespace(**{**vars(options), "nproc": nproc})
        try:
            line += batch_flags(options, line, nproc)
            half, problems = contender.read_config(line, asked)
        except ConfigError as error:
            half, problems = False, error.problems
        for name, environment in contender.contenders(asked, half):
            row = Row(values, name, line, nproc, {**threads, **environment})
            if problems:
                row.status, row.reason = REFUSED, "; ".join(problems)
                reasons |= dict.fromkeys(problems)
            rows.append(row)
    if all(row.status == REFUSED for row in rows):
        raise ConfigError(list(reasons))
    return rows


def measure_all(table: Table, options: argparse.Namespace) -> None:
    """In turns, so that what changes on the machine changes for all rows."""
    todo = [(turn, row) for turn in range(options.repeats) for row in table.rows]
    done, total = 0, sum(row.wants(turn) for turn, row in todo)
    with ProgressBar("benchmark", total, "runs") as bar:
        for turn, row in todo:
            if not row.wants(turn):
                continue
            text = f"{turn + 1} of {options.repeats}: {row.label}, {row.contender}"
            if bar.live:
                bar.update(done, text)
            else:
                print(text, file=sys.stderr, flush=True)
            given = argparse.Namespace(**{**vars(options), "nproc": row.nproc})
            result = contender.measure(row.contender, row.environment, given, row.flags)
            row.take(result, options.timeout)
            table.save(False)
            done += 1
            if "error" in result and not row.values:  # of many combinations the table alone says why
                print(f"{row.contender}: {result['stderr']}", file=sys.stderr)


def finish(table: Table, options: argparse.Namespace, complete: bool) -> None:
    """The files and the table of what there is."""
    measured = tables.figures(table.rows, options.price_per_hour)
    if options.scaling:
        measured = tables.with_efficiency(measured)
    table.facts["figures"] = measured
    table.save(complete)
    if runs := [run for row in table.rows for run in row.runs if "device" in run]:
        device, peak = runs[0]["device"], runs[0]["peak_tflops"] or 0.0
        print(f"{device}, torch {table.facts['torch']}; peak {peak:.2f} TFLOP/s per device")
    print(tables.text_table(measured))
    for row, one in zip(table.rows, measured, strict=True):
        if breakdown := one.get("breakdown"):
            print("\n".join([f"\n{one['label']}:", *tables.breakdown_lines(breakdown), *tables.by_rank(row.runs[-1])]))
    if options.out is None:
        return
    tables.write_csv(measured, options.out / "bench.csv")
    try:
        for picture in bench.pictures(measured):
            save(picture, options.out / f"{picture.name}.png")
    except MissingPackageError as error:
        print_err(f"benchmark.py: no pictures: {error}")


def run(options: argparse.Namespace, flags: list[str], program: str) -> int:
    """The exit code. Raises ConfigError."""
    file = options.json
    try:
        rows = rows_of(options, flags)
        if options.out is not None:
            options.out.mkdir(parents=True, exist_ok=True)
            file = options.out / "bench.json"
        facts: dict[str, Any] = {"machine": platform.platform(), "torch": torch.__version__, "flags": flags}
        facts |= {name: getattr(options, name) for name in ("steps", "warmup", "memory_gib", "scaling")}
        table = Table(facts, rows, file)
        done = table.resume(options.timeout) if options.out is not None else 0
        table.save(False)  # before anything takes time, and after each run: an interrupted benchmark leaves what it has
    except OSError as error:
        flag = "--json" if options.out is None else "--out"
        raise ConfigError([f"{flag} {options.json or options.out} cannot be written: {error.strerror}"]) from None
    if done:
        print(f"{done} of {len(table.rows)} rows are there already", file=sys.stderr)
    interrupted = False
    try:
        measure_all(table, options)
    except KeyboardInterrupt:
        interrupted = True
        resumed = "" if options.out is None else "; the same command resumes it"
        print_err(f"{program}: interrupted{resumed}")
    finish(table, options, not interrupted)
    any_measured = any(row.runs and row.contender.startswith("megalite") for row in table.rows)
    return 130 if interrupted else 0 if any_measured else 1
