"""The numbers in README and docs/status.md.

Each is stored in docs/results.json, counted here, or part of a name in a small list. A stored number stands on the page
of its result, too.
"""

import json
import re
from collections.abc import Callable
from functools import cache
from typing import Any

import documents
import layout_cases
import pytest
import style_rules
from chaos.mistakes import MISTAKES
from documents import ROOT

from docs.document_flags import OUTSIDE
from megalite.config.megatron_flags import INSTEAD, known_flags

PAGES = (ROOT / "README.md", ROOT / "docs/status.md")
RESULTS: dict[str, Any] = json.loads((ROOT / "docs/results.json").read_text("utf-8"))
NUMBER = re.compile(r"(?<![\w.-])\d+(?:,\d{3})*(?:\.\d+)?(?:e-?\d+|k)?(?![\w-])")
# text with digits that is not a figure: code, targets of links, dates, versions, names, positions on an axis
NOT_FIGURES = re.compile(
    r"`[^`]*`|\]\([^)]*\)|\d{4}-\d\d-\d\d|(torch|Python) [\d.]+\+?|Llama[ -]\d[ -]\d+B|Llama \d|Qwen\d\S*"
    r"|(TP|PP|DP|CP|tp|pp|dp) \d|ZeRO-\d( to \d| and \d)?|of spring and summer \d+|Apache-2.0|llama2-7b/13b/70b"
)


@cache
def command_lines(*families: str) -> list[dict[str, Any]]:
    lines = (ROOT / "tests/entry_points/megatron_command_lines.jsonl").read_text("utf-8").splitlines()
    return [line for line in map(json.loads, lines) if line["family"] in families]


@cache
def published() -> list[tuple[str, bool]]:
    """Return (case, whether it is met) for the rows of docs/planning_accuracy.md.

    Another test compares that table with the planner.
    """
    row = r"^\| ([^|*]+) \| [^|]+ \| [^|]+ \| \d\.\d\d \| (misses)? ?\|$"
    rows = re.findall(row, _page("planning_accuracy.md"), re.MULTILINE)
    return [(name, not missed) for name, missed in rows if "Llama-3-8B shape" not in name and "GPT 1.3B" not in name]


@cache
def _page(name: str) -> str:
    return (ROOT / "docs" / name).read_text("utf-8")


def kernels(gpu: str, *names: str, exclude: tuple[str, ...] = ()) -> list[int]:
    """Return the smallest and the largest percentage of the copy rate of these kernels, rounded.

    Args:
        gpu: The GPU of the results.
        names: The kernels; all of them if none is given.
        exclude: Kernels that are left out if no name is given.
    """
    percentages = RESULTS["kernels"][gpu]
    values = [percent for name in names or percentages.keys() - {*exclude} for percent in percentages[name]]
    return [round(min(values)), round(max(values))]


def run(name: str, *keys: str) -> list[float]:
    return [RESULTS[name][key] for key in keys]


def path_lines() -> int:
    return round(sum(style_rules.step_files(ROOT).values()), -2)


LAYER_NORM = ("layer_norm backward", "add_layer_norm backward")
RMS_NORM = ("rms_norm backward", "add_rms_norm backward")
ERF = "bias_gelu by erf"
SLOW_H200 = (*LAYER_NORM, *RMS_NORM, "bias_gelu backward", ERF, f"{ERF} backward")
FLAGS = [f for f in known_flags().values() if f.verdict != INSTEAD and f.group not in OUTSIDE]
ATTENTION = "own_forward positions own_backward cudnn_forward cudnn_backward".split()
OFF = RESULTS["memory"]["off_percent"]

# the beginning of a paragraph or of a table row -> its numbers, in order
CLAIMS: dict[str, Callable[[], list[float]]] = {
    "Pipelines give the losses": lambda: run("layouts", "first", "steps", "largest", "loss"),
    "Neither needs a GPU": lambda: run(
        "quickstart", "minutes", "cores", "least_install_minutes", "most_install_minutes"
    ),
    "| **Correct under": lambda: [layout_cases.FP64_TOLERANCE],
    "| **Fast on": lambda: run("h200_8b", "mfu", "layers", "sequence"),
    "| **Takes Megatron": lambda: [
        sum(not line["refused"] for line in command_lines("gpt")),
        len(command_lines("gpt")),
    ],
    "![the differences": lambda: run("layouts", "steps"),
    "| **Layouts**": lambda: [layout_cases.FP64_TOLERANCE],
    "| **Command lines**": lambda: [
        *(
            number
            for lines in (command_lines("gpt"), command_lines("moe", "mixtral"))
            for number in (sum(not line["refused"] for line in lines), len(lines))
        ),
        len(FLAGS),
    ],
    "| **Your own layout**": lambda: [len(MISTAKES)] * 2,
    "| Llama-3-8B, sequence": lambda: [
        *run("h200_8b", "sequence", "mfu", "layers", "micro_batches", "micro_batch", "tokens_per_s"),
        *run("h200_8b_mb4", "mfu", "layers", "micro_batches", "micro_batch"),
        1,
    ],
    "| the same with 18 layers": lambda: [
        *run("h100_8b", "layers", "micro_batches", "micro_batch", "mfu", "tokens_per_s", "idle_percent"),
        1,
    ],
    "| GPT of 1.3 B": lambda: [1.3, *run("gpt_1b", "sequence", "mfu_h100", "mfu_h200")],
    "| peak memory": lambda: [max(OFF), len(OFF), RESULTS["memory"]["shapes"]],
    "| kernels bound by memory": lambda: [
        *kernels("h100", exclude=(*LAYER_NORM, f"{ERF} backward")),
        *kernels("h100", *LAYER_NORM),
        *kernels("h100", f"{ERF} backward"),
    ],
    "| the same: ": lambda: [
        *kernels("h200", exclude=SLOW_H200),
        *kernels("h200", *RMS_NORM),
        *kernels("h200", *LAYER_NORM),
        *kernels("h200", "bias_gelu backward"),
        *kernels("h200", ERF),
        *kernels("h200", f"{ERF} backward"),
    ],
    "| the same compared with torch.compile": lambda: run(
        "compiled", "least", "most", "swiglu_forward", "head_and_loss"
    ),
    "| own attention": lambda: run("attention", *ATTENTION),
    "| step times that others": lambda: [
        sum(holds for name, holds in published() if "Llama 3" not in name),
        sum("Llama 3" not in name for name, _ in published()),
        *run("published", "tolerance_percent", "fewest", "most"),
    ],
    "| compared with transformers": lambda: [
        *(pick(RESULTS["transformers"][key].values()) for key in ("faster", "memory") for pick in (min, max)),
        2,
    ],
    "| scale that has been run": lambda: [1, 8],
    "| code of one training step": lambda: [path_lines()],
    "Llama 3 70B on 64": lambda: [64, 64 // 8],
}


def parts() -> list[str]:
    """Return the paragraphs and table rows of the pages, without fenced blocks."""
    text = documents.FENCED_BLOCK.sub("", "\n\n".join(page.read_text("utf-8") for page in PAGES))
    blocks = (block.splitlines() for block in re.split(r"\n\s*\n", text))
    rows = (lines if lines and lines[0].startswith("|") else [" ".join(lines)] for lines in blocks)
    return [part for lines in rows for part in lines if part.strip()]


def numbers(part: str) -> list[str]:
    return NUMBER.findall(NOT_FIGURES.sub(" ", part))


def value(number: str) -> float:
    plain = number.replace(",", "")
    return float(plain.removesuffix("k")) * (1024 if plain.endswith("k") else 1)


@pytest.mark.parametrize("begin", CLAIMS)
def test_readme_values_equal_the_stored_results(begin: str) -> None:
    (part,) = [part for part in parts() if part.startswith(begin)]
    assert [value(number) for number in numbers(part)] == CLAIMS[begin]()


def test_every_number_of_the_readme_has_a_stored_result() -> None:
    known = (*CLAIMS, "| [`")  # the last one begins a recipe, which tests/config/test_recipes.py checks
    assert [part for part in parts() if numbers(part) and not part.startswith(known)] == []


def leaves(record: Any) -> list[float]:
    if isinstance(record, dict):
        return [leaf for name, child in record.items() if name != "positions" for leaf in leaves(child)]
    if isinstance(record, list):
        return [leaf for child in record for leaf in leaves(child)]
    return [record] if isinstance(record, (int, float)) else []


@pytest.mark.parametrize("name", [name for name in RESULTS if name])
def test_stored_results_have_a_source_and_stand_on_their_page(name: str) -> None:
    record = RESULTS[name]
    assert {"page", "on", "date"} <= record.keys()
    assert "moments" in record or "mfu" not in " ".join(record)
    matches = re.findall(r"(?<![\w.])\d+(?:,\d{3})*(?:\.\d+)?(?:e-?\d+)?", _page(record["page"]))
    on_page = {*map(value, matches)}
    missing = [leaf for leaf in leaves(record) if leaf not in on_page]
    assert missing == []
