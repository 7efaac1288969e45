"""Lines for the log, from any thread."""

import queue


class LogLines:
    """None is lost, and none told twice."""

    def __init__(self) -> None:
        self._lines: queue.SimpleQueue[str] = queue.SimpleQueue()

    def append(self, line: str) -> None:
        self._lines.put(line)

    def take(self) -> list[str]:
        """What came since the last call."""
        return [self._lines.get_nowait() for _ in range(self._lines.qsize())]  # there is one who takes
