"""The rows of tests/layouts/layouts.toml, and the models, flags and bounds that tests of layouts share."""

from collections.abc import Hashable
from dataclasses import dataclass, replace
from operator import attrgetter

import toml_tables
from pairwise import cover
from train_cases import BORDERS

FP64 = 1e-10  # relative bound on losses and gradient norms
BF16 = 0.02  # relative bound on loss and gradient norm; measured 5e-4 and 6e-3

SIZES = ("--tensor-model-parallel-size", "--pipeline-model-parallel-size", "--num-virtual-stages-per-pipeline-rank")
TABLES = toml_tables.read("layouts/layouts")
flags = toml_tables.spelt({**TABLES["words"], "BORDERS": BORDERS})

COMMON, GPT, LLAMA, DROP, ZLOSS = map(flags, ("COMMON", "GPT", "LLAMA", "DROP", "ZLOSS"))
SPLIT, ZERO2, ZERO3, OFFLOAD, PARAMETERS, HALF = map(flags, "SPLIT ZERO2 ZERO3 OFFLOAD PARAMETERS HALF".split())


@dataclass(frozen=True)
class Row:
    """One layout of one model on `world` ranks; dp is world / (tp x pp)."""

    world: int
    model: str
    layout: str
    name: str

    @property
    def words(self) -> list[str]:
        return f"{self.model} {self.layout}".split()

    def value(self, flag: str, default: str) -> str:
        return self.words[self.words.index(flag) + 1] if flag in self.words else default

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        """The sizes of tp, pp, dp (including cp) and vpp."""
        tp, pp, vpp = (int(self.value(flag, "1")) for flag in SIZES)
        return tp, pp, self.world // (tp * pp), vpp

    @property
    def has_tp(self) -> bool:
        return self.sizes[0] > 1


def table(name: str) -> list[Row]:
    return [Row(world, flags(model), flags(layout), row) for row, (world, model, layout) in TABLES[name].items()]


ROWS = table("rows")


def features(item: Row) -> dict[str, Hashable]:
    """Return the features of a layout. Every pair of features should be tested together."""
    tp, pp, dp, vpp = (size > 1 for size in item.sizes)
    return {
        **{"tp": tp, "pp": pp, "dp": dp, "vpp": vpp, "split": SPLIT in item.words},
        "schedule": item.value("--pipeline-schedule", "1f1b"),
        "ties": "--untie-embeddings-and-output-weights" not in item.words,
        "documents": "--reset-attention-mask" in item.words,
        "recompute": item.value("--recompute-granularity", "none"),
        "zero": item.value("--zero-stage", "1"),
    }


COVER = cover(ROWS, features)
NAME = attrgetter("name")
EXCHANGED = [
    replace(item, name=f"{item.name}, {comm_type}", layout=f"{item.layout} {flag}")
    for comm_type, flag in (("allgather", ""), ("a2a", flags("A2A")))
    for item in table("both_ways")
] + table("context")
OFTEN = [
    row
    for row in EXCHANGED
    if row.name.startswith(("gpt pp2", "llama cp4, w", "three", "gpt cp2 dp2 Z", "llama cp2 rec"))
]
