"""Nothing that megalite reads can run code: tests/support/expected_messages.toml lists all calls that could."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest
from toml_tables import MESSAGES

ROOT = Path(__file__).resolve().parents[2]
SOURCES = [path for directory in ("megalite", "tools", "examples") for path in sorted((ROOT / directory).rglob("*.py"))]
SOURCES += [ROOT / "pretrain_gpt.py", ROOT / "setup.py"]
UNSAFE, BUILTINS, CALLS, METHODS = (
    set(MESSAGES["unsafe_calls"][kind]) for kind in ("modules", "builtins", "calls", "methods")
)

ALLOWED = {(path, use) for path, use in MESSAGES["unsafe_calls"]["allowed"]}


def dotted(node: ast.expr) -> str:
    """Return `a.b.c` of such an expression; otherwise the names after the last part that is not a name."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}"
    return ""


def names(tree: ast.AST) -> tuple[dict[str, str], list[str]]:
    """Return (the full name of each imported name, everything that is imported)."""
    full_names: dict[str, str] = {}
    imported = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                imported.append(alias.name)
                full_names[alias.asname or alias.name.partition(".")[0]] = (
                    alias.name if alias.asname else alias.name.partition(".")[0]
                )
        elif isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                imported += [node.module, f"{node.module}.{alias.name}"]
                full_names[alias.asname or alias.name] = f"{node.module}.{alias.name}"
    return full_names, imported


def is_constant(node: ast.expr | None, value: object) -> bool:
    return isinstance(node, ast.Constant) and node.value is value


def unsafe_uses(text: str) -> Iterator[str]:
    """Yield a word for each call or import of a module that could run data."""
    tree = ast.parse(text)
    full_names, imported = names(tree)
    for name in imported:
        parts = name.split(".")
        for n in range(1, len(parts) + 1):
            if ".".join(parts[:n]) in UNSAFE:
                yield f"import {'.'.join(parts[:n])}"
                break
    for node in ast.walk(tree):
        if isinstance(node, (ast.Attribute, ast.Name)):  # also where it is not called, but handed on or inherited from
            head, _, rest = dotted(node).partition(".")
            name = full_names.get(head, head) + (f".{rest}" if rest else "")
            name = name.replace("numpy.", "np.", 1) if name.startswith("numpy.") else name
            read = isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)  # a field may have such a name
            if name in CALLS or (read and name in BUILTINS):
                yield name
            if isinstance(node, ast.Attribute) and node.attr in METHODS:
                yield f".{node.attr}"
        if not isinstance(node, ast.Call):
            continue
        head, _, rest = dotted(node.func).partition(".")
        name = full_names.get(head, head) + (f".{rest}" if rest else "")
        keywords = {k.arg: k.value for k in node.keywords}
        if name in ("torch.load", "torch.serialization.load") and not is_constant(keywords.get("weights_only"), True):
            yield "torch.load"
        if name in ("np.load", "numpy.load") and not is_constant(keywords.get("allow_pickle"), False):
            yield "np.load"
        for key, safe in (("allow_pickle", False), ("shell", False), ("trust_remote_code", False)):
            if key in keywords and not is_constant(keywords[key], safe):
                yield f"{key}="
        model = name.endswith(".from_pretrained") and "Model" in name
        if model and not is_constant(keywords.get("use_safetensors"), True):
            yield "from_pretrained"
        if None in keywords and name in ("torch.load", "np.load", "numpy.load", "subprocess.run", "subprocess.Popen"):
            yield f"{name}(**)"


BAD: dict[str, str] = MESSAGES["unsafe_lines"]
GOOD = """import torch, re, subprocess
import numpy as np
torch.load(x, weights_only=True)
np.load(x, allow_pickle=False)
np.save(x, y, allow_pickle=False)
re.compile(x)
torch.compile(x)
model.eval()
subprocess.run([x], shell=False)
AutoModel.from_pretrained(x, trust_remote_code=False, use_safetensors=True)
"""


@pytest.mark.parametrize("text", BAD)
def test_unsafe_calls_are_detected(text: str) -> None:
    assert BAD[text] in unsafe_uses(text)


def test_safe_calls_are_not_reported() -> None:
    assert list(unsafe_uses(GOOD)) == []


def test_package_executes_nothing_that_it_reads() -> None:
    seen = {(str(path.relative_to(ROOT)), use) for path in SOURCES for use in unsafe_uses(path.read_text("utf-8"))}
    assert seen - ALLOWED == set()
    assert ALLOWED - seen == set()  # what is no longer used is no longer allowed
    assert len(SOURCES) > 80
