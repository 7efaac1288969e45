"""Nothing is imported from the working directory, by no command and no process that a command starts."""

import importlib.machinery
import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
from train_cases import ROOT

pytestmark = pytest.mark.timeout(900)
RARELY = pytest.mark.nightly(guards=("megalite/launch/children.py", "megalite/api.py"))
PACKAGES = ("torch", "numpy", "megalite", "tools", "safetensors", "tokenizers", "triton", "wandb", "pyarrow", "rich")
HOSTILE = """with open({canary!r}, "a") as file:
    file.write({name!r} + "\\n")
raise ImportError("{name} was imported from the working directory")
"""
LAYER = (
    "--preset tiny --num-layers 2 --hidden-size 32 --ffn-hidden-size 64 --num-attention-heads 4 --num-query-groups 2 "
    "--seq-length 32 --max-position-embeddings 32 --micro-batch-size 2 --global-batch-size 4 --eval-iters 0 "
    "--mock-data --tokenizer-type ByteTokenizer --device cpu --train-iters 1"
).split()
TRAIN = ["--nproc", "2", *LAYER]
TINY = f"""import os, sys
import megalite
text = {" ".join(TRAIN)!r}
"""


def modules() -> list[str]:
    """Return modules of the standard library that are files, which a file of that name could replace, and packages."""
    stdlib = sysconfig.get_path("stdlib")
    names = []
    for name in sorted(sys.stdlib_module_names - {"this", "antigravity", "idlelib"}):
        spec = importlib.machinery.PathFinder.find_spec(name, [stdlib, f"{stdlib}/lib-dynload"])
        if spec is not None:
            names.append(name)
    assert {"socket", "signal", "selectors", "multiprocessing", "ctypes"} <= {*names}
    return [*names, *PACKAGES]


@pytest.fixture
def hostile(tmp_path: Path) -> Path:
    """Return a working directory with a file or a package for every module."""
    directory = tmp_path / "hostile"
    directory.mkdir()
    for name in modules():
        text = HOSTILE.format(canary=str(tmp_path / "canary"), name=name)
        if name in ("multiprocessing", "megalite", "json"):
            (directory / name).mkdir()
            (directory / name / "__init__.py").write_text(text)
        else:
            (directory / f"{name}.py").write_text(text)
    return directory


def command(directory: Path) -> list[str]:
    """Return a command like the `megalite` that pip installs, a script that imports the package from its place."""
    script = directory / "bin" / "megalite"
    script.parent.mkdir(exist_ok=True)
    script.write_text(
        "import sys\nfrom megalite.__main__ import main\nif __name__ == '__main__':\n    sys.exit(main())\n"
    )
    return [sys.executable, str(script)]


def run(argv: list[str], directory: Path, clone: bool = False, **env: str) -> str:
    """Run a command in `directory`, check that it imports nothing from there, and return its output.

    Args:
        argv: The command.
        directory: The working directory.
        clone: Whether the command is one of a clone and needs no PYTHONPATH.
        env: Additional environment variables.
    """
    canary = (directory if (directory / "hostile").exists() else directory.parent) / "canary"
    full_env = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONSAFEPATH")}
    full_env |= {} if clone else {"PYTHONPATH": str(ROOT)}
    result = subprocess.run(argv, cwd=directory, env=full_env | env, capture_output=True, text=True, timeout=300)
    assert not canary.exists(), f"imported from the working directory: {canary.read_text()}\n{result.stderr}"
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout + result.stderr


def test_hostile_directory_would_be_imported(hostile: Path) -> None:
    result = subprocess.run([sys.executable, "-c", "import socket"], cwd=hostile, capture_output=True, text=True)
    assert result.returncode and (hostile.parent / "canary").read_text() == "socket\n"


def test_ranks_import_nothing_from_the_working_directory(hostile: Path, tmp_path: Path) -> None:
    assert "done" in run([*command(tmp_path), "train", *TRAIN], hostile)


def test_ranks_of_a_clone_import_nothing_from_the_working_directory(hostile: Path) -> None:
    assert "done" in run([sys.executable, str(ROOT / "pretrain_gpt.py"), *TRAIN], hostile, clone=True)


@RARELY
def test_commands_import_nothing_from_the_working_directory(hostile: Path, tmp_path: Path) -> None:
    """The commands are all that start processes: ranks, workers, runs, contenders."""
    megalite = command(tmp_path)
    text, data, run_dir = tmp_path / "text.jsonl", str(tmp_path / "data"), str(tmp_path / "run")
    text.write_text('{"text": "some text"}\n' * 40)
    run([*megalite, "train", *LAYER, "--compile", "--save", run_dir], hostile)
    args = f"--input {text} --output-prefix {data} --tokenizer-type ByteTokenizer --workers 2"
    run([*megalite, "preprocess", *args.split()], hostile)
    args = f"--load {run_dir} --nproc 2 --tensor-model-parallel-size 2 --prompt a --max-new-tokens 2 --device cpu"
    run([*megalite, "generate", *args.split()], hostile)
    run([*megalite, "verify", *TRAIN, "--steps", "1"], hostile)
    run([*megalite, *f"convert --load {run_dir} --to-hf {tmp_path / 'hf'} --check".split()], hostile)
    run([*megalite, *"bench comm --nproc 2 --max-bytes 4096 --times 1 --device cpu".split()], hostile)
    run([*megalite, *"cluster --nproc 2 --sizes 4096 --times 1 --device cpu --slow 0".split()], hostile)
    run([*megalite, "plan", "calibrate", "--out", str(tmp_path / "profile.json"), "--seconds", "1", *LAYER], hostile)
    bench = [*megalite, "bench", "--nproc", "2", "--steps", "2", "--warmup", "1", "--repeats", "1", *LAYER, "--compile"]
    run(bench, hostile)
    options = tmp_path / "run.toml"
    options.write_text('num_layers = 1\nhidden_size = 32\nnum_attention_heads = 4\nmock_data = true\neval_iters = 0\n'
                       'seq_length = 16\nmax_position_embeddings = 16\nmicro_batch_size = 1\ntrain_iters = 1\n'
                       'vocab_size = 93\ndevice = "cpu"\nnproc = 2\n')  # fmt: skip
    run([*megalite, "sweep", str(options), "--lr", "1e-3,1e-4", "--runs-dir", str(tmp_path / "sweep")], hostile)


@RARELY
def test_programs_import_nothing_from_the_working_directory(hostile: Path, tmp_path: Path) -> None:
    """These programs of a clone are not commands."""
    run([sys.executable, str(ROOT / "tools/bench/data.py"), "--documents", "2000"], hostile, clone=True)
    args = f"--dir {tmp_path / 'disk'} --mib 16 --ranks 2 --rounds 1"
    run([sys.executable, str(ROOT / "tools/bench/checkpoint.py"), *args.split()], hostile, clone=True)
    args = "--device cpu --only rms_norm --peers compile --repeats 1"
    run([sys.executable, str(ROOT / "tools/bench/kernels.py"), *args.split()], hostile, clone=True)


API = """
megalite.train(megalite.Config(text, save={directory!r} + "/run"), quiet=True)
megalite.convert("to_hf", {directory!r} + "/run", {directory!r} + "/hf")
megalite.plan(megalite.Config(text), gpus=2, top=1)
"""


@RARELY
def test_python_imports_nothing_from_the_working_directory(hostile: Path, tmp_path: Path) -> None:
    """A script is in another directory, and an interactive session changes into the hostile one."""
    script = tmp_path / "script.py"
    script.write_text(TINY + API.format(directory=str(tmp_path / "one")))
    run([sys.executable, str(script)], hostile)
    session = TINY + f"megalite.convert; os.chdir({str(hostile)!r})" + API.format(directory=str(tmp_path / "two"))
    run([sys.executable, "-c", session], tmp_path)


@RARELY
def test_named_plugin_modules_are_found(tmp_path: Path) -> None:
    """All ranks find a plugin that is a module: in PYTHONPATH, and with python -m in the working directory."""
    (tmp_path / "own_part.py").write_text("import megalite\nmegalite.register('metric', 'mine', 'step')\n")
    args = [*TRAIN, "--plugin", "own_part"]
    run([*command(tmp_path), "train", *args], tmp_path, PYTHONPATH=f"{ROOT}{os.pathsep}{tmp_path}")
    run([sys.executable, "-m", "megalite", "train", *args], tmp_path)
    session = "import megalite; megalite.train(megalite.Config({!r}), quiet=True)".format(" ".join(args))
    run([sys.executable, "-c", session], tmp_path)


@RARELY
def test_child_processes_keep_their_environment(tmp_path: Path) -> None:
    """Processes that a plugin starts inherit neither PYTHONSAFEPATH nor PYTHONPATH."""
    (tmp_path / "plugin.py").write_text(
        "import os, megalite\n"
        "class Environment:\n"
        "    def on_train_start(self, *_):\n"
        "        assert 'PYTHONSAFEPATH' not in os.environ and 'PYTHONPATH' not in os.environ\n"
        "        open('started', 'a').write('1')\n"
        "megalite.register('callback', 'environment', Environment())\n"
    )
    argv = [sys.executable, str(ROOT / "pretrain_gpt.py"), *TRAIN, "--plugin", "plugin.py"]
    run(argv, tmp_path, clone=True)
    assert (tmp_path / "started").read_text() == "11"
