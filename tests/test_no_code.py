"""Nothing that megalite reads can run code: what could is called nowhere but at the places listed here."""

import ast
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
SOURCES = [path for folder in ("megalite", "tools", "examples") for path in sorted((ROOT / folder).rglob("*.py"))]
SOURCES += [ROOT / "pretrain_gpt.py", ROOT / "setup.py"]
# modules that run what they read, or read it with pickle
UNSAFE = {"pickle", "_pickle", "cPickle", "dill", "cloudpickle", "joblib", "marshal", "shelve", "copyreg", "runpy"}
UNSAFE |= {"code", "codeop", "imp", "jsonpickle", "yaml", "ruamel", "torch.package", "torch.hub", "pty"}
BUILTINS = {"eval", "exec", "compile", "__import__", "breakpoint"}
CALLS = {"os.system", "os.popen", "pickle.load", "pickle.loads", "pickle.Unpickler", "torch.jit.load", "torch.hub.load"}
CALLS |= {"importlib.import_module", "subprocess.getoutput", "subprocess.getstatusoutput", "pandas.read_pickle"}
CALLS |= {"importlib.util.spec_from_file_location", "torch.package.PackageImporter", "torch.export.load"}
CALLS |= {"shutil.unpack_archive", "tarfile.open", "zipfile.ZipFile", "multiprocessing.reduction.ForkingPickler"}
METHODS = {"extractall", "read_pickle", "unsafe_load", "full_load", "exec_module", "load_module"}

ALLOWED = {
    # the error that torch's restricted loader raises
    ("megalite/interop/megatron/rank_files.py", "import pickle"),
    # the error; and an Unpickler whose find_class knows an exact list of names (test_convert_megatron_dist.py)
    ("megalite/interop/megatron/torch_dist.py", "import pickle"),
    ("megalite/interop/megatron/torch_dist.py", "pickle.Unpickler"),
    # YAML's safe_load, which makes plain values alone (tests/translate/test_translate.py)
    ("megalite/config/translate.py", "import yaml"),
    # names that the code has, never the data
    ("tools/preprocess/text_input.py", "importlib.import_module"),
    ("megalite/__init__.py", "importlib.import_module"),
    ("megalite/__main__.py", "importlib.import_module"),
    ("megalite/config/registry.py", "importlib.import_module"),
    # what the user has typed, or a TOML that the user has named (test_plugins.py)
    ("megalite/config/plugins.py", "importlib.import_module"),
    ("megalite/config/plugins.py", "compile"),
    ("megalite/config/plugins.py", "exec"),
}


def dotted(node: ast.expr) -> str:
    """`a.b.c` of an expression that is one; else what follows the last thing that is not a name."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}"
    return ""


def names(tree: ast.AST) -> tuple[dict[str, str], list[str]]:
    """(what each imported name stands for, all that is imported)."""
    means: dict[str, str] = {}
    imported = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for one in node.names:
                imported.append(one.name)
                means[one.asname or one.name.partition(".")[0]] = one.name if one.asname else one.name.partition(".")[0]
        elif isinstance(node, ast.ImportFrom) and node.module:
            for one in node.names:
                imported += [node.module, f"{node.module}.{one.name}"]
                means[one.asname or one.name] = f"{node.module}.{one.name}"
    return means, imported


def is_constant(node: ast.expr | None, value: object) -> bool:
    return isinstance(node, ast.Constant) and node.value is value


def found(text: str) -> Iterator[str]:
    """What of a module could run data, one word each."""
    tree = ast.parse(text)
    means, imported = names(tree)
    for name in imported:
        parts = name.split(".")
        for n in range(1, len(parts) + 1):
            if ".".join(parts[:n]) in UNSAFE:
                yield f"import {'.'.join(parts[:n])}"
                break
    for node in ast.walk(tree):
        if isinstance(node, (ast.Attribute, ast.Name)):  # also where it is not called, but handed on or inherited from
            head, _, rest = dotted(node).partition(".")
            name = means.get(head, head) + (f".{rest}" if rest else "")
            name = name.replace("numpy.", "np.", 1) if name.startswith("numpy.") else name
            read = isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)  # a field may have such a name
            if name in CALLS or (read and name in BUILTINS):
                yield name
            if isinstance(node, ast.Attribute) and node.attr in METHODS:
                yield f".{node.attr}"
        if not isinstance(node, ast.Call):
            continue
        head, _, rest = dotted(node.func).partition(".")
        name = means.get(head, head) + (f".{rest}" if rest else "")
        given = {k.arg: k.value for k in node.keywords}
        if name in ("torch.load", "torch.serialization.load") and not is_constant(given.get("weights_only"), True):
            yield "torch.load"
        if name in ("np.load", "numpy.load") and not is_constant(given.get("allow_pickle"), False):
            yield "np.load"
        for key, safe in (("allow_pickle", False), ("shell", False), ("trust_remote_code", False)):
            if key in given and not is_constant(given[key], safe):
                yield f"{key}="
        model = name.endswith(".from_pretrained") and "Model" in name
        if model and not is_constant(given.get("use_safetensors"), True):
            yield "from_pretrained"
        if None in given and name in ("torch.load", "np.load", "numpy.load", "subprocess.run", "subprocess.Popen"):
            yield f"{name}(**)"


BAD: dict[str, str] = tomllib.loads((ROOT / "tests/answers.toml").read_text("utf-8"))["code"]
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
def test_it_would_be_found(text: str) -> None:
    assert BAD[text] in found(text)


def test_what_is_safe_is_not_found() -> None:
    assert list(found(GOOD)) == []


def test_nothing_runs_what_it_reads() -> None:
    seen = {(str(path.relative_to(ROOT)), what) for path in SOURCES for what in found(path.read_text("utf-8"))}
    assert seen - ALLOWED == set()
    assert ALLOWED - seen == set()  # what is not needed any more is not allowed
    assert len(SOURCES) > 80
