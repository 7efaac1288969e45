"""The torch and the triton that are installed have what megalite takes from them, on a card too, and warn of nothing
that goes away. `bash .ci/range` runs this on the lowest and the highest torch of the range."""

import ast
import importlib
import inspect
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import programs
import torch
import torch.distributed as dist
from train_cases import SMALL, TP2_PP2

ROOT = Path(__file__).resolve().parents[2]
SOURCES = [path for folder in ("megalite", "tools") for path in sorted((ROOT / folder).rglob("*.py"))]
SOURCES.append(ROOT / "pretrain_gpt.py")
LIBRARIES = ("torch", "triton")
GOES_AWAY = re.compile("DeprecationWarning|FutureWarning|deprecated", re.IGNORECASE)


def imported(tree: ast.Module) -> dict[str, object]:
    """What each name of a file means that comes from one of the libraries, imported anywhere in it."""
    found: dict[str, object] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.split(".")[0] in LIBRARIES:
                    top = alias.name if alias.asname else alias.name.split(".")[0]
                    importlib.import_module(alias.name)
                    module = sys.modules[top]
                    found[alias.asname or module.__name__] = module
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in LIBRARIES:
            module = importlib.import_module(node.module or "")
            for alias in node.names:
                found[alias.asname or alias.name] = taken(module, node.module or "", alias.name)
    return found


def taken(module: ModuleType, path: str, name: str) -> object:
    """`from path import name`."""
    return getattr(module, name) if hasattr(module, name) else importlib.import_module(f"{path}.{name}")


def chain(node: ast.expr) -> list[str]:
    """a.b.c as its names; empty for anything else."""
    if isinstance(node, ast.Name):
        return [node.id]
    if isinstance(node, ast.Attribute) and (inner := chain(node.value)):
        return [*inner, node.attr]
    return []


def lost(text: str) -> Iterator[str]:
    """`line: name` of what a source takes from the libraries and they do not have, and of keywords that they do not take."""
    tree = ast.parse(text)
    names = imported(tree)
    for node in ast.walk(tree):
        called = node.func if isinstance(node, ast.Call) else node
        path = chain(called) if isinstance(called, ast.Attribute | ast.Name) else []
        if not path or path[0] not in names:
            continue
        value = names[path[0]]
        for name in path[1:]:
            if not isinstance(value, ModuleType | type):
                break  # of an object: what it has is known when it runs
            if not hasattr(value, name):
                yield f"{node.lineno}: {'.'.join(path)}"
                break
            value = getattr(value, name)
        else:
            if isinstance(node, ast.Call):
                yield from (f"{node.lineno}: {'.'.join(path)}({word}=)" for word in refused(value, node))


def refused(function: object, call: ast.Call) -> Iterator[str]:
    """Keywords of a call that the function's signature, where Python knows it, does not have."""
    try:
        parameters = inspect.signature(function).parameters  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return
    if not any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        yield from (k.arg for k in call.keywords if k.arg is not None and k.arg not in parameters)


def test_torch_and_triton_have_every_name_that_is_used() -> None:
    found = {str(path.relative_to(ROOT)): list(lost(path.read_text(encoding="utf-8"))) for path in SOURCES}
    assert {path: lines for path, lines in found.items() if lines} == {}
    text = "import torch\nimport torch.distributed as d\nfrom torch import cuda\n"
    text += "def f():\n    torch.cuda.no_such()\n    d.init_process_group('nccl', no_such=1)\n    cuda.no_such_one\n"
    missing = ["5: torch.cuda.no_such", "6: d.init_process_group(no_such=)", "7: cuda.no_such_one"]
    assert sorted(set(lost(text))) == missing


def python(*words: str, **options: bool) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PYTHONWARNINGS": "always", "OMP_NUM_THREADS": "1"}
    return programs.python(*words, timeout=110, env=env, **options)


def test_imports_raise_no_deprecation_warning() -> None:
    said = python("-c", "import warnings; warnings.warn('f is deprecated')", "x").stderr
    assert [line for line in said.splitlines() if GOES_AWAY.search(line)]  # one is found
    modules = [".".join(path.relative_to(ROOT).with_suffix("").parts) for path in (ROOT / "megalite").rglob("*.py")]
    modules = sorted(name.removesuffix(".__init__") for name in modules)
    done = python("-c", "import importlib, sys; [importlib.import_module(name) for name in sys.argv[1:]]", *modules)
    assert done.returncode == 0 and len(modules) > 100, done.stderr
    assert not [line for line in done.stderr.splitlines() if GOES_AWAY.search(line)]


def test_run_raises_no_deprecation_warning(tmp_path: Path) -> None:
    flags = [*SMALL, *TP2_PP2, "--train-iters", "2", "--run-dir", f"{tmp_path}/run", "--save", f"{tmp_path}/save"]
    done = python("pretrain_gpt.py", *flags, ok=True)
    assert not [line for line in done.stderr.splitlines() if GOES_AWAY.search(line)]


def test_cuda_build_has_nccl() -> None:
    assert dist.is_nccl_available() == (torch.version.cuda is not None)
    if dist.is_nccl_available():
        assert torch.cuda.nccl.version() >= (2, 20) and dist.ProcessGroupNCCL.Options() is not None
