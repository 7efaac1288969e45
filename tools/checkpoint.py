#!/usr/bin/env python
"""Inspect and modify checkpoints, without a GPU and without the run that wrote them.

python tools/checkpoint.py inspect runs/mine                       print its contents; --tensors lists every tensor
python tools/checkpoint.py verify runs/mine                        check its hashes, then older ones until one is
                                                                   intact; --all checks every checkpoint
python tools/checkpoint.py diff runs/a/iter_0000500 runs/b         first and largest difference of each tensor
python tools/checkpoint.py reshard runs/mine small/iter_0000500    rewrite it in --files 1; --weights: no optimizer
python tools/checkpoint.py average OUT A B C                       write the mean of the weights
python tools/checkpoint.py prune runs/mine --keep-last 3           delete old ones as a run does; --dry-run: only list
python tools/checkpoint.py data-usage runs/mine                    tokens, documents and epochs of its training data

A --save directory stands for the newest checkpoint in it. Paths may be URLs (s3://bucket/runs/mine). Exit codes: 0
success, 1 checkpoints differ or are damaged, 2 wrong usage, 3 a checkpoint cannot be read or written.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from megalite.checkpoint.format import manifest as manifests
from megalite.checkpoint.storage import storage as storage
from megalite.checkpoint.storage.location import CheckpointError, Location, parse_location, step_from_name
from megalite.common.console import escape_control_chars
from megalite.data.datasets import ledger
from megalite.data.errors import DataError
from tools.cli_common import exits_with, make_parser, positive_int, run_program

if TYPE_CHECKING:
    from torch import Tensor

    from megalite.checkpoint.offline import Checkpoint, TensorProducer
    from tools.verification.conversion import Difference


def inspect(path: Location, list_tensors: bool) -> None:
    """Print the contents of a checkpoint."""
    from megalite.checkpoint import offline

    checkpoint = offline.open_checkpoint(path)
    manifest = checkpoint.manifest
    progress = manifest.state.get("progress", {})
    print(f"{checkpoint.directory}: step {progress.get('step', '?')}, {progress.get('consumed_tokens', 0):,} tokens")
    size = sum(checksum.size for checksum in manifest.files.values())
    algorithms = ", ".join(sorted({checksum.algorithm for checksum in manifest.files.values()}))
    print(f"{len(manifest.files)} files, {size / 2**30:.3f} GiB, hashed with {algorithms}")
    num_elements: Counter[tuple[str, str]] = Counter()
    for name, tensor in manifest.tensors.items():
        num_elements[name.partition("/")[0], tensor.dtype] += math.prod(tensor.shape)
    for (kind, dtype), count in sorted(num_elements.items()):
        print(escape_control_chars(f"{kind:24}") + f" {count:>16,} elements of {dtype}")
    if list_tensors:
        for name, tensor in sorted(manifest.tensors.items()):
            facts = f"{tensor.dtype:10} {tuple(tensor.shape)} in {len(tensor.boxes)} parts"
            print(f"{escape_control_chars(f'{name:56}')} {facts}")
    if "config" in manifest.state:
        print(escape_control_chars(f"\n{manifest.state['config'].rstrip()}"))


def format_data_usage(path: Location) -> str:
    """Return the tokens, documents and epochs of each source that a checkpoint's run was trained on, and its blends.

    Raises CheckpointError or DataError.
    """
    directory, manifest = manifests.find_newest(path)
    saved = manifest.state.get("data")
    if saved is None:
        return f"{directory}: trained on generated data, nothing to account for"
    saved_ledger = ledger.read(saved)
    phases, totals, num_samples = saved_ledger.phases, saved_ledger.totals, saved_ledger.consumed
    width = max([len("source"), *(len(total.name) for total in totals.values())])
    lines = [
        f"{directory}: {num_samples:,} samples",
        f"{'source':{width}}  {'tokens':>18}  {'documents':>14}  {'epochs':>8}",
    ]
    lines += [f"{t.name:{width}}  {t.tokens:18,}  {t.documents:14,}  {t.epochs:8.3f}" for t in totals.values()]
    ends = [*(phase.begin for phase in phases[1:]), num_samples]
    for phase, end in zip(phases, ends, strict=True):
        total_weight = sum(source.weight for source in phase.sources)
        blend = ", ".join(f"{source.weight / total_weight:.4f} {source.name}" for source in phase.sources)
        lines.append(f"samples {phase.begin:,} to {end:,}: {phase.seq_length} tokens each, {blend}")
    return "\n".join(lines)


def verify(path: Location, verify_all: bool) -> int:
    """Verify checkpoints from the newest to the first that is intact, or all; return 1 if any of them is damaged."""
    from megalite.checkpoint.format import reader

    checkpoint_dirs = [storage.checkpoint_dir(path, step) for step in reversed(storage.steps_in(path))]
    if not checkpoint_dirs:  # `path` may be a checkpoint itself
        if step_from_name(path.name) is None and "manifest.json" not in storage.storage_of(path).list_files(path):
            raise CheckpointError(f"{path}: no checkpoint; give a --save directory, or one checkpoint in it")
        checkpoint_dirs = [path]
    code = 0
    for directory in checkpoint_dirs:
        try:
            manifest = manifests.load_manifest(directory)
            reader.verify_checkpoint(directory, manifest, f"verifying {directory}")
            counts = f"{len(manifest.tensors)} tensors in {len(manifest.files)} files"
            print(f"{directory}: {counts}, all as they were written")
            if not verify_all:
                break
        except CheckpointError as error:
            code = 1
            print(escape_control_chars(f"{directory}: {error}"), file=sys.stderr)
    return code


def differences(a: Checkpoint, b: Checkpoint) -> Iterator[Difference]:
    """Yield the differences between two checkpoints, tensor by tensor."""
    from tools.verification.conversion import Difference, difference

    tensors_a = a.manifest.tensors
    tensors_b = b.manifest.tensors
    for name in sorted({*tensors_a, *tensors_b}):
        if name not in tensors_b:
            yield Difference(name, "only in the first")
        elif name not in tensors_a:
            yield Difference(name, "only in the second")
        elif tensors_a[name].shape != tensors_b[name].shape:
            yield Difference(name, f"shape {tensors_a[name].shape} and {tensors_b[name].shape}")
        elif (result := difference(name, a.read(name), b.read(name))) is not None:
            yield result


def diff(path_a: Location, path_b: Location) -> int:
    """Print the differences between two checkpoints, and return 1 if there are any."""
    from megalite.checkpoint.offline import open_checkpoint

    a = open_checkpoint(path_a)
    b = open_checkpoint(path_b)
    count = 0
    for d in differences(a, b):
        count += 1
        texts = [d.note] if d.note else []
        if d.index is not None:
            text = f"first at {[*d.index]}: {d.first:g} and {d.second:g}"
            texts.append(f"{d.count:,} elements; {text}; largest {d.largest:g}")
        print(escape_control_chars(f"{d.name}: {', '.join(texts)}"))
    print(f"{count} tensors differ" if count else f"{len(a.manifest.tensors)} tensors, equal to the bit")
    return 1 if count else 0


def target_directory(source: Checkpoint, path: Location) -> Location:
    """Return `path` if it is named like a checkpoint, otherwise the directory with the source's name in it."""
    return path if path.name.startswith("iter_") else path / source.directory.name


def split_evenly(producers: Sequence[TensorProducer], num_files: int) -> list[list[TensorProducer]]:
    """Split consecutive producers into files of about the same number of bytes."""
    files: list[list[TensorProducer]] = [[] for _ in range(num_files)]
    total = max(1, sum(producer.num_bytes for producer in producers))
    offset = 0
    for producer in producers:
        middle = offset + producer.num_bytes // 2
        files[min(num_files - 1, middle * num_files // total)].append(producer)
        offset += producer.num_bytes
    return files


def write_like(
    directory: Location,
    template: Checkpoint,
    names: Sequence[str],
    make_tensor: Callable[[str], Tensor],
    state: Any,
    num_files: int,
) -> None:
    """Write a checkpoint with the tensors `names` of `template`, with the values that `make_tensor(name)` returns."""
    from megalite.checkpoint.offline import TensorProducer, full_box, write_checkpoint

    shapes = {name: template.shape(name) for name in names}
    producers = []
    for name in names:
        parts = [(name, full_box(shapes[name]))]
        producers.append(TensorProducer(template.dtype(name), parts, lambda name=name: [make_tensor(name)]))
    write_checkpoint(directory, split_evenly(producers, num_files), shapes, state)


def reshard(path: Location, target: Location, num_files: int, weights_only: bool) -> None:
    """Write a checkpoint again, in another number of files."""
    from megalite.checkpoint.offline import open_checkpoint

    source = open_checkpoint(path)
    directory = target_directory(source, target)
    names = list(source.manifest.tensors)
    if weights_only:
        names = [name for name in names if name.startswith(manifests.MODEL_PREFIXES)]
    write_like(directory, source, names, source.read, source.manifest.state, num_files)
    print(f"wrote {directory}")


def average(target: Location, paths: list[Location], num_files: int) -> None:
    """Write the mean of the weights of several checkpoints (arXiv:1803.05407).

    It is computed in fp64, from the main weights if they are stored. The result has no optimizer state: it is for
    --finetune, --no-load-optim, evaluation and conversion.
    """
    import torch

    from megalite.checkpoint.offline import open_checkpoint

    def weight_shapes(checkpoint: Checkpoint) -> dict[str, tuple[int, ...]]:
        tensors = checkpoint.manifest.tensors.items()
        return {name: tensor.shape for name, tensor in tensors if name.startswith(manifests.MODEL_PREFIXES)}

    sources = [open_checkpoint(path) for path in paths]
    directory = target_directory(sources[-1], target)
    newest = max(sources, key=lambda source: int(source.manifest.state.get("progress", {}).get("step", 0)))
    shapes = weight_shapes(newest)
    for source in sources:
        mismatches = sorted({name for name, _ in shapes.items() ^ weight_shapes(source).items()})
        if mismatches:
            names = ", ".join(mismatches[:5])
            raise CheckpointError(
                f"{source.directory} and {newest.directory} are of different models: {names}; average those of one"
            )

    def mean(name: str) -> Tensor:
        main_name = name.replace("model/", "optimizer.main/", 1)
        total = torch.zeros(shapes[name], dtype=torch.float64)
        for source in sources:
            total += source.read(main_name if main_name in source.manifest.tensors else name)
        return (total / len(sources)).to(newest.dtype(name))

    state = {**newest.manifest.state, "averaged": [source.directory.name for source in sources]}
    write_like(directory, newest, list(shapes), mean, state, num_files)
    print(f"wrote {directory}, the mean of {', '.join(str(source.directory) for source in sources)}")


def prune(path: Location, keep_last: int, retain_interval: int | None, dry_run: bool) -> None:
    """Delete old checkpoints as a run does."""
    from megalite.checkpoint.manager import retention

    if not storage.steps_in(path):  # taking the lock would create the directory
        raise CheckpointError(f"{path}: no checkpoint; give a --save directory")
    lock = storage.storage_of(path).lock(path)
    try:
        steps = retention.RetentionPolicy(path, keep_last, retain_interval).prune(dry=dry_run)
    finally:
        lock.close()
    for step in steps:
        print(f"{'would delete' if dry_run else 'deleted'} {storage.checkpoint_dir(path, step)}")


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of this program's flags."""
    parser = make_parser(__doc__)
    commands = parser.add_subparsers(dest="command", required=True)

    command = commands.add_parser("inspect", allow_abbrev=False)
    command.add_argument("checkpoint")
    command.add_argument("--tensors", action="store_true", help="list every tensor")

    command = commands.add_parser("verify", allow_abbrev=False)
    command.add_argument("checkpoint")
    command.add_argument("--all", action="store_true", help="verify every checkpoint of a directory")

    command = commands.add_parser("diff", allow_abbrev=False)
    command.add_argument("a")
    command.add_argument("b")

    command = commands.add_parser("data-usage", allow_abbrev=False)
    command.add_argument("checkpoint")

    command = commands.add_parser("reshard", allow_abbrev=False)
    command.add_argument("checkpoint")
    command.add_argument("out")
    command.add_argument("--files", type=positive_int, default=1)
    command.add_argument("--weights", action="store_true", help="leave out the optimizer state")

    command = commands.add_parser("average", allow_abbrev=False)
    command.add_argument("out")
    command.add_argument("checkpoints", nargs="+")
    command.add_argument("--files", type=positive_int, default=1)

    command = commands.add_parser("prune", allow_abbrev=False)
    command.add_argument("directory")
    command.add_argument("--keep-last", type=positive_int, required=True)
    command.add_argument("--save-retain-interval", type=positive_int)
    command.add_argument("--dry-run", action="store_true")
    return parser


@exits_with(3, CheckpointError, DataError, OSError)
def main(argv: list[str]) -> int:
    """Run the program and return its exit code."""
    args = build_parser().parse_args(argv)
    if args.command == "verify":
        return verify(parse_location(args.checkpoint), args.all)
    if args.command == "diff":
        return diff(parse_location(args.a), parse_location(args.b))
    if args.command == "inspect":
        inspect(parse_location(args.checkpoint), args.tensors)
    elif args.command == "data-usage":
        print(escape_control_chars(format_data_usage(parse_location(args.checkpoint))))
    elif args.command == "reshard":
        reshard(parse_location(args.checkpoint), parse_location(args.out), args.files, args.weights)
    elif args.command == "average":
        average(parse_location(args.out), [parse_location(path) for path in args.checkpoints], args.files)
    else:
        prune(parse_location(args.directory), args.keep_last, args.save_retain_interval, args.dry_run)
    return 0


if __name__ == "__main__":
    run_program(main)
