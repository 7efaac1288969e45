"""A pickle in the place of every file that is read, of a run and of a foreign model: refused by name or left alone, by
the trainer and by every tool. Nothing is unpickled on the way of a model from text to text."""

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
from checkpoint_loads import reseal
from hugging_face_cases import with_tokenizer
from make_fixtures import CASES, FOLDER, write_tokens
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
STORED = FOLDER / megalite.__version__ / "fp64" / "iter_0000002"
EVENTS = {"pickle.find_class", "os.system", "os.exec", "os.posix_spawn", "subprocess.Popen", "os.fork"}
watching: list[str] | None = None


def _hook(event: str, args: Any) -> None:
    if watching is not None and event in EVENTS:
        watching.append(f"{event} {args}")


sys.addaudithook(_hook)  # there is no way to take one out; it costs a comparison


@pytest.fixture
def ran() -> Iterator[list[str]]:
    """What looks up a class for a pickle, or starts a program, in this process during the test."""
    global watching
    watching = []
    yield watching
    watching = None


def refused(do: Callable[[], Any]) -> str:
    """What a refusal says; empty where there is none."""
    try:
        do()
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
    case, canary, run_folder = CASES["fp64"], tmp_path / "canary", tmp_path / "run"
    evil = pickle.dumps(Calls(os.mkdir, str(canary)), protocol)
    monkeypatch.chdir(tmp_path)
    write_tokens(tmp_path)
    config = config_from([*case["flags"].split(), "--load", str(run_folder)])
    run = run_from(config, dtype=torch.float64)
    names = sorted(path.name for path in STORED.iterdir())
    assert len(names) == 6
    for name in names:
        shutil.copytree(STORED, run_folder / STORED.name)
        (run_folder / STORED.name / name).write_bytes(evil)
        shown = "manifest.json" if name == "COMPLETE" else name  # which says that they do not belong together
        for reads in (
            lambda: load_initial_state(run, config),
            lambda: generate.load_model(run_folder, Mesh.single_process()),
        ):
            assert shown in refused(reads)
        for words in (["verify", run_folder], ["reshard", run_folder, tmp_path / "out"]):
            assert checkpoint.main([str(word) for word in words]) != 0 and shown in "".join(capsys.readouterr())
        for target in ("--to-hf", "--to-megatron"):
            assert convert.main(["--load", str(run_folder), target, str(tmp_path / "out")]) == 3
            assert shown in "".join(capsys.readouterr())
        shutil.rmtree(run_folder)
    assert run.progress.step == 0 and ran == [] and not canary.exists()
    left = sorted(path.name for path in tmp_path.rglob("*") if path.is_file())
    assert left == ["tokens.bin", "tokens.idx"]  # nothing is written of what is refused


def test_pickle_next_to_checkpoints_is_not_loaded(tmp_path: Path) -> None:
    """The program runs on. With one in each checkpoint it ends with an error, and not with a fresh start."""
    folder = tmp_path / "run with späces"
    shape = "--num-layers 1 --hidden-size 8 --num-attention-heads 2 --seq-length 8 --max-position-embeddings 8 "
    shape += "--vocab-size 21 --micro-batch-size 2 --global-batch-size 2 --lr 0.01 --lr-decay-iters 9 --mock-data --eval-iters 0"
    where = ["--save", str(folder), "--load", str(folder), "--save-interval", "2"]

    def program(last: int) -> tuple[int, str]:
        done = programs.python("pretrain_gpt.py", *shape.split(), "--train-iters", str(last), *where, cwd=tmp_path)
        return done.returncode, done.stdout + done.stderr

    assert program(2)[0] == 0
    evil = pickle.dumps(Calls(os.mkdir, str(tmp_path / "canary")), 4)
    beside = [path for path in folder.rglob("*") if path.is_file() and "iter_" not in str(path)]
    assert len(beside) >= 5
    for path in [*beside, *(folder / name for name in ("iter_0000002/evil.pt", "iter_0000002/KEEP", ".metadata"))]:
        path.write_bytes(evil)
    code, said = program(4)
    assert code == 0 and "at step 2" in said, said
    for name in ("iter_0000002/manifest.json", "iter_0000004/rank-00000.safetensors"):
        (folder / name).write_bytes(evil)
    code, said = program(6)
    assert code == 3 and "no checkpoint in it is valid" in said and "Traceback" not in said, said
    assert not (folder / "iter_0000006").exists() and not (tmp_path / "canary").exists()
    where[1] = str(folder / "metrics.jsonl")  # a file: found at the start, not by the first save
    code, said = program(6)
    assert code == 3 and "cannot be written" in said and "step" not in said, said


def test_pickle_in_any_file_of_an_external_model_is_not_loaded(
    tmp_path: Path, ran: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    hub("config.json")(tmp_path / "model")
    with_tokenizer(tmp_path / "model", 20)
    with safe_open(tmp_path / "model" / "model.safetensors", "pt") as file:
        index = {"weight_map": dict.fromkeys(file.keys(), "model.safetensors")}
    (tmp_path / "model" / INDEX).write_text(json.dumps(index))
    evil = pickle.dumps(Calls(os.mkdir, str(tmp_path / "canary")), 4)
    flags = "--micro-batch-size 2 --global-batch-size 2 --train-iters 2 --lr 1 --mock-data".split()
    names = sorted(path.name for path in (tmp_path / "model").iterdir())
    assert len(names) == 7
    ran.clear()  # what has made the model
    for name in names:
        folder = shutil.copytree(tmp_path / "model", tmp_path / "bad")
        (folder / name).write_bytes(evil)
        weights = name in ("config.json", "model.safetensors", INDEX)
        words = [*flags, "--use-checkpoint-args", "--load", str(folder)]
        begin = lambda: origin.complete_config(config_from(words))  # noqa: B023, E731
        text = refused(lambda: generate.load_model(folder, Mesh.single_process()))  # noqa: B023
        code = convert.main(["--from-hf", str(folder), "--save", str(tmp_path / "out")])
        said = "".join(capsys.readouterr())
        if weights:
            assert name in refused(begin) and name in text and code == 3 and name in said
        else:  # a tokenizer that cannot be read is left away, or what needs it says so
            refused(begin)
            assert code == 0 or name in said
        assert "Traceback" not in said
        shutil.rmtree(tmp_path / "out", ignore_errors=True)
        shutil.rmtree(folder)
    assert ran == [] and not (tmp_path / "canary").exists()


def test_text_to_text_unpickles_nothing(tmp_path: Path, ran: list[str], monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.jsonl").write_text('{"text": "the river rose"}\n' * 20)
    words = "--input text.jsonl --output-prefix mine --tokenizer-type ByteTokenizer --workers 1 --append-eod"
    assert preprocess.main(words.split()) == 0
    hub("config.json")(tmp_path / "model")
    with_tokenizer(tmp_path / "model", 20)
    assert convert.main(["--from-hf", "model", "--save", "begin", "--check-bits"]) == 0
    assert generate.load_model("begin", Mesh.single_process()).step == 0
    assert checkpoint.main(["verify", "begin"]) == 0
    assert convert.main(["--load", "begin", "--to-hf", "back", "--check-bits"]) == 0
    assert ran == []


def test_code_next_to_a_tokenizer_or_model_is_not_run(tmp_path: Path) -> None:
    """Where transformers runs it, if it is told to trust it."""
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


# ---- hashes that are right of a configuration that is not
BAD = {
    "no configuration": ("config = ", None),
    "not TOML": ("num_layers = 1", "num_layers = "),
    "heads that do not divide": ("num_attention_heads = 2", "num_attention_heads = 3"),
    "another model": ("ffn_hidden_size = 12", "ffn_hidden_size = 16"),
}


@pytest.mark.parametrize("target", ["--to-hf", "--to-megatron"])
@pytest.mark.parametrize("name", BAD)
def test_impossible_configuration_is_refused(name: str, target: str, tmp_path: Path, capsys) -> None:
    folder = shutil.copytree(STORED, tmp_path / "run" / STORED.name)
    data = json.loads((folder / "manifest.json").read_text())
    old, new = BAD[name]
    if new is None:
        del data["state"]["config"]
    else:
        assert old in data["state"]["config"]
        data["state"]["config"] = data["state"]["config"].replace(old, new)
    reseal(folder, data)
    assert convert.main(["--load", str(tmp_path / "run"), target, str(tmp_path / "out")]) == 3
    said = capsys.readouterr().err
    assert "convert_checkpoint.py: " in said, said
    assert not (tmp_path / "out").exists() or not [path for path in (tmp_path / "out").rglob("*") if path.is_file()]
