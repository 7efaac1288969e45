"""Freed memory is used again: counted in pages that the system had to give."""

import json
import subprocess
import sys

import pytest

from megalite.train.tell.device_memory import M_MMAP_THRESHOLD, M_TRIM_THRESHOLD, VARIABLES, keep_freed_memory

PROGRAM = """
import json, resource, sys
import torch
from megalite.train.tell.device_memory import keep_freed_memory

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
def test_the_users_own_settings_win(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, "glibc.malloc.trim_threshold=1000")
    assert not keep_freed_memory()


@pytest.mark.parametrize("most,tried", [(64 << 20, [64]), (32 << 20, [64, 32]), (0, [64, 32])])
def test_a_threshold_that_is_refused_leaves_the_other_alone(most: int, tried: list[int], monkeypatch) -> None:
    """glibc before 2.35 takes at most 32 MiB; once one is set, none adapts itself any more."""
    asked: list[tuple[int, int]] = []

    class Library:
        @staticmethod
        def mallopt(number: int, value: int) -> int:
            asked.append((number, value))
            return int(number == M_TRIM_THRESHOLD or value <= most)

    monkeypatch.setattr("ctypes.CDLL", lambda name: Library)
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    assert keep_freed_memory() == (most > 0)
    assert asked[: len(tried)] == [(M_MMAP_THRESHOLD, size << 20) for size in tried]
    assert [number for number, _ in asked[len(tried) :]] == [M_TRIM_THRESHOLD] * (most > 0)
