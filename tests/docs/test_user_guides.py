"""What a page tells a newcomer to type, typed in an empty folder in the page's order: with fewer steps, else as it stands."""

import json
import os
import random
import sys
from pathlib import Path

import documents
import programs
import pytest
import toml_tables
from documents import ROOT
from token_files import byte_level_bpe

pytestmark = pytest.mark.timeout(900)
REQUEUE = 75
SHORTER = toml_tables.read("docs/user_guides")


class Shell:
    """Runs a page's lines in `folder`."""

    def __init__(self, folder: Path, shorter: dict[str, str]):
        self.folder, self.shorter = folder, shorter

    def type(self, command: documents.Command, code: int = 0) -> str:
        line = " ".join(command.words)
        program, *words = command.words
        words += [word for part, more in self.shorter.items() if part in line for word in more.split()]
        if program == "python":
            return self.python(str(ROOT / words[0]), *words[1:], code=code)
        assert program == "megalite"
        return self.python("-m", "megalite", *words, code=code)

    def python(self, *words: str, code: int = 0) -> str:
        env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        how = dict(cwd=self.folder, env=env, capture_output=True, text=True, timeout=600)
        done = programs.run([sys.executable, *words], **how)
        assert done.returncode == code, f"{words}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
        return done.stdout


def blocks(page: str, language: str) -> list[str]:
    path = ROOT / ("" if page == "README.md" else "docs") / page
    return [text for kind, text in documents.fences(path) if kind == language]


def typed(page: str) -> list[documents.Command]:
    """The commands of a page's blocks, in order, without the installation."""
    found = [command for block in blocks(page, "bash") for command in documents.commands_of(block, page)]
    return [command for command in found if command.words[0] != "pip"]


def text(folder: Path, words: int) -> None:
    """Documents of many different words, so that a tokenizer finds as many pieces as it is asked for."""
    rng = random.Random(5)
    known = ["".join(rng.choices("abcdefghijklmnoprstuvwz", k=rng.randint(4, 9))) for _ in range(words)]
    folder.mkdir()
    with (folder / "a.jsonl").open("w") as file:
        for _ in range(words // 8):
            file.write('{"text": "Once ' + " ".join(rng.choices(known, k=40)) + '"}\n')


def random_qwen(folder: Path) -> None:
    """A Qwen3 of a few thousand random weights, with a tokenizer of the same kind."""
    import torch
    from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(3)
    bpe = byte_level_bpe(["Once upon a time"], 320)
    PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token="<|endoftext|>").save_pretrained(folder)
    shape = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4)
    shape |= dict(num_key_value_heads=2, head_dim=8, max_position_embeddings=4096, vocab_size=320)
    Qwen3ForCausalLM(Qwen3Config(**shape)).save_pretrained(folder)


@pytest.mark.nightly(guards=("README.md",))
def test_readme_from_text_to_an_exported_model(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    shell = Shell(tmp_path, SHORTER["readme"])
    text(tmp_path / "text", 12_000)
    random_qwen(tmp_path / "models/Qwen3-8B")
    begins = [
        f"python tools/{words}" for words in ("train_tokenizer", "convert_checkpoint.py --from-hf", "preprocess_data")
    ]
    lines = [next(block for block in blocks("README.md", "bash") if block.startswith(begin)) for begin in begins]
    said = [shell.type(one) for line in lines for one in documents.commands_of(line, "README.md")]
    assert "8,600" in said[2] and "saved iter_0000004" in said[2]  # the plan: the tokenizer's vocabulary
    assert said[3].startswith("[step 4] Once")
    assert all("all bits equal" in one for one in said[4:6]), said[4:6]
    for folder in ("models/mine", "models/Qwen3-8B-mine"):
        assert AutoModelForCausalLM.from_pretrained(tmp_path / folder).config.num_hidden_layers == 2


@pytest.mark.nightly(guards=("docs/tutorial.md", "docs/python.md"))
def test_tutorial(tmp_path: Path) -> None:
    shell = Shell(tmp_path, SHORTER["tutorial"])
    (config,) = blocks("tutorial.md", "toml")
    (tmp_path / "run.toml").write_text(config)
    for command in typed("tutorial.md"):
        stopped = "--exit-interval" in command.words
        said = shell.type(command, code=REQUEUE if stopped else 0)
        if "convert" in command.words:
            assert "all bits equal" in said and "likeliest token the same in 100.00%" in said
        if "generate" in command.words:
            assert said.startswith("[step 8] def __init__(self")
        if "verify" in command.words:
            assert said.count("all as they were written") == 2
        if "--dry-run" in command.words:
            assert not (tmp_path / "runs").exists() and "layers per stage" in said
        elif "--pipeline-model-parallel-size" in command.words:
            assert "resumed from runs/first/iter_0000004 at step 4" in said
    assert json.loads((tmp_path / "runs/first/status.json").read_text())["outcome"] == "done"
    assert (tmp_path / "loss.png").stat().st_size > 5000
    (program,) = blocks("tutorial.md", "python")
    assert shell.python("-c", program).startswith("import os")
    examples = [program for program in blocks("python.md", "python") if program.startswith("from megalite.")]
    said = [shell.python("-c", program) for program in examples]  # in the tutorial's folder
    tokens = str((tmp_path / "data/python_text_document.bin").stat().st_size // 2)
    parts = (tokens, "model/embedding.word (8000, 128) torch.float32", "1 RF1.0")
    assert all(part in one for part, one in zip(parts, said, strict=True)), said


@pytest.mark.nightly(guards=("docs/from_hugging_face.md",))
def test_guide_from_hugging_face(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    shell = Shell(tmp_path, SHORTER["hugging_face"])
    text(tmp_path / "text", 2_000)
    random_qwen(tmp_path / "models/Qwen3-8B")
    said = {" ".join(command.words[:4]): shell.type(command) for command in typed("from_hugging_face.md")}
    assert sum("all bits equal" in one for one in said.values()) == 2
    for folder in ("models/Qwen3-8B-mine", "models/Qwen3-8B-step"):
        assert AutoModelForCausalLM.from_pretrained(tmp_path / folder).config.num_hidden_layers == 2
    # the same command again continues, as the page says, with nothing left to do
    (train,) = [command for command in typed("from_hugging_face.md") if command.words[1] == "train"]
    words = [word for word in train.words if word not in ("--export-hf", "models/Qwen3-8B-mine")]
    again = shell.type(documents.Command(train.place, tuple(words)))
    assert "iter_0000002" in again and "start from scratch" not in again


@pytest.mark.nightly(guards=("docs/from_megatron.md",))
def test_guide_from_megatron(tmp_path: Path) -> None:
    """`old/checkpoints` is in Megatron-LM's format, for two ranks."""
    shell = Shell(tmp_path, SHORTER["megatron"])
    text(tmp_path / "text", 2_000)
    for command in documents.commands_of(SHORTER["before"], "before"):
        shell.type(command)
    plan, train, to_us, to_them = typed("from_megatron.md")
    assert "6,738,415,616" in shell.type(plan)  # a Llama 2 of 7 B
    assert "weights of" in shell.type(train) and (tmp_path / "runs/mine/iter_0000002").is_dir()
    assert "all bits equal" in shell.type(to_us)
    shell.type(to_them)
    assert {path.name for path in (tmp_path / "new/checkpoints/release").iterdir()} == {"mp_rank_00", "mp_rank_01"}


@pytest.mark.nightly(guards=("docs/index.md",))
def test_guide_first_page(tmp_path: Path) -> None:
    shell = Shell(tmp_path, SHORTER["first_page"])
    (command,) = typed("index.md")
    assert "done: reached the last step" in shell.type(command)
