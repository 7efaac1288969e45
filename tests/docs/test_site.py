"""The site of the documents, and the pages that quote the code.

The site is built as strictly as in CI, without torch and without a network. The quoting pages list messages and
environment variables.
"""

import ast
import functools
import json
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from types import SimpleNamespace

import browser
import documents
import pytest
from documents import ROOT

from docs import hooks

PARTS = "mkdocs.yml docs megalite README.md CHANGELOG.md SECURITY.md CONTRIBUTING.md CODE_OF_CONDUCT.md".split()
HEAVY = ("torch", "numpy", "safetensors", "tokenizers")  # packages that reading docstrings does not need


def copy_sources(directory: Path) -> Path:
    """Copy the files that a build reads to `directory`, and add packages that cannot be imported."""
    tests = ("tests/chaos/README.md", "tests/simulated_gpu/simulator/README.md", "tests/layouts/test_layouts.py")
    tests += ("tests/nn/test_attention_memory.py", "tests/planning/test_layer_cost.py")  # which pages link to
    documents.copy_paths((*PARTS, *tests, "examples/python.ipynb", "examples/recipes"), directory)
    for name in HEAVY:
        (directory / "heavy" / name).mkdir(parents=True)
        (directory / "heavy" / name / "__init__.py").write_text("raise SystemExit('imported')\n")
    return directory


def build(directory: Path) -> subprocess.CompletedProcess[str]:
    unreachable_proxies = {f"{kind}_proxy": "http://127.0.0.1:9" for kind in ("http", "https")}
    env = {**os.environ, **unreachable_proxies, "PYTHONPATH": str(directory / "heavy"), "NO_MKDOCS_2_WARNING": "1"}
    argv = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(directory / "site")]
    return subprocess.run(argv, cwd=directory, env=env, capture_output=True, text=True, timeout=300)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = copy_sources(tmp_path_factory.mktemp("site"))
    result = build(directory)
    assert result.returncode == 0, result.stderr
    return directory / "site"


class Page(HTMLParser):
    """A page of the site.

    Attributes:
        fetched: The URLs that a browser loads by itself.
        paragraphs: The texts of the paragraphs.
        ids: The ids of headings and objects.
    """

    def __init__(self, file: Path):
        super().__init__()
        self.fetched: list[str] = []
        self.paragraphs: list[str] = []
        self.ids: set[str] = set()
        self._inside = False
        self.feed(file.read_text("utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        attr_values = dict(attrs)
        self.ids.add(attr_values.get("id") or "")
        link = attr_values.get("href") if tag == "link" and attr_values.get("rel") != "canonical" else None
        self.fetched += [url for url in (attr_values.get("src"), link) if url]
        if tag == "p":
            self._inside = True
            self.paragraphs.append("")

    def handle_endtag(self, tag: str) -> None:
        self._inside = self._inside and tag != "p"

    def handle_data(self, data: str) -> None:
        if self._inside:
            self.paragraphs[-1] += data


def lost_lists(page: Page) -> list[str]:
    """Return the paragraphs that contain a line of a list or a table, which need an empty line before them."""
    return [text for text in page.paragraphs if re.search(r"^\s*([-*] |\|)", text, re.MULTILINE)]


def test_link_may_break_between_two_words() -> None:
    page = SimpleNamespace(file=SimpleNamespace(src_uri="changelog.md"), ancestors=[], meta={})
    broken = "See [context\n  parallelism](docs/context.md#parallelism)."
    assert hooks.on_page_markdown(broken, page) == "See [context\n  parallelism](context.md#parallelism)."
    two_paragraphs = "An [open\n\nbracket](docs/context.md)"
    assert hooks.on_page_markdown(two_paragraphs, page) == two_paragraphs


@pytest.mark.nightly
def test_site_has_every_document_and_loads_nothing_external(site: Path) -> None:
    pages = {file.stem: Page(file) for file in site.glob("*.html") if file.stem != "404"}
    added = {"changelog", "security", "flags", "megatron_flags"}
    assert pages.keys() >= {path.stem for path in (ROOT / "docs").glob("*.md")} | added
    links = re.findall(r'href="flags.html">(.*?)</a>', (site / "python.html").read_text("utf-8"))
    assert "megalite train --help all" in [re.sub("<.*?>", "", link) for link in links]
    for name, page in pages.items():
        assert page.fetched and [url for url in page.fetched if "//" in url] == [], name
        assert lost_lists(page) == [], name
        missing = [url for url in page.fetched if not (site / url.partition("?")[0]).is_file()]
        assert missing == [], name
    assert not re.search(r"@import|url\((?!data:)['\"]?https?:", "".join(f.read_text() for f in site.rglob("*.css")))
    # the search weighs titles a thousandfold
    entries = json.loads((site / "search/search_index.json").read_text("utf-8"))["docs"]
    locations = [entry["location"] for entry in entries if entry["title"] == "Out of memory"]
    assert "troubleshooting.html#out-of-memory" in locations
    objects = re.findall(r"^::: (\S+)", (ROOT / "docs/python.md").read_text(), re.MULTILINE)
    assert len(objects) > 20 and {*objects} <= pages["python"].ids


# ---- in a browser

LOADED = "if (!page || page.readyState != 'complete' || !page.querySelector('h1')) return null;"
LOWER = {"flags", "megatron_flags", "changelog", "performance"}  # pages of tables and figures
LOWER |= {page.stem for page in (ROOT / "docs/adr").glob("0*.md")}  # reasons of decisions
SEARCHES = {
    "checkpoint": "checkpoints",
    "data": "data",
    "kubernetes": "launch",
    "plugin": "plugins",
    "zero": "sharding",
    "offload": "sharding",
    "learning rate": "optimizers",
    "muon": "optimizers",
    "export hugging face": "from_hugging_face",
}


@pytest.mark.nightly(guards=("docs", "mkdocs.yml"))
@pytest.mark.parametrize("query", SEARCHES)
def test_site_search_finds_tasks_first(query: str, site: Path, tmp_path: Path) -> None:
    browser.require_browser()
    links = "[...page.querySelectorAll('.md-search-result__item > a')].map(a => a.getAttribute('href'))"
    script = f"const links = page ? {links} : []; return links.length ? links : null;"
    results = browser.evaluate_script(site, f"/index.html?q={query.replace(' ', '+')}", 1400, script, tmp_path)
    pages = [Path(link.partition("?")[0].partition("#")[0]).stem for link in results]
    assert pages[0] == SEARCHES[query], pages
    first = next((i for i, page in enumerate(pages) if page in LOWER), len(pages))
    assert first >= min(3, len(pages)), pages


@pytest.mark.nightly(guards=("docs", "mkdocs.yml"))
def test_flag_table_is_readable_on_a_phone(site: Path, tmp_path: Path) -> None:
    browser.require_browser()
    script = f"""{LOADED}
    const root = page.documentElement, cells = [...page.querySelectorAll('td:first-child')];
    return {{wider: root.scrollWidth - root.clientWidth, cells: cells.length,
             narrowest: Math.min(...cells.map(cell => cell.getBoundingClientRect().width)),
             tallest: Math.max(...cells.map(cell => cell.getBoundingClientRect().height)),
             heads: [...page.querySelector('tbody tr').children].map(cell => getComputedStyle(cell, '::before').content)}};"""
    pages = (("flags", 250, ['"type: "', '"default: "']), ("megatron_flags", 900, ['"flags: "']))
    for page, min_cells, heads in pages:
        sizes = browser.evaluate_script(site, f"/{page}.html", 390, script, tmp_path)
        assert sizes["wider"] <= 0 and sizes["cells"] > min_cells
        assert sizes["narrowest"] > 300 and sizes["tallest"] < 130  # the first column was once 60 wide and 290 high
        assert sizes["heads"][1:-1] == heads
    for page in ("logging", "launch", "environment", "planning"):
        script = f"""{LOADED} const codes = [...page.querySelectorAll('td code')];
        return codes.map(code => [code.textContent, code.getClientRects().length]);"""
        broken = [
            text for text, lines in browser.evaluate_script(site, f"/{page}.html", 390, script, tmp_path) if lines > 4
        ]
        assert not broken, page  # broken into syllables


@pytest.mark.nightly(guards=("docs", "mkdocs.yml"))
def test_code_blocks_are_not_cut_off(site: Path, tmp_path: Path) -> None:
    """Lines of 120 characters fit at 1,400 pixels."""
    browser.require_browser()
    script = f"""{LOADED} const blocks = [...page.querySelectorAll('pre > code')];
    return blocks.map(block => [block.textContent.trim().split('\\n')[0], block.scrollWidth - block.clientWidth,
                                Math.max(...block.textContent.split('\\n').map(line => line.length))]);"""
    for page in ("planning", "plugins", "launch"):
        blocks = browser.evaluate_script(site, f"/{page}.html", 1400, script, tmp_path)
        assert blocks and not [(text, beyond) for text, beyond, columns in blocks if beyond > 0 and columns <= 120]


# ---- messages


def texts_of(tree: ast.AST) -> Iterator[str]:
    """Yield every string of a source, with … in place of the fields of f-strings, {name} and %s."""
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            yield "".join(part.value if isinstance(part, ast.Constant) else "…" for part in node.values)  # type: ignore[misc]
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield re.sub(r"\{[^{}]*\}|%s", "…", node.value)


def toml_strings(file: Path) -> list[str]:
    """Return every key and string of a TOML file."""
    table = json.dumps(tomllib.loads(file.read_text("utf-8")))
    return [json.loads(text) for text in re.findall(r'"(?:[^"\\]|\\.)*"', table)]


@functools.cache
def strings_in_code() -> list[str]:
    files = [ROOT / "pretrain_gpt.py", *(ROOT / "megalite").rglob("*.py"), *(ROOT / "tools").rglob("*.py")]
    texts = [text for file in files for text in texts_of(ast.parse(file.read_text("utf-8")))]
    for file in (ROOT / "megalite").rglob("*.toml"):
        texts += [re.sub(r"\{[^{}]*\}", "…", text) for text in toml_strings(file)]
    return texts


def contains_in_order(text: str, message: str) -> bool:
    """Return whether the text contains the parts of the message between its …, in this order."""
    parts = [part for part in message.split("…") if part.strip(" ;:.,?")]
    offset = 0
    for part in parts:
        offset = text.find(part, offset)
        if offset < 0:
            return False
        offset += len(part)
    return bool(parts)


def messages() -> list[str]:
    page = (ROOT / "docs/troubleshooting.md").read_text("utf-8").partition("## Messages of other programs")[0]
    rows = [line.split(" | ")[0] for line in page.splitlines() if line.startswith("| `")]
    return [span for row in rows for span in documents.CODE_SPAN.findall(row)]


@pytest.mark.parametrize("message", messages())
def test_troubleshooting_messages_are_in_the_code(message: str) -> None:
    assert any(contains_in_order(text, message) for text in strings_in_code())


# ---- the environment


def variables_in_code() -> set[str]:
    """Return the strings of the package and its scripts that look like names of environment variables."""
    names = set()
    preprocess = (ROOT / "tools/preprocess").rglob("*.py")  # its workers set variables of their libraries
    for file in [ROOT / "pretrain_gpt.py", *(ROOT / "megalite").rglob("*.py"), *preprocess]:
        tree = ast.parse(file.read_text("utf-8"))
        exported = next((n.value for n in tree.body if isinstance(n, ast.Assign) and "__all__" in ast.unparse(n)), None)
        for node in set(ast.walk(tree)) - {*(ast.walk(exported) if exported else ())}:
            values = [getattr(node, "value" if isinstance(node, ast.Constant) else "arg", None)]
            if isinstance(node, ast.Constant | ast.keyword):
                names |= {n for n in values if isinstance(n, str) and re.fullmatch(r"[A-Z][A-Z0-9]*(_[A-Z0-9]+)+_?", n)}
            if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("getenv") and node.args:
                names |= {a.value for a in node.args[:1] if isinstance(a, ast.Constant)}
    launchers = toml_strings(ROOT / "megalite/launch/launcher_variables.toml")
    names |= {name for name in launchers if re.fullmatch(r"[A-Z][A-Z0-9]*(_[A-Z0-9]+)+", name)}
    for file in (*(ROOT / "tools").glob("*.sh"), ROOT / "tests/run.sh"):
        names |= {*re.findall(r"\bMEGALITE_[A-Z_]+", file.read_text("utf-8"))}
    not_variables = ("SC_", "AVX2_", "AVX512_")  # names of sysconf, and instruction sets
    return {name for name in names if not name.startswith(not_variables)} | {"RANK", "OMPI_MCA_ess_base_jobid"}


def test_environment_page_lists_every_variable() -> None:
    page = (ROOT / "docs/environment.md").read_text("utf-8")
    listed = {
        name for name in documents.CODE_SPAN.findall(page) if re.fullmatch(r"[A-Z][A-Za-z0-9]*(_[A-Za-z0-9]+)*_?", name)
    }
    # variables that only libraries read
    passed_on = {"NCCL_DEBUG", "NCCL_IB_DISABLE", "AWS_PROFILE", "FSSPEC_S3_ENDPOINT_URL", "NO_COLOR", "TERM"}
    warned_of = {
        name
        for names in toml_strings(ROOT / "megalite/launch/system_checks.toml")
        for name in re.findall(r"\w+", names)
    }
    assert passed_on <= listed
    families = {name.removesuffix("...") for name in documents.CODE_SPAN.findall(page) if name.endswith("...")}
    assert {family.removesuffix("_") for family in families} >= {"NCCL", "CUDA", "GLOO", "TORCH", "NVIDIA_TF32", "OMP"}
    prefixes = {name for name in variables_in_code() if name.endswith("_") and name.startswith(tuple(families))}
    in_code = variables_in_code() - families - prefixes
    assert listed - passed_on - warned_of <= in_code <= listed
