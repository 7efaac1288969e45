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
GUESTS = {"changelog.md": "CHANGELOG.md", "security.md": "SECURITY.md", "contributing.md": "CONTRIBUTING.md"}
PAGES = {**{source: page for page, source in GUESTS.items()}, "README.md": "index.md"}
OF_FLAGS = ("flags.md", "megatron.md")
# A search finds what a reader can do first, then tables of flags, and last why something was decided: by section of the
# navigation, and by page.
BOOST = {"Start": 2.0, "How to": 2.0, "Reference": 0.5, "How it is built": 0.25}
BOOST |= {"flags.md": 0.2, "megatron.md": 1e-3, "changelog.md": 1e-3, "performance.md": 1e-3, "experiments.md": 1e-3}
BOOST |= {"Decision records": 1e-6, "From other trainers": 0.5}
BOOST |= {"data.md": 4.0, "extending.md": 0.5}  # whose headings, as `dataset`, are what others explain
LINK = re.compile(r"(?<!!)\[([^\]\n]+)\]\(([^)#\s:]+)(#[^)\s]*)?\)")


def on_files(files: Any, config: Any) -> Any:
    for page, source in GUESTS.items():
        files.append(File.generated(config, page, abs_src_path=str(ROOT / source)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """With links to other files of the repository as links to their pages; one to a file without a page is its name."""
    name = page.file.src_uri
    places = [name, *(section.title for section in page.ancestors)]  # the nearest section first
    page.meta["search"] = {"boost": next((BOOST[place] for place in places if place in BOOST), 1.0)}
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


def on_page_content(html: str, page: Any, **_: Any) -> str:
    """Mark the tables of flags, which a phone shows as paragraphs (site.css): a cell has the head of its column."""
    if page.file.src_uri not in OF_FLAGS:
        return html

    def with_heads(table: re.Match[str]) -> str:
        heads = re.findall(r"<th>(.*?)</th>", table[0])
        cells = iter(heads * table[0].count("<tr>"))
        return re.sub("<td>", lambda _: f'<td data-head="{next(cells)}">', table[0])

    return f'<div class="flags">{re.sub("<table>.*?</table>", with_heads, html, flags=re.DOTALL)}</div>'


class Docstrings(griffe.Extension):
    """Paragraphs in columns, and examples, as they stand."""

    def on_instance(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring:
            obj.docstring.value = "\n\n".join(map(as_it_stands, obj.docstring.value.split("\n\n")))


def as_it_stands(paragraph: str) -> str:
    if re.search(r"^ *(>>>|\S.* {2,}\S)", paragraph, re.MULTILINE):
        return f"```text\n{paragraph}\n```"
    return re.sub(r"(`[^`]+`)|([*_\[\]<])", lambda found: found[1] or f"\\{found[2]}", paragraph)
