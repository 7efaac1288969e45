"""What a card would suffer from is planted into the trainer, one at a time, and found with its line."""

import functools
from collections.abc import Callable
from typing import Any

import pytest
from torch import Tensor
from train_cases import run_from

from card.simulator.device import Card, simulated
from card.simulator.waits import waits_of
from card.test_trainer import COMMON, LLAMA, ONCE
from megalite.models import gpt
from megalite.nn import later
from megalite.nn.mlp import MLP
from megalite.train import setup, step

Patch = Callable[[Any, str, Any], None]


def a_step(flags: str = "") -> Card:
    with simulated() as card:
        run = run_from(f"{COMMON} {LLAMA} --eod-mask-loss {flags}", device=card.device)
        step.train_step(run)
        run.close()
    return card


def plant(patch: Patch, owner: Any, name: str, defect: Callable[..., None]) -> None:
    """`defect` is called with the arguments of a function and its result, each time after it."""
    original = getattr(owner, name)

    @functools.wraps(original)
    def planted(*args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        defect(result, *args, **kwargs)
        return result

    patch(owner, name, planted)


# what is planted: each is one line, of which the test knows the place


def reads_a_norm(y: Tensor, *_: Any) -> None:
    y.detach().norm().item()


def asks_for_nan(_: None, grad: Tensor, dy: Tensor, x: Tensor, **__: Any) -> None:
    assert not dy.isnan().any()


WAITS: dict[str, tuple[Any, str, Callable[..., None], str, str]] = {
    "item in forward": (MLP, "forward", reads_a_norm, "item", "forward"),
    "bool in backward": (later, "accumulate_outer_", asks_for_nan, "item", "backward"),
}


@pytest.mark.parametrize("name", WAITS)
def test_a_wait_is_found_with_its_line_and_phase(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    owner, attribute, defect, kind, phase = WAITS[name]
    plant(monkeypatch.setattr, owner, attribute, defect)
    waits = [wait for wait in waits_of(a_step().trace) if "step" in wait.within]
    where = f"tests/card/test_planted.py:{defect.__code__.co_firstlineno + 1}"
    found = [wait for wait in waits if wait.where == where]
    assert found and {(wait.kind, wait.phase) for wait in found} == {(kind, phase)}
    assert [str(wait) for wait in waits if wait not in found] == ONCE


def table_on_the_host(patch: Patch) -> None:
    tables = gpt.rope_tables
    patch(gpt, "rope_tables", lambda *args, device, **kwargs: tables(*args, **kwargs))


def pageable_batches(patch: Patch) -> None:
    prepare = setup.host_batch
    patch(setup, "host_batch", lambda micro, pin, **marks: prepare(micro, pin=False, **marks))


MIXED: dict[str, tuple[Callable[[Patch], None], str, str]] = {
    "a table on the host": (table_on_the_host, "mul(", "megalite/kernels/rope.py"),
    "pageable batches": (pageable_batches, "host to card, non_blocking", "megalite/train/batch.py"),
}


@pytest.mark.parametrize("name", MIXED)
def test_what_may_not_meet_is_found_with_its_line(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    defect, what, file = MIXED[name]
    defect(monkeypatch.setattr)
    mixed = a_step().mixed
    assert any(what in one.what and one.where.startswith(f"{file}:") for one in mixed), mixed
