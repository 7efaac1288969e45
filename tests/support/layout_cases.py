"""The rows of tests/layouts/layouts.toml, and the models, flags and bounds that tests of layouts share."""

from collections.abc import Hashable, Iterable, Iterator
from dataclasses import dataclass, replace
from operator import attrgetter

import toml_tables
from pairwise import cover
from train_cases import DOCUMENT_FLAGS

FP64_TOLERANCE = 1e-10  # relative bound on losses and gradient norms
BF16_TOLERANCE = 0.02  # relative bound on loss and gradient norm; measured 5e-4 and 6e-3

SIZES = ("--tensor-model-parallel-size", "--pipeline-model-parallel-size", "--num-virtual-stages-per-pipeline-rank")
TABLES = toml_tables.read_table("layouts/layouts")
expand = toml_tables.expander({**TABLES["abbreviations"], "BORDERS": DOCUMENT_FLAGS})

COMMON, GPT, LLAMA, DROP, ZLOSS = map(expand, ("COMMON", "GPT", "LLAMA", "DROP", "ZLOSS"))
SPLIT, ZERO2, ZERO3, OFFLOAD, PARAMETERS, HALF = map(expand, "SPLIT ZERO2 ZERO3 OFFLOAD PARAMETERS HALF".split())


@dataclass(frozen=True)
class Row:
    """One layout of one model on `world` ranks; dp is world / (tp x pp)."""

    world: int
    model: str
    layout: str
    name: str

    @property
    def args(self) -> list[str]:
        return f"{self.model} {self.layout}".split()

    def value(self, flag: str, default: str) -> str:
        return self.args[self.args.index(flag) + 1] if flag in self.args else default

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        """The sizes of tp, pp, dp (including cp) and vpp."""
        tp, pp, vpp = (int(self.value(flag, "1")) for flag in SIZES)
        return tp, pp, self.world // (tp * pp), vpp

    @property
    def has_tp(self) -> bool:
        return self.sizes[0] > 1


def read_rows(name: str) -> list[Row]:
    return [Row(world, expand(model), expand(layout), row) for row, (world, model, layout) in TABLES[name].items()]


ROWS = read_rows("rows")


def features(item: Row) -> dict[str, Hashable]:
    """Return the features of a layout. Every pair of features should be tested together."""
    tp, pp, dp, vpp = (size > 1 for size in item.sizes)
    return {
        **{"tp": tp, "pp": pp, "dp": dp, "vpp": vpp, "split": SPLIT in item.args},
        "schedule": item.value("--pipeline-schedule", "1f1b"),
        "ties": "--untie-embeddings-and-output-weights" not in item.args,
        "documents": "--reset-attention-mask" in item.args,
        "recompute": item.value("--recompute-granularity", "none"),
        "zero": item.value("--zero-stage", "1"),
    }


COVERING_ROWS = cover(ROWS, features)
row_name = attrgetter("name")
CP_ROWS = [
    replace(item, name=f"{item.name}, {comm_type}", layout=f"{item.layout} {flag}")
    for comm_type, flag in (("allgather", ""), ("a2a", expand("A2A")))
    for item in read_rows("cp_comm_types")
] + read_rows("context")
PRESUBMIT_CP_ROWS = [
    row
    for row in CP_ROWS
    if row.name.startswith(("gpt pp2", "llama cp4, w", "three", "gpt cp2 dp2 Z", "llama cp2 rec"))
]
LATENT_ROWS = read_rows("latent")
COVERING_LATENT_ROWS = cover(
    LATENT_ROWS,
    lambda row: {
        **features(row),
        "cp": row.value("--context-parallel-size", "1") != "1" and row.value("--cp-comm-type", "allgather"),
        "recomputed": "mla_up_proj" in row.args,
        "compressed queries": "--q-lora-rank" in row.args,
    },
)


def with_comm_types(rows: Iterable[Row]) -> Iterator[Row]:
    """Yield each row, and those with context parallelism with maps of states, and with heads where cp divides them."""
    for row in rows:
        cp = int(row.value("--context-parallel-size", "1"))
        if cp == 1 or "--cp-comm-type" in row.args:
            yield row
            continue
        yield replace(row, name=f"{row.name}, maps", layout=f"{row.layout} {expand('MAPS')}")
        if cp * row.sizes[0] <= 4:  # all models have four heads
            yield replace(row, name=f"{row.name}, heads", layout=f"{row.layout} {expand('A2A')}")


RECURRENT_ROWS = [*with_comm_types(read_rows("recurrent"))]
COVERING_RECURRENT_ROWS = cover(
    [row for row in RECURRENT_ROWS if "beyond groups" not in row.name],  # those take long
    lambda row: {
        **features(row),
        "cp": row.value("--context-parallel-size", "1"),
        "exchange": row.value("--cp-comm-type", ""),
        "recomputed": not {"gdn", "kda", "mamba"}.isdisjoint(row.args),
        "replicated keys": row.sizes[0] == 4,
        "mixer": next((name for name in ("kda", "mamba") if row.name.startswith(name)), "gdn"),
    },
)
