#!/usr/bin/env python
"""In which options two runs differ, and which of those change the training.

python tools/diff.py runs/a runs/b        two run directories (their run_config.toml)
python tools/diff.py run.toml runs/b      or TOML files of --config

Each option has a class: the training (its losses are others), how the same step is computed (layout, kernels), or
neither (logs, saves, evaluation). Options with the same effect under two names are the same. Exit codes: 0 they are
the same; 1 they differ; 2 one of them cannot be read.
"""

import argparse
import itertools
import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from megalite.common.console import escape_control_chars
from megalite.config.config_file import read_config_file
from megalite.config.option import EXECUTION, MODEL, TRAINING, option_spec
from megalite.config.options import Config, ConfigError, apply_megatron_defaults, apply_preset, build, iter_options
from megalite.models.families import PRESETS
from tools.cli_common import PluginAction, exits_with, make_parser, run_program

CHANGES = {MODEL: "the model", TRAINING: "the training", EXECUTION: "how it is computed"}
ORDER = (*CHANGES.values(), "neither")


def config_of(path: Path) -> Config:
    """Raises ConfigError."""
    file = path / "run_config.toml" if path.is_dir() else path
    values = read_config_file(str(file))
    preset = values.pop("preset", None)
    if preset is not None and preset not in PRESETS:
        raise ConfigError([f"{file}: preset={preset!r} is unknown; use one of {', '.join(sorted(PRESETS))}"])
    return build(apply_megatron_defaults(apply_preset(PRESETS.get(preset, {}) if preset else {}, values)))


def differences(a: Config, b: Config) -> list[dict[str, Any]]:
    """Option, both values and what it changes, the model first."""
    rows = []
    for section, f in iter_options():
        facts, parts = option_spec(f), (getattr(a, section), getattr(b, section))
        one, two = (getattr(part, f.name) for part in parts)
        if one == two or (
            facts.effective_property and len({str(getattr(part, facts.effective_property)) for part in parts}) == 1
        ):
            continue
        rows.append({"option": f.name, "a": one, "b": two, "changes": CHANGES.get(facts.resume, "neither")})
    return sorted(rows, key=lambda row: ORDER.index(row["changes"]))


def _shown(value: Any) -> str:
    return "-" if value is None else " ".join(map(str, value)) if isinstance(value, tuple) else str(value)


def text_of(rows: list[dict[str, Any]], a: Path, b: Path) -> str:
    lines = []
    for changes, alike in itertools.groupby(rows, key=lambda row: row["changes"]):
        lines += [f"what changes {changes}"]
        lines += [f"  {row['option']:<36} {_shown(row['a']):<28} {_shown(row['b'])}" for row in alike]
    return "\n".join([f"{'':<38} {a!s:<28} {b}", *lines]) if rows else "no option differs"


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of this program's flags."""
    parser = make_parser(__doc__, allow_abbrev=True)
    parser.add_argument("a", type=Path, help="a run directory, or a TOML file")
    parser.add_argument("b", type=Path, help="another run directory or TOML file")
    parser.add_argument("--json", action="store_true", help="print a list of objects")
    parser.add_argument("--plugin", action=PluginAction)
    return parser


@exits_with(2, ConfigError)
def main(argv: list[str]) -> int:
    args = build_parser().parse_args(argv)
    rows = differences(config_of(args.a), config_of(args.b))
    print(json.dumps(rows) if args.json else escape_control_chars(text_of(rows, args.a, args.b)))
    return 1 if rows else 0


if __name__ == "__main__":
    run_program(main)
