"""The line that `megalite.common.console.ProgressBar` shows on a terminal, drawn by rich.

This module is imported only if stdout is a terminal, because most processes of a run have none.
"""

import os
import sys

from rich.console import Console, ConsoleDimensions
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TextColumn, TimeRemainingColumn
from rich.text import Text

BAR_COLUMNS = 20
# rich estimates the remaining time from the updates of this many seconds; the steps of a large run are minutes apart
SPEED_ESTIMATE_PERIOD_S = 3600.0


class TerminalConsole(Console):
    """A rich console on stdout, which is a terminal.

    It never hides the cursor, so a process that is killed leaves the terminal usable. Its size is the terminal's
    current one, and not that of COLUMNS and LINES, which rich would use: they may have been exported long ago.
    """

    @property
    def size(self) -> ConsoleDimensions:
        columns, lines = os.get_terminal_size(sys.stdout.fileno())
        return ConsoleDimensions(columns or 80, lines or 25)  # 0 if the terminal does not report its size

    def show_cursor(self, show: bool = True) -> bool:
        return False


class CutTextColumn(ProgressColumn):
    """A field of the task on one line, which is cut if the terminal is too narrow for the whole line."""

    def __init__(self, field: str):
        super().__init__()
        self.field = field

    def render(self, task: Task) -> Text:
        return Text(task.fields[self.field], no_wrap=True, overflow="ellipsis")


def one_line_progress() -> Progress:
    """Return a progress display of one line, which is drawn only by its `start`, `refresh` and `stop`.

    Its tasks have the fields `what` (before the bar), `count` and `text` (after it).
    """
    return Progress(
        CutTextColumn("what"),
        BarColumn(BAR_COLUMNS, complete_style="cyan", finished_style="cyan"),
        TextColumn("{task.fields[count]}", markup=False),
        CutTextColumn("text"),
        TimeRemainingColumn(),
        console=TerminalConsole(force_terminal=True),
        auto_refresh=False,
        speed_estimate_period=SPEED_ESTIMATE_PERIOD_S,
        transient=True,
        redirect_stdout=False,
        redirect_stderr=False,
    )
