"""The command `megalite` in a clone; tests/distribution/test_installed.py tests it from a wheel."""

import argparse
import importlib
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import documents
import programs
import pytest
from toml_tables import MESSAGES

from megalite import __main__ as command
from megalite import __version__
from megalite.common import console
from megalite.config.option import flags_of
from megalite.config.options import iter_options

ROOT = Path(__file__).resolve().parents[2]
MODULES = {name: module for name, (module, _) in command.COMMANDS.items() if module}
CLONE_ONLY = {"tools.gpu_report"}  # it runs the clone's tests


PIPES: dict[str, Any] = {"capture_output": True, "text": True, "timeout": 60}


def megalite(*argv: str, python: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
    return programs.run([sys.executable, *python, "-m", "megalite", *argv], cwd=ROOT, **PIPES)


def test_every_program_has_a_command() -> None:
    tool_names = {f"tools.{path.stem}" for path in (ROOT / "tools").glob("*.py") if "def main(argv" in path.read_text()}
    command_modules = {module for module in MODULES.values() if not module.startswith("megalite.")}
    assert command_modules == tool_names - CLONE_ONLY - {"tools.benchmark_rank"} | {"pretrain_gpt"}


def help_text(argv: list[str], patch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *topic: str) -> str:
    """Return what `megalite ARGV --help TOPIC` prints, in lines that are not wrapped."""
    with patch.context() as context:
        context.setenv("COLUMNS", "1000")
        context.setattr(sys, "argv", [])
        context.setattr(sys, "path", [*sys.path])
        module = importlib.import_module(MODULES[" ".join(argv)])
        context.setattr(module, "__doc__", module.__doc__)
        try:
            code = command.run([*argv, "--help", *topic])
        except SystemExit as end:
            code = end.code
    assert code == 0
    return capsys.readouterr().out


def test_documents_list_every_command() -> None:
    page = (ROOT / "docs/commands.md").read_text()
    rows = [line for line in page.splitlines() if line.startswith("| `megalite ")]
    listed = []
    for row in rows:
        first, *more = re.findall(r"`([^`]+)`", row.split("|")[1])
        group = first.split()[1:-1]
        names = [" ".join([*group, word.split()[-1]]) for word in (first, *more)]
        listed += zip(names, re.findall(r"`([^`]+)\.py`", row.split("|")[2]), strict=True)
    assert {name: file.replace("/", ".") for name, file in listed} == MODULES


@pytest.mark.parametrize("name", sorted(MODULES.keys() - {"train"}))
def test_help_equals_the_programs_help(name: str, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    """It has all flags, the name that was typed, and examples that work without a clone."""
    text = help_text(name.split(), monkeypatch, capsys)
    assert text.startswith(f"usage: megalite {name} ") and not re.search(r"(python|torchrun .*) \S+\.py", text), text
    with (
        documents.parsers_stopped(monkeypatch, parse=False) as context,
        pytest.raises(documents.ParserStopped) as parsed,
    ):
        documents.run_script(MODULES[name].replace(".", "/") + ".py", [], context)
    flags = re.findall(r"(?<![\w-])--?[\w-]+", text)
    for action in parsed.value.parser._actions:
        if action.help != argparse.SUPPRESS:
            assert set(action.option_strings) <= set(flags)
            assert (action.help or "") % vars(action) in text


def test_train_help(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    first = help_text(["train"], monkeypatch, capsys)
    assert first.startswith("usage: megalite train ") and "megalite train --preset" in first
    text = help_text(["train"], monkeypatch, capsys, "all")
    assert {flag for _, f in iter_options() for flag in [flags_of(f)[0][0]]} <= set(re.findall(r"--[\w-]+", text))


def test_command_list_imports_few_modules_and_no_torch() -> None:
    """It takes 0.2 s, mostly for imports."""
    done = megalite("--help", python=("-X", "importtime"))
    assert done.returncode == 0 and all(f"\n  {name} " in done.stdout for name in command.COMMANDS)
    imported = done.stderr
    assert imported.count("import time:") < 200  # 128 with Python 3.11, whose own are 99
    assert "megalite.common.console" in imported and not re.search(r"\| +(torch|numpy|multiprocessing)\b", imported)


@pytest.mark.parametrize("line", MESSAGES["commands"])
def test_exit_codes_equal_the_programs(line: str, tmp_path: Path) -> None:
    code, text = MESSAGES["commands"][line]
    done = megalite(*line.format(tmp_path).split())
    assert done.returncode == code and text in done.stderr and "Traceback" not in done.stderr, done.stderr
    name = next((n for n in MODULES if line.startswith(n + " ")), None)
    if name is not None:
        argv = line.format(tmp_path).split()[len(name.split()) :]
        assert programs.run_python(MODULES[name].replace(".", "/") + ".py", *argv).returncode == code


READS = {  # arguments with which each command reads a missing run, model or data set
    "train": "--preset tiny --vocab-size 300 --micro-batch-size 2 --train-iters 2 --device cpu --data-path {}",
    "generate": "--load {}",
    "checkpoint": "inspect {}",
    "convert": "--load {} --to-hf {}-2",
    "data inspect": "{}",
    "data merge": "--input {} --output-prefix {}-2",
    "preprocess": "--input {} --output-prefix {}-2 --tokenizer-type NullTokenizer",
    "tokenizer": "--input {} --model-prefix {}-2",
    "plot": "loss {}",
    "report": "{}",
    "runs": "{}",
    "logs": "{}",
}


@pytest.mark.parametrize("name", READS)
def test_missing_input_is_exit_code_3(name: str, tmp_path: Path) -> None:
    argv = READS[name].replace("{}", str(tmp_path / "none")).split()
    for done, prefix in (
        (megalite(*name.split(), *argv), f"megalite {name}: "),
        (programs.run_python(file := MODULES[name].replace(".", "/") + ".py", *argv), f"{Path(file).name}: "),
    ):
        messages = [line for line in done.stderr.splitlines() if not line.startswith("note: ")]
        assert done.returncode == 3 and messages[0].startswith(prefix) and "Traceback" not in done.stderr, done
        assert not prefix.startswith("megalite") or ".py" not in done.stderr, done.stderr


def test_messages_name_the_command_as_typed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = "plan.py: make one with tools/plan.py calibrate, or python pretrain_gpt.py --nproc 2; /my/tools/plan.py"
    assert console.as_typed(text) == text
    monkeypatch.setattr(sys, "argv", ["megalite plan"])
    expected = "megalite plan: make one with megalite plan calibrate, or megalite train --nproc 2; /my/tools/plan.py"
    assert console.as_typed(text) == expected
    torchrun = console.as_typed("torchrun --nnodes 2 tools/check_cluster.py --tp 8")
    assert torchrun == "torchrun --nnodes 2 -m megalite cluster --tp 8"
    done = megalite(
        "plan",
        *"--preset tiny --vocab-size 300 --micro-batch-size 2 --global-batch-size 8 --num-gpus 2 --device cpu".split(),
    )
    assert done.returncode == 0 and "megalite train --nproc 2" in done.stdout and ".py" not in done.stdout


def test_ctrl_c_prints_no_traceback() -> None:
    stop = "import signal, sys; import megalite.__main__ as m; m.run = lambda argv: signal.raise_signal(signal.SIGINT)"
    done = programs.run_python("-c", f"{stop}; m.main()")
    assert (done.returncode, done.stderr) == (130, "")


def test_version_is_defined_once_and_heads_the_changelog() -> None:
    assert megalite("--version").stdout == f"megalite {__version__}\n"
    changes = re.findall(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert changes[0] == __version__
    others = [p for p in (*ROOT.glob("*.py"), *ROOT.glob("*.toml"), *(ROOT / "megalite").rglob("*.py"))]
    assert [str(p.relative_to(ROOT)) for p in others if f'"{__version__}"' in p.read_text()] == ["megalite/__init__.py"]


def test_shell_completion(tmp_path: Path) -> None:
    """Test bash as when TAB is pressed: COMP_WORDS and COMP_CWORD are set, and COMPREPLY is shown."""
    script = megalite("completion", "bash").stdout
    assert script == megalite("completion", "zsh").stdout and "complete " in script
    tries = "".join(
        f"COMP_WORDS=(megalite {line.strip()}{' ' if line.endswith(' ') or not line else ''}"
        f"{chr(34) * 2 if line.endswith(' ') or not line else ''}); "
        'COMP_CWORD=$((${#COMP_WORDS[@]} - 1)); _megalite; echo "${COMPREPLY[*]}"\n'
        for line in MESSAGES["completions"]
    )
    (tmp_path / "megalite").write_text(f'#!/bin/sh\nexec {sys.executable} -m megalite "$@"\n')
    (tmp_path / "megalite").chmod(0o755)
    bash = shutil.which("bash")
    done = programs.run([bash, "-eu", "-c", f"PATH={tmp_path}:$PATH\n{script}\n{tries}"], cwd=ROOT, **PIPES)
    assert done.returncode == 0 and done.stderr == ""
    for (line, (present, absent)), output in zip(
        MESSAGES["completions"].items(), done.stdout.splitlines(), strict=True
    ):
        completions = set(output.split())
        assert set(present.split()) <= completions and not set(absent.split()) & completions, (line, output)


def test_closed_pipe_ends_a_command_quietly(tmp_path: Path) -> None:
    (tmp_path / "status.json").write_text('{"outcome": "done"}')
    line = [sys.executable, "-m", "megalite", "runs", str(tmp_path), "--json"]
    env = {**os.environ, "PYTHONUNBUFFERED": "1"}  # as with output that does not fit into a buffer
    process = programs.Popen(line, cwd=ROOT, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    process.stdout.close()  # as head does, here before the first line
    assert process.stderr.read() == "" and process.wait() == 141
