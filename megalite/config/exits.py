"""How a program ends: with 0 only when its work is done.

A plugin, or a library that one calls, may raise SystemExit(0) in the middle of a run, and a caller would take that for
success. Only `Finished` ends a program with 0 before its `main` has returned.
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

from megalite.common.optional_packages import CODE, MissingPackageError
from megalite.config.console import MOST_CHARACTERS, discard_unwritable_output, print_err, shortened

_reports: list[int] = []  # the file descriptor on which megalite/api.py waits for the exit code of this process


class Finished(SystemExit):
    """The program has done all that it was asked for, as to show its help."""

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
    """Return whether a process that ends with the code of a SystemExit reports success; only its lowest byte counts."""
    return code is None or (isinstance(code, int) and code & 0xFF == 0)


def message_of(error: BaseException) -> str:
    """Return the error's type and text as one short line."""
    name, text = type(error).__name__, " ".join(text_of(error).split())
    return shortened(f"{name}: {text}" if text else name, MOST_CHARACTERS // 2)  # the rest of a line names the place


def text_of(error: BaseException) -> str:
    """Return the error's text, whatever its __str__ does."""
    return str(traceback.TracebackException.from_exception(error))


def early_exit(error: SystemExit) -> str:
    """Return where a SystemExit was raised, and what is wrong with that."""
    frames = traceback.extract_tb(error.__traceback__)
    where = f"{frames[-1].filename}:{frames[-1].lineno}: " if frames else ""
    return f"{where}{message_of(error)} before the work was done; raise another error there"


def exit_code(error: SystemExit) -> Any:
    """Return the code with which a program ends that SystemExit has come through: never 0, unless it is `Finished`."""
    if isinstance(error, Finished) or not is_success(error.code):
        return error.code
    print_err(f"{os.path.basename(sys.argv[0])}: {early_exit(error)}")
    return 1


def report_code_on(number: int) -> None:
    """Write this process's exit code on a file descriptor, too, as it ends.

    The parent may be unable to wait for it: where SIGCHLD is ignored the kernel drops exit codes, and a handler of the
    parent's program may take them. subprocess then reports 0.
    """
    os.set_inheritable(number, False)
    _reports[:] = [number]


def report(code: object) -> None:
    """Report the exit code with which this process is about to end, if it was asked to."""
    for number in _reports:
        with contextlib.suppress(OSError):  # nobody waits for it any more
            os.write(number, b"%d\n" % (code & 0xFF if isinstance(code, int) else int(code is not None)))
    _reports.clear()


def end_at_once(code: int) -> NoReturn:
    """End this process without the interpreter's shutdown, which may wait for other ranks."""
    report(code)
    os._exit(code)


def wait_for_children() -> None:
    """Let this process have the exit codes of those that it starts, also where its parent ignores SIGCHLD: that is
    inherited, the kernel then drops the codes, and subprocess reports 0 instead."""
    if threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGCHLD) is signal.SIG_IGN:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)


def run_cli(run: Callable[[], int], prints: bool = True) -> Any:
    """The exit code of a program: 130 after Ctrl-C, that of SIGPIPE where the reader of its output has closed the pipe,
    as head does, 1 on a full disk, 3 without a package that it needs. `prints`: fail if its output is lost."""
    wait_for_children()
    try:
        code = run()
        if prints and sys.stdout is not None:
            sys.stdout.flush()
        return code
    except SystemExit as error:
        return exit_code(error)
    except KeyboardInterrupt:
        end_at_once(130)
    except BrokenPipeError:
        stdout = select.poll()
        stdout.register(1, 0)
        if stdout.poll(0):
            return 128 + signal.SIGPIPE
        raise
    except MissingPackageError as error:
        print_err(f"{os.path.basename(sys.argv[0])}: {error}")
        return CODE
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        print_err(f"{error}: what was printed or written is not whole; make room")
        return 1
    finally:
        discard_unwritable_output()
