"""The layout of a page in chromium at a width, and screenshots of pages.

python tests/support/browser.py runs/NAME/report/index.html page.png
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

LAYOUT_SCRIPT = Path(__file__).with_suffix(".js").read_text("utf-8")


def require_browser() -> None:
    """Skip the test if there is no browser. In CI a missing browser is a failure."""
    if not BROWSER:
        assert not os.environ.get("CI"), "CI has no chromium; .ci/run installs it"
        pytest.skip("no chromium here; apt-get install chromium")


def _chromium(directory: Path, *args: str) -> tuple[str, str]:
    """Run chromium, and return its standard output and what the page logged to its console."""
    flags = ("--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--enable-logging=stderr")
    command = [BROWSER, *flags, f"--user-data-dir={directory / 'profile'}", *args]
    result = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert result.returncode == 0, result.stderr
    return result.stdout, "\n".join(line for line in result.stderr.splitlines() if "CONSOLE" in line)


def measure_layout(page: Path, width: int, directory: Path) -> dict[str, Any]:
    """Return the layout of the page at a width, measured in a frame because a window is at least 500 wide."""
    frame = html.escape(page.read_text("utf-8"))
    holder = directory / f"layout-{width}.html"
    iframe = f'<iframe id="page" width="{width}" height="900" style="border:0" srcdoc="{frame}"></iframe>'
    holder.write_text(
        f'<!doctype html><meta charset="utf-8">{iframe}<pre id="result"></pre><script>{LAYOUT_SCRIPT}</script>'
    )
    dom, console = _chromium(directory, "--dump-dom", holder.as_uri())
    layout = json.loads(html.unescape(dom.rpartition('<pre id="result">')[2].partition("</pre>")[0]))
    return {**layout, "console": console}


HOLDER = """<!doctype html><meta charset="utf-8">
<iframe id="page" width="{width}" height="900" style="border:0" src="{page}"></iframe><img src="/wait"><pre id="result"></pre>
<script>
  const evaluate = (page) => {{ {script} }};
  const timer = setInterval(() => {{
    const value = evaluate(document.getElementById("page").contentDocument);
    if (value == null) return;
    clearInterval(timer);
    document.getElementById("result").textContent = JSON.stringify(value);
    fetch("/done");
  }}, 200);
</script>"""


def evaluate_script(site: Path, page: str, width: int, script: str, directory: Path) -> Any:
    """Evaluate a JavaScript function body in a page of a site, in a frame of that width, until it is not null.

    The site is served from this process. The browser stays open until the image /wait has loaded.
    """
    is_done = threading.Event()

    class Handler(http.server.SimpleHTTPRequestHandler):
        def do_GET(self) -> None:
            responses = {"/holder": HOLDER.format(width=width, page=page, script=script), "/done": "", "/wait": ""}
            if self.path not in responses:
                return super().do_GET()
            is_done.wait(60 if self.path == "/wait" else 0)
            if self.path == "/done":
                is_done.set()
            self.send_response(200)
            self.send_header("Content-Type", "text/html")
            self.end_headers()
            self.wfile.write(responses[self.path].encode())

        def log_message(self, *_: Any) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Handler, directory=str(site))) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        dom, _ = _chromium(
            directory, f"--window-size={width + 20},900", "--dump-dom", f"http://127.0.0.1:{server.server_port}/holder"
        )
        server.shutdown()
    return json.loads(html.unescape(dom.rpartition('<pre id="result">')[2].partition("</pre>")[0] or "null"))


def take_screenshot(page: Path, directory: Path, *, dark: bool = False, size: tuple[int, int] = (1000, 800)) -> Any:
    """Return a screenshot as an array [height, width, channels] of values from 0 to 1."""
    from matplotlib.image import imread

    path = directory / "shot.png"
    scheme = ["--blink-settings=preferredColorScheme=0"] if dark else []
    window = f"--window-size={size[0]},{size[1]}"
    _, console = _chromium(directory, *scheme, window, f"--screenshot={path}", page.as_uri())
    assert not console, console
    return imread(path)


if __name__ == "__main__":
    _, page, target = sys.argv
    with tempfile.TemporaryDirectory() as temporary_dir:
        take_screenshot(Path(page).resolve(), Path(temporary_dir), size=(1000, 2740))
        shutil.copy(Path(temporary_dir) / "shot.png", target)
