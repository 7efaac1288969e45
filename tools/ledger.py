#!/usr/bin/env python
"""What a checkpoint's run has seen: tokens, documents and epochs of each source, and the blends on the way.

python tools/ledger.py runs/mine                    # the newest checkpoint of a --save directory
python tools/ledger.py runs/mine/iter_0000500
"""

import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from megalite.checkpoint.format.manifest import newest
from megalite.checkpoint.storage.location import CheckpointError, Location, parse
from megalite.config.console import printable
from megalite.data.errors import DataError
from megalite.data.samples.ledger import Total, read
from tools.program import parser_of, refusing, run_program


def table(totals: Sequence[Total]) -> str:
    """Sources, tokens, documents and epochs as text."""
    width = max([6, *(len(total.name) for total in totals)])
    lines = [f"{'source':{width}}  {'tokens':>18}  {'documents':>14}  {'epochs':>8}"]
    lines += [f"{t.name:{width}}  {t.tokens:18,}  {t.documents:14,}  {t.epochs:8.3f}" for t in totals]
    return "\n".join(lines)


def show(directory: str | Location) -> str:
    folder, manifest = newest(parse(directory))
    saved = manifest.state.get("data")
    if saved is None:
        return f"{folder}: trained on generated data, nothing to account for"
    eras, _, totals, consumed = read(saved)
    lines = [f"{folder}: {consumed:,} samples", table(list(totals.values()))]
    for number, era in enumerate(eras):
        weights = sum(share.weight for share in era.sources)
        blend = ", ".join(f"{share.weight / weights:.4f} {share.name}" for share in era.sources)
        end = eras[number + 1].begin if number + 1 < len(eras) else consumed
        lines.append(f"samples {era.begin:,} to {end:,}: {era.seq_length} tokens each, {blend}")
    return "\n".join(lines)


@refusing(3, CheckpointError, DataError)
def main(argv: list[str]) -> int:
    parser = parser_of(__doc__)
    parser.add_argument("checkpoint", type=str, metavar="CHECKPOINT")
    print(printable(show(parser.parse_args(argv).checkpoint)))
    return 0


if __name__ == "__main__":
    run_program(main)
