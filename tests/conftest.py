from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator

import pytest
from long_tests import read_list

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.pop("PYTHONUNBUFFERED", None)  # users have none: what is told lies in a buffer first
# what a shell's background job and nohup ignore: what tests start would inherit it
for number, usual in (
    (signal.SIGINT, signal.default_int_handler),
    (signal.SIGQUIT, signal.SIG_DFL),
    (signal.SIGHUP, signal.SIG_DFL),
):
    if signal.getsignal(number) is signal.SIG_IGN:
        signal.signal(number, usual)
with contextlib.suppress(ImportError):  # the tests that need a card run without it, too (tools/gpu_report.py)
    from hypothesis import HealthCheck, settings

    # The same examples everywhere, however slow the machine; --hypothesis-profile=default looks for others.
    settings.register_profile(
        "megalite", derandomize=True, database=None, deadline=None, suppress_health_check=[HealthCheck.too_slow]
    )
    settings.load_profile("megalite")


@pytest.hookimpl(tryfirst=True)  # before -m is applied
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    long = set(read_list())
    for item in items:
        if item.nodeid in long:
            item.add_marker("long")


@pytest.fixture(autouse=True)
def signals_as_they_were() -> Iterator[None]:
    """Programs that a test runs in this process hold signals back, and what later tests start inherits that."""
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, [])
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    yield
    for number, handler in handlers.items():
        if signal.getsignal(number) is not handler:
            signal.signal(number, handler)
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)
