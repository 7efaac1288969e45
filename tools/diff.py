#!/usr/bin/env python
"""Compare the options of two runs, and show which differences change the training.

python tools/diff.py runs/a runs/b        two run directories (their run_config.toml)
python tools/diff.py run.toml runs/b      or TOML files of --config

Every option belongs to one of these classes: the model, the training (losses change), how a step is computed (layout,
kernels), or neither (logs, checkpoints, evaluation). Two spellings with the same effect count as equal. Exit codes: 0
no option differs; 1 options differ; 2 a file cannot be read.
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
from megalite.config.hybrid_pattern import BORDER
from megalite.config.option import EXECUTION, MODEL, TRAINING, option_spec
from megalite.config.options import Config, ConfigError, apply_megatron_defaults, apply_preset, build, iter_options
from megalite.config.plugins import plugin_hashes
from megalite.models.families import PRESETS
from tools.cli_common import PluginAction, exits_with, make_parser, run_program

CHANGES = {MODEL: "the model", TRAINING: "the training", EXECUTION: "how it is computed"}
ORDER = (*CHANGES.values(), "neither")


def read_config(path: Path) -> Config:
    """Return the configuration of a run directory or TOML file. Raises ConfigError."""
    file = path / "run_config.toml" if path.is_dir() else path
    values = read_config_file(str(file))
    preset = values.pop("preset", None)
    if preset is not None and preset not in PRESETS:
        raise ConfigError([f"{file}: preset={preset!r} is unknown; use one of {', '.join(sorted(PRESETS))}"])
    preset_values = PRESETS[preset] if preset is not None else {}
    return build(apply_megatron_defaults(apply_preset(preset_values, values)))


def differences(a: Config, b: Config) -> list[dict[str, Any]]:
    """Return option, both values and what it changes for every option that differs, sorted by ORDER."""
    rows = []
    for section, field in iter_options():
        spec = option_spec(field)
        section_a = getattr(a, section)
        section_b = getattr(b, section)
        value_a = getattr(section_a, field.name)
        value_b = getattr(section_b, field.name)
        if value_a == value_b:
            continue
        effective = spec.effective_property
        changes = CHANGES.get(spec.resume, "neither")
        if effective and _same_effect(a, b, section, effective, field.name):
            if field.name != "hybrid_layer_pattern" or BORDER not in f"{value_a}{value_b}":
                continue
            changes = CHANGES.get(EXECUTION, "neither")  # only the pipeline borders differ
        rows.append({"option": field.name, "a": value_a, "b": value_b, "changes": changes})
    return sorted(rows, key=lambda row: ORDER.index(row["changes"]))


def _same_effect(a: Config, b: Config, section: str, effective: str, name: str) -> bool:
    """Return True if the effective values are equal. Raises ConfigError if an option cannot be read."""
    try:
        return str(getattr(getattr(a, section), effective)) == str(getattr(getattr(b, section), effective))
    except ValueError as error:  # for example a layer pattern with the letter of a plugin that is not given
        missing = dict.fromkeys(
            spec for spec in (*a.operations.plugin, *b.operations.plugin) if Path(spec).name not in plugin_hashes()
        )
        if missing:
            problem = f"{name} needs a plugin of these runs"
            raise ConfigError([f"{problem}; add {' '.join(f'--plugin {spec}' for spec in missing)}"]) from None
        raise ConfigError([f"{name} {error}"]) from None


def _format_value(value: Any) -> str:
    if value is None:
        return "-"
    return " ".join(map(str, value)) if isinstance(value, tuple) else str(value)


def format_differences(rows: list[dict[str, Any]], path_a: Path, path_b: Path) -> str:
    """Return a table of the differences, one block per class."""
    if not rows:
        return "no option differs"
    lines = [f"{'':<38} {path_a!s:<28} {path_b}"]
    for changes, group in itertools.groupby(rows, key=lambda row: row["changes"]):
        lines.append(f"what changes {changes}")
        for row in group:
            lines.append(f"  {row['option']:<36} {_format_value(row['a']):<28} {_format_value(row['b'])}")
    return "\n".join(lines)


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
    """Run the program and return its exit code."""
    args = build_parser().parse_args(argv)
    rows = differences(read_config(args.a), read_config(args.b))
    if args.json:
        print(json.dumps(rows))
    else:
        print(escape_control_chars(format_differences(rows, args.a, args.b)))
    return 1 if rows else 0


if __name__ == "__main__":
    run_program(main)
