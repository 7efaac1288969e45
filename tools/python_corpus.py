#!/usr/bin/env python
"""Real text that is on every machine with Python: the standard library's own source, as train.jsonl and valid.jsonl.

    python tools/python_corpus.py --out data

One document per .py file, in sorted order, each content once, without site-packages. Every --valid-every-th document
goes to validation. The same interpreter gives the same files; different Python versions give different ones.
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
    """{"path", "text"} of each file that is UTF-8, new, and of a usual size."""
    seen: set[bytes] = set()
    files = (path for path in root.rglob("*.py") if SKIP.isdisjoint(path.relative_to(root).parts[:-1]))
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
    """Write both files; {name: (documents, bytes)}."""
    out.mkdir(parents=True, exist_ok=True)
    counts = {"train": (0, 0), "valid": (0, 0)}
    partial = {name: out / f"{name}.jsonl.partial" for name in counts}
    for path in partial.values():
        path.unlink(missing_ok=True)  # a link is not written through
    with open(partial["train"], "x", encoding="utf-8") as train, open(partial["valid"], "x", encoding="utf-8") as valid:
        for index, document in enumerate(documents(root)):
            name, file = ("valid", valid) if index % valid_every == valid_every // 2 else ("train", train)
            n, size = counts[name]
            line = json.dumps(document, ensure_ascii=False) + "\n"
            file.write(line)
            counts[name] = (n + 1, size + len(line.encode("utf-8")))
    whole = all(n for n, _ in counts.values())
    for name, path in partial.items():
        os.replace(path, out / f"{name}.jsonl") if whole else path.unlink()
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
    for name, (n, size) in counts.items():
        print(f"{args.out / name}.jsonl: {n} documents, {size / 1e6:.1f} MB")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
