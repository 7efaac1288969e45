"""Freed memory is used again: counted in pages that the system had to give."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from megalite.train.allocator import VARIABLES, keep_freed_memory

PROGRAM = """
import json, resource, sys
import torch
from megalite.train.allocator import keep_freed_memory

kept = keep_freed_memory() if sys.argv[1] == "keep" else None
pages = []
for _ in range(30):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    torch.ones(10 << 20)
    pages.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
print(json.dumps([kept, pages]))
"""


def pages_of(what: str) -> tuple[bool | None, list[int]]:
    done = subprocess.run([sys.executable, "-c", PROGRAM, what], capture_output=True, text=True, timeout=60, check=True)
    kept, pages = json.loads(done.stdout)
    return kept, pages


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="glibc")
def test_a_tensor_like_one_freed_before_costs_no_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    kept, pages = pages_of("keep")
    if not kept:
        pytest.skip("not glibc")
    assert min(pages_of("leave")[1][-9:]) > 15  # 40 MiB, in pages of 4 KiB or 2 MiB
    assert max(pages[-9:]) < 5


@pytest.mark.parametrize("name", VARIABLES)
def test_the_users_own_settings_win(name: str) -> None:
    assert not keep_freed_memory({name: "glibc.malloc.trim_threshold=1000"})
