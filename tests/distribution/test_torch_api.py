"""The installed torch and triton have every name that megalite uses, on a GPU too, and warn of no deprecation.

`bash .ci/range` runs this on the lowest and the highest torch of the range.
"""

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
from train_cases import SMALL_RUN, TP2_PP2

ROOT = Path(__file__).resolve().parents[2]
SOURCES = [path for directory in ("megalite", "tools") for path in sorted((ROOT / directory).rglob("*.py"))]
SOURCES.append(ROOT / "pretrain_gpt.py")
LIBRARIES = ("torch", "triton")
DEPRECATION = re.compile("DeprecationWarning|FutureWarning|deprecated", re.IGNORECASE)


def imported_objects(tree: ast.Module) -> dict[str, object]:
    """Return the object of each name that a file imports from one of the libraries, anywhere in it."""
    objects: dict[str, object] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.split(".")[0] in LIBRARIES:
                    top = alias.name if alias.asname else alias.name.split(".")[0]
                    importlib.import_module(alias.name)
                    module = sys.modules[top]
                    objects[alias.asname or module.__name__] = module
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in LIBRARIES:
            module = importlib.import_module(node.module or "")
            for alias in node.names:
                objects[alias.asname or alias.name] = import_from(module, node.module or "", alias.name)
    return objects


def import_from(module: ModuleType, path: str, name: str) -> object:
    """Return the object that `from path import name` imports."""
    return getattr(module, name) if hasattr(module, name) else importlib.import_module(f"{path}.{name}")


def chain(node: ast.expr) -> list[str]:
    """Return the names of an expression like a.b.c; an empty list for any other expression."""
    if isinstance(node, ast.Name):
        return [node.id]
    if isinstance(node, ast.Attribute) and (inner := chain(node.value)):
        return [*inner, node.attr]
    return []


def missing_names(text: str) -> Iterator[str]:
    """Yield `line: name` of the names and keywords that a source uses and the libraries do not have."""
    tree = ast.parse(text)
    names = imported_objects(tree)
    for node in ast.walk(tree):
        target = node.func if isinstance(node, ast.Call) else node
        path = chain(target) if isinstance(target, ast.Attribute | ast.Name) else []
        if not path or path[0] not in names:
            continue
        value = names[path[0]]
        for name in path[1:]:
            if not isinstance(value, ModuleType | type):
                break  # an object's attributes are known only when it exists
            if not hasattr(value, name):
                yield f"{node.lineno}: {'.'.join(path)}"
                break
            value = getattr(value, name)
        else:
            if isinstance(node, ast.Call):
                yield from (f"{node.lineno}: {'.'.join(path)}({keyword}=)" for keyword in unknown_keywords(value, node))


def unknown_keywords(function: object, call: ast.Call) -> Iterator[str]:
    """Yield the keywords of a call that the function's signature, where Python knows it, does not have."""
    try:
        parameters = inspect.signature(function).parameters  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return
    if not any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        yield from (k.arg for k in call.keywords if k.arg is not None and k.arg not in parameters)


def test_torch_and_triton_have_every_name_that_is_used() -> None:
    lines_of = {str(path.relative_to(ROOT)): list(missing_names(path.read_text(encoding="utf-8"))) for path in SOURCES}
    assert {path: lines for path, lines in lines_of.items() if lines} == {}
    text = "import torch\nimport torch.distributed as d\nfrom torch import cuda\n"
    text += "def f():\n    torch.cuda.no_such()\n    d.init_process_group('nccl', no_such=1)\n    cuda.no_such_one\n"
    missing = ["5: torch.cuda.no_such", "6: d.init_process_group(no_such=)", "7: cuda.no_such_one"]
    assert sorted(set(missing_names(text))) == missing


def python(*argv: str, **options: bool) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PYTHONWARNINGS": "always", "OMP_NUM_THREADS": "1"}
    return programs.run_python(*argv, timeout=110, env=env, **options)


def test_imports_raise_no_deprecation_warning() -> None:
    stderr = python("-c", "import warnings; warnings.warn('f is deprecated')", "x").stderr
    assert [line for line in stderr.splitlines() if DEPRECATION.search(line)]  # the pattern matches
    modules = [".".join(path.relative_to(ROOT).with_suffix("").parts) for path in (ROOT / "megalite").rglob("*.py")]
    modules = sorted(name.removesuffix(".__init__") for name in modules)
    done = python("-c", "import importlib, sys; [importlib.import_module(name) for name in sys.argv[1:]]", *modules)
    assert done.returncode == 0 and len(modules) > 100, done.stderr
    assert not [line for line in done.stderr.splitlines() if DEPRECATION.search(line)]


def test_run_raises_no_deprecation_warning(tmp_path: Path) -> None:
    flags = [*SMALL_RUN, *TP2_PP2, "--train-iters", "2", "--run-dir", f"{tmp_path}/run", "--save", f"{tmp_path}/save"]
    done = python("pretrain_gpt.py", *flags, check=True)
    assert not [line for line in done.stderr.splitlines() if DEPRECATION.search(line)]


def test_cuda_build_has_nccl() -> None:
    assert dist.is_nccl_available() == (torch.version.cuda is not None)
    if dist.is_nccl_available():
        assert torch.cuda.nccl.version() >= (2, 20) and dist.ProcessGroupNCCL.Options() is not None
