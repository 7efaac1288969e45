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

LOOK = """
const of = document.getElementById("page"), seen = {};
of.onload = () => {
  const page = of.contentDocument, root = page.documentElement;
  seen.overflow = root.scrollWidth - root.clientWidth;
  seen.titles = [...page.querySelectorAll("h2")].map(e => e.textContent);
  seen.headline = page.querySelector("h1").textContent;
  seen.scripts = page.querySelectorAll("script, iframe, [onclick], [onload], [onerror]").length;
  seen.clipped = []; seen.overlap = []; seen.pictures = 0; seen.small = [];
  for (const svg of page.querySelectorAll("svg")) {
    const box = svg.getBoundingClientRect();
    if (!box.width) continue;
    seen.pictures += 1;
    const texts = [...svg.querySelectorAll("text")].map(e => [e.textContent, e.getBoundingClientRect()]);
    for (const [text, at] of texts) {
      if (at.left < box.left - 2 || at.right > box.right + 2 || at.top < box.top - 2 || at.bottom > box.bottom + 2)
        seen.clipped.push(text);
      if (Math.max(at.width, at.height) < 8 && text.trim()) seen.small.push(text);
    }
    for (let i = 0; i < texts.length; i++) for (let j = 0; j < i; j++) {
      const [a, p] = texts[i], [b, q] = texts[j];
      const x = Math.min(p.right, q.right) - Math.max(p.left, q.left);
      const y = Math.min(p.bottom, q.bottom) - Math.max(p.top, q.top);
      if (x > 2 && y > 4) seen.overlap.push(`${a} | ${b}`);
    }
  }
  document.getElementById("seen").textContent = JSON.stringify(seen);
};
"""


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
