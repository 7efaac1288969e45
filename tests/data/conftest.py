from collections.abc import Callable

import pytest

Typed = Callable[..., tuple[int, str, str]]


@pytest.fixture
def typed(capsys: pytest.CaptureFixture[str]) -> Typed:
    """Exit code, stdout and stderr of a tool of this process."""
    return lambda tool, *words: (tool.main([str(word) for word in words]), *capsys.readouterr())
