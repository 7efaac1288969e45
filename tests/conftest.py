import contextlib
import os
import signal
import sys
from collections import Counter
from collections.abc import Iterator

import durations
import programs
import pytest
import train_cases

os.environ.setdefault("OMP_NUM_THREADS", "1")
for name in ("PYTHONUNBUFFERED", "RANK", "WORLD_SIZE"):  # users have none: what is told lies in a buffer first
    os.environ.pop(name, None)
programs.environment()
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


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--record", action="store_true", help="write what tests took to tests/durations.txt")


@pytest.hookimpl(tryfirst=True)  # before -m is applied
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what is not quick, and what guards a file that was changed."""
    of_commits, means = durations.of_commits(), durations.mean_of_everything()
    guards = list[tuple[str, float]]()
    for item in items:
        if item.get_closest_marker("gpu") and not sys.modules["torch"].cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
        if item.nodeid in of_commits:
            item.add_marker("commit")
        if (mark := item.get_closest_marker("everything")) and durations.guarded(mark.kwargs.get("guards", ())):
            guards.append((item.nodeid, means.get(item.nodeid.split("::")[0], durations.COMMIT_S)))
    chosen = set(durations.within(durations.GUARDED_S, guards))
    for item in items:
        if item.nodeid in chosen:
            item.add_marker("changed")


class Recorder:
    """What tests took, of all workers."""

    def __init__(self, kinds: set[str]) -> None:
        self.took, self.everything, self.kinds = Counter[str](), set[str](), kinds

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.took[report.nodeid] += report.duration  # type: ignore[assignment]
        if "everything" in report.keywords:
            self.everything.add(report.nodeid)

    def pytest_sessionfinish(self) -> None:
        durations.record(self.took, self.everything, self.kinds)


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--record") and not hasattr(config, "workerinput"):
        config.pluginmanager.register(Recorder(durations.ran(config.getoption("markexpr"))))


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


@pytest.fixture(autouse=True)
def environment_as_it_was() -> Iterator[None]:
    """torch.compile sets a variable, and programs that find another environment are not forked."""
    with programs.environment_kept():
        yield


@pytest.fixture(autouse=True)
def runs_are_closed_without_plugins() -> Iterator[None]:
    yield
    train_cases.close_runs()
    if plugins := sys.modules.get("megalite.config.plugins"):
        plugins.load_plugins([])
