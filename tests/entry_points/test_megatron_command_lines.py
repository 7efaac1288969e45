"""111 command lines of Megatron-LM's own functional tests (d98e8a64), with their verdicts in
megatron_command_lines.jsonl: `refused` lists what is missing here. The names of files are replaced, and the plan is
made for the smallest world."""

import json
import math
import re
from pathlib import Path

import pytest
from test_published_scripts import byte_level_vocabulary, docs, preprocessed
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
def places(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    import sentencepiece

    folder = tmp_path_factory.mktemp("files")
    found = byte_level_vocabulary(folder)
    found["$DATA"] = preprocessed(folder, found)
    Path(found["$DATA"] + ".json").unlink()  # lines with other tokenizers read it, too
    text = folder / "text.txt"
    text.write_text("\n".join(docs()))
    train = sentencepiece.SentencePieceTrainer.train
    train(input=str(text), model_prefix=str(folder / "spm"), vocab_size=400, minloglevel=2)
    return {**found, "$SENTENCEPIECE": str(folder / "spm.model"), "$ELSE": str(folder / "else")}


def words_of(line: dict, places: dict[str, str]) -> list[str]:
    """The line with files that exist in place of its own."""
    found: list[str] = []
    for word in line["argv"]:
        if found and found[-1] in _DATA:
            word = places[_DATA[found[-1]]]
        found.append(re.sub(r"\$\{?[A-Z_]+\}?", places["$ELSE"], word) if "$" in word else word)
    return found


def world_of(words: list[str]) -> int:
    """Of two data-parallel ranks, or as many as share the experts."""

    def size(flag: str) -> int:
        return int(words[len(words) - words[::-1].index(flag)]) if flag in words else 1

    shards = ("--tensor-model-parallel-size", "--pipeline-model-parallel-size", "--context-parallel-size")
    stage, pp = 2 * size(shards[0]) * size(shards[2]), size(shards[1])
    return pp * math.lcm(stage, size("--expert-model-parallel-size") * size("--expert-tensor-parallel-size"))


@pytest.mark.parametrize("line", LINES, ids=[line["name"] for line in LINES])
def test_megatron_line_starts_or_is_refused_for_its_missing_features(
    line: dict, places: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    words = words_of(line, places)
    world = world_of(words)
    try:
        found = cli.parse_config([*words, "--dry-run"], PRESETS, world=lambda config: world)
    except ConfigError as error:
        assert sorted(map(_feature, error.problems)) == sorted(line["refused"]), error.problems
        return
    assert line["refused"] == []
    assert pretrain(found.config, RankInfo(world_size=world, local_world_size=world)) == 0, capsys.readouterr().err
    assert f"= {world} rank" in capsys.readouterr().out
    assert all("yet" not in note for note in found.notes)


@pytest.mark.parametrize("line", [one for one in LINES if not one["refused"]], ids=lambda one: one["name"])
def test_accepted_megatron_lines_are_planned(line: dict, places: dict[str, str], capsys) -> None:
    words = words_of(line, places)
    number = str(world_of(words))
    cluster = ["--num-gpus", number, "--gpus-per-node", str(min(8, int(number)))]
    assert plan.main([*words, *cluster]) in (0, 1)  # 1: does not fit
    planned = capsys.readouterr().out
    assert "as given: tp" in planned
    nowhere = words_of(line, dict.fromkeys(places, "/no/such/file"))
    if {"--vocab-file", "--tokenizer-model"} & {*words} and "--vocab-size" not in words:
        assert plan.main([*nowhere, *cluster]) == 2
        assert "/no/such/file" in (said := capsys.readouterr().err) and "give --vocab-size" in said
        data = config_from(words).data
        nowhere += ["--vocab-size", str(true_vocab_size(data, open_tokenizer(data)))]
    assert plan.main([*nowhere, *cluster]) in (0, 1)
    assert capsys.readouterr().out.partition("sbatch ")[0] == planned.partition("sbatch ")[0]


def _feature(problem: str) -> str:
    """What is missing, in a word: the feature of the first flag that a problem names, or its option."""
    flag = known_flags().get(problem.partition(":")[0].partition(",")[0])
    return flag.feature if flag is not None and flag.feature else problem.partition("=")[0]


def test_number_of_accepted_megatron_lines() -> None:
    gpt = [line for line in LINES if line["family"] == "gpt"]
    missing = {feature for line in LINES for feature in line["refused"]}
    assert len(gpt) == 79 and sum(not line["refused"] for line in gpt) >= 0.7 * len(gpt)
    known = "FP8 and FP4|multi-latent attention|multi-token prediction|FSDP|hybrid models"
    known += "|experimental attention|distillation|elastic models|architecture|offloading|layer specs"
    # Transformer Engine's; of experts and multi-latent attention; with a place for multi-token prediction
    known += "|cuda_graph_impl|recompute_modules|pipeline_model_parallel_layout"
    assert missing <= {*known.split("|")}, missing
