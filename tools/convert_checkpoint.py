#!/usr/bin/env python
"""Convert weights between megalite, Hugging Face and Megatron-LM, in one process, one tensor in memory at a time.

    python tools/convert_checkpoint.py --from-hf models/Qwen3-8B --save runs/qwen
    python tools/convert_checkpoint.py --load runs/qwen --to-hf models/mine --check
    python tools/convert_checkpoint.py --from-megatron old/checkpoints --save runs/old
    python tools/convert_checkpoint.py --load runs/old --to-megatron new/checkpoints

--save writes a checkpoint of step 0 without optimizer states, from which a run can start. --load takes a --save
directory (its newest valid checkpoint is converted) or one checkpoint in it, saved under any layout. The families and
the names of their tensors are in megalite/models/families.toml. If something cannot be converted exactly, the program
names it and fails.
"""

import argparse
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch

from megalite.checkpoint.format.manifest import CheckpointError
from megalite.checkpoint.offline import Checkpoint, open_checkpoint
from megalite.checkpoint.storage.location import parse_location
from megalite.common.console import print_err
from megalite.config.config_file import dump_config, parse_config_text
from megalite.config.option import flag_name
from megalite.config.options import Config, ConfigError, ModelConfig, build
from megalite.config.plugins import missing_plugins_message
from megalite.data.errors import DataError
from megalite.data.tokenizers.build_tokenizer import build_tokenizer
from megalite.data.tokenizers.huggingface_tokenizer import find_tokenizer_in
from megalite.interop.fold_mup import fold_mup
from megalite.interop.huggingface import model_files
from megalite.interop.huggingface.config_json import choose_family
from megalite.interop.huggingface.model_files import write_model
from megalite.interop.megatron import torch_dist_format, torch_format
from megalite.interop.name_mapping import FAMILIES
from megalite.interop.tensor_mapping import ExportSource, ExternalModel, build_model_config, norm_offsets
from megalite.models.specs import checkpoint_specs
from megalite.optim.loss_scale import LossScaler
from megalite.training.checkpointing.compatibility import checkpoint_config
from megalite.training.checkpointing.initial_state import UNKNOWN_VOCABULARY, tokenizer_from_args
from megalite.training.checkpointing.named_tokenizer import find_usable_tokenizer, print_external_paths
from megalite.training.datasets import TOKENIZER_OPTIONS, open_tokenizer
from megalite.training.job.export_hf import read_model_type, tokenizer_files, tokenizer_source_dir
from megalite.training.state import Progress
from tools.cli_common import (
    PluginAction,
    exits_with,
    local_path,
    make_parser,
    move_plugins_first,
    positive_int,
    run_program,
)
from tools.export_files import write_initial_checkpoint, write_megatron
from tools.verification import megatron_reading
from tools.verification.conversion import compare, compare_logits, require_transformers

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
SAMPLE_TEXT = (
    "The river rose in the night. By noon two of the bridges were closed, and the mill at 14 Ford Lane was cut off."
)
_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "ki": 2**10, "mi": 2**20, "gi": 2**30}


def parse_size(text: str) -> int:
    """Return the bytes of '5GB', '500MB', '2GiB' or a plain number.

    >>> parse_size("5GB"), parse_size("2GiB")
    (5000000000, 2147483648)
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmg]i?)?b?", text.strip().lower())
    size = int(float(match[1]) * _UNITS[match[2] or ""]) if match else 0
    if size < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size; write it as 5GB or 500MiB")
    return size


MEGATRON_MODELS = {False: "GPTModel", True: "HybridModel"}  # is it hybrid -> its class in Megatron-LM

_ONLY_WITH = {  # flag -> it needs one of these flags
    "seq_length": ("from_hf",),
    "vocab_size": ("from_megatron", "to_hf", "to_megatron"),
    "family": ("to_hf",),
    "like": ("to_hf",),
    "dtype": ("to_hf", "to_megatron"),
    "max_shard_size": ("to_hf",),
    "target_tensor_parallel_size": ("to_megatron",),
    "target_pipeline_parallel_size": ("to_megatron",),
    "transformer_impl": ("to_megatron",),
    "export_model_type": ("to_megatron",),
}


def flag_conflicts(args: argparse.Namespace) -> str | None:
    """Return a message if the flags cannot be combined, otherwise None."""
    if (args.load is None) == (args.save is None):
        return "--load goes with --to-hf or --to-megatron, --from-hf and --from-megatron with --save"
    for name, partners in _ONLY_WITH.items():
        value = getattr(args, name)
        if value not in (None, False) and all(getattr(args, partner) is None for partner in partners):
            return f"{flag_name(name)} has no effect without {' or '.join(map(flag_name, partners))}; drop it"
    return None


def usable_tokenizer(find: Callable[[], dict[str, Any]], rows: int) -> dict[str, Any]:
    """Return the tokenizer options that `find` returns, or {} with a note if they do not open or do not fit `rows`."""
    options, reason = find_usable_tokenizer(find, rows)
    if reason is not None:
        print_err(f"note: the tokenizer is left out: {reason}")
    return options


def start_state(options: dict[str, Any], dtype: torch.dtype, tokenizer: dict[str, Any]) -> dict[str, Any]:
    """Return the state in a checkpoint's manifest for a run that starts from converted weights."""
    precision = {torch.bfloat16: {"bf16": True}, torch.float16: {"fp16": True}}.get(dtype, {})
    config = build({**options, **tokenizer, **precision})
    return {
        "progress": Progress().to_json(),
        "updates": 0,
        "loss_scaler": LossScaler().to_json(),
        "config": dump_config(config),
        "vocab_size": options["vocab_size"],
    }


def saved_model(source: Checkpoint) -> ModelConfig:
    """Return the model that a checkpoint's configuration describes. Raises CheckpointError."""
    title = f"{source.directory}: its configuration"
    try:
        return build_model_config(parse_config_text(str(source.manifest.state["config"]), str(source.directory)), title)
    except (KeyError, ConfigError, CheckpointError) as error:
        if problem := missing_plugins_message(source.manifest.state.get("plugins")):
            raise CheckpointError(f"{source.directory} {problem}") from None
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(f"{title} cannot be read ({error}); use another checkpoint") from None


def import_hf(args: argparse.Namespace) -> bool:
    """Convert a Hugging Face model into a checkpoint of megalite, and return False if a check fails."""
    external = model_files.open_model(args.from_hf, args.seq_length)
    if external.num_missing_depths:
        depths = f"{external.num_missing_depths} depths of multi-token prediction"
        print(f"{args.from_hf}: config.json has {depths}, the files have none; the checkpoint is without them")
    if args.check and external.is_quantized:
        remedy = "give --check-bits, and --check when you export the model"
        raise CheckpointError(f"{args.from_hf}: logits of quantised weights are not compared; {remedy}")
    tokenizer = usable_tokenizer(lambda: find_tokenizer_in(args.from_hf), external.rows)
    state = start_state(external.options, external.dtype, tokenizer)
    specs = checkpoint_specs(external.model, external.rows)
    directory = write_initial_checkpoint(args.save, external.tensors, specs, state)
    print(f"{directory}: {external.name}, {len(external.tensors)} tensors, vocabulary {external.rows}")
    return run_checks(args, args.from_hf, external, ExportSource(open_checkpoint(directory, verified=True)))


def run_checks(args: argparse.Namespace, directory: Path, external: ExternalModel, local: ExportSource) -> bool:
    """Run the checks of --check and --check-bits against a Hugging Face model, and return True if they pass."""
    if not args.check_bits:
        return True
    success = bits_agree(external, local, external.rows)
    if not args.check:
        return success
    tokenizer = open_tokenizer(checkpoint_config(local.checkpoint.manifest, local.checkpoint.directory).data)
    verdict = compare_logits(
        directory,
        local.checkpoint,
        saved_model(local.checkpoint),
        external.rows,
        tokenizer.encode(SAMPLE_TEXT) if tokenizer is not None and not tokenizer.is_null else None,
        use_main_weights=local.dtype == torch.float32,
        rounding=weight_rounding(local),
    )
    print(verdict)
    return success and verdict.within_bound


def import_megatron(args: argparse.Namespace) -> bool:
    """Convert a checkpoint of Megatron-LM into one of megalite, and return False if a check fails."""
    directory: Path = args.from_megatron
    external = torch_dist_format.open_checkpoint(
        torch_format.find_checkpoint(directory) or torch_format.rank_files_dir(directory)
    )
    rows = external.rows
    saved_tokenizer = tokenizer_from_args(external.args)
    print_external_paths(saved_tokenizer, directory)
    tokenizer = usable_tokenizer(lambda: saved_tokenizer, rows)
    vocab_size = args.vocab_size
    if vocab_size is None:
        tokenizer_size = build_tokenizer(**tokenizer).vocab_size if tokenizer else None
        vocab_size = torch_format.true_vocab_size(external.args, rows, tokenizer_size)
    is_unknown = vocab_size is None
    vocab_size = vocab_size or rows
    if vocab_size > rows:
        raise CheckpointError(f"vocab_size={vocab_size} is above the {rows} rows of the embedding; give at most those")
    tokenizer["vocab_size"] = vocab_size
    state = start_state({**external.options, "vocab_size": vocab_size}, external.dtype, tokenizer)
    written = write_initial_checkpoint(args.save, external.tensors, checkpoint_specs(external.model, vocab_size), state)
    print(f"{written}: {len(external.tensors)} tensors, vocabulary {vocab_size} of {rows} rows")
    if is_unknown:
        print_err(f"note: {UNKNOWN_VOCABULARY}; give --vocab-size")
    if not args.check_bits:
        return True
    return check_megatron(external, ExportSource(open_checkpoint(written, verified=True)), vocab_size)


def check_megatron(external: ExternalModel, local: ExportSource, vocab_size: int) -> bool:
    """Run the checks of --check and --check-bits against a checkpoint of Megatron-LM, and return True if they pass."""
    success = bits_agree(external, local, vocab_size)
    verdict = megatron_reading.compare_layers(
        megatron_reading.read_weights(external.ranks, external.args, external.model),
        external.model,
        local.checkpoint,
        saved_model(local.checkpoint),
        vocab_size,
        use_main_weights=local.dtype == torch.float32,
        rounding=weight_rounding(local),
    )
    print(verdict)
    return success and verdict.within_bound


def export_hf(args: argparse.Namespace) -> bool:
    """Convert a checkpoint of megalite into a Hugging Face model, and return False if a check fails."""
    source = open_checkpoint(args.load, verified=True)
    model = saved_model(source)
    config = checkpoint_config(source.manifest, source.directory)
    print_external_paths({name: getattr(config.data, name) for name in TOKENIZER_OPTIONS}, parse_location(args.load))
    like: Path | None = args.like or tokenizer_source_dir(config.data)
    vocab_size, eod = vocab_and_eod(config, source.manifest.state.get("vocab_size"), args.vocab_size)
    tokens = {"eos_token_id": eod, **model_files.special_token_ids(like)}
    if args.like is None:
        files, note = tokenizer_files(config.data, eod)
    else:
        files, note = model_files.auxiliary_files(like), None
    folded = fold_mup(model)
    family = choose_family(folded.model, args.family, read_model_type(like))
    zero_centered = FAMILIES.get(family).zero_centered_norms
    offsets = norm_offsets(model, zero_centered)
    local = ExportSource(source, DTYPES.get(args.dtype), offsets, folded.factors)
    folded.check(zero_centered, local.dtype_of("embedding.word"))
    size = args.max_shard_size or parse_size("5GB")
    external = write_model(
        args.to_hf, local, folded.model, family, vocab_size, tokens=tokens, files=files, shard_bytes=size
    )
    num_files = len({tensor.location.rpartition(" in ")[2] for tensor in external.tensors})
    print(f"{args.to_hf}: {family}, {len(external.tensors)} tensors in {num_files} files, vocabulary {vocab_size}")
    if note is not None:
        print_err(f"note: {note}")
    return run_checks(args, args.to_hf, external, local)


def export_megatron(args: argparse.Namespace) -> bool:
    """Convert a checkpoint of megalite into one of Megatron-LM, and return False if a check fails."""
    source = open_checkpoint(args.load, verified=True)
    model = saved_model(source)
    config = checkpoint_config(source.manifest, source.directory)
    tokenizer = {name: getattr(config.data, name) for name in TOKENIZER_OPTIONS}
    print_external_paths(tokenizer, parse_location(args.load))
    vocab_size, _ = vocab_and_eod(config, source.manifest.state.get("vocab_size"), args.vocab_size)
    # values as stored: Megatron-LM, too, may store norm weights as a difference from 1
    local = ExportSource(source, DTYPES.get(args.dtype))
    tp = args.target_tensor_parallel_size or 1
    pp = args.target_pipeline_parallel_size or 1
    is_hybrid = model.hybrid_layer_pattern is not None
    if args.export_model_type is not None:
        is_hybrid = args.export_model_type == MEGATRON_MODELS[True]
    directory = write_megatron(
        args.to_megatron,
        local,
        model,
        vocab_size=vocab_size,
        tokenizer=tokenizer,
        tp=tp,
        pp=pp,
        transformer_engine=args.transformer_impl != "local",
        is_hybrid=is_hybrid,
    )
    print(f"{directory}: {MEGATRON_MODELS[is_hybrid]}, tp {tp} x pp {pp}, vocabulary {vocab_size}")
    if not args.check_bits:
        return True
    return check_megatron(torch_format.open_torch_checkpoint(args.to_megatron), local, vocab_size)


def vocab_and_eod(config: Config, saved_size: Any, requested_size: int | None) -> tuple[int, int | None]:
    """Return (rows of the embedding without padding, the id of the end-of-document token).

    Args:
        saved_size: the vocabulary size in the checkpoint.
        requested_size: the value of --vocab-size.

    Raises:
        CheckpointError: The size is unknown.
    """
    eod = size = None
    try:
        tokenizer = open_tokenizer(config.data)
        if tokenizer is not None:
            size, eod = tokenizer.vocab_size, tokenizer.eod
    except DataError as error:
        if requested_size is None and saved_size is None and config.data.vocab_size is None:
            raise CheckpointError(f"{error}; or give --vocab-size") from None
        print_err(f"note: the run's tokenizer cannot be opened: {error}")
    size = requested_size or saved_size or max(size or 0, config.data.vocab_size or 0)
    if not isinstance(size, int) or size < 1:
        raise CheckpointError("the checkpoint does not state the size of its vocabulary; give --vocab-size")
    return size, eod


def bits_agree(external: ExternalModel, local: ExportSource, vocab_size: int) -> bool:
    """Compare all bits of the weights, print the result, and return True if they are equal."""
    verdict = compare(external.tensors, local, checkpoint_specs(external.model, vocab_size))
    print(verdict)
    return not verdict.differing


def weight_rounding(local: ExportSource) -> float:
    """Return the largest relative change of a weight in a conversion."""
    stored_dtype = local.checkpoint.dtype("model/embedding.word")
    dtype = local.dtype_of("embedding.word")
    is_rounded = dtype != stored_dtype or bool(local.offsets) or bool(local.factors)
    return torch.finfo(dtype).eps if is_rounded else 0.0


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of this program's flags."""
    parser = make_parser(__doc__)
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--from-hf", type=local_path, metavar="DIR", help="Hugging Face model directory")
    source.add_argument("--from-megatron", type=local_path, metavar="DIR", help="directory of Megatron-LM checkpoints")
    source.add_argument("--load", type=local_path, metavar="DIR", help="checkpoint of megalite")
    target = parser.add_mutually_exclusive_group(required=True)
    target.add_argument("--save", type=local_path, metavar="DIR", help="write a checkpoint of megalite")
    target.add_argument("--to-hf", type=local_path, metavar="DIR", help="write a Hugging Face model directory")
    target.add_argument("--to-megatron", type=local_path, metavar="DIR", help="write a release of Megatron-LM")
    parser.add_argument("--plugin", action=PluginAction)
    parser.add_argument(
        "--check",
        action="store_true",
        help="compare source and target: all bits, and logits with those of transformers, or Megatron-LM's layers",
    )
    parser.add_argument(
        "--check-bits", action="store_true", help="like --check without transformers: one layer in memory at a time"
    )
    parser.add_argument(
        "--seq-length", type=positive_int, help="--from-hf: tokens per sequence; default: all positions of the model"
    )
    parser.add_argument(
        "--family", choices=FAMILIES, help="--to-hf: model family; default: that of --like, or the first that fits"
    )
    parser.add_argument(
        "--like", type=local_path, metavar="DIR", help="--to-hf: model directory whose tokenizer is copied"
    )
    parser.add_argument("--dtype", choices=sorted(DTYPES), help="--to-hf: dtype of the weights; default: as stored")
    parser.add_argument("--max-shard-size", type=parse_size, help="--to-hf: largest size of a file (default 5GB)")
    parser.add_argument(
        "--vocab-size", type=positive_int, help="rows to keep; default: those of the checkpoint or the tokenizer"
    )
    parser.add_argument(
        "--target-tensor-parallel-size", type=positive_int, metavar="TP", help="--to-megatron: default 1"
    )
    parser.add_argument(
        "--target-pipeline-parallel-size", type=positive_int, metavar="PP", help="--to-megatron: default 1"
    )
    parser.add_argument(
        "--transformer-impl",
        choices=["transformer_engine", "local"],
        help="--to-megatron: implementation whose layer names are written (default transformer_engine)",
    )
    parser.add_argument(
        "--export-model-type",
        choices=[*MEGATRON_MODELS.values()],
        help="--to-megatron: model class that loads it; default: HybridModel for a run with --hybrid-layer-pattern",
    )
    return parser


@exits_with(3, CheckpointError, ConfigError, DataError, OSError)
def main(argv: list[str]) -> int:
    """Run the program and return its exit code."""
    parser = build_parser()
    args = parser.parse_args(move_plugins_first(argv))
    if (problem := flag_conflicts(args)) is not None:
        parser.error(problem)
    if args.check:
        args.check_bits = True
        if args.from_hf is not None or args.to_hf is not None:
            require_transformers()
    torch.set_num_threads(1)  # a conversion copies; more threads would not help
    if args.from_hf is not None:
        success = import_hf(args)
    elif args.from_megatron is not None:
        success = import_megatron(args)
    elif args.to_hf is not None:
        success = export_hf(args)
    else:
        success = export_megatron(args)
    return 0 if success else 1


if __name__ == "__main__":
    run_program(main)
