"""Sweeps and scaling of tools/benchmark.py: all combinations, in turns, into a folder that an interrupted one goes on
from. What was measured is written after each run."""

from __future__ import annotations

import argparse
import contextlib
import os
import platform
import sys
import tempfile
from collections.abc import Callable, Iterator
from typing import Any

from megalite.config import cli
from megalite.config.options import ConfigError
from megalite.config.packages import MissingPackage
from megalite.models.families import PRESETS
from megalite.parallel.local_ranks import cores
from megalite.train.arrangement import arrange
from tools import benchmark
from tools.bench import tables
from tools.bench.turns import OK, REFUSED, OtherBenchmark, Row, Table, combinations_of


def batch_flags(options: argparse.Namespace, flags: list[str], nproc: int) -> list[str]:
    """The global batch of weak scaling, where a rank's share is that of the fewest ranks. Raises ConfigError."""
    if options.scaling != "weak":
        return []
    batch, fewest = cli.read(flags, PRESETS)[0].train.global_batch_size, min(options.nproc)
    if batch is None:
        return []  # micro_batch_size x dp, which is weak
    if batch * nproc % fewest:
        raise ConfigError(
            [f"global_batch_size={batch} of {fewest} ranks is no whole number for {nproc}; give a multiple"]
        )
    return ["--global-batch-size", str(batch * nproc // fewest)]


def problems_of(flags: list[str], options: argparse.Namespace, nproc: int) -> tuple[bool, list[str]]:
    """Whether it is bf16; why this combination cannot run, with what the check of options cannot see."""
    half, problems = benchmark.read_config(flags, argparse.Namespace(**{**vars(options), "nproc": nproc}))
    if not problems:
        config, _ = cli.read(flags, PRESETS)
        try:
            if config.data.vocab_size is not None:
                arrange(config, nproc, config.data.vocab_size)
        except ValueError as error:
            problems = [str(error)]
    return half, problems


def rows_of(options: argparse.Namespace, flags: list[str]) -> list[Row]:
    """Every contender under every combination. Raises ConfigError where a list, or all of them, cannot be read."""
    threads = {}
    if len(options.nproc) > 1 and "OMP_NUM_THREADS" not in os.environ:
        threads = {"OMP_NUM_THREADS": str(max(1, cores() // max(options.nproc)))}
    rows = []
    for values, words, nproc in combinations_of(options.sweep, options.nproc):
        line = [*flags, *words]
        try:
            line += batch_flags(options, line, nproc)
            half, problems = problems_of(line, options, nproc)
        except ConfigError as error:
            half, problems = False, error.problems
        asked = argparse.Namespace(**{**vars(options), "nproc": nproc})
        for name, more in benchmark.contenders(asked, half):
            row = Row(values, name, line, nproc, {**threads, **more})
            if problems:
                row.status, row.reason = REFUSED, "; ".join(problems)
            rows.append(row)
    if all(row.status == REFUSED for row in rows):
        raise ConfigError(list(dict.fromkeys(row.reason for row in rows)))
    return rows


def facts_of(options: argparse.Namespace, flags: list[str]) -> dict[str, Any]:
    import torch

    same = {name: getattr(options, name) for name in ("steps", "warmup", "memory_gib")}
    return {
        "machine": platform.platform(),
        "torch": torch.__version__,
        "flags": flags,
        "scaling": options.scaling,
    } | same


@contextlib.contextmanager
def progress(total: int) -> Iterator[Callable[[str], None]]:
    """Tells which run begins: a bar on a terminal, lines elsewhere."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    console = Console(stderr=True)
    if not console.is_terminal:
        yield lambda text: print(text, file=sys.stderr, flush=True)
        return
    columns = TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
    with Progress(*columns, console=console) as bar:
        task = bar.add_task("", total=total)
        begun = False

        def next_one(text: str) -> None:
            nonlocal begun
            bar.update(task, advance=int(begun), description=text)
            begun = True

        yield next_one
        bar.update(task, advance=int(begun))


def measure_all(table: Table, options: argparse.Namespace) -> None:
    """In turns, so that what changes on the machine changes for all rows."""
    with progress(sum(row.wants(turn) for turn in range(options.repeats) for row in table.rows)) as tell:
        for turn in range(options.repeats):
            for row in table.rows:
                if row.wants(turn):
                    tell(f"{turn + 1} of {options.repeats}: {row.label}, {row.contender}")
                    given = argparse.Namespace(**{**vars(options), "nproc": row.nproc})
                    row.take(benchmark.measure(row.contender, row.environment, given, row.flags), options.timeout)
                    table.save(False)


def finish(table: Table, options: argparse.Namespace, complete: bool) -> None:
    """The files and the table of what there is."""
    found = tables.figures(table.rows, options.price_per_hour)
    if options.scaling:
        found = tables.with_efficiency(found)
    table.facts["figures"] = found
    table.save(complete)
    print(tables.text_table(found))
    for one in found:
        if made := one.get("breakdown"):
            print("\n".join([f"\n{one['label']}:", *tables.told(made)]))
    if table.folder is not None:
        tables.write_csv(found, table.folder / "bench.csv")
        draw(table, found)


def draw(table: Table, found: list[dict[str, Any]]) -> None:
    from tools.pictures import bench
    from tools.pictures.canvas import save

    assert table.folder is not None
    try:
        for picture in bench.pictures(found):
            save(picture, table.folder / f"{picture.name}.png")
    except MissingPackage as error:
        print(f"benchmark.py: no pictures: {error}", file=sys.stderr)


def run(options: argparse.Namespace, flags: list[str], program: str) -> int:
    """The exit code."""
    try:
        table = Table(facts_of(options, flags), rows_of(options, flags), options.out)
        if options.out is not None:
            options.out.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=options.out):
                pass
        done = table.resume(options.timeout)
    except ConfigError as error:
        print(*(f"{program}: {problem}" for problem in error.problems), sep="\n", file=sys.stderr)
        return 2
    except OSError as error:
        print(f"{program}: --out {options.out} cannot be written: {error.strerror}", file=sys.stderr)
        return 2
    except OtherBenchmark as error:
        print(f"{program}: {error}", file=sys.stderr)
        return 2
    if done:
        print(f"{done} of {len(table.rows)} rows are there already", file=sys.stderr)
    table.save(False)
    interrupted = False
    try:
        measure_all(table, options)
    except KeyboardInterrupt:
        interrupted = True
        print(f"{program}: interrupted; the same command goes on", file=sys.stderr)
    finish(table, options, not interrupted)
    measured = any(row.status == OK and row.contender.startswith("megalite") for row in table.rows)
    return 130 if interrupted else 0 if measured else 1
