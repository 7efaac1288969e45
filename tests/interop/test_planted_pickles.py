"""A pickle in place of every file of a run or of an external model.

The trainer and every tool refuse it by name or ignore it. Nothing is unpickled between the raw text and an exported
model.
"""

import json
import os
import pickle
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import programs
import pytest
import torch
from checkpoint_loads import replace_manifest
from hugging_face_cases import write_tokenizer
from make_fixtures import CASES, FIXTURES, write_tokens
from safetensors import safe_open
from test_convert_megatron import Calls
from test_convert_mutations import hub
from tokenizers import Tokenizer, models
from train_cases import config_from, run_from

import megalite
from megalite.checkpoint.storage.location import CheckpointError
from megalite.data.errors import DataError
from megalite.data.tokenizers.build_tokenizer import build_tokenizer
from megalite.generate import generation as generate
from megalite.interop.huggingface.model_files import INDEX, open_model
from megalite.parallel.mesh import Mesh
from megalite.training.checkpointing import initial_state as origin
from megalite.training.checkpointing.initial_state import load_initial_state
from megalite.training.setup import SetupError
from tools import checkpoint
from tools import convert_checkpoint as convert
from tools import preprocess_data as preprocess

ROOT = Path(__file__).resolve().parents[2]
STORED = FIXTURES / megalite.__version__ / "fp64" / "iter_0000002"
EVENTS = {"pickle.find_class", "os.system", "os.exec", "os.posix_spawn", "subprocess.Popen", "os.fork"}
watching: list[str] | None = None


def _hook(event: str, args: Any) -> None:
    if watching is not None and event in EVENTS:
        watching.append(f"{event} {args}")


sys.addaudithook(_hook)  # an audit hook cannot be removed; it costs a comparison


@pytest.fixture
def ran() -> Iterator[list[str]]:
    """Yield the events of this process during the test that look up a class for a pickle or start a program."""
    global watching
    watching = []
    yield watching
    watching = None


def refusal_message(action: Callable[[], Any]) -> str:
    """Return the message with which `action` is refused, or "" if it is not."""
    try:
        action()
    except (CheckpointError, SetupError, DataError) as error:
        return str(error)
    return ""


def test_audit_hook_sees_a_pickle(ran: list[str], tmp_path: Path) -> None:
    pickle.loads(pickle.dumps(Calls(os.mkdir, str(tmp_path / "canary"))))
    assert (tmp_path / "canary").is_dir() and "pickle.find_class" in ran[0]


@pytest.mark.parametrize("protocol", [0, 4])
def test_pickle_in_any_file_of_a_run_is_not_loaded(
    protocol: int, tmp_path: Path, ran: list[str], capsys, monkeypatch
) -> None:
    case, canary, run_dir = CASES["fp64"], tmp_path / "canary", tmp_path / "run"
    evil = pickle.dumps(Calls(os.mkdir, str(canary)), protocol)
    monkeypatch.chdir(tmp_path)
    write_tokens(tmp_path)
    config = config_from([*case["flags"].split(), "--load", str(run_dir)])
    run = run_from(config, dtype=torch.float64)
    names = sorted(path.name for path in STORED.iterdir())
    assert len(names) == 6
    for name in names:
        shutil.copytree(STORED, run_dir / STORED.name)
        (run_dir / STORED.name / name).write_bytes(evil)
        reported_name = "manifest.json" if name == "COMPLETE" else name  # the hash in COMPLETE does not match
        for load in (
            lambda: load_initial_state(run, config),
            lambda: generate.load_model(run_dir, Mesh.single_process()),
        ):
            assert reported_name in refusal_message(load)
        for argv in (["verify", run_dir], ["reshard", run_dir, tmp_path / "out"]):
            assert checkpoint.main([str(arg) for arg in argv]) != 0 and reported_name in "".join(capsys.readouterr())
        for target in ("--to-hf", "--to-megatron"):
            assert convert.main(["--load", str(run_dir), target, str(tmp_path / "out")]) == 3
            assert reported_name in "".join(capsys.readouterr())
        shutil.rmtree(run_dir)
    assert run.progress.step == 0 and ran == [] and not canary.exists()
    remaining_files = sorted(path.name for path in tmp_path.rglob("*") if path.is_file())
    assert remaining_files == ["tokens.bin", "tokens.idx"]  # a refusal leaves no output


def test_pickle_next_to_checkpoints_is_not_loaded(tmp_path: Path) -> None:
    """The program continues. With a pickle in each checkpoint it fails instead of starting from scratch."""
    run_dir = tmp_path / "run with späces"
    shape = "--num-layers 1 --hidden-size 8 --num-attention-heads 2 --seq-length 8 --max-position-embeddings 8 "
    shape += "--vocab-size 21 --micro-batch-size 2 --global-batch-size 2 --lr 0.01 --lr-decay-iters 9 --mock-data --eval-iters 0"
    save_flags = ["--save", str(run_dir), "--load", str(run_dir), "--save-interval", "2"]

    def program(train_iters: int) -> tuple[int, str]:
        result = programs.run_python(
            "pretrain_gpt.py", *shape.split(), "--train-iters", str(train_iters), *save_flags, cwd=tmp_path
        )
        return result.returncode, result.stdout + result.stderr

    assert program(2)[0] == 0
    evil = pickle.dumps(Calls(os.mkdir, str(tmp_path / "canary")), 4)
    other_files = [path for path in run_dir.rglob("*") if path.is_file() and "iter_" not in str(path)]
    assert len(other_files) >= 5
    for path in [
        *other_files,
        *(run_dir / name for name in ("iter_0000002/evil.pt", "iter_0000002/KEEP", ".metadata")),
    ]:
        path.write_bytes(evil)
    code, output = program(4)
    assert code == 0 and "at step 2" in output, output
    for name in ("iter_0000002/manifest.json", "iter_0000004/rank-00000.safetensors"):
        (run_dir / name).write_bytes(evil)
    code, output = program(6)
    assert code == 3 and "no checkpoint in it is valid" in output and "Traceback" not in output, output
    assert not (run_dir / "iter_0000006").exists() and not (tmp_path / "canary").exists()
    save_flags[1] = str(run_dir / "metrics.jsonl")  # a file: detected at the start, not by the first save
    code, output = program(6)
    assert code == 3 and "cannot be written" in output and "step" not in output, output


def test_pickle_in_any_file_of_an_external_model_is_not_loaded(
    tmp_path: Path, ran: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    hub("config.json")(tmp_path / "model")
    write_tokenizer(tmp_path / "model", 20)
    with safe_open(tmp_path / "model" / "model.safetensors", "pt") as file:
        index = {"weight_map": dict.fromkeys(file.keys(), "model.safetensors")}
    (tmp_path / "model" / INDEX).write_text(json.dumps(index))
    evil = pickle.dumps(Calls(os.mkdir, str(tmp_path / "canary")), 4)
    flags = "--micro-batch-size 2 --global-batch-size 2 --train-iters 2 --lr 1 --mock-data".split()
    names = sorted(path.name for path in (tmp_path / "model").iterdir())
    assert len(names) == 7
    ran.clear()  # the events of creating the model
    for name in names:
        model_dir = shutil.copytree(tmp_path / "model", tmp_path / "bad")
        (model_dir / name).write_bytes(evil)
        is_model_file = name in ("config.json", "model.safetensors", INDEX)
        argv = [*flags, "--use-checkpoint-args", "--load", str(model_dir)]
        complete = lambda: origin.complete_config(config_from(argv))  # noqa: B023, E731
        message = refusal_message(lambda: generate.load_model(model_dir, Mesh.single_process()))  # noqa: B023
        code = convert.main(["--from-hf", str(model_dir), "--save", str(tmp_path / "out")])
        output = "".join(capsys.readouterr())
        if is_model_file:
            assert name in refusal_message(complete) and name in message and code == 3 and name in output
        else:  # an unreadable tokenizer is left out, or the tool that needs it names it
            refusal_message(complete)
            assert code == 0 or name in output
        assert "Traceback" not in output
        shutil.rmtree(tmp_path / "out", ignore_errors=True)
        shutil.rmtree(model_dir)
    assert ran == [] and not (tmp_path / "canary").exists()


def test_text_to_text_unpickles_nothing(tmp_path: Path, ran: list[str], monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.jsonl").write_text('{"text": "the river rose"}\n' * 20)
    flags = "--input text.jsonl --output-prefix mine --tokenizer-type ByteTokenizer --workers 1 --append-eod"
    assert preprocess.main(flags.split()) == 0
    hub("config.json")(tmp_path / "model")
    write_tokenizer(tmp_path / "model", 20)
    assert convert.main(["--from-hf", "model", "--save", "begin", "--check-bits"]) == 0
    assert generate.load_model("begin", Mesh.single_process()).step == 0
    assert checkpoint.main(["verify", "begin"]) == 0
    assert convert.main(["--load", "begin", "--to-hf", "back", "--check-bits"]) == 0
    assert ran == []


def test_code_next_to_a_tokenizer_or_model_is_not_run(tmp_path: Path) -> None:
    """Plant code that transformers would run with trust_remote_code."""
    canary = tmp_path / "ran"
    Tokenizer(models.BPE({"<|endoftext|>": 0, "a": 1}, [])).save(str(tmp_path / "tokenizer.json"))
    names = {
        "AutoTokenizer": ["evil.Evil", "evil.Evil"],
        "AutoConfig": "evil.Evil",
        "AutoModelForCausalLM": "evil.Evil",
    }
    for name in ("tokenizer_config.json", "config.json"):
        shape = {"model_type": "evil", "auto_map": names, "tokenizer_class": "Evil", "eos_token": "<|endoftext|>"}
        (tmp_path / name).write_text(json.dumps(shape))
    for name in ("evil.py", "__init__.py", "conftest.py"):
        (tmp_path / name).write_text(f"open({str(canary)!r}, 'w')\nclass Evil: pass\n")
    assert build_tokenizer("HuggingFaceTokenizer", str(tmp_path)).encode("a") == [1]
    with pytest.raises(CheckpointError, match="model_type='evil' is not one of"):
        open_model(tmp_path)
    assert not canary.exists()


# ---- valid hashes of an invalid configuration
BAD = {
    "no configuration": ("config = ", None),
    "not TOML": ("num_layers = 1", "num_layers = "),
    "heads that do not divide": ("num_attention_heads = 2", "num_attention_heads = 3"),
    "another model": ("ffn_hidden_size = 12", "ffn_hidden_size = 16"),
}


@pytest.mark.parametrize("target", ["--to-hf", "--to-megatron"])
@pytest.mark.parametrize("name", BAD)
def test_impossible_configuration_is_refused(name: str, target: str, tmp_path: Path, capsys) -> None:
    checkpoint_dir = shutil.copytree(STORED, tmp_path / "run" / STORED.name)
    data = json.loads((checkpoint_dir / "manifest.json").read_text())
    old, new = BAD[name]
    if new is None:
        del data["state"]["config"]
    else:
        assert old in data["state"]["config"]
        data["state"]["config"] = data["state"]["config"].replace(old, new)
    replace_manifest(checkpoint_dir, data)
    assert convert.main(["--load", str(tmp_path / "run"), target, str(tmp_path / "out")]) == 3
    error = capsys.readouterr().err
    assert "convert_checkpoint.py: " in error, error
    assert not (tmp_path / "out").exists() or not [path for path in (tmp_path / "out").rglob("*") if path.is_file()]
