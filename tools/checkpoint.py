#!/usr/bin/env python
"""Look at checkpoints, and change them, without a GPU and without the run that made them.

python tools/checkpoint.py inspect runs/mine                       what is in it; --tensors: every one
python tools/checkpoint.py verify runs/mine                        hash it, and older ones until one is whole; --all
python tools/checkpoint.py diff runs/a/iter_0000500 runs/b         first and largest difference of each tensor
python tools/checkpoint.py reshard runs/mine small/iter_0000500    in --files 1; --weights: without the optimizer
python tools/checkpoint.py average OUT A B C                       the mean of the weights
python tools/checkpoint.py prune runs/mine --keep-last 3           as a run does; --dry-run: only say
python tools/checkpoint.py data-usage runs/mine                    tokens, documents and epochs of its training data

A --save directory stands for the newest checkpoint in it; each may be a URL (s3://bucket/runs/mine). Exit codes: 0;
1: it differs, or is damaged; 2: usage; 3: it cannot be read or written.
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


def inspect(path: Location, tensors: bool) -> None:
    from megalite.checkpoint import offline

    found = offline.open_checkpoint(path)
    folder, manifest = found.directory, found.manifest
    progress = manifest.state.get("progress", {})
    print(f"{folder}: step {progress.get('step', '?')}, {progress.get('consumed_tokens', 0):,} tokens")
    size = sum(stamp.size for stamp in manifest.files.values())
    hashes = ", ".join(sorted({stamp.algorithm for stamp in manifest.files.values()}))
    print(f"{len(manifest.files)} files, {size / 2**30:.3f} GiB, hashed with {hashes}")
    elements: Counter[tuple[str, str]] = Counter()
    for name, whole in manifest.tensors.items():
        elements[name.partition("/")[0], whole.dtype] += math.prod(whole.shape)
    for (kind, dtype), count in sorted(elements.items()):
        print(escape_control_chars(f"{kind:24}") + f" {count:>16,} elements of {dtype}")
    if tensors:
        for name, whole in sorted(manifest.tensors.items()):
            print(
                escape_control_chars(f"{name:56}")
                + f" {whole.dtype:10} {tuple(whole.shape)} in {len(whole.boxes)} parts"
            )
    if "config" in manifest.state:
        print(escape_control_chars(f"\n{manifest.state['config'].rstrip()}"))


def format_data_usage(path: Location) -> str:
    """Return the tokens, documents and epochs of each source that a checkpoint's run was trained on, and its blends.

    Raises CheckpointError or DataError.
    """
    folder, manifest = manifests.find_newest(path)
    saved = manifest.state.get("data")
    if saved is None:
        return f"{folder}: trained on generated data, nothing to account for"
    eras, _, totals, consumed = ledger.read(saved)
    width = max([6, *(len(total.name) for total in totals.values())])
    lines = [f"{folder}: {consumed:,} samples", f"{'source':{width}}  {'tokens':>18}  {'documents':>14}  {'epochs':>8}"]
    lines += [f"{t.name:{width}}  {t.tokens:18,}  {t.documents:14,}  {t.epochs:8.3f}" for t in totals.values()]
    for number, era in enumerate(eras):
        weights = sum(share.weight for share in era.sources)
        blend = ", ".join(f"{share.weight / weights:.4f} {share.name}" for share in era.sources)
        end = eras[number + 1].begin if number + 1 < len(eras) else consumed
        lines.append(f"samples {era.begin:,} to {end:,}: {era.seq_length} tokens each, {blend}")
    return "\n".join(lines)


def verify(path: Location, every: bool) -> int:
    """From the newest down to the first that is whole, or `every` one; 1 if any of them is damaged."""
    from megalite.checkpoint.format import reader

    folders = [storage.checkpoint_dir(path, step) for step in reversed(storage.steps_in(path))]
    if (
        not folders
        and step_from_name(path.name) is None
        and "manifest.json" not in storage.storage_of(path).list_files(path)
    ):
        raise CheckpointError(f"{path}: no checkpoint; give a --save directory, or one checkpoint in it")
    bad = 0
    for folder in folders or [path]:
        try:
            manifest = manifests.load_manifest(folder)
            reader.verify_checkpoint(folder, manifest, f"verifying {folder}")
            print(f"{folder}: {len(manifest.tensors)} tensors in {len(manifest.files)} files, all as they were written")
            if not every:
                break
        except CheckpointError as error:
            bad += 1
            print(escape_control_chars(f"{folder}: {error}"), file=sys.stderr)
    return 1 if bad else 0


def differences(a: Checkpoint, b: Checkpoint) -> Iterator[Difference]:
    """The differences between two checkpoints, tensor by tensor."""
    from tools.verification.conversion import Difference, difference

    mine, theirs = a.manifest.tensors, b.manifest.tensors
    for name in sorted({*mine, *theirs}):
        if name not in theirs or name not in mine:
            yield Difference(name, f"only in the {'first' if name in mine else 'second'}")
        elif mine[name].shape != theirs[name].shape:
            yield Difference(name, f"shape {mine[name].shape} and {theirs[name].shape}")
        elif (found := difference(name, a.read(name), b.read(name))) is not None:
            yield found


def diff(a: Location, b: Location) -> int:
    from megalite.checkpoint.offline import open_checkpoint

    one, two = open_checkpoint(a), open_checkpoint(b)
    count = 0
    for d in differences(one, two):
        count += 1
        text = d.note
        if d.index is not None:
            text += f"{', ' if text else ''}{d.count:,} elements; first at {[*d.index]}: {d.here:g} and {d.there:g}"
            text += f"; largest {d.largest:g}"
        print(escape_control_chars(f"{d.name}: {text}"))
    print(f"{count} tensors differ" if count else f"{len(one.manifest.tensors)} tensors, equal to the bit")
    return 1 if count else 0


def named(source: Checkpoint, folder: Location) -> Location:
    """`folder`, or in it the folder of the source's name."""
    return folder if folder.name.startswith("iter_") else folder / source.directory.name


def shares(items: Sequence[TensorProducer], files: int) -> list[list[TensorProducer]]:
    """Consecutive items, cut where their bytes pass the next multiple of total / files."""
    shares: list[list[TensorProducer]] = [[] for _ in range(files)]
    total, done = max(1, sum(item.bytes for item in items)), 0
    for item in items:
        shares[min(files - 1, (done + item.bytes // 2) * files // total)].append(item)
        done += item.bytes
    return shares


def write_whole(
    folder: Location, like: Checkpoint, names: Sequence[str], make: Callable[[str], Tensor], state: Any, files: int
) -> None:
    """The tensors `names` of `like`, with the values that `make` gives."""
    from megalite.checkpoint.offline import TensorProducer, full_box, write_checkpoint

    shapes = {name: like.shape(name) for name in names}
    items = [TensorProducer(like.dtype(n), [(n, full_box(shapes[n]))], lambda n=n: [make(n)]) for n in names]
    write_checkpoint(folder, shares(items, files), shapes, state)


def reshard(source: Location, target: Location, files: int, weights: bool) -> None:
    from megalite.checkpoint.offline import open_checkpoint

    found = open_checkpoint(source)
    folder = named(found, target)
    names = [name for name in found.manifest.tensors if not weights or name.startswith(manifests.MODEL_PREFIXES)]
    write_whole(folder, found, names, found.read, found.manifest.state, files)
    print(f"wrote {folder}")


def average(target: Location, paths: list[Location], files: int) -> None:
    """The mean of the weights of several checkpoints (arXiv:1803.05407), summed in fp64 from main weights where they
    are stored. No optimizer state: the result is for --finetune, --no-load-optim, evaluation and conversion."""
    import torch

    from megalite.checkpoint.offline import open_checkpoint

    sources = [open_checkpoint(path) for path in paths]
    folder = named(sources[-1], target)
    newest = max(sources, key=lambda s: int(s.manifest.state.get("progress", {}).get("step", 0)))
    weights = {
        name: w.shape for name, w in newest.manifest.tensors.items() if name.startswith(manifests.MODEL_PREFIXES)
    }
    for source in sources:
        here = {
            name: w.shape for name, w in source.manifest.tensors.items() if name.startswith(manifests.MODEL_PREFIXES)
        }
        wrong = sorted(n for n in {*here, *weights} if n not in weights or here.get(n) != weights[n])
        if wrong:
            both = f"{source.directory} and {newest.directory}"
            raise CheckpointError(f"{both} are of different models: {', '.join(wrong[:5])}; average those of one")

    def mean(name: str) -> Tensor:
        main = name.replace("model/", "optimizer.main/", 1)
        total = torch.zeros(weights[name], dtype=torch.float64)
        for source in sources:
            total += source.read(main if main in source.manifest.tensors else name)
        return (total / len(sources)).to(newest.dtype(name))

    state = {**newest.manifest.state, "averaged": [source.directory.name for source in sources]}
    write_whole(folder, newest, list(weights), mean, state, files)
    print(f"wrote {folder}, the mean of {', '.join(str(one.directory) for one in sources)}")


def prune(path: Location, keep: int, retain: int | None, dry: bool) -> None:
    from megalite.checkpoint.manager import retention

    if not storage.steps_in(path):  # the lock would make the directory
        raise CheckpointError(f"{path}: no checkpoint; give a --save directory")
    lock = storage.storage_of(path).lock(path)
    try:
        gone = retention.RetentionPolicy(path, keep, retain).prune(dry=dry)
    finally:
        lock.close()
    for step in gone:
        print(f"{'would delete' if dry else 'deleted'} {storage.checkpoint_dir(path, step)}")


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
    work: dict[str, Callable[[], int | None]] = {
        "inspect": lambda: inspect(parse_location(a.checkpoint), a.tensors),
        "verify": lambda: verify(parse_location(a.checkpoint), a.all),
        "diff": lambda: diff(parse_location(a.a), parse_location(a.b)),
        "data-usage": lambda: print(escape_control_chars(format_data_usage(parse_location(a.checkpoint)))),
        "reshard": lambda: reshard(parse_location(a.checkpoint), parse_location(a.out), a.files, a.weights),
        "average": lambda: average(parse_location(a.out), [parse_location(one) for one in a.checkpoints], a.files),
        "prune": lambda: prune(parse_location(a.directory), a.keep_last, a.save_retain_interval, a.dry_run),
    }
    a = build_parser().parse_args(argv)
    return work[a.command]() or 0


if __name__ == "__main__":
    run_program(main)
