"""Ranks that are started again with the store of those that died, as torchrun does, meet each other and not the dead."""

from __future__ import annotations

import datetime
import os
import shutil
from pathlib import Path

import torch
import torch.distributed as dist

from megalite.parallel.launch import Ranks, process_group
from megalite.parallel.local_ranks import start_local


def _meet(ranks: Ranks, folder: str, attempt: int) -> None:
    """The store is a file here that outlives the ranks; what they sum is left in another."""
    os.environ["TORCHELASTIC_RESTART_COUNT"] = str(attempt)
    here = Ranks(ranks.rank, ranks.world, ranks.rank, ranks.world, f"file://{folder}/store")
    with process_group(here, device="cpu", startup_timeout=datetime.timedelta(seconds=10)):
        x = torch.tensor([attempt + 1.0])
        dist.all_reduce(x)
        (Path(folder) / f"{attempt}-{ranks.rank}").write_text(str(x.item()))
        os._exit(0)  # as a rank that is killed: nothing is closed, and the store keeps its addresses


def _keys(tmp_path: Path) -> int:
    """In a copy of the store, which torch deletes when nobody has it open any more."""
    shutil.copy(tmp_path / "store", tmp_path / "copy")
    return dist.FileStore(str(tmp_path / "copy"), 1).num_keys()


def test_every_attempt_has_its_own_addresses(tmp_path: Path) -> None:
    """None of the keys is written again, so none is there too early."""
    keys = [0]
    for attempt in range(3):
        code = start_local(2, _meet, (str(tmp_path), attempt), threads=1, timeout_s=60)
        found = [(tmp_path / f"{attempt}-{rank}").read_text() for rank in range(2) if code == 0]
        assert (code, found) == (0, [str(2.0 * (attempt + 1))] * 2)
        keys.append(_keys(tmp_path))
    new = [after - before for before, after in zip(keys, keys[1:], strict=False)]
    assert min(new) >= 2, keys
