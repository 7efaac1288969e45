"""Extensions of the site's build (mkdocs.yml).

- Documents outside docs/ become pages, and the pages of flags are generated.
- Links to files of the repository become links to their pages.
- Docstrings are plain text with tables and examples in it.
"""

from __future__ import annotations

import os
import re
import sys
import textwrap
from pathlib import Path
from typing import Any

import griffe
from mkdocs.structure.files import File

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from docs.document_flags import flags_page, megatron_page

ROOT = Path(__file__).resolve().parent.parent
GUESTS = {"changelog.md": "CHANGELOG.md", "security.md": "SECURITY.md", "contributing.md": "CONTRIBUTING.md"}
PAGES = {**{source: page for page, source in GUESTS.items()}, "README.md": "index.md"}
GENERATED = {"flags.md": flags_page, "megatron_flags.md": megatron_page}
# A command that prints what a generated page holds. The documents name the command, and the site links it to the page.
PRINTED_BY = {
    "`megalite train --help all`": "flags.md",
    "`python -m docs.document_flags --megatron`": "megatron_flags.md",
}
# A search ranks pages for users first, then the tables of flags, and the reasons for decisions last. Keys are sections
# of the navigation and pages.
BOOST = {"Start": 2.0, "How to": 2.0, "Reference": 0.5, "How it is built": 0.25}
BOOST |= {"flags.md": 0.2, "megatron_flags.md": 1e-3, "changelog.md": 1e-3}
BOOST |= {"performance.md": 1e-3, "experiments.md": 1e-3}
BOOST |= {"Decision records": 1e-6, "from_other_trainers.md": 0.5}
BOOST |= {"data.md": 4.0, "plugins.md": 0.5}  # other pages have headings with the same words, such as `dataset`
# Lines do not break within the dashes of a flag, a date, or a number and its unit. `(?=...)`: not inside a tag.
NOT_BROKEN = re.compile(r"(?<![\w-])(?:--\w|\d{4}-\d\d-\d\d|\d[\d.]* %)(?=[^<>]*<)")
# A text may go on in the next line, as Markdown allows, and not over a blank one.
LINK = re.compile(r"(?<!!)\[((?:[^\]\n]|\n(?!\s*\n))+)\]\(([^)#\s:]+)(#[^)\s]*)?\)")


def on_files(files: Any, config: Any) -> Any:
    for page, source in GUESTS.items():
        files.append(File.generated(config, page, abs_src_path=str(ROOT / source)))
    for page, text in GENERATED.items():
        files.append(File.generated(config, page, content=text()))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Set the page's rank in searches, and make links to files of the repository links to their pages.

    A link to a file that has no page becomes the name of the file.
    """
    name = page.file.src_uri
    keys = [name, *(section.title for section in page.ancestors)]  # the nearest section first
    page.meta["search"] = {"boost": next((BOOST[key] for key in keys if key in BOOST), 1.0)}
    source_dir = (ROOT / GUESTS.get(name, f"docs/{name}")).parent
    page_dir = (ROOT / "docs" / name).parent

    def site_link(match: re.Match[str]) -> str:
        text, link, anchor = match[1], match[2], match[3] or ""
        path = (source_dir / link).resolve()
        if not path.exists() or not path.is_relative_to(ROOT):
            return match[0]  # mkdocs reports it as broken
        if path.is_relative_to(ROOT / "docs"):
            return f"[{text}]({os.path.relpath(path, page_dir)}{anchor})"
        target = str(path.relative_to(ROOT))
        if target in PAGES:
            return f"[{text}]({PAGES[target]}{anchor})"
        return text if text.strip("`") in (target, path.stem) else f"{text} (`{target}`)"

    markdown = LINK.sub(site_link, markdown)
    for command, target in PRINTED_BY.items():
        markdown = markdown.replace(command, f"[{command}]({os.path.relpath(ROOT / 'docs' / target, page_dir)})")
    return markdown


def on_page_content(html: str, page: Any, **_: Any) -> str:
    """Mark what a line must not end within, and give each cell of the tables of flags the head of its column.

    A phone shows a row of these tables as a paragraph (site.css).
    """
    html = NOT_BROKEN.sub(r'<span class="not-broken">\g<0></span>', html)
    if page.file.src_uri not in GENERATED:
        return html

    def with_heads(table: re.Match[str]) -> str:
        heads = re.findall(r"<th>(.*?)</th>", table[0])
        cells = iter(heads * table[0].count("<tr>"))
        return re.sub("<td>", lambda _: f'<td data-head="{next(cells)}">', table[0])

    return f'<div class="flags">{re.sub("<table>.*?</table>", with_heads, html, flags=re.DOTALL)}</div>'


class Docstrings(griffe.Extension):
    """Keeps the lines of docstrings that hold a table or an example."""

    def on_instance(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring:
            obj.docstring.value = "\n\n".join(map(_as_markdown, obj.docstring.value.split("\n\n")))


SECTION = re.compile(r"(Args|Attributes|Raises|Returns|Yields):\n")  # lists in Google's style, which mkdocstrings reads


def _as_markdown(paragraph: str) -> str:
    if SECTION.match(paragraph):
        return paragraph
    if re.search(r"^ *(>>>|\S.* {2,}\S)", paragraph, re.MULTILINE):
        return f"```text\n{textwrap.dedent(paragraph)}\n```"
    return re.sub(r"(`[^`]+`)|([*_\[\]<])", lambda match: match[1] or f"\\{match[2]}", paragraph)
