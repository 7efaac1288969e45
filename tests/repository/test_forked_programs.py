"""Programs that tests fork (support/programs.py) behave like programs that an interpreter starts.

Nearly every test of an exit code relies on this. Each case runs both ways.
"""

import os
import signal
import subprocess
import sys
from types import ModuleType
from typing import Any

import programs
import pytest

WITH_BOTH = pytest.mark.parametrize("runner", [programs, subprocess], ids=["forked", "started"])
PRINT_BOTH = "import sys; print('out'); print('err', file=sys.stderr); "
PIPES: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}


@WITH_BOTH
@pytest.mark.parametrize(
    "ending,code,last",
    [
        ("sys.exit()", 0, "err"),
        ("sys.exit('why')", 1, "why"),
        ("1 / 0", 1, "ZeroDivisionError: division by zero"),
        ("import atexit; atexit.register(print, 'end', file=sys.stderr)", 0, "end"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", -signal.SIGKILL, "err"),
        ("raise KeyboardInterrupt", -signal.SIGINT, "KeyboardInterrupt"),
    ],
)
def test_program_ends_with_code_and_output(runner: ModuleType, ending: str, code: int, last: str) -> None:
    done = runner.run([sys.executable, "-c", PRINT_BOTH + ending], **PIPES, timeout=60)
    assert done.returncode == code and done.stderr.splitlines()[-1] == last
    assert done.stdout == ("out\n" if code != -signal.SIGKILL else "")  # it was still in a buffer


def test_torch_is_preloaded_unless_the_interpreter_has_options() -> None:
    code = "import sys; print('torch' in sys.modules, 'triton' in sys.modules)"

    def stdout_of(*flags: str, **variables: str) -> str:
        env = {**programs.initial_environment(), **variables}  # whatever other tests have set here
        return programs.run([sys.executable, *flags, "-c", code], env=env, **PIPES, check=True, timeout=60).stdout

    assert stdout_of() == stdout_of(MEGALITE_A="1") == "True False\n"
    assert stdout_of("-X", "dev") == stdout_of(PYTHONWARNINGS="error") == stdout_of(TORCH_LOGS="") == "False False\n"


@pytest.mark.parametrize("variables", [{}, {"TORCH_LOGS": ""}], ids=["forked", "started"])
def test_new_session_owns_its_terminal(variables: dict[str, str]) -> None:
    controller, terminal = os.openpty()
    code = "import os; print(os.tcgetpgrp(0) == os.getpgrp() == os.getsid(0))"
    env = {**programs.initial_environment(), **variables}
    with programs.Popen(
        [sys.executable, "-c", code], stdin=terminal, env=env, start_new_session=True, **PIPES
    ) as process:
        assert process.communicate(timeout=60) == ("True\n", "")
    os.close(controller)
    os.close(terminal)


def test_leftover_variable_does_not_slow_later_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in {*os.environ, *programs.initial_environment()}:  # a fixture that lasts longer may have set some
        if name.startswith(programs.READ_AT_START):
            monkeypatch.delenv(name, raising=False)
    for name, value in programs.initial_environment().items():
        monkeypatch.setenv(name, value)
    before = dict(os.environ)
    with programs.environment_restored():  # as around every test
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = "x"  # torch.compile sets it
        assert not programs._can_be_forked([sys.executable, "-c", ""], None, None)
    assert dict(os.environ) == before and programs._can_be_forked([sys.executable, "-c", ""], None, None)
