"""Every recipe starts as its header says, fits, and states the planner's figures."""

import re
import subprocess
import sys

import programs
import pytest
from documents import ROOT
from train_cases import pretrain

from megalite.config import cli
from megalite.config.recipes import recipes
from megalite.launch.rank_info import RankInfo
from megalite.models.families import PRESETS
from tools import plan, verify
from tools.cli_common import read_json

RECIPES = recipes()
FIRST = re.compile(r"# (.+) on (\d+) (H\d00): ([\d.]+[BT]) tokens, (.+)\n")
PLANNED = re.compile(
    r"# planned: ([\d.]+) GiB of a device at most, ([\d.]+)% MFU, ([\d,]+) tokens/s, ([\d.]+) (days|hours)\n"
)


@pytest.mark.parametrize("name", RECIPES)
def test_recipe_starts_and_uses_its_stated_resources(name: str, tmp_path, capsys) -> None:
    text = RECIPES[name]
    first, planned = FIRST.match(text), PLANNED.search(text)
    assert first and planned and f"--config {name}.toml " in text and "# measured: " in text
    world = int(first[2])
    assert name.endswith(f"-{world}x{first[3].lower()}")
    (tmp_path / "recipe.toml").write_text(text)
    config_flags = ["--config", str(tmp_path / "recipe.toml"), "--mock-data"]
    config = cli.parse_config([*config_flags, "--dry-run"], PRESETS, world=lambda config: world).config
    tp, pp = config.parallel.tensor_model_parallel_size, config.parallel.pipeline_model_parallel_size
    for rank in range(0, world, world // pp):
        assert pretrain(config, RankInfo(rank=rank, world_size=world, local_world_size=min(8, world))) == 0, (
            capsys.readouterr().err
        )
    cluster = ["--tp", str(tp), "--num-gpus", str(world), "--device", first[3].lower(), "--tokens", first[4]]
    assert plan.main([*config_flags, *cluster, "--json", str(tmp_path / "plan.json")]) == 0
    (layout,) = read_json(tmp_path / "plan.json")["plans"]
    assert layout["peak"] / 2**30 == pytest.approx(float(planned[1]), abs=0.06)
    assert 100 * layout["mfu"] == pytest.approx(float(planned[2]), abs=0.06)
    tokens, rate = float(first[4][:-1]) * {"B": 1e9, "T": 1e12}[first[4][-1]], float(planned[3].replace(",", ""))
    assert layout["tokens_per_s"] == pytest.approx(rate, abs=0.6)
    assert tokens / rate / {"days": 86400, "hours": 3600}[planned[5]] == pytest.approx(float(planned[4]), rel=5e-3)
    assert config.train.train_iters * config.train.global_batch_size * config.model.seq_length == pytest.approx(
        tokens, rel=1e-3
    )


@pytest.mark.nightly(guards=[f"examples/recipes/{name}.toml" for name in RECIPES])
@pytest.mark.parametrize("name", RECIPES)
def test_recipe_trains_at_a_small_size_like_one_process(name: str, tmp_path, capsys) -> None:
    """Two steps and their evaluations run on at most 4 ranks, with every feature of the recipe's layout."""
    (tmp_path / "recipe.toml").write_text(RECIPES[name])
    layout = ["--nproc", name.rpartition("-")[2].partition("x")[0], "--max-ranks", "4", "--device", "cpu"]
    assert verify.main(["--config", str(tmp_path / "recipe.toml"), "--mock-data", *layout, "--steps", "2"]) == 0
    assert "trains as one process does" in capsys.readouterr().out


def test_recipes_page_has_a_row_for_each_recipe() -> None:
    rows = re.findall(r"^\| \[`.*$", (ROOT / "docs/recipes.md").read_text("utf-8"), re.MULTILINE)
    expected = []
    for name, text in RECIPES.items():
        first, planned = FIRST.match(text), PLANNED.search(text)
        assert first and planned
        description, num_gpus, gpu, tokens, _ = first.groups()
        gib, mfu, _, duration, unit = planned.groups()
        link = f"[`{name}`](../examples/recipes/{name}.toml)"
        expected.append(
            f"| {link} | {description} | {tokens} | {num_gpus} {gpu} | {duration} {unit} | {gib} | {mfu} % |"
        )
    assert rows == expected


def test_recipes_command_lists_and_shows_recipes() -> None:
    def run_recipe(*args: str) -> subprocess.CompletedProcess[str]:
        return programs.run(
            [sys.executable, "-m", "megalite", "recipe", *args], capture_output=True, text=True, timeout=60
        )

    assert [line.split()[0] for line in run_recipe().stdout.splitlines()] == [*RECIPES]
    assert run_recipe("llama3-8b-8xh100").stdout.strip() == RECIPES["llama3-8b-8xh100"].strip()
    refused = run_recipe("llama3-8b")
    assert refused.returncode == 2 and "megalite recipe lists them" in refused.stderr
    assert run_recipe("--help").returncode == 0
