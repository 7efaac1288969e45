"""The times of messages and collectives over the links of a cluster: latency + bytes / bandwidth (alpha-beta model).

The times are those of NCCL's algorithms, whose rings move the fewest bytes that any algorithm can (Patarasu and Yuan
2009, Bandwidth optimal all-reduce algorithms). n is the number of bytes of the full tensor, N the number of ranks, B
the bandwidth of a link in bytes/s, and a its latency:

    message              a + n / B
    all-gather           (N - 1) a + (N - 1) / N n / B             ring
    reduce-scatter       as an all-gather
    all-reduce           2 (N - 1) a + 2 (N - 1) / N n / B         ring: reduce-scatter, then all-gather
                         2 log2(N) a + 2 (N - 1) / N n / B         double binary tree over nodes; the faster one is used

The ring of a group that spans nodes passes all ranks of one node before it continues on the next node. Traffic between
nodes is spread over the NICs of the group's ranks on a node, so the bandwidth is the minimum of a link within the node
and the number of ranks per node times a NIC's: each of 8 dp groups with one rank per node uses one NIC, and one dp
group with 8 ranks per node uses 8. Groups that communicate at the same time therefore never share a NIC, unless the
ranks of a node do.
"""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from megalite.planning.cluster import Cluster, Link

GB = 1e9
US = 1e-6


@dataclass(frozen=True)
class CommGroup:
    """The ranks of a collective.

    Attributes:
        size: The number of ranks.
        num_nodes: The number of nodes with any of these ranks.
        min_per_node: The smallest number of these ranks on one of these nodes.
    """

    size: int
    num_nodes: int = 1
    min_per_node: int = 1

    @classmethod
    def from_ranks(cls, ranks: Sequence[int], devices_per_node: int) -> "CommGroup":
        """Return the group of these global ranks.

        >>> CommGroup.from_ranks(range(0, 64, 8), 8), CommGroup.from_ranks(range(16), 8)
        (CommGroup(size=8, num_nodes=8, min_per_node=1), CommGroup(size=16, num_nodes=2, min_per_node=8))
        """
        ranks_on_node = Counter(rank // devices_per_node for rank in ranks)
        return cls(len(ranks), len(ranks_on_node), min(ranks_on_node.values()))


@dataclass(frozen=True)
class CommTimes:
    """Durations of messages and collectives on a cluster, in seconds.

    A collective is given by the `num_bytes` of its full tensor. It takes no time in a group of one rank.

    >>> from megalite.planning.cluster import Link, make_cluster
    >>> from dataclasses import replace
    >>> cluster = replace(make_cluster("h100", 16), intra_node=Link(1e-6, 1e9), inter_node=Link(1e-5, 1e8))
    >>> times, one_node, two_nodes = CommTimes(cluster), CommGroup(4), CommGroup(8, num_nodes=2, min_per_node=4)
    >>> times.all_gather(4e9, one_node) == 3 * 1e-6 + 3.0, times.all_reduce(4e9, one_node) == 6e-6 + 6.0
    (True, True)
    >>> round(times.reduce_scatter(8e8, two_nodes), 6)  # 7/8 of the bytes over 4 NICs, 6 hops inside, 1 between
    1.750016
    """

    cluster: Cluster

    @classmethod
    def with_measured(cls, cluster: Cluster, intra_node: Link | None) -> "CommTimes":
        """Return the times with a measured link within a node, or if it is None with the cluster's."""
        if intra_node is None:
            return cls(cluster)
        return cls(replace(cluster, intra_node=intra_node))

    def bandwidth(self, group: CommGroup) -> float:
        """Return the bytes/s per rank of a ring through the group."""
        intra_node = self.cluster.intra_node.bytes_per_s
        inter_node = self.cluster.inter_node.bytes_per_s
        return intra_node if group.num_nodes == 1 else min(intra_node, group.min_per_node * inter_node)

    def latency(self, group: CommGroup) -> float:
        """Return the latency of one pass through all ranks of the group."""
        hops_between = group.num_nodes - 1
        hops_inside = group.size - group.num_nodes
        return hops_inside * self.cluster.intra_node.latency_s + hops_between * self.cluster.inter_node.latency_s

    def all_gather(self, num_bytes: float, group: CommGroup) -> float:
        return self.latency(group) + (group.size - 1) / group.size * num_bytes / self.bandwidth(group)

    reduce_scatter = all_gather

    def all_reduce(self, num_bytes: float, group: CommGroup) -> float:
        latency = 2 * self.latency(group)
        if group.num_nodes > 1:
            hops_inside = math.ceil(group.size / group.num_nodes) - 1
            hops_between = math.ceil(math.log2(group.num_nodes))
            intra_node, inter_node = self.cluster.intra_node, self.cluster.inter_node
            latency_of_tree = 2 * (hops_inside * intra_node.latency_s + hops_between * inter_node.latency_s)
            latency = min(latency, latency_of_tree)
        return latency + 2 * (group.size - 1) / group.size * num_bytes / self.bandwidth(group)

    def all_to_all(self, num_bytes: float, group: CommGroup) -> float:
        """Return the time of an all-to-all in which each rank has `num_bytes`.

        Traffic to other nodes uses the rank's own NIC, at the same time as the traffic within the node.
        """
        bytes_per_peer = num_bytes / group.size
        peers_inside = math.ceil(group.size / group.num_nodes) - 1
        inside_s = peers_inside * bytes_per_peer / self.cluster.intra_node.bytes_per_s
        between_s = 0.0
        if group.num_nodes > 1:
            peers_outside = group.size - group.min_per_node
            between_s = peers_outside * bytes_per_peer / self.cluster.inter_node.bytes_per_s
        return self.latency(group) + max(inside_s, between_s)

    def p2p(self, num_bytes: float, source: int, target: int) -> float:
        """Return the time of a message from one global rank to another."""
        devices_per_node = self.cluster.devices_per_node
        is_same_node = source // devices_per_node == target // devices_per_node
        link = self.cluster.intra_node if is_same_node else self.cluster.inter_node
        return link.seconds(num_bytes)


def link_table(cluster: Cluster) -> list[tuple[str, str, str, str]]:
    """Return rows of (link, vendor's figure, bandwidth that large messages reach, latency), the header first."""
    rows = [("link", "label, GB/s", "reached, GB/s", "latency, us")]
    for name, link in (("within a node", cluster.intra_node), ("between nodes, per device", cluster.inter_node)):
        nominal = f"{link.nominal_bytes_per_s / GB:g}"
        rows.append((name, nominal, f"{link.bytes_per_s / GB:.4g}", f"{link.latency_s / US:g}"))
    return rows


def explain(cluster: Cluster) -> list[str]:
    """Return what the formulas mean for this cluster, one paragraph each, for readers of a plan."""
    paragraphs = [
        "An all-reduce moves 2 (N - 1) / N of the tensor over each link of the ring, an all-gather or reduce-scatter "
        "half of that. This hardly depends on the number of ranks: only the latency of N - 1 hops grows with N."
    ]
    if cluster.num_nodes > 1:
        intra_node, inter_node = cluster.intra_node, cluster.inter_node
        ratio = intra_node.bytes_per_s / inter_node.bytes_per_s
        balanced_bytes = inter_node.latency_s * inter_node.bytes_per_s
        paragraphs += [
            f"A link within a node is {ratio:.1f} times as fast as a device's share of the network. Keep tensor "
            "parallelism, which waits for 4 collectives per layer in forward, inside a node; pipeline stages exchange "
            "the least, so they may be on different nodes.",
            f"Between nodes a message of {balanced_bytes / 1e3:.0f} kB takes as long to start as to transfer, so "
            "buckets should be much larger.",
        ]
    return paragraphs
