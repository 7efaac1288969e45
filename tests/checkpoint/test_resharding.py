"""Saved under A, loaded under B, for all pairs of layouts: the same bits, and the run continues as the unbroken one.

Each layout trains two steps and saves. Then each loads the checkpoints of all, tells what it has, and trains a step
more (two after its own). Tensors are compared whole; those of layout A with one process's within the layout tolerance.
"""

import functools
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import toml_tables
import torch
from full_tensors import Owned, whole_of
from pairwise import rarely
from ranks import run_ranks
from train_cases import SMALL, config_from, run_from

from megalite.checkpoint.offline import open_checkpoint
from megalite.config.config_file import dump_config
from megalite.config.options import Config
from megalite.training.checkpointing.resume import LoadOptions, resume
from megalite.training.checkpointing.save import open_saver, save, shards_to_save
from megalite.training.train_step import train_step

TABLES = toml_tables.read("layouts/layouts")
spelt = toml_tables.spelt(TABLES["words"])


@dataclass(frozen=True)
class Layout:
    name: str
    world: int
    flags: str = ""


FP32, ZERO = (
    [Layout(name, world, spelt(f)) for name, (world, f) in TABLES[k].items()] for k in ("saved", "saved_zero")
)
BF16 = [
    Layout("alone bf16", 1, "--bf16"),
    *(Layout(f"{a.name} bf16", a.world, f"{a.flags} --bf16") for a in (FP32[1], FP32[5], ZERO[4])),
]
HIGH = "--optimizer muon --muon-fp32-matmul-prec high"
MUON = [replace(one, name=f"{one.name} muon", flags=f"{one.flags} {HIGH}") for one in FP32[::3]]
MORE = "--global-batch-size 4 --train-iters 4 --lr-decay-style constant --seed 7 --init-method-std 0.2 --adam-eps 1e-3 --clip-grad 0.5".split()


def config_of(layout: Layout, *flags: str) -> Config:
    return config_from([*SMALL, *MORE, *layout.flags.split(), *flags])


def _train_and_save(base: str, layouts: list[Layout]) -> list[list[float]]:
    """Two steps, a checkpoint, two steps more: the losses of these."""
    losses = []
    for layout in layouts:
        config = config_of(layout, "--save", f"{base}/{layout.name}", "--save-interval", "2", "--async-save")
        run = run_from(config)
        saver = open_saver(run, config)
        for _ in range(2):
            train_step(run)
        save(run, saver, dump_config(config))
        losses.append([train_step(run).loss for _ in range(2)])  # while it is written
        saver.wait()
        saver.close()
    return losses


def _load_and_go_on(
    base: str, sources: list[Layout], layouts: list[Layout]
) -> list[list[tuple[list[float], list[Owned]]]]:
    """Per layout and source: the losses of the next steps, and what this rank owned before."""
    result = []
    for layout in layouts:
        config = config_of(layout)
        run = run_from(config)
        rows = []
        for source in sources:
            found = resume(run, f"{base}/{source.name}", config, LoadOptions())
            assert found is not None and run.progress.step == run.optimizer.num_updates == 2
            owned = [(p.name, p.shape, p.box, p.span, p.data.clone()) for p in shards_to_save(run)]
            rows.append(([train_step(run).loss for _ in range(2 if source == layout else 1)], owned))
        result.append(rows)
    return result


def _by_world(layouts: list[Layout]) -> dict[int, list[Layout]]:
    return {w: [x for x in layouts if x.world == w] for w in sorted({x.world for x in layouts})}


def _ranks(world: int, fn, *args):
    return run_ranks(world, fn, *args, timeout=110) if world > 1 else [fn(*args)]


@functools.cache
def whole(folder: Path) -> dict[str, torch.Tensor]:
    found = open_checkpoint(folder, verified=True)
    return {name: found.read(name) for name in found.manifest.tensors}


SETS = {"fp32": FP32, "bf16": BF16, "muon": MUON, "ZeRO": ZERO}
SETS |= {"some fp32": [FP32[i] for i in (0, 4, 5, 7, 8)], "some ZeRO": [ZERO[i] for i in (0, 4, 5, 7, 8)]}
OFTEN = [name for name in SETS if name not in ("fp32", "ZeRO")]


@pytest.mark.parametrize("which", rarely([*SETS], OFTEN, str, guards=("megalite/checkpoint", "megalite/optim")))
def test_resume_under_any_other_layout(tmp_path: Path, which: str) -> None:
    layouts = SETS[which]
    unbroken: dict[str, list[float]] = {}
    for world, some in _by_world(layouts).items():
        losses = _ranks(world, _train_and_save, str(tmp_path), some)[0]
        unbroken |= {layout.name: row for layout, row in zip(some, losses, strict=True)}
    bf16, more = layouts is BF16, {BF16[0]: {"optimizer.main"}, MUON[0]: {"optimizer.momentum_buffer"}}
    alone = whole(tmp_path / layouts[0].name)
    kinds = {name.partition("/")[0] for name in alone}
    assert kinds == {"model", "optimizer.exp_avg", "optimizer.exp_avg_sq"} | more.get(layouts[0], set())
    for layout in layouts:
        got = whole(tmp_path / layout.name)
        assert got.keys() == alone.keys()
        for name, values in got.items():
            assert values.shape == alone[name].shape, f"{layout.name}: {name}"
            bound = (1e-1 if layouts in (BF16, MUON) else 1e-3) * float(alone[name].abs().max())
            assert float((values - alone[name]).abs().max()) <= bound, f"{layout.name}: {name}"
    for world, some in _by_world(layouts).items():
        ranks = _ranks(world, _load_and_go_on, str(tmp_path), layouts, some)
        for t, target in enumerate(some):
            for n, source in enumerate(layouts):
                what, row = f"saved by {source.name}, loaded by {target.name}", ranks[0][t][n][0]
                wanted, got = whole(tmp_path / source.name), whole_of(one for rank in ranks for one in rank[t][n][1])
                assert wanted.keys() == got.keys(), what
                for name in wanted:
                    assert wanted[name].dtype == got[name].dtype and torch.equal(wanted[name], got[name]), (what, name)
                if source is target:
                    assert row == unbroken[source.name], what
                else:
                    assert row == pytest.approx(unbroken[source.name][:1], rel=2e-2 if bf16 else 1e-4), what
    whole.cache_clear()
