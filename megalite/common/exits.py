"""Exit codes of programs: 0 only when the work is done.

A plugin, or a library that it calls, may raise SystemExit(0) in the middle of a run, which would look like success to
the caller. Only `Finished` ends a program with 0 before its `main` has returned.
"""

import argparse
import contextlib
import errno
import os
import select
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from typing import Any, NoReturn

from megalite.common.console import MAX_LINE_CHARACTERS, discard_unwritable_output, print_err, shortened
from megalite.common.exit_codes import ExitCode
from megalite.common.optional_packages import MissingPackageError

_reports: list[int] = []  # the file descriptor on which megalite/api.py waits for the exit code of this process


class Finished(SystemExit):
    """A successful exit before `main` returns, for example after the help was printed."""

    def __init__(self) -> None:
        super().__init__(0)


class Parser(argparse.ArgumentParser):
    """A parser whose --help is `Finished`."""

    def exit(self, status: int = 0, message: str | None = None) -> NoReturn:
        if status:
            super().exit(status, message)
        if message:
            self._print_message(message, sys.stderr)
        raise Finished


def is_success(code: object) -> bool:
    """Return True if the code of a SystemExit means success. Only its lowest byte counts, as in exit codes."""
    return code is None or (isinstance(code, int) and code & 0xFF == 0)


def message_of(error: BaseException) -> str:
    """Return the error's type and text as one short line."""
    name, text = type(error).__name__, " ".join(error_text(error).split())
    return shortened(f"{name}: {text}" if text else name, MAX_LINE_CHARACTERS // 2)  # leaves room for a file and line


def error_text(error: BaseException) -> str:
    """Return the error's text, whatever its __str__ does."""
    return str(traceback.TracebackException.from_exception(error))


def early_exit(error: SystemExit) -> str:
    """Return a message about a SystemExit in the middle of a run, with the file and line that raised it."""
    frames = traceback.extract_tb(error.__traceback__)
    where = f"{frames[-1].filename}:{frames[-1].lineno}: " if frames else ""
    return f"{where}{message_of(error)} before the work was done; raise another error there"


def exit_code(error: SystemExit) -> Any:
    """Return the exit code of a program that raised SystemExit: 0 only for `Finished`, otherwise 1 instead of 0."""
    if isinstance(error, Finished) or not is_success(error.code):
        return error.code
    print_err(f"{os.path.basename(sys.argv[0])}: {early_exit(error)}")
    return 1


def report_code_on(number: int) -> None:
    """Write this process's exit code to a file descriptor, too, when it ends.

    The parent may be unable to wait for the code: the kernel drops exit codes if SIGCHLD is ignored, and a handler of
    the parent's program may collect them. subprocess then reports 0.
    """
    os.set_inheritable(number, False)
    _reports[:] = [number]


def report(code: object) -> None:
    """Write the exit code of a SystemExit to the file descriptor of `report_code_on`, if there is one."""
    for number in _reports:
        with contextlib.suppress(OSError):  # the parent no longer waits for it
            os.write(number, b"%d\n" % (code & 0xFF if isinstance(code, int) else int(code is not None)))
    _reports.clear()


def exit_now(code: int) -> NoReturn:
    """Exit without the interpreter's shutdown, which may wait for other ranks."""
    report(code)
    os._exit(code)


def wait_for_children() -> None:
    """Make sure that this process gets the exit codes of its children.

    If the parent ignores SIGCHLD, this process inherits that; the kernel then drops the codes and subprocess reports 0.
    """
    if threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGCHLD) is signal.SIG_IGN:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)


def run_cli(run: Callable[[], int], prints: bool = True) -> Any:
    """Run a program and return its exit code.

    The code is that of `run`, or 130 after Ctrl-C, 141 (SIGPIPE) if the reader of its output has closed the pipe, as
    head does, 1 on a full disk, and 3 if a package is missing.

    Args:
        prints: fail if output cannot be written.
    """
    wait_for_children()
    try:
        code = run()
        if prints and sys.stdout is not None:
            sys.stdout.flush()
        return code
    except SystemExit as error:
        return exit_code(error)
    except KeyboardInterrupt:
        exit_now(ExitCode.INTERRUPTED)
    except BrokenPipeError:
        stdout = select.poll()
        stdout.register(1, 0)
        if stdout.poll(0):
            return 128 + signal.SIGPIPE
        raise
    except MissingPackageError as error:
        print_err(f"{os.path.basename(sys.argv[0])}: {error}")
        return ExitCode.PREFLIGHT
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        print_err(f"{error}: what was printed or written is incomplete; free some space")
        return 1
    finally:
        discard_unwritable_output()
