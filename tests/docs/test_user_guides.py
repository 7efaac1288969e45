"""The commands of the guides, run in an empty directory in the order of the page, unchanged except for fewer steps."""

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
SHORTER = toml_tables.read_table("docs/user_guides")


class Shell:
    """A shell that runs the commands of a page.

    Attributes:
        directory: The working directory.
        shorter: Parts of commands, and the flags that are added to a command with such a part.
    """

    def __init__(self, directory: Path, shorter: dict[str, str]):
        self.directory, self.shorter = directory, shorter

    def type(self, command: documents.Command, code: int = 0) -> str:
        line = " ".join(command.argv)
        program, *args = command.argv
        args += [flag for part, flags in self.shorter.items() if part in line for flag in flags.split()]
        if program == "python":
            return self.python(str(ROOT / args[0]), *args[1:], code=code)
        assert program == "megalite"
        return self.python("-m", "megalite", *args, code=code)

    def python(self, *args: str, code: int = 0) -> str:
        env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        options = dict(cwd=self.directory, env=env, capture_output=True, text=True, timeout=600)
        result = programs.run([sys.executable, *args], **options)
        assert result.returncode == code, f"{args}\n{result.stdout[-3000:]}\n{result.stderr[-3000:]}"
        return result.stdout


def blocks(page: str, language: str) -> list[str]:
    path = ROOT / ("" if page == "README.md" else "docs") / page
    return [block for kind, block in documents.fenced_blocks(path) if kind == language]


def page_commands(page: str) -> list[documents.Command]:
    """Return the commands of a page's blocks, in order, without the installation."""
    commands = [command for block in blocks(page, "bash") for command in documents.commands_of(block, page)]
    return [command for command in commands if command.argv[0] != "pip"]


def write_text_files(directory: Path, num_words: int) -> None:
    """Write documents with many different words, so that a tokenizer finds as many pieces as it is asked for."""
    rng = random.Random(5)
    vocabulary = ["".join(rng.choices("abcdefghijklmnoprstuvwz", k=rng.randint(4, 9))) for _ in range(num_words)]
    directory.mkdir()
    with (directory / "a.jsonl").open("w") as file:
        for _ in range(num_words // 8):
            file.write('{"text": "Once ' + " ".join(rng.choices(vocabulary, k=40)) + '"}\n')


def save_random_qwen(directory: Path) -> None:
    """Save a Qwen3 with a few thousand random weights, and a tokenizer of the same kind."""
    import torch
    from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(3)
    bpe = byte_level_bpe(["Once upon a time"], 320)
    PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token="<|endoftext|>").save_pretrained(directory)
    shape = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4)
    shape |= dict(num_key_value_heads=2, head_dim=8, max_position_embeddings=4096, vocab_size=320)
    Qwen3ForCausalLM(Qwen3Config(**shape)).save_pretrained(directory)


@pytest.mark.nightly(guards=("README.md",))
def test_readme_from_text_to_an_exported_model(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    shell = Shell(tmp_path, SHORTER["readme"])
    write_text_files(tmp_path / "text", 12_000)
    save_random_qwen(tmp_path / "models/Qwen3-8B")
    tools = ("train_tokenizer", "convert_checkpoint.py --from-hf", "preprocess_data")
    starts = [f"python tools/{tool}" for tool in tools]
    selected = [next(block for block in blocks("README.md", "bash") if block.startswith(start)) for start in starts]
    outputs = [shell.type(command) for block in selected for command in documents.commands_of(block, "README.md")]
    assert "8,600" in outputs[2] and "saved iter_0000004" in outputs[2]  # the plan has the tokenizer's vocabulary
    assert outputs[3].startswith("[step 4] Once")
    assert all("all bits equal" in output for output in outputs[4:6]), outputs[4:6]
    for directory in ("models/mine", "models/Qwen3-8B-mine"):
        assert AutoModelForCausalLM.from_pretrained(tmp_path / directory).config.num_hidden_layers == 2


@pytest.mark.nightly(guards=("docs/tutorial.md", "docs/python.md"))
def test_tutorial(tmp_path: Path) -> None:
    shell = Shell(tmp_path, SHORTER["tutorial"])
    (config,) = blocks("tutorial.md", "toml")
    (tmp_path / "run.toml").write_text(config)
    for command in page_commands("tutorial.md"):
        is_stopped = "--exit-interval" in command.argv
        output = shell.type(command, code=REQUEUE if is_stopped else 0)
        if "convert" in command.argv:
            assert "all bits equal" in output and "likeliest token the same in 100.00%" in output
        if "generate" in command.argv:
            assert output.startswith("[step 8] def __init__(self")
        if "verify" in command.argv:
            assert output.count("all as they were written") == 2
        if "--dry-run" in command.argv:
            assert not (tmp_path / "runs").exists() and "layers per stage" in output
        elif "--pipeline-model-parallel-size" in command.argv:
            assert "resumed from runs/first/iter_0000004 at step 4" in output
    assert json.loads((tmp_path / "runs/first/status.json").read_text())["outcome"] == "done"
    assert (tmp_path / "loss.png").stat().st_size > 5000
    (program,) = blocks("tutorial.md", "python")
    assert shell.python("-c", program).startswith("import os")
    examples = [program for program in blocks("python.md", "python") if program.startswith("from megalite.")]
    outputs = [shell.python("-c", program) for program in examples]  # in the directory of the tutorial
    tokens = str((tmp_path / "data/python_text_document.bin").stat().st_size // 2)
    parts = (tokens, "model/embedding.word (8000, 128) torch.float32", "1 RF1.0")
    assert all(part in output for part, output in zip(parts, outputs, strict=True)), outputs


@pytest.mark.nightly(guards=("docs/from_hugging_face.md",))
def test_guide_from_hugging_face(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    shell = Shell(tmp_path, SHORTER["hugging_face"])
    write_text_files(tmp_path / "text", 2_000)
    save_random_qwen(tmp_path / "models/Qwen3-8B")
    outputs = {" ".join(command.argv[:4]): shell.type(command) for command in page_commands("from_hugging_face.md")}
    assert sum("all bits equal" in output for output in outputs.values()) == 2
    for directory in ("models/Qwen3-8B-mine", "models/Qwen3-8B-step"):
        assert AutoModelForCausalLM.from_pretrained(tmp_path / directory).config.num_hidden_layers == 2
    # the same command resumes, as the page says, and has nothing left to do
    (train,) = [command for command in page_commands("from_hugging_face.md") if command.argv[1] == "train"]
    args = [arg for arg in train.argv if arg not in ("--export-hf", "models/Qwen3-8B-mine")]
    resumed_output = shell.type(documents.Command(train.location, tuple(args)))
    assert "iter_0000002" in resumed_output and "start from scratch" not in resumed_output


@pytest.mark.nightly(guards=("docs/from_megatron.md",))
def test_guide_from_megatron(tmp_path: Path) -> None:
    """`old/checkpoints` is in Megatron-LM's format, for two ranks."""
    shell = Shell(tmp_path, SHORTER["megatron"])
    write_text_files(tmp_path / "text", 2_000)
    for command in documents.commands_of(SHORTER["before"], "before"):
        shell.type(command)
    plan, train, import_command, export_command, hybrid_command = page_commands("from_megatron.md")
    assert "6,738,415,616" in shell.type(plan)  # a Llama 2 of 7 B
    assert "weights of" in shell.type(train) and (tmp_path / "runs/mine/iter_0000002").is_dir()
    assert "all bits equal" in shell.type(import_command)
    shell.type(export_command)
    assert {path.name for path in (tmp_path / "new/checkpoints/release").iterdir()} == {"mp_rank_00", "mp_rank_01"}
    shell.type(hybrid_command)
    assert {path.name for path in (tmp_path / "new/hybrid/release").iterdir()} == {"mp_rank_00"}


@pytest.mark.nightly(guards=("docs/index.md",))
def test_guide_first_page(tmp_path: Path) -> None:
    shell = Shell(tmp_path, SHORTER["first_page"])
    (command,) = page_commands("index.md")
    assert "done: reached the last step" in shell.type(command)
