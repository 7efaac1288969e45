"""What mkdocs.yml cannot say: documents that stand elsewhere in the repository are pages, too, a link means on the site
what it means in the repository, and docstrings are plain text with tables and examples in it.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import griffe
from mkdocs.structure.files import File

ROOT = Path(__file__).resolve().parent.parent
GUESTS = {
    "changelog.md": "CHANGELOG.md",
    "security.md": "SECURITY.md",
    "contributing.md": "CONTRIBUTING.md",
    "chaos.md": "tests/chaos/README.md",
}
PAGES = {**{source: page for page, source in GUESTS.items()}, "README.md": "index.md"}
LINK = re.compile(r"(?<!!)\[([^\]\n]+)\]\(([^)#\s:]+)(#[^)\s]*)?\)")


def on_files(files: Any, config: Any) -> Any:
    for page, source in GUESTS.items():
        files.append(File.generated(config, page, abs_src_path=str(ROOT / source)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """With links to other files of the repository as links to their pages; one to a file without a page is its name."""
    name = page.file.src_uri
    folder = (ROOT / GUESTS.get(name, f"docs/{name}")).parent

    def led(match: re.Match[str]) -> str:
        text, link, anchor = match[1], match[2], match[3] or ""
        path = (folder / link).resolve()
        if not path.exists() or not path.is_relative_to(ROOT):
            return match[0]  # mkdocs says that it leads nowhere
        if path.is_relative_to(ROOT / "docs"):
            return f"[{text}]({os.path.relpath(path, (ROOT / 'docs' / name).parent)}{anchor})"
        target = str(path.relative_to(ROOT))
        return f"[{text}]({PAGES[target]}{anchor})" if target in PAGES else f"{text} (`{target}`)"

    return LINK.sub(led, markdown)


class Docstrings(griffe.Extension):
    """Paragraphs in columns, and examples, as they stand."""

    def on_instance(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring:
            obj.docstring.value = "\n\n".join(map(as_it_stands, obj.docstring.value.split("\n\n")))


def as_it_stands(paragraph: str) -> str:
    if re.search(r"^ *(>>>|\S.* {2,}\S)", paragraph, re.MULTILINE):
        return f"```text\n{paragraph}\n```"
    return re.sub(r"(`[^`]+`)|([*_\[\]<])", lambda found: found[1] or f"\\{found[2]}", paragraph)
