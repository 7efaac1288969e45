#!/usr/bin/env python
"""Where the time of a run went, and its goodput, from its run directory; also of one that still runs or was killed.

python tools/report.py RUN_DIR        report.json, of the last process that ended; and the run so far
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from megalite.train.figures import table  # noqa: E402
from megalite.train.watch.report import read_past, summary  # noqa: E402


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run_dir", type=Path)
    folder = parser.parse_args().run_dir
    path, metrics = folder / "report.json", folder / "metrics.jsonl"
    try:
        made = json.loads(path.read_text("utf-8")) if path.exists() else None
        rows = {} if made is None else {"written": made["time"], **summary(made)}
        if (past := read_past(folder, metrics.stat().st_mtime)) is not None:
            rows["run so far"] = f"goodput {past}"
    except (OSError, ValueError, TypeError, AttributeError, LookupError, ArithmeticError) as error:  # as rows may be
        raise SystemExit(f"report.py: {folder}: {error!r}; give a run directory") from None
    print(table(rows))


if __name__ == "__main__":
    main()
