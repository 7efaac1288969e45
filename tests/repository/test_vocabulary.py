"""The vocabulary of the code base: the right column of the glossary in docs/style.md does not come back.

`python tests/repository/test_vocabulary.py PATH...` prints what these files and directories would have to change.
"""

import ast
import io
import re
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCES = ("megalite", "tools", "pretrain_gpt.py", "examples", "tests")
DOCUMENTS = ("docs", "README.md", "CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md")
EXEMPT_FILES = {  # they list the words themselves, or the keys of other programs
    ROOT / name for name in ("docs/style.md", "tests/repository/test_vocabulary.py", "tests/translate/keys.toml")
}
# names of variables, parameters, attributes, functions and classes; an underscore at either end does not matter
NAMES = frozenset(
    """
    afresh again alike anew apart asked beside bill card dog doubt doubts folder foreign found given got held here home
    house how kept life made mine moment news of ours pulse room taken theirs told unlike usual wanted whole words
    """.split()
)
# phrases of comments, docstrings, help texts and documents, but not of keys such as checkpoint.folder of other programs
PHRASES = re.compile(
    r"(?<!\w\.)\b(afresh|anew|cards?|folders?|foreign|likewise|of which|ours|pulse|share[ds]? out|theirs|"
    r"(?:is|are) told|(?:it|they|which|who) tells?)\b",
    re.IGNORECASE,
)
TOML_KEY = re.compile(r"^[\w\"-][^=#]*=")  # may be another program's
CODE = re.compile(r"`[^`]*`|<[^>]*>|\]\([^)]*\)")  # quoted names, tags, and targets of links


def defined_names(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yield (line, name) of everything that a module defines or assigns."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.lineno, node.name
        elif isinstance(node, ast.arg):
            yield node.lineno, node.arg
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.lineno, node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.lineno, node.attr


def messages(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yield (line, text) of the string literals with a space: messages, help texts, docstrings."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and " " in node.value:
            yield node.lineno, node.value


def python_prose(text: str) -> Iterator[tuple[int, str]]:
    """Yield (line, text) of the comments and docstrings of Python source."""
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT or (token.type == tokenize.STRING and token.string.startswith('"""')):
            yield from enumerate(token.string.split("\n"), token.start[0])


def problems(path: Path) -> list[str]:
    """Return the words and names of a file that the glossary replaces, as "line: word"."""
    text = path.read_text("utf-8")
    if path.suffix == ".md":  # blank out commands and their output
        text = re.sub(r"^```.*?^```", lambda fence: "\n" * fence[0].count("\n"), text, flags=re.DOTALL | re.MULTILINE)
    lines = enumerate(text.split("\n"), 1)
    hits = list[tuple[int, str]]()
    if path.suffix == ".py":
        tree = ast.parse(text)
        hits += [(line, name) for line, name in defined_names(tree) if name.strip("_") in NAMES]
        lines = [*messages(tree), *python_prose(text)]
    if path.suffix == ".toml":
        lines = ((line, TOML_KEY.sub("", prose)) for line, prose in lines)
    hits += [(line, match[0]) for line, prose in lines for match in PHRASES.finditer(re.sub(CODE, "", prose))]
    return [f"{line}: {word}" for line, word in sorted(set(hits))]


def files_in(*places: str) -> list[Path]:
    """Return the Python files, tables and pages below these paths."""
    paths = [ROOT / place for place in places]
    files = [path for place in paths for path in (sorted(place.rglob("*")) if place.is_dir() else [place])]
    return [p for p in files if p.suffix in (".py", ".md", ".toml") and p not in EXEMPT_FILES]


@pytest.mark.parametrize("place", [*SOURCES, *DOCUMENTS])
def test_words_are_those_of_the_glossary(place: str) -> None:
    hits_of = {str(path.relative_to(ROOT)): problems(path) for path in files_in(place)}
    assert {path: hits for path, hits in hits_of.items() if hits} == {}


def test_words_of_the_old_dialect_are_found(tmp_path: Path) -> None:
    source = tmp_path / "mixed.py"
    source.write_text(
        'def told(folder, size):\n    """Sizes of which a card holds most."""\n    made = size\n    print(f"{size} cards, a.folder")\n',
        "utf-8",
    )
    assert problems(source) == ["1: folder", "1: told", "2: card", "2: of which", "3: made", "4: cards"]


if __name__ == "__main__":
    for file in files_in(*sys.argv[1:]):
        for problem in problems(file):
            print(f"{file}:{problem}")
