"""A page in a real browser, chromium: what it makes of it at a width, and a photograph.

python tests/browser.py runs/mine/report/index.html page.png
"""

import html
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

BROWSER = shutil.which("chromium") or shutil.which("google-chrome") or ""

LOOK = Path(__file__).with_suffix(".js").read_text("utf-8")


def need_browser() -> None:
    """Skips where there is none; in CI its absence is a failure."""
    if not BROWSER:
        assert not os.environ.get("CI"), "CI has no chromium; .ci/run installs it"
        pytest.skip("no chromium here; apt-get install chromium")


def _chromium(folder: Path, *words: str) -> tuple[str, str]:
    """stdout, and what the console of the page said."""
    how = ("--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--enable-logging=stderr")
    command = [BROWSER, *how, f"--user-data-dir={folder / 'profile'}", *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    return done.stdout, "\n".join(line for line in done.stderr.splitlines() if "CONSOLE" in line)


def look(page: Path, width: int, folder: Path) -> dict[str, Any]:
    """What a browser makes of the page in a window of that width: in a frame, as its own windows have 500 at least."""
    frame = html.escape(page.read_text("utf-8"))
    holder = folder / f"look-{width}.html"
    shown = f'<iframe id="page" width="{width}" height="900" style="border:0" srcdoc="{frame}"></iframe>'
    holder.write_text(f'<!doctype html><meta charset="utf-8">{shown}<pre id="seen"></pre><script>{LOOK}</script>')
    dom, console = _chromium(folder, "--dump-dom", holder.as_uri())
    seen = json.loads(html.unescape(dom.rpartition('<pre id="seen">')[2].partition("</pre>")[0]))
    return {**seen, "console": console}


def photograph(page: Path, folder: Path, *, dark: bool = False, size: tuple[int, int] = (1000, 800)) -> Any:
    """The page as an array of pixels, [height, width, channels] of 0 to 1."""
    from matplotlib.image import imread

    path = folder / "shot.png"
    scheme = ["--blink-settings=preferredColorScheme=0"] if dark else []
    window = f"--window-size={size[0]},{size[1]}"
    _, console = _chromium(folder, *scheme, window, f"--screenshot={path}", page.as_uri())
    assert not console, console
    return imread(path)


if __name__ == "__main__":
    _, page, picture = sys.argv
    with tempfile.TemporaryDirectory() as scratch:
        photograph(Path(page).resolve(), Path(scratch), size=(1000, 2740))
        shutil.copy(Path(scratch) / "shot.png", picture)
