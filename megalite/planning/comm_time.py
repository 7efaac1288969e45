"""The times of messages and collectives over the links of a cluster: latency + bytes / rate (alpha-beta). Pure.

n bytes of the whole tensor, N ranks, a link of B bytes/s and latency a; NCCL's algorithms, whose rings move the fewest
bytes that any algorithm can (Patarasu and Yuan 2009, Bandwidth optimal all-reduce algorithms):

    message              a + n / B
    all-gather           (N - 1) a + (N - 1) / N n / B             ring
    reduce-scatter       the same
    all-reduce           2 (N - 1) a + 2 (N - 1) / N n / B         ring: reduce-scatter, then all-gather
                         2 log2(N) a + 2 (N - 1) / N n / B         double binary tree over nodes; the faster one counts

The ring of a group that spans nodes goes through all its ranks of a node before the next node. Traffic between nodes is
shared by the network cards of the group's ranks there, so the rate is the smaller of the inside link's and of the
network's times the ranks per node: 8 dp groups of tp 8 have a card each, a dp group of 8 ranks per node has all 8.
Groups that run at the same time therefore never share a card, unless the ranks of a node do.
"""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from megalite.common.tables import load_table
from megalite.planning.cluster import Cluster, Link


@dataclass(frozen=True)
class CommGroup:
    """The ranks of a collective: how many, on how many nodes, and the fewest on one node."""

    size: int
    nodes: int = 1
    min_per_node: int = 1

    @classmethod
    def of(cls, ranks: Sequence[int], per_node: int) -> "CommGroup":
        """
        >>> CommGroup.of(range(0, 64, 8), 8), CommGroup.of(range(16), 8)
        (CommGroup(size=8, nodes=8, min_per_node=1), CommGroup(size=16, nodes=2, min_per_node=8))
        """
        members = Counter(rank // per_node for rank in ranks)
        return cls(len(ranks), len(members), min(members.values()))


@dataclass(frozen=True)
class CommTimes:
    """Seconds of the collectives of a group of `cluster` on `n` bytes of the whole tensor; a group of one takes none.

    >>> from megalite.planning.cluster import Link, make_cluster
    >>> from dataclasses import replace
    >>> cluster = replace(make_cluster("h100", 16), intra_node=Link(1e-6, 1e9), inter_node=Link(1e-5, 1e8))
    >>> links, inside, across = CommTimes(cluster), CommGroup(4), CommGroup(8, nodes=2, min_per_node=4)
    >>> links.all_gather(4e9, inside) == 3 * 1e-6 + 3.0, links.all_reduce(4e9, inside) == 6e-6 + 6.0
    (True, True)
    >>> round(links.reduce_scatter(8e8, across), 6)  # 4 cards of 1e8: 7/8 of 8e8 bytes at 4e8, 6 hops inside, 1 between
    1.750016
    """

    cluster: Cluster

    @classmethod
    def with_measured(cls, cluster: Cluster, inside: Link | None) -> "CommTimes":
        """`inside`: measured, in place of the table's."""
        return cls(replace(cluster, intra_node=inside) if inside else cluster)

    def bandwidth(self, group: CommGroup) -> float:
        """Bytes/s of a ring through the group, per rank."""
        inside, between = self.cluster.intra_node.bytes_per_s, self.cluster.inter_node.bytes_per_s
        return inside if group.nodes == 1 else min(inside, group.min_per_node * between)

    def latency(self, group: CommGroup) -> float:
        """Latency of one pass through all ranks."""
        a, b = self.cluster.intra_node.latency_s, self.cluster.inter_node.latency_s
        return (group.size - group.nodes) * a + (group.nodes - 1) * b

    def all_gather(self, n: float, group: CommGroup) -> float:
        return self.latency(group) + (group.size - 1) / group.size * n / self.bandwidth(group)

    reduce_scatter = all_gather

    def all_reduce(self, n: float, group: CommGroup) -> float:
        a, b = self.cluster.intra_node.latency_s, self.cluster.inter_node.latency_s
        tree = 2 * ((math.ceil(group.size / group.nodes) - 1) * a + math.ceil(math.log2(group.nodes)) * b)
        latency = min(2 * self.latency(group), tree) if group.nodes > 1 else 2 * self.latency(group)
        return latency + 2 * (group.size - 1) / group.size * n / self.bandwidth(group)

    def all_to_all(self, n: float, group: CommGroup) -> float:
        """`n` bytes of each rank: what goes to other nodes passes the rank's own card, at the same time as the rest."""
        near, part = math.ceil(group.size / group.nodes), n / group.size
        inside = (near - 1) * part / self.cluster.intra_node.bytes_per_s
        across = (
            (group.size - group.min_per_node) * part / self.cluster.inter_node.bytes_per_s if group.nodes > 1 else 0.0
        )
        return self.latency(group) + max(inside, across)

    def p2p(self, n: float, source: int, target: int) -> float:
        """A message of `n` bytes from one global rank to another."""
        same = source // self.cluster.devices_per_node == target // self.cluster.devices_per_node
        return (self.cluster.intra_node if same else self.cluster.inter_node).seconds(n)


def link_table(cluster: Cluster) -> list[tuple[str, str, str, str]]:
    """Rows of (link, vendor's figure, rate that large messages reach, latency), the header first."""
    rows = [("link", "label, GB/s", "reached, GB/s", "latency, us")]
    for name, link in (("within a node", cluster.intra_node), ("between nodes, per device", cluster.inter_node)):
        rows.append(
            (name, f"{link.nominal_bytes_per_s / 1e9:g}", f"{link.bytes_per_s / 1e9:.4g}", f"{link.latency_s * 1e6:g}")
        )
    return rows


def explain(cluster: Cluster) -> list[str]:
    """The meaning of the formulas for this cluster, for readers of a plan."""
    words = load_table(__file__, "links")
    ratio = cluster.intra_node.bytes_per_s / cluster.inter_node.bytes_per_s
    even = cluster.inter_node.latency_s * cluster.inter_node.bytes_per_s
    return [
        words["ring"],
        *(text.format(ratio=ratio, kB=even / 1e3) for text in words["nodes"] if cluster.num_nodes > 1),
    ]
