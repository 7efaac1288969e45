"""The documents as a site: built as strictly as CI builds it, without torch and without a network; and its pages that
tell what the code says: messages, variables."""

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

import browser
import documents
import pytest
from documents import ROOT

PARTS = "mkdocs.yml docs megalite README.md CHANGELOG.md SECURITY.md CONTRIBUTING.md CODE_OF_CONDUCT.md".split()
HEAVY = ("torch", "numpy", "safetensors", "tokenizers")  # what docstrings are read without


def copied(folder: Path) -> Path:
    """What a build reads, in a folder where it can be broken, and packages that cannot be imported."""
    tests = ("tests/chaos/README.md", "tests/simulated_gpu/simulator/README.md", "tests/layouts/test_layouts.py")
    tests += ("tests/nn/test_attention_memory.py", "tests/planning/test_layer_cost.py")  # which pages link to
    documents.copy_parts((*PARTS, *tests, "examples/python.ipynb", "examples/recipes"), folder)
    for name in HEAVY:
        (folder / "heavy" / name).mkdir(parents=True)
        (folder / "heavy" / name / "__init__.py").write_text("raise SystemExit('imported')\n")
    return folder


def build(folder: Path) -> subprocess.CompletedProcess[str]:
    nowhere = {f"{kind}_proxy": "http://127.0.0.1:9" for kind in ("http", "https")}
    env = {**os.environ, **nowhere, "PYTHONPATH": str(folder / "heavy"), "NO_MKDOCS_2_WARNING": "1"}
    words = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder / "site")]
    return subprocess.run(words, cwd=folder, env=env, capture_output=True, text=True, timeout=300)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = copied(tmp_path_factory.mktemp("site"))
    done = build(folder)
    assert done.returncode == 0, done.stderr
    return folder / "site"


class Page(HTMLParser):
    """`fetched`: what a browser loads by itself; `paragraphs`: their texts; `ids`: of headings and objects."""

    def __init__(self, file: Path):
        super().__init__()
        self.fetched: list[str] = []
        self.paragraphs: list[str] = []
        self.ids: set[str] = set()
        self._inside = False
        self.feed(file.read_text("utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        self.ids.add(given.get("id") or "")
        link = given.get("href") if tag == "link" and given.get("rel") != "canonical" else None
        self.fetched += [found for found in (given.get("src"), link) if found]
        if tag == "p":
            self._inside = True
            self.paragraphs.append("")

    def handle_endtag(self, tag: str) -> None:
        self._inside = self._inside and tag != "p"

    def handle_data(self, data: str) -> None:
        if self._inside:
            self.paragraphs[-1] += data


def lost_lists(page: Page) -> list[str]:
    """Paragraphs with a line of a list or a table in them: on the site these need an empty line before."""
    return [text for text in page.paragraphs if re.search(r"^\s*([-*] |\|)", text, re.MULTILINE)]


@pytest.mark.nightly
def test_site_has_every_document_and_loads_nothing_external(site: Path) -> None:
    pages = {file.stem: Page(file) for file in site.glob("*.html") if file.stem != "404"}
    added = {"changelog", "security", "flags", "megatron_flags"}
    assert pages.keys() >= {path.stem for path in (ROOT / "docs").glob("*.md")} | added
    assert 'href="flags.html"><code>megalite train --help all</code>' in (site / "python.html").read_text("utf-8")
    for name, page in pages.items():
        assert page.fetched and [found for found in page.fetched if "//" in found] == [], name
        assert lost_lists(page) == [], name
        lost = [found for found in page.fetched if not (site / found.partition("?")[0]).is_file()]
        assert lost == [], name
    assert not re.search(r"@import|url\((?!data:)['\"]?https?:", "".join(f.read_text() for f in site.rglob("*.css")))
    found = json.loads((site / "search/search_index.json").read_text("utf-8"))[
        "docs"
    ]  # titles count a thousandfold there
    assert "troubleshooting.html#out-of-memory" in [one["location"] for one in found if one["title"] == "Out of memory"]
    asked = re.findall(r"^::: (\S+)", (ROOT / "docs/python.md").read_text(), re.MULTILINE)
    assert len(asked) > 20 and {*asked} <= pages["python"].ids


# ---- in a browser

LOADED = "if (!page || page.readyState != 'complete' || !page.querySelector('h1')) return null;"
LOWER = {"flags", "megatron_flags", "changelog", "performance"}  # tables, figures
LOWER |= {page.stem for page in (ROOT / "docs/adr").glob("0*.md")}  # why
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
@pytest.mark.parametrize("words", SEARCHES)
def test_site_search_finds_tasks_first(words: str, site: Path, tmp_path: Path) -> None:
    browser.need_browser()
    links = "[...page.querySelectorAll('.md-search-result__item > a')].map(a => a.getAttribute('href'))"
    how = f"const links = page ? {links} : []; return links.length ? links : null;"
    found = browser.ask(site, f"/index.html?q={words.replace(' ', '+')}", 1400, how, tmp_path)
    pages = [Path(link.partition("?")[0].partition("#")[0]).stem for link in found]
    assert pages[0] == SEARCHES[words], pages
    first = next((i for i, page in enumerate(pages) if page in LOWER), len(pages))
    assert first >= min(3, len(pages)), pages


@pytest.mark.nightly(guards=("docs", "mkdocs.yml"))
def test_flag_table_is_readable_on_a_phone(site: Path, tmp_path: Path) -> None:
    browser.need_browser()
    how = f"""{LOADED}
    const root = page.documentElement, cells = [...page.querySelectorAll('td:first-child')];
    return {{wider: root.scrollWidth - root.clientWidth, cells: cells.length,
             narrowest: Math.min(...cells.map(cell => cell.getBoundingClientRect().width)),
             tallest: Math.max(...cells.map(cell => cell.getBoundingClientRect().height)),
             heads: [...page.querySelector('tbody tr').children].map(cell => getComputedStyle(cell, '::before').content)}};"""
    pages = (("flags", 250, ['"type: "', '"default: "']), ("megatron_flags", 900, ['"flags: "']))
    for page, at_least, heads in pages:
        seen = browser.ask(site, f"/{page}.html", 390, how, tmp_path)
        assert seen["wider"] <= 0 and seen["cells"] > at_least
        assert seen["narrowest"] > 300 and seen["tallest"] < 130  # its first column was 60 wide, and 290 high
        assert seen["heads"][1:-1] == heads
    for page in ("logging", "launch", "environment", "planning"):
        how = f"""{LOADED} const codes = [...page.querySelectorAll('td code')];
        return codes.map(code => [code.textContent, code.getClientRects().length]);"""
        broken = [text for text, lines in browser.ask(site, f"/{page}.html", 390, how, tmp_path) if lines > 4]
        assert not broken, page  # into its syllables


@pytest.mark.nightly(guards=("docs", "mkdocs.yml"))
def test_code_blocks_are_not_cut_off(site: Path, tmp_path: Path) -> None:
    """Lines of 120 characters fit at 1,400 pixels."""
    browser.need_browser()
    how = f"""{LOADED} const blocks = [...page.querySelectorAll('pre > code')];
    return blocks.map(block => [block.textContent.trim().split('\\n')[0], block.scrollWidth - block.clientWidth,
                                Math.max(...block.textContent.split('\\n').map(line => line.length))]);"""
    for page in ("planning", "plugins", "launch"):
        blocks = browser.ask(site, f"/{page}.html", 1400, how, tmp_path)
        assert blocks and not [(text, beyond) for text, beyond, columns in blocks if beyond > 0 and columns <= 120]


# ---- messages


def texts_of(tree: ast.AST) -> Iterator[str]:
    """Every text of a source, with … for what is put in: by an f-string, or later, as {name} and %s."""
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            yield "".join(part.value if isinstance(part, ast.Constant) else "…" for part in node.values)  # type: ignore[misc]
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield re.sub(r"\{[^{}]*\}|%s", "…", node.value)


def of_table(file: Path) -> list[str]:
    """Every key and text of a TOML file."""
    table = json.dumps(tomllib.loads(file.read_text("utf-8")))
    return [json.loads(text) for text in re.findall(r'"(?:[^"\\]|\\.)*"', table)]


@functools.cache
def said_in_code() -> list[str]:
    files = [ROOT / "pretrain_gpt.py", *(ROOT / "megalite").rglob("*.py"), *(ROOT / "tools").rglob("*.py")]
    texts = [text for file in files for text in texts_of(ast.parse(file.read_text("utf-8")))]
    for file in (ROOT / "megalite").rglob("*.toml"):
        texts += [re.sub(r"\{[^{}]*\}", "…", text) for text in of_table(file)]
    return texts


def says(text: str, message: str) -> bool:
    """Whether the parts of the message between its … stand in the text, in this order."""
    parts, at = [part for part in message.split("…") if part.strip(" ;:.,?")], 0
    for part in parts:
        at = text.find(part, at)
        if at < 0:
            return False
        at += len(part)
    return bool(parts)


def messages() -> list[str]:
    page = (ROOT / "docs/troubleshooting.md").read_text("utf-8").partition("## Messages of other programs")[0]
    rows = [line.split(" | ")[0] for line in page.splitlines() if line.startswith("| `")]
    return [span for row in rows for span in documents.SPAN.findall(row)]


@pytest.mark.parametrize("message", messages())
def test_troubleshooting_messages_are_in_the_code(message: str) -> None:
    assert any(says(text, message) for text in said_in_code())


# ---- the environment


def read_of_the_environment() -> set[str]:
    """Names that look like a variable's among the texts of the package and its scripts."""
    found = set()
    preprocess = (ROOT / "tools/preprocess").rglob("*.py")  # its workers set what their libraries read
    for file in [ROOT / "pretrain_gpt.py", *(ROOT / "megalite").rglob("*.py"), *preprocess]:
        tree = ast.parse(file.read_text("utf-8"))
        exported = next((n.value for n in tree.body if isinstance(n, ast.Assign) and "__all__" in ast.unparse(n)), None)
        for node in set(ast.walk(tree)) - {*(ast.walk(exported) if exported else ())}:
            names = [getattr(node, "value" if isinstance(node, ast.Constant) else "arg", None)]
            if isinstance(node, ast.Constant | ast.keyword):
                found |= {n for n in names if isinstance(n, str) and re.fullmatch(r"[A-Z][A-Z0-9]*(_[A-Z0-9]+)+_?", n)}
            if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("getenv") and node.args:
                found |= {a.value for a in node.args[:1] if isinstance(a, ast.Constant)}
    launchers = of_table(ROOT / "megalite/launch/launcher_variables.toml")
    found |= {name for name in launchers if re.fullmatch(r"[A-Z][A-Z0-9]*(_[A-Z0-9]+)+", name)}
    for file in (*(ROOT / "tools").glob("*.sh"), ROOT / "tests/run.sh"):
        found |= {*re.findall(r"\bMEGALITE_[A-Z_]+", file.read_text("utf-8"))}
    not_variables = ("SC_", "AVX2_", "AVX512_")  # of sysconf, and instruction sets
    return {name for name in found if not name.startswith(not_variables)} | {"RANK", "OMPI_MCA_ess_base_jobid"}


def test_environment_page_lists_every_variable() -> None:
    page = (ROOT / "docs/environment.md").read_text("utf-8")
    listed = {n for n in documents.SPAN.findall(page) if re.fullmatch(r"[A-Z][A-Za-z0-9]*(_[A-Za-z0-9]+)*_?", n)}
    # read by libraries
    passed_on = {"NCCL_DEBUG", "NCCL_IB_DISABLE", "AWS_PROFILE", "FSSPEC_S3_ENDPOINT_URL", "NO_COLOR", "TERM"}
    assert passed_on <= listed
    families = {n.removesuffix("...") for n in documents.SPAN.findall(page) if n.endswith("...")}
    assert {f.removesuffix("_") for f in families} >= {"NCCL", "CUDA", "GLOO", "TORCH", "NVIDIA_TF32", "OMP"}
    read = {name for name in read_of_the_environment() if name not in families}
    assert listed - passed_on <= read <= listed
