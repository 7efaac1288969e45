"""What the check of CUDA's branches sees, and what it must not take for seen."""

import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from card.mentions import Watch, mentions, of_text

TEXT = """
from __future__ import annotations
import types
torch = types.SimpleNamespace(cuda=types.SimpleNamespace(synchronize=lambda: None, memory=types.SimpleNamespace(a=1)))
Stream = torch.cuda.memory
Tensor = lambda on: types.SimpleNamespace(is_cuda=on)
def hinted(x: torch.cuda.Stream) -> torch.cuda.Event: ...
def chosen(device):
    return torch.cuda.memory.a if device == "cuda" else 3
def turned(device):
    if device != "cuda" and hinted:
        return 0
    else:
        torch.cuda.synchronize()
    return 1
def asked(x):
    if not x.is_cuda:
        return 5
    return 6
"""


PLACES = [
    "torch.cuda.memory.a",
    "device == 'cuda'",
    "device != 'cuda'",
    "torch.cuda.synchronize",
    "torch.cuda.synchronize()",  # what is done on a card
    "x.is_cuda",
]


def test_the_places_of_a_text() -> None:
    assert [place.text for place in sorted({*of_text(TEXT, "text.py")})] == PLACES


@pytest.mark.parametrize(
    ("call", "seen"),
    [
        ("chosen('cpu')", [1]),
        ("chosen('cuda')", [0, 1]),
        ("turned('cpu')", [2]),
        ("turned('cuda')", [2, 3, 4]),
        ("asked(Tensor(False))", [5]),
        ("asked(Tensor(True))", [5]),
        ("hinted(3)", []),
        ("in_thread(turned, 'cuda')", [2, 3, 4]),
    ],
)
def test_what_ran_is_seen_and_nothing_else(call: str, seen: list[int], tmp_path: Path) -> None:
    path = tmp_path / "text.py"
    path.write_text(TEXT)
    space: dict[str, object] = {"in_thread": in_thread}
    exec(compile(TEXT, str(path), "exec"), space)  # noqa: S102
    watch = Watch([*of_text(TEXT, "text.py")], tmp_path)
    with watch.watching():
        eval(call, space)  # noqa: S307
    assert [place.text for place in sorted(watch.visited())] == [PLACES[i] for i in seen]


def in_thread(work: Callable[[str], object], device: str) -> None:
    thread = threading.Thread(target=work, args=(device,))
    thread.start()
    thread.join()


def test_the_places_of_the_repository_are_many() -> None:
    files = {place.file for place in mentions()}
    assert {"megalite/train/tell/device_memory.py", "tools/bench/kernel_bench.py", "examples/quickstart.py"} <= files
    assert len(mentions()) > 100
