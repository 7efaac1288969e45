"""Run every combination of flags for tools/benchmark.py, and write the results after each run.

The files of --out are complete after each run, so an interrupted benchmark resumes from them.
"""

import argparse
import os
import platform
import sys
from typing import Any

import torch

from megalite.common.console import ProgressBar, print_err
from megalite.common.optional_packages import MissingPackageError
from megalite.config import cli
from megalite.config.options import ConfigError
from megalite.launch.local_launcher import cpu_count
from megalite.models.families import PRESETS
from tools.bench import format_results, systems
from tools.bench.results import REFUSED, BenchResult, ResultsFile, combinations_of
from tools.plots import bench
from tools.plots.style import save


def batch_flags(options: argparse.Namespace, flags: list[str], nproc: int) -> list[str]:
    """Return the flags that set the global batch of weak scaling.

    Each rank keeps the batch that it has with the smallest number of ranks. Raises ConfigError if that is impossible.
    """
    if options.scaling != "weak":
        return []
    batch = cli.read(flags, PRESETS)[0].train.global_batch_size
    if batch is None:
        return []  # the default, micro_batch_size x dp, scales with the ranks
    min_nproc = min(options.nproc)
    if batch * nproc % min_nproc:
        whole_number = f"global_batch_size={batch} of {min_nproc} ranks is not a whole number for {nproc}"
        raise ConfigError([f"{whole_number}; give a multiple"])
    return ["--global-batch-size", str(batch * nproc // min_nproc)]


def plan_results(options: argparse.Namespace, flags: list[str]) -> list[BenchResult]:
    """Return an empty result for every system under every combination of flags.

    Raises ConfigError if a list of values cannot be parsed, or if every combination is refused.
    """
    environment = {}
    if len(options.nproc) > 1 and "OMP_NUM_THREADS" not in os.environ:
        environment["OMP_NUM_THREADS"] = str(max(1, cpu_count() // max(options.nproc)))
    rows: list[BenchResult] = []
    reasons: dict[str, None] = {}  # in order, without duplicates
    for values, varied_flags, nproc in combinations_of(options.sweep, options.nproc):
        row_flags = [*flags, *varied_flags]
        row_options = argparse.Namespace(**{**vars(options), "nproc": nproc})
        try:
            row_flags += batch_flags(options, row_flags, nproc)
            is_bf16, problems = systems.read_config(row_flags, row_options)
        except ConfigError as error:
            is_bf16, problems = False, error.problems
        for name, variables in systems.list_systems(row_options, is_bf16):
            row = BenchResult(values, name, row_flags, nproc, {**environment, **variables})
            if problems:
                row.status, row.reason = REFUSED, "; ".join(problems)
                reasons |= dict.fromkeys(problems)
            rows.append(row)
    if all(row.status == REFUSED for row in rows):
        raise ConfigError(list(reasons))
    return rows


def measure_all(table: ResultsFile, options: argparse.Namespace) -> None:
    """Measure each system once per repeat, so that changes of the machine's load affect all of them."""
    runs = [(repeat, row) for repeat in range(options.repeats) for row in table.rows]
    num_done, total = 0, sum(row.needs_run(repeat) for repeat, row in runs)
    with ProgressBar("benchmark", total, "runs") as bar:
        for repeat, row in runs:
            if not row.needs_run(repeat):  # also if an earlier repeat has failed
                continue
            text = f"{repeat + 1} of {options.repeats}: {row.label}, {row.contender}"
            if bar.live:
                bar.update(num_done, text)
            else:
                print(text, file=sys.stderr, flush=True)
            row_options = argparse.Namespace(**{**vars(options), "nproc": row.nproc})
            measurement = systems.measure(row.contender, row.environment, row_options, row.flags)
            row.record(measurement, options.timeout)
            table.save(False)
            num_done += 1
            # on a terminal with several combinations, the last line of the error in the table is enough
            if "error" in measurement and not (row.values and bar.live):
                print(f"{row.contender}: {measurement['stderr']}", file=sys.stderr)


def write_results(table: ResultsFile, options: argparse.Namespace, complete: bool) -> None:
    """Write the files, and print the table, of all results so far."""
    measured = format_results.summarize(table.rows, options.price_per_hour)
    if options.scaling:
        measured = format_results.add_scaling_efficiency(measured)
    table.facts["figures"] = measured
    table.save(complete)
    if runs := [run for row in table.rows for run in row.runs if "device" in run]:
        device, peak = runs[0]["device"], runs[0]["peak_tflops"] or 0.0
        print(f"{device}, torch {table.facts['torch']}; peak {peak:.2f} TFLOP/s per device")
    print(format_results.text_table(measured))
    for row, summary in zip(table.rows, measured, strict=True):
        if breakdown := summary.get("breakdown"):
            print(f"\n{summary['label']}:")
            for line in (*format_results.breakdown_lines(breakdown), *format_results.rank_lines(row.runs[-1])):
                print(line)
    if options.out is None:
        return
    format_results.write_csv(measured, options.out / "bench.csv")
    try:
        for picture in bench.pictures(measured):
            save(picture, options.out / f"{picture.name}.png")
    except MissingPackageError as error:
        print_err(f"benchmark.py: no pictures: {error}")


def run(options: argparse.Namespace, flags: list[str], program: str) -> int:
    """Run the benchmark, and return the exit code. Raises ConfigError if it cannot run."""
    file = options.json
    try:
        rows = plan_results(options, flags)
        if options.out is not None:
            options.out.mkdir(parents=True, exist_ok=True)
            file = options.out / "bench.json"
        facts: dict[str, Any] = {
            "machine": platform.platform(),
            "torch": torch.__version__,
            "flags": flags,
            "steps": options.steps,
            "warmup": options.warmup,
            "memory_gib": options.memory_gib,
            "scaling": options.scaling,
        }
        table = ResultsFile(facts, rows, file)
        num_complete = table.resume(options.timeout) if options.out is not None else 0
        table.save(False)  # before the first run, so that an unwritable file is found at once
    except OSError as error:
        flag = "--json" if options.out is None else "--out"
        raise ConfigError([f"{flag} {options.json or options.out} cannot be written: {error.strerror}"]) from None
    if num_complete:
        print(f"{num_complete} of {len(table.rows)} rows are there already", file=sys.stderr)
    interrupted = False
    try:
        measure_all(table, options)
    except KeyboardInterrupt:
        interrupted = True
        resume_note = "" if options.out is None else "; the same command resumes it"
        print_err(f"{program}: interrupted{resume_note}")
    write_results(table, options, not interrupted)
    if interrupted:
        return 130
    any_measured = any(row.runs and row.contender.startswith("megalite") for row in table.rows)
    return 0 if any_measured else 1
