"""111 command lines of Megatron-LM's own functional tests (d98e8a64), each with its verdict.

In megatron_command_lines.jsonl, `refused` lists what is missing here. File names are replaced, and the plan is made for
the smallest world.
"""

import json
import math
import re
from pathlib import Path

import pytest
from test_published_scripts import byte_level_vocabulary, docs, preprocess_docs
from train_cases import config_from, pretrain

from megalite.config import cli
from megalite.config.megatron_flags import known_flags
from megalite.config.options import ConfigError
from megalite.launch.rank_info import RankInfo
from megalite.models.families import PRESETS
from megalite.training.datasets import open_tokenizer, true_vocab_size
from tools import plan

ROOT = Path(__file__).resolve().parents[2]
LINES = [
    json.loads(line) for line in (ROOT / "tests/entry_points/megatron_command_lines.jsonl").read_text().splitlines()
]
_DATA = {"--vocab-file": "$VOCAB", "--merge-file": "$MERGES", "--data-path": "$DATA"}
_DATA |= {"--tokenizer-model": "$SENTENCEPIECE"}


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    import sentencepiece

    directory = tmp_path_factory.mktemp("files")
    files = byte_level_vocabulary(directory)
    files["$DATA"] = preprocess_docs(directory, files)
    Path(files["$DATA"] + ".json").unlink()  # lines with other tokenizers read it, too
    text = directory / "text.txt"
    text.write_text("\n".join(docs()))
    train = sentencepiece.SentencePieceTrainer.train
    train(input=str(text), model_prefix=str(directory / "spm"), vocab_size=400, minloglevel=2)
    return {**files, "$SENTENCEPIECE": str(directory / "spm.model"), "$ELSE": str(directory / "else")}


def argv_of(line: dict, paths: dict[str, str]) -> list[str]:
    """Return the arguments of a line, with existing files in place of its own."""
    argv: list[str] = []
    for word in line["argv"]:
        if argv and argv[-1] in _DATA:
            word = paths[_DATA[argv[-1]]]
        argv.append(re.sub(r"\$\{?[A-Z_]+\}?", paths["$ELSE"], word) if "$" in word else word)
    return argv


def world_of(argv: list[str]) -> int:
    """Return the smallest world size: two data-parallel ranks, or as many as share the experts."""

    def size(flag: str) -> int:
        return int(argv[len(argv) - argv[::-1].index(flag)]) if flag in argv else 1

    shards = ("--tensor-model-parallel-size", "--pipeline-model-parallel-size", "--context-parallel-size")
    stage, pp = 2 * size(shards[0]) * size(shards[2]), size(shards[1])
    return pp * math.lcm(stage, size("--expert-model-parallel-size") * size("--expert-tensor-parallel-size"))


@pytest.mark.parametrize("line", LINES, ids=[line["name"] for line in LINES])
def test_megatron_line_starts_or_is_refused_for_its_missing_features(
    line: dict, paths: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    argv = argv_of(line, paths)
    world = world_of(argv)
    try:
        parsed = cli.parse_config([*argv, "--dry-run"], PRESETS, world=lambda config: world)
    except ConfigError as error:
        assert sorted(map(_feature, error.problems)) == sorted(line["refused"]), error.problems
        return
    assert line["refused"] == []
    assert pretrain(parsed.config, RankInfo(world_size=world, local_world_size=world)) == 0, capsys.readouterr().err
    assert f"= {world} rank" in capsys.readouterr().out
    assert all("yet" not in note for note in parsed.notes)


@pytest.mark.parametrize("line", [line for line in LINES if not line["refused"]], ids=lambda line: line["name"])
def test_accepted_megatron_lines_are_planned(line: dict, paths: dict[str, str], capsys) -> None:
    argv = argv_of(line, paths)
    world_size = str(world_of(argv))
    cluster = ["--num-gpus", world_size, "--gpus-per-node", str(min(8, int(world_size)))]
    assert plan.main([*argv, *cluster]) in (0, 1)  # 1: does not fit
    planned = capsys.readouterr().out
    assert "as given: tp" in planned
    missing_files = argv_of(line, dict.fromkeys(paths, "/no/such/file"))
    if {"--vocab-file", "--tokenizer-model"} & {*argv} and "--vocab-size" not in argv:
        assert plan.main([*missing_files, *cluster]) == 2
        assert "/no/such/file" in (stderr := capsys.readouterr().err) and "give --vocab-size" in stderr
        data = config_from(argv).data
        missing_files += ["--vocab-size", str(true_vocab_size(data, open_tokenizer(data)))]
    assert plan.main([*missing_files, *cluster]) in (0, 1)
    assert capsys.readouterr().out.partition("sbatch ")[0] == planned.partition("sbatch ")[0]


def _feature(problem: str) -> str:
    """Return the missing feature in a word: that of the first flag that a problem names, or its option."""
    flag = known_flags().get(problem.partition(":")[0].partition(",")[0])
    return flag.feature if flag is not None and flag.feature else problem.partition("=")[0]


def test_number_of_accepted_megatron_lines() -> None:
    gpt = [line for line in LINES if line["family"] == "gpt"]
    missing = {feature for line in LINES for feature in line["refused"]}
    assert len(gpt) == 79 and sum(not line["refused"] for line in gpt) >= 0.7 * len(gpt)
    known = {"FP8 and FP4", "distillation", "elastic models", "architecture", "offloading"}
    known.add("cuda_graph_impl")  # graphs of Transformer Engine
    known.add("num_layers")  # the pattern of an elastic model has one layer more
    assert missing == known
