"""What the check of CUDA's branches sees, and what it must not take for seen."""

import threading
from pathlib import Path

import pytest

from card.mentions import Watch, of_text

TEXT = """from types import SimpleNamespace
torch = SimpleNamespace(cuda=SimpleNamespace(synchronize=lambda: None))
Stream = torch.cuda.synchronize
def turned(x, device: torch.cuda.synchronize):
    if device != "cuda" and turned:
        return 0
    else:
        device = 1
    torch.cuda.synchronize()
    if not x.is_cuda:
        return 5
    return 7 if device == "cuda" else 6
def in_thread(*args):
    thread = Thread(target=turned, args=args)
    thread.start(), thread.join()
"""
PLACES = [
    (5, "device != 'cuda'"),
    (8, "device = 1"),
    (9, "torch.cuda.synchronize"),
    (10, "x.is_cuda"),
    (12, "7"),
    (12, "device == 'cuda'"),
]


def test_the_places_of_a_text() -> None:
    assert [(place.begin[0], place.text) for place in sorted(of_text(TEXT, "text.py"))] == PLACES


@pytest.mark.parametrize(("call", "seen"), [("turned(X, 'cpu')", [5]), ("in_thread(X, 'cuda')", [5, 8, 9, 10, 12])])
def test_what_ran_is_seen_and_nothing_else(call: str, seen: list[int], tmp_path: Path) -> None:
    path = tmp_path / "text.py"
    path.write_text(TEXT)
    space: dict[str, object] = {"Thread": threading.Thread}
    exec(compile(TEXT, str(path), "exec"), space)  # noqa: S102
    exec("X = SimpleNamespace(is_cuda=True)", space)  # noqa: S102
    watch = Watch([*of_text(TEXT, "text.py")], tmp_path)
    with watch.watching():
        eval(call, space)  # noqa: S307
    assert [place.begin[0] for place in sorted(watch.visited())] == seen
