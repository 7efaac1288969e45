#!/usr/bin/env python
"""Weights between megalite, Hugging Face and Megatron-LM, on one process, one tensor in memory at a time.

    python tools/convert_checkpoint.py --from-hf models/Qwen3-8B --save runs/qwen
    python tools/convert_checkpoint.py --load runs/qwen --to-hf models/mine --check
    python tools/convert_checkpoint.py --from-megatron old/checkpoints --save runs/old
    python tools/convert_checkpoint.py --load runs/old --to-megatron new/checkpoints

The result of --save is a checkpoint of step 0 without optimizer states: the start of a run. --load takes a --save
directory (its newest valid checkpoint) or one checkpoint in it, saved under any layout. Names of families and of their
tensors: megalite/models/families.toml. What cannot be converted exactly is refused by name.
"""

import argparse
import importlib.util
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
from megalite.config.config_file import dump_config, parse_config_text
from megalite.config.console import print_err
from megalite.config.option import flag_name
from megalite.config.options import Config, ConfigError, ModelConfig, build
from megalite.config.plugins import missing_plugins_message
from megalite.data.errors import DataError
from megalite.data.tokenizers.build_tokenizer import build_tokenizer
from megalite.data.tokenizers.huggingface_tokenizer import find_tokenizer_in
from megalite.interop.huggingface import model_files as hugging_face
from megalite.interop.huggingface.config_json import choose_family
from megalite.interop.huggingface.model_files import write_model
from megalite.interop.megatron import torch_dist_format as megatron_dist
from megalite.interop.megatron import torch_format as megatron
from megalite.interop.name_mapping import FAMILIES
from megalite.interop.tensor_mapping import ExportSource, ExternalModel, build_model_config
from megalite.models.specs import checkpoint_specs, model_specs
from megalite.optim.loss_scale import LossScaler
from megalite.training.checkpointing.initial_state import UNKNOWN_VOCABULARY, tokenizer_from_args
from megalite.training.checkpointing.named_tokenizer import announce, fitting
from megalite.training.checkpointing.resume import checkpoint_config
from megalite.training.datasets import TOKENIZER_OPTIONS, open_tokenizer
from megalite.training.job.export_hf import read_model_type, tokenizer_files, tokenizer_source_dir
from megalite.training.state import Progress
from tools.cli_common import Plugins, local_path, parser_of, plugins_first, positive, refusing, run_program
from tools.export_files import write_import, write_megatron
from tools.verification import independent_import as second_reading
from tools.verification.conversion import compare, compare_logits

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
LOGIT_BOUND = 1e-4
SAMPLE = (
    "The river rose in the night. By noon two of the bridges were closed, and the mill at 14 Ford Lane was cut off."
)
_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "ki": 2**10, "mi": 2**20, "gi": 2**30}


def parse_size(text: str) -> int:
    """Bytes of '5GB', '500MB', '2GiB' or a plain number.

    >>> parse_size("5GB"), parse_size("2GiB")
    (5000000000, 2147483648)
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmg]i?)?b?", text.strip().lower())
    size = int(float(match[1]) * _UNITS[match[2] or ""]) if match else 0
    if size < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size; write it as 5GB or 500MiB")
    return size


_ONLY_WITH = {  # flag -> those that it goes with
    "seq_length": ("from_hf",),
    "vocab_size": ("from_megatron", "to_hf", "to_megatron"),
    "family": ("to_hf",),
    "like": ("to_hf",),
    "dtype": ("to_hf", "to_megatron"),
    "max_shard_size": ("to_hf",),
    "target_tensor_parallel_size": ("to_megatron",),
    "target_pipeline_parallel_size": ("to_megatron",),
    "transformer_impl": ("to_megatron",),
}


def misuse(args: argparse.Namespace) -> str | None:
    """Why these flags do not go together, or None."""
    if (args.load is None) == (args.save is None):
        return "--load goes with --to-hf or --to-megatron, --from-hf and --from-megatron with --save"
    for name, partners in _ONLY_WITH.items():
        value = getattr(args, name)
        if value not in (None, False) and all(getattr(args, partner) is None for partner in partners):
            return f"{flag_name(name)} has no effect without {' or '.join(map(flag_name, partners))}; drop it"
    return None


def checked_tokenizer(find: Callable[[], dict[str, Any]], rows: int) -> dict[str, Any]:
    """The options that `find` gives if such a tokenizer opens here and fits; else nothing, with a note."""
    options, why = fitting(find, rows)
    if why is not None:
        print_err(f"note: the tokenizer is left out: {why}")
    return options


def start_state(options: dict[str, Any], dtype: torch.dtype, tokenizer: dict[str, Any]) -> dict[str, Any]:
    """The state that a checkpoint holds beside tensors, for a run that starts from converted weights."""
    precision = {torch.bfloat16: {"bf16": True}, torch.float16: {"fp16": True}}.get(dtype, {})
    config = build({**options, **tokenizer, **precision})
    state = {"progress": Progress().to_json(), "updates": 0, "loss_scaler": LossScaler().to_json()}
    return {**state, "config": dump_config(config), "vocab_size": options["vocab_size"]}


def saved_model(source: Checkpoint) -> ModelConfig:
    """The model that a checkpoint's configuration describes. Raises CheckpointError."""
    where = f"{source.directory}: its configuration"
    try:
        return build_model_config(parse_config_text(str(source.manifest.state["config"]), str(source.directory)), where)
    except (KeyError, ConfigError, CheckpointError) as error:
        if lacks := missing_plugins_message(source.manifest.state.get("plugins")):
            raise CheckpointError(f"{source.directory} {lacks}") from None
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(f"{where} cannot be read ({error}); use another checkpoint") from None


def from_hf(args: argparse.Namespace) -> bool:
    folder: Path = args.from_hf
    theirs = hugging_face.open_model(folder, args.seq_length)
    tokenizer = checked_tokenizer(lambda: find_tokenizer_in(folder), theirs.rows)
    state, specs = start_state(theirs.options, theirs.dtype, tokenizer), model_specs(theirs.model, theirs.rows)
    written = write_import(args.save, theirs.tensors, specs, state)
    print(f"{written}: {theirs.name}, {len(theirs.tensors)} tensors, vocabulary {theirs.rows}")
    return checked(args, folder, theirs, ExportSource(open_checkpoint(written, verified=True)))


def checked(args: argparse.Namespace, folder: Path, theirs: ExternalModel, ours: ExportSource) -> bool:
    """Run the checks of --check and --check-bits. Logits have a bound, unless --dtype rounded the weights."""
    if not args.check_bits:
        return True
    good = agrees(second_reading.hugging_face(folder, theirs.name, theirs.model), theirs, ours, theirs.rows)
    if not args.check:
        return good
    if importlib.util.find_spec("transformers") is None:
        print("check: logits are not compared; pip install transformers for that")
        return good
    tokenizer = open_tokenizer(checkpoint_config(ours.source.manifest, ours.source.directory).data)
    ids = tokenizer.encode(SAMPLE) if tokenizer is not None and not tokenizer.is_null else None
    whole = args.dtype == "float32"
    verdict = compare_logits(folder, ours.source, saved_model(ours.source), theirs.rows, ids, whole)
    print(verdict)
    return good and (args.dtype in ("bfloat16", "float16") or verdict.largest <= LOGIT_BOUND * max(1.0, verdict.scale))


def from_megatron(args: argparse.Namespace) -> bool:
    folder: Path = args.from_megatron
    theirs = megatron_dist.open_checkpoint(megatron.find_checkpoint(folder) or megatron.rank_files_dir(folder))
    rows, vocab_size = theirs.rows, args.vocab_size
    named = tokenizer_from_args(theirs.args)
    announce(named, folder)
    tokenizer = checked_tokenizer(lambda: named, rows)
    if vocab_size is None:
        size = build_tokenizer(**tokenizer).vocab_size if tokenizer else None
        vocab_size = megatron.true_vocab_size(theirs.args, rows, size)
    unknown, vocab_size = vocab_size is None, vocab_size or rows
    if vocab_size > rows:
        raise CheckpointError(f"vocab_size={vocab_size} is above the {rows} rows of the embedding; give at most those")
    tokenizer["vocab_size"] = vocab_size
    state = start_state({**theirs.options, "vocab_size": vocab_size}, theirs.dtype, tokenizer)
    written = write_import(args.save, theirs.tensors, checkpoint_specs(theirs.model, vocab_size), state)
    print(f"{written}: {len(theirs.tensors)} tensors, vocabulary {vocab_size} of {rows} rows")
    if unknown:
        print_err(f"note: {UNKNOWN_VOCABULARY}; give --vocab-size")
    check = args.check_bits
    return not check or checked_megatron(theirs, ExportSource(open_checkpoint(written, verified=True)), vocab_size)


def checked_megatron(theirs: ExternalModel, ours: ExportSource, vocab_size: int) -> bool:
    return agrees(second_reading.megatron(theirs.ranks, theirs.args, theirs.model), theirs, ours, vocab_size)


def to_hf(args: argparse.Namespace) -> bool:
    source = open_checkpoint(args.load, verified=True)
    model, config = saved_model(source), checkpoint_config(source.manifest, source.directory)
    announce({name: getattr(config.data, name) for name in TOKENIZER_OPTIONS}, parse_location(args.load))
    like: Path | None = args.like or tokenizer_source_dir(config.data)
    vocab_size, eod = vocabulary(config, source.manifest.state.get("vocab_size"), args.vocab_size)
    tokens = {"eos_token_id": eod, **hugging_face.special_token_ids(like)}
    files, note = tokenizer_files(config.data, eod) if args.like is None else (hugging_face.auxiliary_files(like), None)
    family = choose_family(model, args.family, read_model_type(like))
    ours = ExportSource(source, DTYPES.get(args.dtype), model_specs(model, vocab_size))
    size = args.max_shard_size or parse_size("5GB")
    theirs = write_model(args.to_hf, ours, model, family, vocab_size, tokens=tokens, files=files, shard_bytes=size)
    count = len({one.place.rpartition(" in ")[2] for one in theirs.tensors})
    print(f"{args.to_hf}: {family}, {len(theirs.tensors)} tensors in {count} files, vocabulary {vocab_size}")
    if note is not None:
        print_err(f"note: {note}")
    return checked(args, args.to_hf, theirs, ours)


def to_megatron(args: argparse.Namespace) -> bool:
    source = open_checkpoint(args.load, verified=True)
    model = saved_model(source)
    config = checkpoint_config(source.manifest, source.directory)
    tokenizer = {name: getattr(config.data, name) for name in TOKENIZER_OPTIONS}
    announce(tokenizer, parse_location(args.load))
    vocab_size, _ = vocabulary(config, source.manifest.state.get("vocab_size"), args.vocab_size)
    ours = ExportSource(source, DTYPES.get(args.dtype))  # as stored: there too, norm weights may be a difference from 1
    tp, pp = args.target_tensor_parallel_size or 1, args.target_pipeline_parallel_size or 1
    layout: dict[str, Any] = dict(tp=tp, pp=pp, fused=args.transformer_impl != "local")
    written = write_megatron(args.to_megatron, ours, model, vocab_size=vocab_size, tokenizer=tokenizer, **layout)
    print(f"{written}: tp {tp} x pp {pp}, vocabulary {vocab_size}")
    return not args.check_bits or checked_megatron(megatron.open_torch_checkpoint(args.to_megatron), ours, vocab_size)


def vocabulary(config: Config, saved: Any, given: int | None) -> tuple[int, int | None]:
    """(rows without padding, the id that ends a document). `saved`: as the checkpoint says. Raises CheckpointError."""
    eod = size = None
    try:
        tokenizer = open_tokenizer(config.data)
        if tokenizer is not None:
            size, eod = tokenizer.vocab_size, tokenizer.eod
    except DataError as error:
        if given is None and saved is None and config.data.vocab_size is None:
            raise CheckpointError(f"{error}; or give --vocab-size") from None
        print_err(f"note: the run's tokenizer cannot be opened: {error}")
    size = given or saved or max(size or 0, config.data.vocab_size or 0)
    if not isinstance(size, int) or size < 1:
        raise CheckpointError("the checkpoint does not state the size of its vocabulary; give --vocab-size")
    return size, eod


def agrees(reading: second_reading.Reading, theirs: ExternalModel, ours: ExportSource, vocab_size: int) -> bool:
    """Every bit is the same, and, by the check that shares nothing with what converts, each layer computes the same."""
    bits = compare(theirs.tensors, ours, checkpoint_specs(theirs.model, vocab_size))
    print(bits)
    model, stored = saved_model(ours.source), ours.source.dtype("model/embedding.word")
    written = ours.dtype_of("embedding.word")
    rounded = written != stored or (model.apply_layernorm_1p and ours.used)
    how = {"main_weights": ours.dtype == torch.float32, "rounding": torch.finfo(written).eps if rounded else 0.0}
    verdict = second_reading.compare_layers(reading, ours.source, model, vocab_size, **how)
    print(verdict)
    return verdict.good and not bits.differing


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of this program's flags."""
    parser = parser_of(__doc__)
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--from-hf", type=local_path, metavar="DIR", help="Hugging Face model directory")
    source.add_argument("--from-megatron", type=local_path, metavar="DIR", help="directory of Megatron-LM checkpoints")
    source.add_argument("--load", type=local_path, metavar="DIR", help="checkpoint of megalite")
    target = parser.add_mutually_exclusive_group(required=True)
    target.add_argument("--save", type=local_path, metavar="DIR", help="write a checkpoint of megalite")
    target.add_argument("--to-hf", type=local_path, metavar="DIR", help="write a Hugging Face model directory")
    target.add_argument("--to-megatron", type=local_path, metavar="DIR", help="write a release of Megatron-LM")
    parser.add_argument("--plugin", action=Plugins)
    parser.add_argument(
        "--check",
        action="store_true",
        help="compare source and target: all bits, each layer, and logits with those of transformers",
    )
    parser.add_argument(
        "--check-bits", action="store_true", help="like --check without logits: one layer in memory at a time"
    )
    parser.add_argument(
        "--seq-length", type=positive, help="--from-hf: tokens per sequence; default: all positions of the model"
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
        "--vocab-size", type=positive, help="rows to keep; default: those of the checkpoint or the tokenizer"
    )
    parser.add_argument("--target-tensor-parallel-size", type=positive, metavar="TP", help="--to-megatron: default 1")
    parser.add_argument("--target-pipeline-parallel-size", type=positive, metavar="PP", help="--to-megatron: default 1")
    parser.add_argument(
        "--transformer-impl",
        choices=["transformer_engine", "local"],
        help="--to-megatron: implementation whose layer names are written (default transformer_engine)",
    )
    return parser


@refusing(3, CheckpointError, ConfigError, DataError, OSError)
def main(argv: list[str]) -> int:
    parser = build_parser()
    args = parser.parse_args(plugins_first(argv))
    if (problem := misuse(args)) is not None:
        parser.error(problem)
    args.check_bits |= args.check  # which is of logits, too
    torch.set_num_threads(1)  # it copies; nothing is computed
    ways = ("from_hf", from_hf), ("from_megatron", from_megatron), ("to_hf", to_hf), ("to_megatron", to_megatron)
    return next(0 if convert(args) else 1 for name, convert in ways if getattr(args, name) is not None)


if __name__ == "__main__":
    run_program(main)
