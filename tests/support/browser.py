"""A page in chromium: its layout at a width, and a screenshot.

python tests/support/browser.py runs/mine/report/index.html page.png
"""

import functools
import html
import http.server
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any

import pytest

BROWSER = shutil.which("chromium") or shutil.which("google-chrome") or ""

LOOK = Path(__file__).with_suffix(".js").read_text("utf-8")


def need_browser() -> None:
    """Skip the test if there is no browser. In CI a missing browser is a failure."""
    if not BROWSER:
        assert not os.environ.get("CI"), "CI has no chromium; .ci/run installs it"
        pytest.skip("no chromium here; apt-get install chromium")


def _chromium(folder: Path, *words: str) -> tuple[str, str]:
    """Return stdout and the output of the page's console."""
    how = ("--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--enable-logging=stderr")
    command = [BROWSER, *how, f"--user-data-dir={folder / 'profile'}", *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    return done.stdout, "\n".join(line for line in done.stderr.splitlines() if "CONSOLE" in line)


def look(page: Path, width: int, folder: Path) -> dict[str, Any]:
    """Return the layout of the page at a width, measured in a frame, since windows have a minimum width of 500."""
    frame = html.escape(page.read_text("utf-8"))
    holder = folder / f"look-{width}.html"
    shown = f'<iframe id="page" width="{width}" height="900" style="border:0" srcdoc="{frame}"></iframe>'
    holder.write_text(f'<!doctype html><meta charset="utf-8">{shown}<pre id="seen"></pre><script>{LOOK}</script>')
    dom, console = _chromium(folder, "--dump-dom", holder.as_uri())
    seen = json.loads(html.unescape(dom.rpartition('<pre id="seen">')[2].partition("</pre>")[0]))
    return {**seen, "console": console}


HOLDER = """<!doctype html><meta charset="utf-8">
<iframe id="page" width="{width}" height="900" style="border:0" src="{page}"></iframe><img src="/until-seen"><pre id="seen"></pre>
<script>
  const ask = (page) => {{ {ask} }};
  const timer = setInterval(() => {{
    const found = ask(document.getElementById("page").contentDocument);
    if (found == null) return;
    clearInterval(timer);
    document.getElementById("seen").textContent = JSON.stringify(found);
    fetch("/seen");
  }}, 200);
</script>"""


def ask(site: Path, page: str, width: int, how: str, folder: Path) -> Any:
    """Evaluate a JavaScript function body in a page of a site, in a frame of that width, until it is not null.

    The site is served locally. An image that arrives last keeps the browser open.
    """
    seen = threading.Event()

    class Handler(http.server.SimpleHTTPRequestHandler):
        def do_GET(self) -> None:
            own = {"/holder": HOLDER.format(width=width, page=page, ask=how), "/seen": "", "/until-seen": ""}
            if self.path not in own:
                return super().do_GET()
            seen.wait(60 if self.path == "/until-seen" else 0)
            if self.path == "/seen":
                seen.set()
            self.send_response(200)
            self.send_header("Content-Type", "text/html")
            self.end_headers()
            self.wfile.write(own[self.path].encode())

        def log_message(self, *_: Any) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Handler, directory=str(site))) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        dom, _ = _chromium(
            folder, f"--window-size={width + 20},900", "--dump-dom", f"http://127.0.0.1:{server.server_port}/holder"
        )
        server.shutdown()
    return json.loads(html.unescape(dom.rpartition('<pre id="seen">')[2].partition("</pre>")[0] or "null"))


def photograph(page: Path, folder: Path, *, dark: bool = False, size: tuple[int, int] = (1000, 800)) -> Any:
    """Return a screenshot as an array [height, width, channels] of values from 0 to 1."""
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
