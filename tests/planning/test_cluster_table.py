"""Clusters: the table, and files of one's own."""

import re
from pathlib import Path

import pytest
import torch

from megalite.plan import cluster as module
from megalite.plan.cluster import DEVICES, cluster, read_cluster


def test_the_example_of_the_help_is_a_file(tmp_path: Path) -> None:
    example = re.sub(r"^    ", "", (module.__doc__ or "").split("\n\n", 1)[1], flags=re.M)
    example = example.split("\nA file's sections")[0]
    (tmp_path / "mine.toml").write_text(example)
    made = read_cluster(tmp_path / "mine.toml")
    assert (made.device.name, made.nodes, made.per_node, made.world) == ("h100", 16, 8, 128)
    assert (made.inside.bytes_per_s, made.inside.latency_s) == (360e9, pytest.approx(8e-6))
    assert made.between == cluster("h100", 8).between
    own = re.sub(r"^device = .*$", "", example, flags=re.M)
    own = re.sub(r"^# ", "", own, flags=re.M)  # the table [device], without its marks
    (tmp_path / "own.toml").write_text(own)
    made = read_cluster(tmp_path / "own.toml")
    assert made.device.name == "mine" and made.device.memory_bytes == 96 * 2**30
    assert made.device.peak_tflops(torch.bfloat16) == 500 and made.device.peak_tflops(torch.float32) == 60


def test_everything_that_is_wrong_with_a_file_is_said_at_once(tmp_path: Path) -> None:
    path = tmp_path / "bad.toml"
    path.write_text(
        'nodes = 0\nper_node = 2.5\ncolour = 1\n[device]\nname = "x"\npeak_tflops = { bf8 = 1 }\n'
        '[inside]\ngb_per_s = "fast"\n[between]\nlatency = 1\n'
    )
    with pytest.raises(ValueError) as error:
        read_cluster(path)
    for text in ("nodes=0", "per_node=2.5", "colour", "memory_gib", "bf8", "inside.gb_per_s='fast'", "between.latency"):
        assert text in str(error.value), text
    path.write_text("device = [")
    with pytest.raises(ValueError, match="is not TOML"):
        read_cluster(path)


def test_peaks_are_those_of_the_trainer() -> None:
    """Independent of the table: the vendors' dense figures."""
    peaks = {"a100": 312.0, "h100": 989.4, "h200": 989.4, "b200": 2250.0}
    assert {name: cluster(name, 1).device.peak_tflops(torch.bfloat16) for name in peaks} == peaks
    with pytest.raises(ValueError, match="device=v100 has no known bf16 peak; train in fp16 or fp32"):
        cluster("v100", 1).device.peak_tflops(torch.bfloat16)
    assert cluster("cpu", 2).device.peak_tflops(torch.float32) > 0


def test_ranks_on_a_cpu_share_its_memory_and_what_cannot_be_is_refused() -> None:
    for devices, per_node, text in ((0, None, "num_devices=0"), (8, 0, "per_node=0")):
        with pytest.raises(ValueError, match=text):
            cluster("h100", devices, per_node)
    assert cluster("cpu", 2).device.memory_bytes == DEVICES["cpu"][0].memory_bytes // 2
    assert cluster("cpu", 2).nodes == 1 and cluster("h100", 4).nodes == 1


MINE = '[device]\nname = "x"\nmemory_gib = inf\nmemory_gb_per_s = 1'


@pytest.mark.parametrize(
    "text,said",
    [
        ("[device]", "device.name is missing"),
        ('device = ["h100"]', "is not in the table"),
        ("[device]\nname = 5\nmemory_gib = 1\nmemory_gb_per_s = 1", "device.name=5 is not a string"),
        (MINE, "device.memory_gib=inf is not a number above 0"),
        ("[inside]\ngb_per_s = inf", "inside.gb_per_s=inf is not a number above 0"),
    ],
)
def test_a_file_with_odd_values_is_refused(tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / "c.toml").write_text(text)
    with pytest.raises(ValueError, match=re.escape(said)):
        read_cluster(tmp_path / "c.toml")
