"""Start interpreters that find this process's modules, and none in the working directory.

multiprocessing starts its resource tracker, its fork server and spawned workers as `python -c ...`. The first entry of
`sys.path` of such a process is the working directory, so a `socket.py` in that directory would run.
"""

import contextlib
import os
import sys
import threading
from collections.abc import Iterator, Sequence
from multiprocessing import util
from pathlib import Path
from typing import Any

_lock = threading.RLock()


def module_path() -> list[str]:
    """Return `sys.path` for a child.

    In an interactive session the first entry is "", the working directory. For a child it comes last, where no file
    takes the place of an installed module; it stays first only if megalite itself is imported from it.
    """
    path = [entry for entry in sys.path if entry]
    if len(path) == len(sys.path):
        return path
    with contextlib.suppress(OSError):  # it may have been removed
        directory = os.getcwd()
        has_megalite = Path(__file__).resolve().parents[2] == Path(directory).resolve()
        return [directory, *path] if has_megalite else [*path, directory]
    return path


def with_module_path(code: str) -> str:
    """Return `code` for `python -c` with this process's `module_path` in front."""
    return f"import sys; sys.path[:] = {module_path()!r}; {code}"


@contextlib.contextmanager
def safe_start() -> Iterator[None]:
    """Make multiprocessing start interpreters with -P and `module_path` inside the block.

    PYTHONSAFEPATH would be inherited by all processes that a rank or a user's plugin starts. multiprocessing has no
    option for it, so its function is replaced. Other threads that start processes in the meantime are not harmed.
    """
    with _lock:
        spawn: Any = util.spawnv_passfds  # pyright: ignore[reportAttributeAccessIssue]

        def start(executable: Any, args: Sequence[Any], fds: Sequence[int]) -> int:
            args = [*args]
            code = args.index("-c") + 1
            args[code] = with_module_path(args[code])
            return spawn(executable, [args[0], "-P", *args[1:]], fds)

        util.spawnv_passfds = start  # pyright: ignore[reportAttributeAccessIssue]
        try:
            yield
        finally:
            util.spawnv_passfds = spawn  # pyright: ignore[reportAttributeAccessIssue]
