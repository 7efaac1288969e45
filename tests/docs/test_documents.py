"""Every command in the documents parses, and the files, flags and model families that they mention exist."""

import re
import tomllib
from dataclasses import replace
from pathlib import Path

import documents
import pytest
import torch_range
import yaml
from documents import ROOT, Command, all_commands, run_script, stop_in_parser
from train_cases import config_from, pretrain

from megalite import __main__ as COMMAND
from megalite import __version__
from megalite.config.megatron_flags import known_flags
from megalite.config.option import flags_of
from megalite.config.options import iter_options, num_local_ranks
from megalite.config.validation import find_problems
from megalite.interop.name_mapping import FAMILIES
from megalite.launch.rank_info import RankInfo

COMMANDS = all_commands()
SMALL = """--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 32 --max-position-embeddings 32
 --micro-batch-size 2 --global-batch-size 2048 --train-iters 4 --lr 1e-3 --vocab-size 100 --mock-data""".split()
STANDS_FOR = {"FLAGS": SMALL, "...": SMALL}  # placeholders of the documents for the flags of a run


def split_launcher(command: Command) -> tuple[str, list[str], int]:
    """Split a command `python SCRIPT ...` or `megalite COMMAND ...`, which may be under a launcher.

    torch's own parser reads the arguments of torchrun.

    Returns:
        The script, its arguments, and the number of processes.
    """
    program, *args = command.argv
    world = 1
    if (
        program in ("bash", "sbatch") or args[0] == "examples/launch/ray_job.py"
    ):  # a script of examples/launch: SCRIPT DIR FLAGS, on two nodes
        assert documents.is_script(args[0])
        program = "python"
        args = ["pretrain_gpt.py", "--save", args[1], *args[2:]]
        world = 16
    elif program == "srun":
        flags = {a: b for a, b in zip(args, args[1:], strict=False) if a.startswith("--")}
        world = int(flags["--ntasks"])
        args = args[args.index("python") + 1 :]
    elif program == "torchrun":
        from torch.distributed.run import get_args_parser

        namespace = get_args_parser().parse_args(args)
        world = int(namespace.nnodes.rpartition(":")[2]) * int(namespace.nproc_per_node)
        args = [namespace.training_script, *namespace.training_script_args]
        program = args.pop(0) if namespace.module else program
    if program == "megalite":
        name = next(n for n in (" ".join(args[:2]), args[0]) if n in COMMAND.COMMANDS)
        args = [COMMAND.COMMANDS[name][0].replace(".", "/") + ".py", *args[len(name.split()) :]]
    script, *args = args
    assert (ROOT / script).is_file(), f"{script} does not exist"
    return script, [expanded for arg in args for expanded in STANDS_FOR.get(arg, [arg])], world


@pytest.mark.parametrize("command", COMMANDS, ids=[c.location for c in COMMANDS])
def test_every_command_parses(command: Command, tmp_path: Path, monkeypatch, capsys) -> None:
    program, *rest = command.argv
    if program == "pip":
        known = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
        bracketed = [names for arg in rest for names in re.findall(r"\[(.*)\]", arg)]
        extras = [extra for names in bracketed for extra in names.split(",")]
        assert rest[0] == "install" and extras and all(extra in known for extra in extras)
        return
    if program in ("kubectl", "sky"):
        assert all(yaml.safe_load_all((ROOT / rest[-1]).read_text()))
        return
    if rest[:2] == ["-m", "pytest"] or (program == "bash" and not rest[0].startswith("examples/launch/")):
        files = [arg for arg in rest if arg.endswith((".py", ".sh"))]
        assert files and all(documents.is_script(file) for file in files)
        return
    if re.match(r"from_(?!hugging|megatron)", command.location):
        return  # tests/translate/test_translate.py runs it
    if command.location.startswith("plugins.md: megalite "):
        return  # tests/config/test_plugins.py: test_plugins_page_commands runs it
    script, args, world = split_launcher(command)
    if script.startswith("tests/") or "--help" in args:
        assert script != "pretrain_gpt.py" or run_script(script, args, monkeypatch) == 0
        return
    if "make_parser(__doc__" not in (ROOT / script).read_text() and script != "pretrain_gpt.py":
        assert args == []
        return
    if script != "pretrain_gpt.py":
        stop_in_parser(script, args, monkeypatch)
        return
    run_toml = tmp_path / "run.toml"  # the first TOML block of the document, if it has one
    page = ROOT / "docs" / command.location.partition(":")[0]
    tomls = [text for language, text in documents.fenced_blocks(page) if language == "toml"] if page.is_file() else []
    run_toml.write_text(tomls[0] if tomls else "bf16 = true\n")
    args = [str(run_toml) if arg == "run.toml" else arg for arg in args]
    config = config_from([str(ROOT / arg) if arg.startswith("examples/") else arg for arg in args])
    if config.checkpoint.use_checkpoint_args:  # the other options are in a checkpoint
        return
    ranks = max(world, num_local_ranks(config.parallel))
    assert find_problems(config, ranks) == []
    mock_data_options = dict(data_path=None, tokenizer_type=None, tokenizer_model=None, mock_data=True, vocab_size=100)
    plan = replace(config, data=replace(config.data, **mock_data_options), train=replace(config.train, dry_run=True))
    assert pretrain(plan, RankInfo(world_size=ranks, local_world_size=ranks)) == 0
    assert "layers per stage" in capsys.readouterr().out


@pytest.mark.parametrize("span", documents.megalite_commands())
def test_every_mentioned_command_exists(span: str, monkeypatch: pytest.MonkeyPatch) -> None:
    _, *args = span.split()
    name = next((candidate for candidate in (" ".join(args[:2]), args[0]) if candidate in COMMAND.COMMANDS), None)
    if name is None:
        assert len(args) == 1 and any(known.startswith(f"{args[0]} ") for known in COMMAND.COMMANDS), span
    elif "--help" in args:
        assert (
            run_script(split_launcher(Command(span, tuple(span.split())))[0], args[len(name.split()) :], monkeypatch)
            == 0
        )
    elif rest := args[len(name.split()) :]:
        script, _, _ = split_launcher(Command(span, tuple(span.split())))
        stop_in_parser(script, rest, monkeypatch)


def test_commands_are_found_in_readme_and_docs() -> None:
    counts = {name: sum(c.location.startswith(name + ":") for c in COMMANDS) for name in ("README.md", "conversion.md")}
    assert counts["README.md"] >= 15 and counts["conversion.md"] >= 4


NAMED = list(documents.checked_documents(ROOT))
# flags of the tests, nsys, docker and sky, sbatch and srun, lm_eval, mkdocs, docs/document_flags.py
OTHER_FLAGS = """fresh commit record capture-range build-arg rm gpus shm-size ulimit user network ipc entrypoint env
 ntasks ntasks-per-node signal model model_args tasks strict megatron"""


def existing_flags(patch: pytest.MonkeyPatch) -> set[str]:
    """Return the flags of trainer, tools, torchrun and tests, and the Megatron-LM flags that the trainer answers."""
    from torch.distributed.run import get_args_parser

    flags = (
        {flag for _, option in iter_options() for flag, _ in flags_of(option)}
        | known_flags().keys()
        | {"--preset", "--config"}
    )
    flags |= documents.flags_of(get_args_parser()) | documents.flags_of(torch_range.make_parser())
    flags |= {f"--{flag_name}" for flag_name in OTHER_FLAGS.split()}
    for script_path in sorted((ROOT / "tools").rglob("*.py")):
        if "make_parser(__doc__" in script_path.read_text():
            with documents.parsers_stopped(patch, parse=False) as inner_patch:
                try:
                    run_script(str(script_path.relative_to(ROOT)), [], inner_patch)
                except documents.ParserStopped as parsed:
                    flags |= documents.flags_of(parsed.parser)
    return flags


def test_every_named_flag_exists(monkeypatch: pytest.MonkeyPatch) -> None:
    existing = existing_flags(monkeypatch)
    for path in NAMED:
        flags = re.findall(r"(?<![\w-])--[a-z][\w-]*", path.read_text(encoding="utf-8"))
        assert len(existing) > 250 and [flag for flag in flags if flag not in existing] == [], path.name


def test_documents_list_the_existing_families() -> None:
    """The table of conversions lists every family; no page gives their number, which the next family would change."""
    built_in = set(FAMILIES.built_in)
    rows = re.findall(r"^\| [^|]+ \| `(\w+)` \|", (ROOT / "docs/conversion.md").read_text("utf-8"), re.MULTILINE)
    assert sorted(set(rows) - {"model_type"}) == sorted(built_in)
    for path in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))):
        numbers = re.findall(r"\b\d+ (?:model )?(?:families|from Hugging Face)", path.read_text("utf-8"))
        assert not numbers, (path.name, numbers)


def test_document_checks_can_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    text = "python tools/generate.py --load x \\\n  --promt y > z  # why\n"
    (command,) = documents.commands_of(text, "a.md")
    assert command.argv == ("python", "tools/generate.py", "--load", "x", "--promt", "y")
    with pytest.raises(AssertionError):
        stop_in_parser(command.argv[1], list(command.argv[2:]), monkeypatch)
    assert "--promt" not in existing_flags(monkeypatch)


def test_issue_forms_and_citation_parse() -> None:
    forms = [yaml.safe_load(path.read_text()) for path in (ROOT / ".github/ISSUE_TEMPLATE").glob("[!c]*.yml")]
    assert len(forms) == 3 and all({"name", "description", "body"} <= form.keys() for form in forms)
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation["version"] == __version__ and {"cff-version", "message", "title", "authors"} <= citation.keys()
