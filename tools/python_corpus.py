#!/usr/bin/env python
"""Write the source of Python's standard library as train.jsonl and valid.jsonl: real text that every machine has.

    python tools/python_corpus.py --out data

Each .py file is a document, in sorted order, without duplicates and site-packages. Every --valid-every-th document is
for validation. An interpreter always gives the same files; different Python versions give different ones.
"""

import argparse
import hashlib
import json
import os
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from megalite.common.console import print_err
from tools.cli_common import local_path, make_parser, number_in_range

SKIP = {"site-packages", "dist-packages", "__pycache__", "idle_test"}


def documents(root: Path) -> Iterator[dict[str, str]]:
    """Yield {"path", "text"} of each UTF-8 file between 64 bytes and 1 MiB, without duplicates."""
    seen: set[bytes] = set()
    files = [path for path in root.rglob("*.py") if SKIP.isdisjoint(path.relative_to(root).parts[:-1])]
    for path in sorted(files, key=lambda path: (path.parent.parts, path.name)):
        try:
            raw = path.read_bytes()
            text = raw.decode("utf-8")
        except (OSError, UnicodeDecodeError):  # some of the library's tests are unreadable on purpose
            continue
        digest = hashlib.sha256(raw).digest()
        if not 64 <= len(raw) <= 1 << 20 or digest in seen:
            continue
        seen.add(digest)
        yield {"path": path.relative_to(root).as_posix(), "text": text}


def write(root: Path, out: Path, valid_every: int) -> dict[str, tuple[int, int]]:
    """Write both files and return name -> (number of documents, bytes). If one would be empty, write neither."""
    out.mkdir(parents=True, exist_ok=True)
    counts = {"train": (0, 0), "valid": (0, 0)}
    partial = {name: out / f"{name}.jsonl.partial" for name in counts}
    for path in partial.values():
        path.unlink(missing_ok=True)  # do not write through a link
    with open(partial["train"], "x", encoding="utf-8") as train, open(partial["valid"], "x", encoding="utf-8") as valid:
        for index, document in enumerate(documents(root)):
            is_valid = index % valid_every == valid_every // 2
            line = json.dumps(document, ensure_ascii=False) + "\n"
            (valid if is_valid else train).write(line)
            name = "valid" if is_valid else "train"
            num_documents, num_bytes = counts[name]
            counts[name] = (num_documents + 1, num_bytes + len(line.encode("utf-8")))
    is_complete = all(num_documents for num_documents, _ in counts.values())
    for name, path in partial.items():
        if is_complete:
            os.replace(path, out / f"{name}.jsonl")
        else:
            path.unlink()
    return counts


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of this program's flags."""
    parser = make_parser(__doc__)
    parser.add_argument("--out", type=local_path, required=True, help="directory for train.jsonl and valid.jsonl")
    parser.add_argument(
        "--valid-every",
        type=number_in_range(int, "[2, inf)"),
        default=50,
        metavar="N",
        help="one document in N, 2 or more, is for validation",
    )
    return parser


def main(argv: list[str]) -> int:
    """Run the program and return its exit code."""
    args = build_parser().parse_args(argv)
    root = Path(sysconfig.get_paths()["stdlib"])
    try:
        counts = write(root, args.out, args.valid_every)
    except OSError as error:
        print_err(f"python_corpus.py: {error.filename}: {error.strerror}; choose another --out")
        return 3
    if not counts["train"][0] or not counts["valid"][0]:
        print_err(f"python_corpus.py: {root} holds too few .py files for --valid-every {args.valid_every}")
        return 3
    for name, (num_documents, num_bytes) in counts.items():
        print(f"{args.out / name}.jsonl: {num_documents} documents, {num_bytes / 1e6:.1f} MB")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
