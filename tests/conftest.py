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
for name in ("PYTHONUNBUFFERED", "RANK", "WORLD_SIZE"):  # users do not set them; their output is buffered
    os.environ.pop(name, None)
programs.initial_environment()
# a shell's background jobs and nohup ignore these signals, and the programs that tests start would inherit that
for number, default in (
    (signal.SIGINT, signal.default_int_handler),
    (signal.SIGQUIT, signal.SIG_DFL),
    (signal.SIGHUP, signal.SIG_DFL),
):
    if signal.getsignal(number) is signal.SIG_IGN:
        signal.signal(number, default)
with contextlib.suppress(ImportError):  # the tests that need a GPU run without hypothesis too (tools/gpu_report.py)
    from hypothesis import HealthCheck, settings

    # the same examples everywhere, however slow the machine; --hypothesis-profile=default looks for others
    settings.register_profile(
        "megalite", derandomize=True, database=None, deadline=None, suppress_health_check=[HealthCheck.too_slow]
    )
    settings.load_profile("megalite")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--record", action="store_true", help="write the durations to tests/durations.txt")


@pytest.hookimpl(tryfirst=True)  # before -m is applied
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark presubmit tests, the slow ones among them, and slow and nightly tests that guard a changed file."""
    presubmit, means = durations.presubmit_seconds(), durations.mean_nightly_seconds()
    guards = list[tuple[str, float]]()
    for item in items:
        if item.get_closest_marker("gpu") and not sys.modules["torch"].cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
        if item.nodeid in presubmit and not item.get_closest_marker("nightly"):
            item.add_marker("presubmit")
            seconds = presubmit[item.nodeid]
            if seconds > durations.MAX_PRESUBMIT_S:
                item.add_marker("slow")
                if durations.any_changed(durations.paths_guarded_by(item.nodeid)):
                    guards.append((item.nodeid, seconds))
        if (mark := item.get_closest_marker("nightly")) and durations.any_changed(mark.kwargs.get("guards", ())):
            guards.append((item.nodeid, means.get(item.nodeid.split("::")[0], durations.DEFAULT_NIGHTLY_S)))
    guarded = set(durations.select_within_budget(durations.MAX_GUARDED_S, guards))
    for item in items:
        if item.nodeid in guarded:
            item.add_marker("guarded")


class Recorder:
    """A pytest plugin that records the durations of the tests of all workers."""

    def __init__(self, groups: set[str]) -> None:
        self.seconds_of, self.nightly, self.groups = Counter[str](), set[str](), groups

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.seconds_of[report.nodeid] += report.duration  # type: ignore[assignment]
        if "nightly" in report.keywords:
            self.nightly.add(report.nodeid)

    def pytest_sessionfinish(self) -> None:
        durations.record(self.seconds_of, self.nightly, self.groups)


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--record") and not hasattr(config, "workerinput"):
        config.pluginmanager.register(Recorder(durations.groups_that_ran(config.getoption("markexpr"))))


@pytest.fixture(autouse=True)
def signals_as_they_were() -> Iterator[None]:
    """Restore signals: programs that a test runs in this process block them, and later tests' programs inherit that."""
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, [])
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    yield
    for number, handler in handlers.items():
        if signal.getsignal(number) is not handler:
            signal.signal(number, handler)
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)


@pytest.fixture(autouse=True)
def environment_as_it_was() -> Iterator[None]:
    """Restore the environment: torch.compile sets a variable, and programs with a changed one are not forked."""
    with programs.environment_restored():
        yield


@pytest.fixture(autouse=True)
def runs_are_closed_without_plugins() -> Iterator[None]:
    yield
    train_cases.close_runs()
    if plugins := sys.modules.get("megalite.config.plugins"):
        plugins.load_plugins([])
