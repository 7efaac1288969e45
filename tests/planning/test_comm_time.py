"""Times of messages and collectives: closed forms equal rings simulated hop by hop; and cluster files."""

import doctest
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from megalite.parallel.mesh import abstract_mesh
from megalite.planning import cluster_file
from megalite.planning import comm_time as module
from megalite.planning.cluster import DEVICES, Link, make_cluster
from megalite.planning.cluster_file import read_cluster
from megalite.planning.comm_time import CommGroup, CommTimes, explain, link_table

CLUSTER = replace(make_cluster("h100", 32), intra_node=Link(1e-6, 100e9), inter_node=Link(5e-6, 10e9))


def test_comm_time_examples() -> None:
    assert doctest.testmod(module).failed == 0


def ring(n: float, ranks: list[int], per_node: int) -> float:
    """Return the seconds of an all-gather in a ring, hop by hop.

    In each round every rank passes on a part of n / N bytes. A part that crosses a node border is split over the GPUs
    of the group's ranks on that node, and the slowest hop sets the round's time. Latency is that of all hops of a part.
    """
    size, seconds = len(ranks), 0.0
    nodes = [rank // per_node for rank in ranks]
    for _ in range(size - 1):
        hops = []
        for node, next_node in zip(nodes, [*nodes[1:], nodes[0]], strict=True):
            num_gpus = nodes.count(node)
            hops.append(n / size / (100e9 if node == next_node else min(100e9, num_gpus * 10e9)))
        seconds += max(hops)
    latencies = [1e-6 if a == b else 5e-6 for a, b in zip(nodes, nodes[1:], strict=False)]
    return seconds + sum(latencies)


@pytest.mark.parametrize("ranks", [[0, 1], list(range(8)), list(range(0, 32, 8)), list(range(16)), [0, 4, 8, 12]])
def test_all_gather_time_equals_a_ring(ranks: list[int]) -> None:
    links, group = CommTimes(CLUSTER), CommGroup.from_ranks(ranks, 8)
    assert links.all_gather(3e8, group) == pytest.approx(ring(3e8, ranks, 8))
    assert links.reduce_scatter(3e8, group) == links.all_gather(3e8, group)
    assert links.all_reduce(3e8, group) <= 2 * ring(3e8, ranks, 8) * (1 + 1e-9)


def test_rank_order_decides_the_links() -> None:
    """In dp 4 x pp 2 x tp 4 on nodes of 8, tp stays within a node; dp has pairs in a node, or one rank if outermost."""
    inner, outer = (abstract_mesh(32, 0, tp=4, pp=2, dp_outermost=outermost) for outermost in (False, True))
    assert CommGroup.from_ranks(inner.axis("tp").ranks, 8) == CommGroup(4, num_nodes=1, min_per_node=4)
    assert CommGroup.from_ranks(inner.axis("dp").ranks, 8) == CommGroup(4, num_nodes=2, min_per_node=2)
    assert CommGroup.from_ranks(outer.axis("dp").ranks, 8) == CommGroup(4, num_nodes=4, min_per_node=1)
    links = CommTimes(CLUSTER)
    faster, slower = (links.all_gather(1e9, CommGroup.from_ranks(mesh.axis("dp").ranks, 8)) for mesh in (inner, outer))
    assert slower == pytest.approx(2 * faster, rel=1e-3)  # one GPU in place of two


def test_message_uses_the_link_of_its_two_ranks() -> None:
    links, alone = CommTimes(CLUSTER), CommGroup.from_ranks([3], 8)
    assert [f(1e9, alone) for f in (links.all_gather, links.reduce_scatter, links.all_reduce)] == [0] * 3
    assert links.p2p(1e9, 0, 7) == pytest.approx(1e-6 + 0.01)
    assert links.p2p(1e9, 7, 8) == pytest.approx(5e-6 + 0.1)


def test_large_collectives_reach_the_bus_bandwidth() -> None:
    """The bus bandwidth of nccl-tests is bytes / time x 2 (N - 1) / N, or half of it for an all-gather."""
    links, group = CommTimes(CLUSTER), CommGroup.from_ranks(range(0, 32, 8), 8)
    assert 1e12 / links.all_reduce(1e12, group) * 1.5 == pytest.approx(10e9, rel=1e-3)
    assert 1e12 / links.all_gather(1e12, group) * 0.75 == pytest.approx(10e9, rel=1e-3)


def test_small_all_reduce_uses_a_tree() -> None:
    """1,024 ranks on 128 nodes take 7 rounds of the tree over nodes and back, not 2,046 hops."""
    links, group = CommTimes(make_cluster("h100", 1024)), CommGroup(1024, 128, 8)
    a, b = links.cluster.intra_node.latency_s, links.cluster.inter_node.latency_s
    assert links.all_reduce(64, group) == pytest.approx(2 * (7 * a + 7 * b), rel=0.01)


def test_cluster_description_and_table() -> None:
    assert link_table(CLUSTER)[2][2] == "10" and "10.0 times" in " ".join(explain(CLUSTER))


# ---- clusters: the table, and a user's files
def test_cluster_example_in_the_help_is_valid(tmp_path: Path) -> None:
    example = re.sub(r"^    ", "", (cluster_file.__doc__ or "").split("\n\n", 1)[1], flags=re.M)
    example = example.split("\nA file's sections")[0]
    (tmp_path / "mine.toml").write_text(example)
    cluster = read_cluster(tmp_path / "mine.toml")
    assert (cluster.device.name, cluster.num_nodes, cluster.devices_per_node, cluster.world) == ("h100", 16, 8, 128)
    assert (cluster.intra_node.bytes_per_s, cluster.intra_node.latency_s) == (360e9, pytest.approx(8e-6))
    assert cluster.inter_node == make_cluster("h100", 8).inter_node
    own = re.sub(r"^device = .*$", "", example, flags=re.M)
    own = re.sub(r"^# ", "", own, flags=re.M)  # the table [device], without its marks
    (tmp_path / "own.toml").write_text(own)
    cluster = read_cluster(tmp_path / "own.toml")
    assert cluster.device.name == "mine" and cluster.device.memory_bytes == 96 * 2**30
    assert cluster.device.peak_tflops(torch.bfloat16) == 500 and cluster.device.peak_tflops(torch.float32) == 60


def test_cluster_file_lists_all_problems_at_once(tmp_path: Path) -> None:
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


def test_cluster_peaks_equal_the_trainers() -> None:
    """The expected peaks are the vendors' dense figures, independent of the table."""
    peaks = {"a100": 312.0, "h100": 989.4, "h200": 989.4, "b200": 2250.0}
    assert {name: make_cluster(name, 1).device.peak_tflops(torch.bfloat16) for name in peaks} == peaks
    with pytest.raises(ValueError, match="device=v100 has no known bf16 peak; train in fp16 or fp32"):
        make_cluster("v100", 1).device.peak_tflops(torch.bfloat16)
    assert make_cluster("cpu", 2).device.peak_tflops(torch.float32) > 0


def test_cpu_ranks_share_memory() -> None:
    for devices, per_node, text in ((0, None, "num_devices=0"), (8, 0, "per_node=0")):
        with pytest.raises(ValueError, match=text):
            make_cluster("h100", devices, per_node)
    assert make_cluster("cpu", 2).device.memory_bytes == DEVICES["cpu"].device.memory_bytes // 2
    assert make_cluster("cpu", 2).num_nodes == 1 and make_cluster("h100", 4).num_nodes == 1


INFINITE_MEMORY = '[device]\nname = "x"\nmemory_gib = inf\nmemory_gb_per_s = 1'


@pytest.mark.parametrize(
    "text,message",
    [
        ("[device]", "device.name is missing; a device of your own needs a name"),
        ("inside = 3", "inside=3 is not a table; write [inside]"),
        ("nodes = true", "nodes=True is not an int; write it as one"),
        ("per_node = -2", "per_node=-2 is negative; give 1 or more"),
        ("[between]\nlatency_us = 0", "between.latency_us=0 is too small; give more than 0"),
        ('device = ["h100"]', "is not in the table"),
        ("[device]\nname = 5\nmemory_gib = 1\nmemory_gb_per_s = 1", "device.name=5 is not a str; write it as one"),
        (INFINITE_MEMORY, "device.memory_gib=inf is not finite; give a number"),
        ("[inside]\ngb_per_s = inf", "inside.gb_per_s=inf is not finite; give a number"),
    ],
)
def test_cluster_file_with_odd_values_is_refused(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "c.toml").write_text(text)
    with pytest.raises(ValueError, match=re.escape(message)):
        read_cluster(tmp_path / "c.toml")
