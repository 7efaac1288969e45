from collections.abc import Callable

import pytest

Typed = Callable[..., tuple[int, str, str]]


@pytest.fixture
def typed(capsys: pytest.CaptureFixture[str]) -> Typed:
    """Return a function that runs a tool in this process and returns its exit code, stdout and stderr."""
    return lambda tool, *args: (tool.main([str(arg) for arg in args]), *capsys.readouterr())
