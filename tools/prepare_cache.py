#!/usr/bin/env python
"""Build the index cache of a run before it begins, where no GPU waits for it. Takes the flags of pretrain_gpt.py.

    python tools/prepare_cache.py --config run.toml --data-cache-path /shared/cache
    python tools/prepare_cache.py FLAGS OF THE RUN

Builds the order of documents of every epoch that training, validation and test will read, and prints the files that are
new. What exists already is checked and kept, so a second call builds nothing. The run must have the same data, split,
sequence length, seed and length; what it misses it builds by itself.

The flags: python pretrain_gpt.py --help
"""

import os
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from megalite.config import cli
from megalite.config.options import Config, ConfigError
from megalite.data.errors import DataError
from megalite.data.samples.blend import Blend
from megalite.data.samples.source import Dataset
from megalite.models.families import PRESETS
from megalite.train.sources import open_sources
from tools.program import refusing, run_program


def prepare(config: Config) -> tuple[int, int]:
    """Fill the cache; (files built, their bytes). Raises DataError or ConfigError."""
    from megalite.plan.arrangement import Arrangement  # imports torch

    d, m, t = config.data, config.model, config.train
    problems = []
    if d.data_cache_path is None:
        problems.append("data_cache_path is not set; give --data-cache-path DIR, the directory to fill")
    if d.mock_data:
        problems.append("mock_data=True needs no index; give --data-path")
    if t.global_batch_size is None:
        problems.append("global_batch_size is not set, and its default depends on the number of ranks; give it")
    if problems:
        raise ConfigError(problems)
    assert d.data_cache_path and m.seq_length
    sources = open_sources(d, m.seq_length, t.seed, t.eval_iters)
    plan = Arrangement(config, 1, sources.vocab_size)  # no number of ranks changes what is read
    eval_samples = t.eval_iters * plan.eval_batch_size
    assert sources.ledger is not None
    sets: list[tuple[str, Dataset, int]] = [("train", sources.ledger.blend, plan.samples)]
    sets += [(f"valid {one.name}".strip(), one.data, eval_samples) for one in sources.valid]
    sets += [(f"test {one.name}".strip(), one.data, eval_samples) for one in sources.test]
    folder = Path(d.data_cache_path)
    folder.mkdir(parents=True, exist_ok=True)
    if not os.access(folder, os.W_OK):
        raise DataError(f"data_cache_path={folder} cannot be written; choose another directory")
    files = size = 0
    for name, dataset, samples in sets:
        assert isinstance(dataset, Blend)
        for source, count in zip(dataset.datasets, dataset.order.counts(samples), strict=True):
            before, begin = set(folder.glob("*.epoch")), time.perf_counter()
            source.prepare(count)
            new = sorted(set(folder.glob("*.epoch")) - before)
            files, size = files + len(new), size + sum(path.stat().st_size for path in new)
            made = ", ".join(path.name for path in new) or "nothing to build"
            print(f"{name}: {source.describe(count)}, {time.perf_counter() - begin:.1f} s: {made}", flush=True)
    return files, size


@refusing(2, ConfigError)
@refusing(3, DataError)
def main(argv: list[str]) -> int:
    if {"-h", "--help"} & set(argv):
        print(__doc__)
        return 0
    try:
        config, _ = cli.read(argv, PRESETS)
        files, size = prepare(config)
    except OSError as error:
        raise DataError(f"{error.filename}: {error.strerror}; choose a directory to write in") from None
    print(f"{config.data.data_cache_path}: {files} files built, {size / 1e6:.1f} MB")
    return 0


if __name__ == "__main__":
    run_program(main)
