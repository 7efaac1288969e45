"""Every command of the documents is read by the program it names, and what they mention exists."""

import re
import tomllib
from dataclasses import replace
from pathlib import Path

import documents
import pytest
import torch_range
import yaml
from documents import ROOT, Command, commands, parsed_by, start
from train_cases import config_from, pretrain

from megalite import __main__ as COMMAND
from megalite import __version__
from megalite.config.megatron_flags import known_flags
from megalite.config.option import flags_of
from megalite.config.options import iter_options, num_local_ranks
from megalite.config.validation import find_problems
from megalite.interop.name_mapping import FAMILIES
from megalite.launch.rank_info import RankInfo

COMMANDS = commands()
SMALL = """--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 32 --max-position-embeddings 32
 --micro-batch-size 2 --global-batch-size 2048 --train-iters 4 --lr 1e-3 --vocab-size 100 --mock-data""".split()
STANDS_FOR = {"FLAGS": SMALL, "...": SMALL}  # in the documents: the flags of a run


def split_launcher(command: Command) -> tuple[str, list[str], int]:
    """(script, its words, processes) of `python SCRIPT ...`, `megalite COMMAND ...`, or either under a launcher: of
    torchrun torch's parser reads the words."""
    program, *words = command.words
    world = 1
    if program in ("bash", "sbatch"):  # of examples/launch: SCRIPT DIR FLAGS, on two nodes
        assert documents.is_script(words[0])
        program, words, world = "python", ["pretrain_gpt.py", "--save", words[1], *words[2:]], 16
    elif program == "srun":
        flags, world = {a: b for a, b in zip(words, words[1:], strict=False) if a.startswith("--")}, 0
        world = int(flags["--ntasks"])
        words = words[words.index("python") + 1 :]
    elif program == "torchrun":
        from torch.distributed.run import get_args_parser

        read = get_args_parser().parse_args(words)
        world = int(read.nnodes.rpartition(":")[2]) * int(read.nproc_per_node)
        words = [read.training_script, *read.training_script_args]
        program = words.pop(0) if read.module else program
    if program == "megalite":
        name = next(n for n in (" ".join(words[:2]), words[0]) if n in COMMAND.COMMANDS)
        words = [COMMAND.COMMANDS[name][0].replace(".", "/") + ".py", *words[len(name.split()) :]]
    script, *words = words
    assert (ROOT / script).is_file(), f"{script} does not exist"
    return script, [more for word in words for more in STANDS_FOR.get(word, [word])], world


@pytest.mark.parametrize("command", COMMANDS, ids=[c.place for c in COMMANDS])
def test_every_command_parses(command: Command, tmp_path: Path, monkeypatch, capsys) -> None:
    program, *rest = command.words
    if program == "pip":
        known = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
        asked = [extra for word in rest for found in re.findall(r"\[(.*)\]", word) for extra in found.split(",")]
        assert rest[0] == "install" and asked and all(extra in known for extra in asked)
        return
    if program in ("kubectl", "sky"):
        assert all(yaml.safe_load_all((ROOT / rest[-1]).read_text()))
        return
    if rest[:2] == ["-m", "pytest"] or (program == "bash" and not rest[0].startswith("examples/launch/")):
        files = [word for word in rest if word.endswith((".py", ".sh"))]
        assert files and all(documents.is_script(word) for word in files)
        return
    if re.match(r"from_(?!hugging|megatron)", command.place):
        return  # tests/translate/test_translate.py runs it
    if command.place.startswith("plugins.md: megalite "):
        return  # tests/config/test_plugins.py: test_plugins_page_commands runs it
    script, words, world = split_launcher(command)
    if script.startswith("tests/") or "--help" in words:
        assert script != "pretrain_gpt.py" or start(script, words, monkeypatch) == 0
        return
    if "make_parser(__doc__" not in (ROOT / script).read_text() and script != "pretrain_gpt.py":
        assert words == []
        return
    if script != "pretrain_gpt.py":
        parsed_by(script, words, monkeypatch)
        return
    run_toml = tmp_path / "run.toml"  # the document's own, if it has one
    page = ROOT / "docs" / command.place.partition(":")[0]
    tomls = [text for language, text in documents.fences(page) if language == "toml"] if page.is_file() else []
    run_toml.write_text(tomls[0] if tomls else "bf16 = true\n")
    words = [str(run_toml) if word == "run.toml" else word for word in words]
    config = config_from([str(ROOT / w) if w.startswith("examples/") else w for w in words])
    if config.checkpoint.use_checkpoint_args:  # the rest is in a checkpoint
        return
    ranks = max(world, num_local_ranks(config.parallel))
    assert find_problems(config, ranks) == []
    other = dict(data_path=None, tokenizer_type=None, tokenizer_model=None, mock_data=True, vocab_size=100)
    plan = replace(config, data=replace(config.data, **other), train=replace(config.train, dry_run=True))
    assert pretrain(plan, RankInfo(world_size=ranks, local_world_size=ranks)) == 0
    assert "layers per stage" in capsys.readouterr().out


@pytest.mark.parametrize("span", documents.installed_commands())
def test_every_mentioned_command_exists(span: str, monkeypatch: pytest.MonkeyPatch) -> None:
    _, *words = span.split()
    name = next((n for n in (" ".join(words[:2]), words[0]) if n in COMMAND.COMMANDS), None)
    if name is None:
        assert len(words) == 1 and any(known.startswith(f"{words[0]} ") for known in COMMAND.COMMANDS), span
    elif "--help" in words:
        assert (
            start(split_launcher(Command(span, tuple(span.split())))[0], words[len(name.split()) :], monkeypatch) == 0
        )
    elif rest := words[len(name.split()) :]:
        script, _, _ = split_launcher(Command(span, tuple(span.split())))
        parsed_by(script, rest, monkeypatch)


def test_commands_are_found_in_readme_and_docs() -> None:
    counts = {name: sum(c.place.startswith(name + ":") for c in COMMANDS) for name in ("README.md", "conversion.md")}
    assert counts["README.md"] >= 15 and counts["conversion.md"] >= 4


NAMED = list(documents.named(ROOT))
# flags of the tests, nsys, docker and sky, sbatch and srun, lm_eval, mkdocs, docs/document_flags.py
OTHERS = """fresh commit record capture-range build-arg rm gpus shm-size ulimit user network ipc entrypoint env
 ntasks ntasks-per-node signal model model_args tasks strict megatron"""


def flags_there_are(patch: pytest.MonkeyPatch) -> set[str]:
    """Of the trainer, with Megatron-LM's that it answers, of the tools, of torchrun and of the test suite."""
    from torch.distributed.run import get_args_parser

    found = (
        {flag for _, f in iter_options() for flag, _ in flags_of(f)} | known_flags().keys() | {"--preset", "--config"}
    )
    found |= documents.flags_of(get_args_parser()) | documents.flags_of(torch_range.parser())
    found |= {f"--{word}" for word in OTHERS.split()}
    for path in sorted((ROOT / "tools").rglob("*.py")):
        if "make_parser(__doc__" in path.read_text():
            with documents.stopped(patch, read=False) as here:
                try:
                    start(str(path.relative_to(ROOT)), [], here)
                except documents.Parsed as parsed:
                    found |= documents.flags_of(parsed.parser)
    return found


def test_every_named_flag_exists(monkeypatch: pytest.MonkeyPatch) -> None:
    there = flags_there_are(monkeypatch)
    for path in NAMED:
        words = re.findall(r"(?<![\w-])--[a-z][\w-]*", path.read_text(encoding="utf-8"))
        assert len(there) > 250 and [word for word in words if word not in there] == [], path.name


def test_documents_list_the_existing_families() -> None:
    """The table of conversions lists each; elsewhere a number of them would be wrong with the next one."""
    built_in = set(FAMILIES.built_in)
    rows = re.findall(r"^\| [^|]+ \| `(\w+)` \|", (ROOT / "docs/conversion.md").read_text("utf-8"), re.MULTILINE)
    assert sorted(set(rows) - {"model_type"}) == sorted(built_in)
    for path in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))):
        counted = re.findall(r"\b\d+ (?:model )?(?:families|from Hugging Face)", path.read_text("utf-8"))
        assert not counted, (path.name, counted)


def test_document_checks_can_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = "python tools/generate.py --load x \\\n  --promt y > z  # why\n"
    (command,) = documents.commands_of(wrong, "a.md")
    assert command.words == ("python", "tools/generate.py", "--load", "x", "--promt", "y")
    with pytest.raises(AssertionError):
        parsed_by(command.words[1], list(command.words[2:]), monkeypatch)
    assert "--promt" not in flags_there_are(monkeypatch)


def test_issue_forms_and_citation_parse() -> None:
    forms = [yaml.safe_load(path.read_text()) for path in (ROOT / ".github/ISSUE_TEMPLATE").glob("[!c]*.yml")]
    assert len(forms) == 3 and all({"name", "description", "body"} <= form.keys() for form in forms)
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert cited["version"] == __version__ and {"cff-version", "message", "title", "authors"} <= cited.keys()
