"""stdout and stderr, which may end before the program does."""

from __future__ import annotations

import contextlib
import os
import sys


def let_go_of_console() -> None:
    """What cannot be written there any more, as on a full disk, is no failure of the run: Python tries again at its
    end, and would make it one (exit code 120, of a rank 1)."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (AttributeError, ValueError):  # there is none, or it was closed before
            continue
        except OSError:
            with contextlib.suppress(OSError, ValueError):
                os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
