"""megalite from Python: every function with a real run, its error messages, the cost of its import, the notebook."""

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import documents
import programs
import pytest
import torch
from train_cases import ROOT, run_from

import megalite
from megalite import api
from megalite.nn.micro_batch import Batch, ForwardContext
from megalite.training.checkpointing.initial_state import load_initial_state

SMALL = megalite.Config(
    "--preset tiny --num-layers 2 --hidden-size 32 --ffn-hidden-size 64 --num-attention-heads 4 --num-query-groups 2"
    " --seq-length 32 --max-position-embeddings 32 --micro-batch-size 2 --global-batch-size 4 --eval-iters 1"
    " --log-interval 1 --mock-data --tokenizer-type ByteTokenizer --device cpu"
)
TOKENS_SB = [[1, 72], [256, 0], [9, 9]]
# message -> (prompts, arguments)
GENERATE: dict[str, tuple[Any, dict[str, Any]]] = {
    "max_new_tokens=-1 is not a whole number of 1 or more; give one": ("a", {"max_new_tokens": -1}),
    "max_new_tokens=2.5 is": ("a", {"max_new_tokens": 2.5}),
    "max_new_tokens='5' is": ("a", {"max_new_tokens": "5"}),
    "max_new_tokens=True is": ("a", {"max_new_tokens": True}),
    "batch_size=0 is not a whole number": ("a", {"batch_size": 0}),
    "batch_size=-1 is not a whole number": ("a", {"batch_size": -1}),
    "temperature='hot' is not a number of 0 or more; give one": ("a", {"temperature": "hot"}),
    "temperature=nan is": ("a", {"temperature": float("nan")}),
    "temperature=1000": ("a", {"temperature": 10**400}),
    "top_k=2.5 is not a whole number of 0 or more": ("a", {"top_k": 2.5}),
    "top_p=0 is not a number in (0, 1]": ("a", {"top_p": 0}),
    "top_p=None is": ("a", {"top_p": None}),
    "seed='x' is not a whole number": ("a", {"seed": "x"}),
    "prompts of type NoneType are not a text or a list of texts": (None, {}),
    "prompts of type bytes are": (b"a", {}),
    "prompts of type list are": ([1, 2], {}),
    "prompt 1 has characters that UTF-8 cannot encode": (["a", "\ud800"], {}),
    "prompt 0 has 100 tokens, the model 32 positions; shorten it": ("a" * 100, {}),
}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Yield the directory of a run of two steps on two pipeline stages, which is in the current directory.

    Commands are forked, so that they need not import torch again.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(api, "Popen", programs.Popen)
        patch.chdir(tmp_path_factory.mktemp("runs"))
        yield megalite.train(megalite.Config(SMALL, train_iters=2, nproc=2, pp=2, save="run"), quiet=True)


def test_api_train_returns_metrics_and_model(run: Path) -> None:
    rows = megalite.read_metrics(run)
    assert [row["step"] for row in rows if "train/loss" in row] == [1, 2] and "val/valid/loss" in rows[2]
    model = megalite.load(run, device="cpu")
    logits_SBV = model.logits(TOKENS_SB)
    assert logits_SBV.shape == (3, 2, 257) and logits_SBV.dtype == torch.float32 and model.step == 2
    facts = (
        "2 layers of 32, 4 heads, 2 of keys and values, 32 positions; ByteTokenizer, 257 tokens; step 2; float32 on cpu"
    )
    assert re.fullmatch(rf"Generator\([\d,]+ parameters: {facts}\)", repr(model))
    assert "(mlp): MLP(up [2, 64, 32], down [32, 64])" in repr(model.stage) and len(repr(model.stage)) < 600
    options = megalite.Config(SMALL, train_iters=2, load=run).options
    resumed = run_from(options)  # the same run, resumed on one rank
    assert load_initial_state(resumed, options)[0] is not None
    batch = Batch(torch.tensor(TOKENS_SB), None, None, torch.zeros(2, dtype=torch.int64))
    assert (
        resumed.pipeline.stages[0](None, batch, ForwardContext())[..., :257].equal(logits_SBV) and logits_SBV.std() > 0
    )
    assert model.generate(["a text", ""], 5, temperature=0)[:1] == model.generate("a text", 5, temperature=0)
    for wrong in ([1, 2], [[257]], [[-1]], [[0]] * 33, torch.zeros(2, 0, dtype=torch.int64)):
        with pytest.raises(megalite.ConfigError, match=r"are not ids below 257, \[S, B\] with S up to 32"):
            model.logits(wrong)
    for odd in ([[1], [2, 3]], "abc", [["a"]], None, [[1.5]], [[True]], [[2**70]]):
        with pytest.raises(megalite.ConfigError, match="^tokens .* ids below 257"):
            model.logits(odd)
    assert model.logits(torch.tensor([[1]], dtype=torch.uint8)).equal(model.logits([[1]]))
    for message, (texts, arguments) in GENERATE.items():
        with pytest.raises(megalite.ConfigError) as error:
            model.generate(texts, **{"max_new_tokens": 2, **arguments})
        assert str(error.value).startswith(message) and "\n" not in str(error.value)
    with pytest.raises(megalite.ConfigError, match="max_new_tokens=0 .*\nprompts of type NoneType .*\ntop_p=2 is not"):
        model.generate(None, 0, top_p=2)


def test_api_plan_describes_the_run(run: Path) -> None:
    result = megalite.plan(megalite.Config(preset="llama3-8b", global_batch_size=128), gpus=8, top=2)
    best, _ = result["plans"]
    assert best["seconds"] > 0 and best["peak"] < 80 * 2**30 and best["world"] == 8 and "8 x h100" in result["text"]
    options = megalite.Config(result["command"]).options
    assert options.parallel.tensor_model_parallel_size == best["layout"]["tp"] and options.model.num_layers == 32
    with pytest.raises(megalite.CommandError, match="as given: .* does not fit into"):
        megalite.plan(megalite.Config(preset="llama3-70b", global_batch_size=8, tp=1), gpus=1)


def test_api_convert_round_trips_weights(run: Path) -> None:
    assert megalite.convert("to_hf", run, "hf") == Path("hf")
    paths = run, "hf", megalite.convert("from_hf", "hf", "back", check_bits=True)
    first, *others = (megalite.load(path, device="cpu").logits(TOKENS_SB) for path in paths)
    assert all(other.equal(first) for other in others)


@pytest.mark.nightly(guards=("megalite/api.py", "tools/verify.py"))
def test_api_verify(run: Path) -> None:
    verdict = megalite.verify(megalite.Config(SMALL, train_iters=2, nproc=2, tp=2), steps=1)
    assert verdict["agrees"] and verdict["first"] is None and len(verdict["rows"]) > 10 and verdict["text"]


def test_api_invalid_argument_is_a_config_error(run: Path) -> None:
    small, path_rule = megalite.Config(SMALL, train_iters=2), "is not a path; give that of a directory"
    cases: dict[str, Any] = {
        "config='--preset tiny' is of type str, not a megalite.Config; give megalite.Config('--preset tiny')": [
            lambda: megalite.train("--preset tiny"),
            lambda: megalite.plan("--preset tiny", gpus=8),
            lambda: megalite.verify("--preset tiny"),
        ],
        "config=['--lr'] is of type list": [lambda: megalite.train(["--lr"])],
        "config=None is of type NoneType": [lambda: megalite.train(None)],
        "config=Config(model=": [lambda: megalite.train(small.options)],
        "help is for a terminal": [
            lambda: megalite.plan(small, gpus=1, help=True),
            lambda: megalite.verify(small, help=True),
            lambda: megalite.convert("to_hf", run, "x", help=True),
        ],
        "direction='to_onnx' is not one of to_hf, from_hf,": [lambda: megalite.convert("to_onnx", "a", "b")],
        "direction=None is not one": [lambda: megalite.convert(None, "a", "b")],
        f"source=None {path_rule}": [lambda: megalite.convert("to_hf", None, "b")],
        f"target=5 {path_rule}": [lambda: megalite.convert("to_hf", "a", 5)],
        f"run=5 {path_rule}": [lambda: megalite.read_metrics(5)],
        f"path='' {path_rule}": [lambda: megalite.load("")],
        "dtype='int4' is not one of float32, bfloat16; give one": [lambda: megalite.load(run, dtype="int4")],
        "dtype=torch.bfloat16 is not one": [lambda: megalite.load(run, dtype=torch.bfloat16)],
        "device='gpu' is not one of auto, cpu, cuda; give one": [lambda: megalite.load(run, device="gpu")],
        "plugins='x.py' is not a list of names": [lambda: megalite.load(run, plugins="x.py")],
        "plugins=None is not a list of names": [lambda: megalite.load(run, plugins=None)],
        '"--a \'b" cannot be split into arguments (No closing quotation)': [lambda: megalite.Config("--a 'b")],
        "5 is of type int, not a command line": [lambda: megalite.Config(5)],
        "['--lr', 0.001] is of type list, not": [lambda: megalite.Config(["--lr", 1e-3])],
        "lr={'a': 1} is of type dict; give a text": [lambda: megalite.Config(lr={"a": 1})],
        "data_path=[None] has a value of type NoneType;": [lambda: megalite.Config(data_path=[None])],
        "train_iters is a whole number of more than": [
            lambda: megalite.Config(train_iters=10**5000),
            lambda: megalite.Config(train_iters=[1, -(10**5000)]),
        ],
        "a value of type int is of type int, not a command line": [lambda: megalite.Config(10**5000)],
        "'a\\x00b' has a character that no argument may contain": [lambda: megalite.Config(save="a\0b")],
        "'\\ud800' has a character that no": [lambda: megalite.plan(megalite.Config(small, name="\ud800"), gpus=1)],
        "--lr needs a value": [lambda: megalite.Config(lr=True)],
    }
    for message, calls in cases.items():
        for call in calls:
            with pytest.raises(megalite.ConfigError) as error:
                call()
            assert str(error.value).startswith(message), str(error.value)[:200]


def test_api_too_many_arguments_are_a_config_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(api, "Popen", subprocess.Popen)
    config = megalite.Config(SMALL, data_path=["x" * 100] * 40_000)
    with pytest.raises(
        megalite.ConfigError, match="^400.. arguments are longer than a command line may be; put the options"
    ):
        megalite.plan(config, gpus=1)


def test_api_errors_equal_those_of_the_commands(run: Path) -> None:
    small = megalite.Config(SMALL, train_iters=2)
    absent = megalite.Config(small, mock_data=False, data_path="none/there")
    cases: dict[str, Any] = {
        "2 unknown flag --train-iterz; did you mean --train-iters?": lambda: megalite.Config(train_iterz=3),
        "2 lr='abc' is not a float; write it as one": lambda: megalite.train(megalite.Config(small, lr="abc")),
        "2 num_gpus=0 is not positive": lambda: megalite.plan(small, gpus=0),
        "2 unrecognized arguments: --chek": lambda: megalite.convert("to_hf", run, "x", chek=True),
        "2 steps=0 is below 1; give 1 or more": lambda: megalite.verify(small, steps=0),
        "3 none/there.idx: No such file": lambda: megalite.train(absent, quiet=True),
        "3 load='none' holds no checkpoint; give": lambda: megalite.load("none"),
        "2 none/metrics.jsonl does not exist; give": lambda: megalite.read_metrics("none"),
        "3 none holds no checkpoint that can be read": lambda: megalite.convert("to_hf", "none", "x"),
    }
    for message, call in cases.items():
        with pytest.raises((megalite.ConfigError, megalite.CommandError, FileNotFoundError)) as error:
            call()
        assert f"{getattr(error.value, 'code', 2)} {error.value}".startswith(message)


def test_api_ctrl_c_stops_the_run(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The run saves, and KeyboardInterrupt is raised once it has ended."""

    def press(text: str, **_: Any) -> None:
        if "step     1/" in text:
            raise KeyboardInterrupt

    monkeypatch.setattr(api, "print", press, raising=False)
    with pytest.raises(KeyboardInterrupt):
        megalite.train(megalite.Config(SMALL, train_iters=10_000, save="long"))
    status = json.loads(Path("long/status.json").read_text())
    assert status["outcome"] == "requeue" and 0 < status["checkpoint_step"] < 10_000


def test_api_command_line_of_arguments() -> None:
    line = "torchrun --nproc_per_node 8 pretrain_gpt.py \\\n --num-layers 2 --use-mcore-models"
    assert megalite.Config(line) == ("--num-layers", "2", "--use-mcore-models")
    named = megalite.Config(["--bf16"], lr=None, data_path=["a", "b"], no_load_optim=False, seed=-1)
    assert named == ("--bf16", "--data-path", "a", "b", "--load-optim", "--seed", "-1")


def test_api_import_is_cheap() -> None:
    text = "import sys, time; t = time.process_time(); import megalite; t = time.process_time() - t; megalite.Config; megalite.register;"
    text += "print(t, 'torch' in sys.modules, callable(megalite.train), f'{megalite.train.__module__}.{megalite.train.__name__}', *dir(megalite))"
    argv = [sys.executable, "-c", text]
    seconds, *facts = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, timeout=60).stdout.split()
    assert float(seconds) < 0.1 and facts[:3] == ["False", "True", "megalite.api.train"]
    assert {"Config", "train", "plan", "load", "convert", "verify", "read_metrics"} <= {*facts}


@pytest.mark.nightly(guards=("megalite/api.py", "examples/python.ipynb"))
def test_api_notebook_and_page(tmp_path: Path) -> None:
    cells = json.loads((ROOT / "examples/python.ipynb").read_text("utf-8"))["cells"]
    code = [cell for cell in cells if cell["cell_type"] == "code"]
    assert all(cell["outputs"] == [] for cell in code)
    output = programs.run_python(
        "-c", "\n".join("".join(cell["source"]) for cell in code), cwd=tmp_path, check=True
    ).stdout
    assert "step    20/20" in output and "torch.Size([6, 1, 257])" in output and "did you mean" in output
    assert (tmp_path / "models/notebook/config.json").is_file()
    fences = documents.fenced_blocks(
        ROOT / "docs/python.md"
    )  # those that import from modules: tests/docs/test_user_guides.py
    page = "\n".join(text for kind, text in fences if kind == "python" and not text.startswith("from megalite."))
    output = programs.run_python("-c", page, cwd=tmp_path, check=True, timeout=250).stdout
    assert "step    20/20" in output and "torch.Size([6, 1, 257])" in output and "\nTrue " in output


CHILDREN = {
    "ignored": "signal.signal(signal.SIGCHLD, signal.SIG_IGN)\nwork()",
    "ignored, in a thread": (
        "signal.signal(signal.SIGCHLD, signal.SIG_IGN)\n"
        "thread = threading.Thread(target=work)\nthread.start()\nthread.join()"
    ),
    "taken by a handler": (
        "def take(*_):\n    try:\n        while os.waitpid(-1, os.WNOHANG)[0]:\n            pass\n"
        "    except ChildProcessError:\n        pass\n"
        "signal.signal(signal.SIGCHLD, take)\nwork()"
    ),
}


@pytest.mark.parametrize("sigchld", CHILDREN)
def test_api_call_waits_for_the_command(sigchld: str, tmp_path: Path) -> None:
    """It waits although the child's exit code is lost: the caller ignores SIGCHLD, or waits for all its children."""
    text = f"""import os, signal, threading
import megalite
from megalite import api
def work():
    try:
        print(megalite.convert("to_hf", "none", "x"))
    except megalite.CommandError as error:
        print(error.code, str(error)[:15])
    try:
        print(api._run("plan", ["--num-gpus", "0"]))
    except megalite.ConfigError as error:
        print(str(error)[:10])
    print(api._run("--version", []))
{CHILDREN[sigchld]}
"""
    done = subprocess.run([sys.executable, "-c", text], cwd=ROOT, capture_output=True, text=True, timeout=200)
    assert done.stdout.split("\n")[:2] == ["3 none holds no c", "num_gpus=0"], done.stdout + done.stderr
    assert done.stdout.split("\n")[2].startswith("megalite 0.")


def test_api_killed_command_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A plugin ends the run's only process with exit code 0."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(api, "Popen", programs.Popen)
    Path("mine.py").write_text(
        "import megalite, os\nclass Ends:\n    def on_train_step_end(self, *_):\n        os._exit(0)\n"
        "megalite.register('callback', 'ends', Ends())\n"
    )
    with pytest.raises(megalite.CommandError, match="^it was ended before it had reported") as error:
        megalite.train(megalite.Config(SMALL, train_iters=2, plugin="mine.py", save="run"), quiet=True)
    assert error.value.code == 1
