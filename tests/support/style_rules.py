"""The rules of the code base that are checked on its source.

`python tests/support/style_rules.py` prints every violation. `python tests/support/style_rules.py path` prints the
files that a training step runs through, with their numbers of lines.

Nothing of the package is imported: the files are read as text and syntax trees, which takes seconds. A rule takes the
root of a repository and yields a line per violation. tests/repository/test_style_rules.py runs each rule, and shows that
each can fail.
"""

import ast
import functools
import re
import sys
import tomllib
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import documents

ROOT = Path(__file__).resolve().parents[2]

ENVIRONMENT_READERS = {
    "megalite/common/environment.py",
    "megalite/common/fault_injection.py",
    "megalite/launch/rank_info.py",
    "megalite/launch/process_group.py",
    "megalite/launch/local_launcher.py",
}  # may read os.environ
LAYERS = (
    ("generate",),
    ("training",),
    ("planning",),
    ("interop",),
    ("checkpoint", "pipeline", "data", "optim"),
    ("models",),
    ("nn",),
    ("parallel", "kernels"),
    ("launch",),
    ("config",),
    ("common",),
)


CODE = ("megalite", "tools", "pretrain_gpt.py")
parse = functools.cache(ast.parse)


def sources(root: Path, *paths: str) -> Iterator[tuple[str, ast.Module]]:
    """Yield (path from the root, syntax tree) of every Python file below `paths`."""
    for path in paths:
        for file in sorted((root / path).rglob("*.py")) if (root / path).is_dir() else [root / path]:
            if file.is_file():
                yield str(file.relative_to(root)), parse(file.read_text(encoding="utf-8"))


def import_graph(root: Path, *paths: str, annotations: bool = False) -> dict[str, set[str]]:
    """Return module -> the modules of `paths` (by default the package) that it imports, also inside functions.

    Args:
        annotations: include imports that only a type checker runs (if TYPE_CHECKING).
    """
    paths = paths or ("megalite",)
    names = {".".join(Path(path).with_suffix("").parts): path for path, _ in sources(root, *paths)}
    edges: dict[str, set[str]] = {}
    for path, tree in sources(root, *paths):
        name = ".".join(Path(path).with_suffix("").parts)
        edges[name] = set()
        for node in set(ast.walk(tree)) - (set() if annotations else _for_type_checkers(tree)):
            if isinstance(node, ast.ImportFrom) and node.module:
                imported = [f"{node.module}.{alias.name}" for alias in node.names]
                edges[name] |= {
                    m if m in names else node.module for m in imported if m in names or node.module in names
                }
            elif isinstance(node, ast.Import):
                edges[name] |= {alias.name for alias in node.names if alias.name in names}
    return edges


def _for_type_checkers(tree: ast.Module) -> set[ast.AST]:
    """Return all nodes below `if TYPE_CHECKING`."""
    blocks = [n for n in ast.walk(tree) if isinstance(n, ast.If) and ast.unparse(n.test).endswith("TYPE_CHECKING")]
    return {inner for block in blocks for statement in block.body for inner in ast.walk(statement)}


def import_cycles(root: Path) -> Iterator[str]:
    """Yield import cycles, including tools, and imports that do not point to a lower layer."""
    edges = import_graph(root, *CODE, annotations=True)
    try:
        TopologicalSorter({name: others - {name} for name, others in edges.items()}).prepare()
    except CycleError as error:
        yield f"import circle: {' <-> '.join(error.args[1][1:])}"
    layer = {package: number for number, packages in enumerate(LAYERS) for package in packages}
    for name, others in import_graph(root, *CODE).items():
        top_level, package = [*name.split("."), ""][:2]
        for other in sorted(others if top_level == "megalite" else ()):
            is_outside, other_package = not other.startswith("megalite."), [*other.split("."), ""][1]
            if is_outside or (package != other_package and layer.get(package, -1) >= layer.get(other_package, 99)):
                yield f"{name} imports {other}, which is not below it"


def environment_readers(root: Path) -> Iterator[str]:
    """Yield reads of os.environ outside of ENVIRONMENT_READERS. Other modules use environment.getenv."""
    for path, tree in sources(root, "megalite", "pretrain_gpt.py"):
        attributes = [n for n in ast.walk(tree) if isinstance(n, ast.Attribute) and n.attr in ("environ", "getenv")]
        reads = [n.lineno for n in attributes if ast.unparse(n) != "environment.getenv"]
        if reads and path not in ENVIRONMENT_READERS:
            yield f"{path}:{reads[0]}: reads the environment; only {', '.join(sorted(ENVIRONMENT_READERS))} do"


# write_text of a Storage (checkpoint/storage/), which follows no link
STORAGE_WRITE = re.compile(r"(self|self\._there|(self\.)?\w*storage|storage_of\(.*\))\.write_text")


def writes_through_links(root: Path) -> Iterator[str]:
    """Yield writes that could follow a planted link.

    These are writes without an opener of common/safe_open.py, unless they create a file (mode "x").
    """
    for path, tree in sources(root, *(f"megalite/{package}" for package in ("checkpoint", "training", "data"))):
        for node in ast.walk(tree):
            called = ast.unparse(node.func) if isinstance(node, ast.Call) else ""
            if not isinstance(node, ast.Call) or any(keyword.arg == "opener" for keyword in node.keywords):
                continue
            arguments = "".join(ast.unparse(a) for a in [*node.args[1:], *(keyword.value for keyword in node.keywords)])
            follows_links = called == "open" and re.search(r"'[rb]*[wa+][wab+]*'", arguments)
            follows_links = follows_links or (called == "os.open" and re.search("O_WRONLY|O_RDWR|O_CREAT", arguments))
            follows_links = follows_links or (
                called.endswith((".write_text", ".write_bytes")) and not STORAGE_WRITE.fullmatch(called)
            )
            if follows_links:
                yield f"{path}:{node.lineno}: {called} follows links; give it an opener of common/safe_open.py"


STREAMS = "megalite/parallel/streams.py"
STREAM_NAMES = set("Stream Event ExternalStream current_stream default_stream stream set_stream synchronize".split())
STREAM_NAMES |= set("graph CUDAGraph graph_pool_handle make_graphed_callables".split())  # in torch.cuda
STREAM_METHODS = {"record_stream", "wait_stream", "wait_event", "record_event"}  # methods of tensors and streams


def stray_streams(root: Path) -> Iterator[str]:
    """Yield uses of CUDA streams outside of parallel/streams.py, which is the only file to review and to simulate."""
    for path, tree in sources(root, "megalite", "pretrain_gpt.py"):
        for node in ast.walk(tree) if path != STREAMS else ():
            if isinstance(node, ast.Attribute):
                is_stream_name = node.attr in STREAM_NAMES and ast.unparse(node.value) in ("torch.cuda", "cuda")
                if is_stream_name or node.attr in STREAM_METHODS:
                    yield f"{path}:{node.lineno}: {ast.unparse(node)}: streams and events go through {STREAMS}"


# Parts of parameter names, megalite's or another program's. The ParamSpec of a parameter says what it is.
NAME_PARTS = set("layers embedding word position attention mlp norm q_norm k_norm final_norm head weight bias".split())
NAME_PARTS |= set("q kv out gate_up up down q_bias kv_bias out_bias gate_up_bias up_bias down_bias".split())
NAME_PARTS |= set("decoder self_attention input_layernorm pre_mlp_layernorm output_layer word_embeddings".split())
NAME_METHODS = set("startswith endswith removeprefix removesuffix split rsplit partition rpartition count find".split())
MODEL_PACKAGES = set("parallel nn models optim pipeline checkpoint interop generate".split())
# It reads external files independently, with its own table of names: a check must not use the facts that it checks.
MAY_USE_NAMES = {"tools/verification/megatron_reading.py"}


def _is_name(node: ast.expr) -> bool:
    """Return True if an expression is called a name, such as `name`, `spec.name` and `old_name[0]`."""
    while isinstance(node, ast.Subscript | ast.Call):
        node = node.value if isinstance(node, ast.Subscript) else node.func
        node = node.value if isinstance(node, ast.Attribute) and node.attr in NAME_METHODS else node
    return (node.id if isinstance(node, ast.Name) else getattr(node, "attr", "")).endswith(("name", "ours", "theirs"))


def _names_parameter(node: ast.expr, with_name: bool) -> bool:
    """Return True if a string in an expression is a part of a parameter's name.

    Args:
        with_name: The expression is compared with a name, or given to a method of one. Otherwise, only strings with a
            dot count.
    """
    texts = [n.value for n in ast.walk(node) if isinstance(n, ast.Constant) and isinstance(n.value, str)]
    return any(NAME_PARTS & set(re.split("[./]", text.strip("_["))) and (with_name or "." in text) for text in texts)


def decisions_by_name(root: Path) -> Iterator[str]:
    """Yield code that decides something about a parameter by its name or a part of it."""
    for path, tree in sources(root, "megalite", "tools", "pretrain_gpt.py"):
        package = path.split("/")[1] if "/" in path else path
        for node in ast.walk(tree) if path not in MAY_USE_NAMES else ():
            if isinstance(node, ast.Compare):
                sides = [node.left, *node.comparators]
                by_name = any(_names_parameter(side, any(map(_is_name, sides))) for side in sides)
            elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in NAME_METHODS:
                is_name = _is_name(node.func.value)
                splits_at_dots = node.func.attr.endswith(("split", "partition")) and "'.'" in map(
                    ast.unparse, node.args
                )
                by_name = any(_names_parameter(a, is_name) for a in node.args) or (
                    is_name and splits_at_dots and package in MODEL_PACKAGES
                )
            else:
                continue
            if by_name:
                yield f"{path}:{node.lineno}: decides by a parameter's name: {ast.unparse(node)[:100]}"


def letters(root: Path) -> set[str]:
    """Return the letters of the axes that docs/shapes.md defines in the first cells of its tables."""
    return set(re.findall(r"^\| `([A-Z])` \|", (root / "docs/shapes.md").read_text(encoding="utf-8"), re.MULTILINE))


def suffix(name: str) -> str:
    """Return the axes that a tensor's name ends in, or "".

    >>> suffix("x_sBD"), suffix("head_size"), suffix("MAX_ROWS")
    ('sBD', '', '')
    """
    head, _, tail = name.rpartition("_")
    return tail if re.search("[A-Z]", tail) and re.search("[a-z]", head) else ""


LETTER = r"(?:[A-Za-z0-9]{1,2}|\.\.\.)"
SHAPE = re.compile(rf"\[({LETTER}(?:[ ,*/+-]+{LETTER})*)\]")  # in a docstring or comment


def shape_letters(root: Path) -> Iterator[str]:
    """Yield axes that docs/shapes.md does not define, and tensors that are given a name with other axes."""
    known = letters(root)
    for path, tree in sources(root, *(f"megalite/{package}" for package in ("kernels", "nn", "models", "generate"))):
        undefined: dict[str, int] = {}
        for node in ast.walk(tree):
            for name in (getattr(node, field, None) for field in ("id", "arg", "attr")):
                if isinstance(name, str) and set(filter(str.isalpha, suffix(name).upper())) - known:
                    undefined.setdefault(name, node.lineno)  # type: ignore[attr-defined]
            yield from (f"{path}:{node.lineno}: {problem}" for problem in _renamed(node))  # type: ignore[attr-defined]
        yield from (
            f"{path}:{line}: {name} ends in an axis that docs/shapes.md lacks" for name, line in undefined.items()
        )
        for text in (root / path).read_text(encoding="utf-8").split('"""')[1::2]:
            for shape in SHAPE.findall(text):
                if re.search("[A-Z]", shape) and set(re.findall("[A-Z]", shape.upper())) - known:
                    yield f"{path}: [{shape}] has an axis that docs/shapes.md lacks"


def _renamed(node: ast.AST) -> Iterator[str]:
    """Yield renamed axes: x_SB = y_sB, f(x_SB=y_sB) and `B, S = x_SB.shape`."""
    pairs: list[tuple[str, ast.expr]] = []
    if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
        pairs = [(node.targets[0].id, node.value)]
    elif isinstance(node, ast.Call):
        pairs = [(keyword.arg, keyword.value) for keyword in node.keywords if keyword.arg]
    for name, value in pairs:
        if isinstance(value, ast.Name) and suffix(name) and suffix(value.id) and suffix(name) != suffix(value.id):
            yield f"{name} is given {value.id}, whose axes are others"
    if (
        isinstance(node, ast.Assign)
        and isinstance(node.targets[0], ast.Tuple)
        and isinstance(node.value, ast.Attribute)
    ):
        axes = [element.id if isinstance(element, ast.Name) else "_" for element in node.targets[0].elts]
        tensor = node.value.value.id if isinstance(node.value.value, ast.Name) else ""
        if node.value.attr == "shape" and suffix(tensor) and all(len(axis) == 1 for axis in axes):
            differing = [a for a, b in zip(axes, suffix(tensor), strict=False) if a != "_" and a.upper() != b.upper()]
            if differing or len(axes) != len(suffix(tensor)):
                yield f"{', '.join(axes)} = {tensor}.shape names other axes"


CORE = ("parallel", "kernels", "nn", "models", "pipeline", "optim")


def step_files(root: Path) -> dict[str, int]:
    """Return file -> number of lines, for the files of a step in docs/architecture.md and their imports in the core."""
    page = root / "docs/architecture.md"
    places = documents.call_trees(page.read_text(encoding="utf-8"))[0] if page.is_file() else []
    edges, modules = import_graph(root), set[str]()
    todo = [f"megalite/{place.file}".removesuffix(".py").replace("/", ".") for place in places if "/" in place.file]
    while todo:
        name = todo.pop()
        if name not in modules:
            modules.add(name)
            todo += [other for other in edges[name] if other.split(".")[1] in CORE]
            todo += [other for other in edges if other.startswith(tuple(registered_modules(name, root)))]
    files = sorted(name.replace(".", "/") + ".py" for name in modules)
    return {file: len((root / file).read_text(encoding="utf-8").splitlines()) for file in files}


def registered_modules(name: str, root: Path) -> Iterator[str]:
    """Yield the prefixes of modules whose components a module gets by name (config/registry.py)."""
    text = root.joinpath(*name.split(".")).with_suffix(".py").read_text("utf-8")
    for kind in re.findall(r'REGISTRIES\["(\w+)"\]', text):
        kinds = tomllib.loads((root / "megalite/config/registry.toml").read_text("utf-8"))
        targets = (str(target).partition(":") for target in kinds[kind].values())
        yield from (module for module, colon, _ in targets if colon)
        yield from (
            f"megalite.{kinds[kind]['directory'].replace('/', '.')}." for _ in range("directory" in kinds[kind])
        )


RULES = (
    *(import_cycles, environment_readers, writes_through_links, stray_streams, decisions_by_name, shape_letters),
    *(documents.missing_files, documents.undefined_names, documents.undefined_places, documents.long_lines),
)


def main(argv: list[str]) -> int:
    if argv == ["path"]:
        num_lines = step_files(ROOT)
        for file, lines in num_lines.items():
            print(f"{lines:6,d}  {file}")
        print(f"{sum(num_lines.values()):6,d}  lines in {len(num_lines)} files")
        return 0
    violations = [(rule.__name__, line) for rule in RULES for line in rule(ROOT)]
    for name, line in violations:
        print(f"{name}: {line}")
    print(f"{len(violations)} places")
    return bool(violations)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
