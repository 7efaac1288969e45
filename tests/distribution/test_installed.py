"""The wheel without a clone: it is built, installed into an empty environment, and used from an empty directory.

A .pth file lets the environment import torch and the other packages from where this one has them, and nothing else.
"""

import json
import os
import subprocess
import sys
import tarfile
import venv
import zipfile
from collections.abc import Callable
from pathlib import Path

import documents
import pytest

from megalite.config.registry import REGISTRIES

ROOT = Path(__file__).resolve().parents[2]
CLONE = (
    "megalite",
    "tools",
    "tests/tools/test_tools.py",
    "examples",
    "setup.py",
    "pyproject.toml",
    "README.md",
    "LICENSE",
)
BUILD = "import sys; from setuptools import build_meta; print(getattr(build_meta, sys.argv[1])(sys.argv[2]))"
pytestmark = pytest.mark.timeout(900)
RARELY = pytest.mark.nightly(guards=("pyproject.toml", "megalite/__main__.py"))


def build(kind: str, source: Path, out: Path) -> Path:
    """Build a wheel or an sdist (`kind`) as pip does, and return its path."""
    out.mkdir(exist_ok=True)
    argv = [sys.executable, "-c", BUILD, f"build_{kind}", str(out)]
    done = subprocess.run(argv, cwd=source, env=environment(), capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-4000:]
    return out / done.stdout.splitlines()[-1]


def environment(**variables: str) -> dict[str, str]:
    """Return the environment without PYTHONPATH, which leads to the clone."""
    return {**{k: v for k, v in os.environ.items() if k != "PYTHONPATH"}, "OMP_NUM_THREADS": "1", **variables}


@pytest.fixture(scope="module")
def clone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Copy the clone, since a build leaves files in its directory."""
    return documents.copy_paths((*CLONE, "pretrain_gpt.py"), tmp_path_factory.mktemp("clone"))


@pytest.fixture(scope="module")
def wheel(clone: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build("wheel", clone, tmp_path_factory.mktemp("wheel"))


DATA = """commands.toml common/fault_points.toml config/megatron_flags.txt config/help_pages.toml
 config/unsupported_values.toml config/registry.toml data/tokenizers/tables.toml interop/huggingface/constants.toml
 interop/megatron/names.toml kernels/newton_schulz.toml kernels/tiles.toml launch/system_checks.toml
 launch/launcher_variables.toml models/families.toml planning/devices.toml training/logging/metrics.toml completion.sh py.typed"""


@RARELY
def test_wheel_contents(clone: Path, wheel: Path, tmp_path: Path) -> None:
    """The package with its data, the programs below it, and nothing else; the same from a source distribution."""
    contents = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    package = {str(p.relative_to(ROOT)) for p in (ROOT / "megalite").rglob("*.py")}
    package |= {f"megalite/{name}" for name in DATA.split()}
    directories = (ROOT / "tools", ROOT / "examples/recipes", ROOT / "examples/plugins")
    files = [
        p for directory in directories for p in directory.rglob("*") if p.is_file() and p.suffix not in (".sh", ".pyc")
    ]
    programs = {str(p.relative_to(ROOT)) for p in files} | {"pretrain_gpt.py"}
    assert {"megalite/common/console.py", "megalite/__main__.py"} <= package and "tools/bench/timeout.py" in programs
    assert contents == package | {f"megalite/programs/{name}" for name in programs}
    others = [p for p in (ROOT / "megalite").rglob("*") if p.is_file() and p.suffix not in (".py", ".pyc")]
    assert {str(p.relative_to(ROOT)) for p in others} <= contents  # data files that a later change adds

    with tarfile.open(build("sdist", clone, tmp_path / "sdist")) as archive:
        archive.extractall(tmp_path, **({"filter": "data"} if hasattr(tarfile, "data_filter") else {}))
    (unpacked,) = tmp_path.glob("megalite-*")
    rebuilt = zipfile.ZipFile(build("wheel", unpacked, tmp_path / "again"))
    assert {name for name in rebuilt.namelist() if ".dist-info/" not in name} == contents


@pytest.fixture(scope="module")
def programs(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the programs of an environment with the wheel and with other packages that have our programs' names."""
    env_dir = tmp_path_factory.mktemp("installed") / "env"
    venv.create(env_dir, with_pip=False)
    python = env_dir / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--python", str(python), "install", "--no-index", "--no-deps", str(wheel)]
    subprocess.run([*pip, "--disable-pip-version-check", "--quiet"], env=environment(), check=True, timeout=300)
    (site,) = (env_dir / "lib").glob("python*/site-packages")
    (site / "others.pth").write_text("\n".join(path for path in sys.path if path.endswith("site-packages")))
    (site / "tools").mkdir()
    for name in ("tools/__init__.py", "pretrain_gpt.py"):
        (site / name).write_text("raise ImportError('somebody else wrote this')\n")
    return env_dir / "bin"


Run = Callable[..., str]


@pytest.fixture
def run(programs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    def run(line: str, code: int = 0) -> str:
        argv = [str(programs / line.split()[0]), *line.split()[1:]]
        env = environment(PATH=f"{programs}:{os.environ['PATH']}")
        done = subprocess.run(argv, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=300)
        assert done.returncode == code, f"{line}\n{done.stdout[-2000:]}{done.stderr[-4000:]}"
        return done.stdout + done.stderr

    script = tmp_path / "where.py"
    script.write_text("import megalite\nprint(megalite.__file__)\n")
    assert str(programs.parent) in run(f"python {script}"), "this checks the clone"
    script.unlink()
    return run


SHAPE = (
    "--preset tiny --num-layers 2 --hidden-size 32 --ffn-hidden-size 64 --num-attention-heads 4 --num-query-groups 2 "
    "--seq-length 32 --max-position-embeddings 32 --micro-batch-size 2 --global-batch-size 4 --eval-iters 1 "
    "--tensor-model-parallel-size 2 --device cpu --data-path data/mine_text_document --split 90,10,0 "
    "--tokenizer-type SentencePieceTokenizer --tokenizer-model data/spm.model --save runs/mine --load runs/mine --lr-decay-iters 4"
)


def test_installed_commands_go_from_text_to_an_exported_model(run: Run, tmp_path: Path) -> None:
    """Train on two ranks of a fork server, continue on one rank of torchrun, and use the result."""
    text = "".join(json.dumps({"text": f"Once {n} is {n * n}, and {n * 7} is more.\n" * 3}) + "\n" for n in range(300))
    (tmp_path / "mine.jsonl").write_text(text)
    run("megalite tokenizer --input mine.jsonl --vocab-size 300 --model-prefix data/spm --workers 1")
    tokenizer = "--tokenizer-type SentencePieceTokenizer --tokenizer-model data/spm.model"
    run(f"megalite preprocess --input mine.jsonl --output-prefix data/mine {tokenizer} --append-eod --workers 2")
    assert "300 documents" in run("megalite data inspect data/mine_text_document")
    assert "reached the last step" in run(f"megalite train --nproc 2 {SHAPE} --train-iters 2")
    one_rank = "--tensor-model-parallel-size 1 --train-iters 4"
    run(f"python -m torch.distributed.run --standalone --nproc_per_node 1 -m megalite train {SHAPE} {one_rank}")
    assert json.loads((tmp_path / "runs/mine/status.json").read_text())["step"] == 4
    run("megalite checkpoint verify runs/mine --all")
    output = run("megalite generate --load runs/mine --prompt Once --max-new-tokens 3")
    assert output.startswith("[step 4] Once")
    assert "goodput" in run("megalite report runs/mine")
    assert "data/mine_text_document" in run("megalite checkpoint data-usage runs/mine")
    assert "all bits equal" in run("megalite convert --load runs/mine --to-hf models/mine --check-bits")
    assert (tmp_path / "models/mine/config.json").is_file()
    assert "[0]" in run("megalite plot schedule --pp 2 --microbatches 2 --text")
    run("megalite logs runs/mine --short")


@RARELY
def test_installed_commands_ignore_foreign_files(run: Run, tmp_path: Path) -> None:
    wrong = run(f"megalite train {SHAPE} --lr abc", code=2)
    assert wrong.startswith("megalite train: ") and "abc" in wrong and ".py" not in wrong
    planned = run(
        "megalite plan --preset tiny --vocab-size 300 --micro-batch-size 2 --global-batch-size 16 --num-gpus 2"
    )
    assert "srun megalite train" in planned and "examples/" not in planned and ".py" not in planned
    no_data = "--preset tiny --vocab-size 300 --data-path data/none --train-iters 2 --micro-batch-size 2 --device cpu"
    assert "data/none" in run(f"megalite train {no_data} --global-batch-size 2", code=3)
    assert "holds no checkpoint" in run("megalite generate --load nothing --prompt a", code=3)
    assert "--microbatches" in run("megalite plot schedule --pp 0 --text", code=2)
    assert "complete " in run("megalite completion bash")
    (tmp_path / "ds.json").write_text('{"train_batch_size": 8, "zero_optimization": {"stage": 2}}')
    assert "zero_stage = 2" in run("megalite translate ds.json --gpus 2")
    (tmp_path / "tools").mkdir()  # python -m puts the current directory first on its path
    for name in ("tools/__init__.py", "pretrain_gpt.py"):
        (tmp_path / name).write_text("raise ImportError('Megatron-LM has such files')\n")
    assert "usage: megalite checkpoint" in run("python -m megalite checkpoint --help")
    assert "all_reduce" in run("megalite cluster --nproc 2 --device cpu --sizes 1024 --times 1 --slow 0")


@RARELY
def test_installed_benchmark_starts_its_contenders(run: Run, tmp_path: Path) -> None:
    small = SHAPE.partition(" --data-path")[0].replace(" --eval-iters 1", "").replace("--preset tiny ", "")
    small += " --vocab-size 96"
    out = run(f"megalite bench --nproc 2 --steps 2 --warmup 1 --repeats 1 --json out.json {small}")
    assert "megalite" in out and json.loads((tmp_path / "out.json").read_text())


def indented_lines(text: str) -> str:
    """Return the indented lines of a program's output, which are commands."""
    return "".join(line[2:] for line in text.splitlines(keepends=True) if line.startswith("  "))


@pytest.mark.nightly(guards=("examples/plugins", "megalite/config/plugin_examples.py"))
@pytest.mark.parametrize("kind", REGISTRIES)
def test_installed_plugin_example_trains(kind: str, run: Run, tmp_path: Path) -> None:
    """The commands that `megalite plugin KIND` prints run without changes, and their runs train."""
    output = run(f"megalite plugin {kind} --out mine.py")
    commands = [[*command.argv] for command in documents.commands_of(indented_lines(output), "")]
    assert commands and any(argv[:2] == ["megalite", "train"] for argv in commands), output
    for argv in commands:
        flags = "--num-layers 2 --train-iters 3 --device cpu".split() if argv[1] == "train" else []
        if "--use-checkpoint-args" in argv or "--hybrid-layer-pattern" in argv:
            flags = flags[2:]
        run(" ".join([*argv, *flags]))
    (run_dir,) = {argv[argv.index("--save") + 1] for argv in commands if "mine.py" in argv and "--save" in argv}
    rows = [json.loads(line) for line in (tmp_path / run_dir / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows if "train/loss" in row] == [1, 2, 3]
    assert 'plugin = ["mine.py"]' in (tmp_path / run_dir / "run_config.toml").read_text()


@RARELY
def test_installed_user_plugin_trains(run: Run, tmp_path: Path) -> None:
    """Use the examples of every kind of plugin in one run."""
    names = {kind: f"{kind}_of_mine.py" for kind in REGISTRIES}
    for kind, name in names.items():
        run(f"megalite plugin {kind} --out {name}")
    files = [*names.values()]
    small = "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 16 --max-position-embeddings 16"
    small += " --micro-batch-size 2 --global-batch-size 8 --lr 1e-3 --train-iters 3 --device cpu --nproc 2 --pp 2"
    choices = (
        "--activation watched_gelu --lr-decay-style power --optimizer lion --dataset sums --tokenizer-type Characters"
    )
    output = run(
        f"megalite train --plugin {' '.join(files)} {choices} --pipeline-schedule eager {small} --save runs/own"
    )
    assert "reached the last step" in output and "counting: done after 3 updates" in output and "dataset sums" in output
    rows = [json.loads(line) for line in (tmp_path / "runs/own/metrics.jsonl").read_text().splitlines()]
    assert rows[0]["train/loss"] > 0 and len(rows[0]["metric/quiet/layers"]) == 2
    plugin_flags = " ".join(f"--plugin {name}" for name in files)
    assert run(f"megalite generate --load runs/own --prompt 1+1= --max-new-tokens 3 {plugin_flags}").startswith(
        "[step 3] 1+1="
    )
    assert "not given here" in run("megalite generate --load runs/own --prompt 1+1=", code=3)
