"""Exchange of tokens for heads in recurrent layers whose samples are sharded over context-parallel ranks.

    conv input, gates   S tokens of all heads --all-to-all--> all T tokens of H / cp heads (arXiv:2309.14509)
    o                   T tokens of H / cp heads --all-to-all--> S tokens of all heads

Convolution and recurrence run in between over complete samples, so that there are no borders and no maps. With fewer
key heads than ranks, a rank gets the key head that its value heads use. If neither number divides the other, key heads
are repeated, so only cp must divide the value heads.

Bytes that a rank receives per layer and micro-batch in forward, and again in backward, for S tokens of B samples, e per
element, W tokens of the convolution, C channels before it, c channels of a rank's heads and gates after the exchange:

    heads   (cp - 1) S B (c + H V / cp) e
    maps    B H K N 4 + (cp - 1) r (W - 1) B C e     N channels of maps (map_composition.py), r chunks of a rank

Maps do not grow with S. With the sizes of Qwen3-Next in bf16 and cp 8 in zigzag order, heads are fewer bytes up to
1,192 tokens of a rank. The chunks of all T tokens follow one after the other, cp times as many as with maps.
"""

import functools
from dataclasses import dataclass
from math import gcd
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from megalite.nn.context_parallel import heads_to_sequence, sequence_to_heads
from megalite.nn.map_composition import count_exchange
from megalite.nn.sequence_sharding import SequenceSharding
from megalite.parallel.mesh import Axis

ALL_HEADS = slice(None)


class Channels(NamedTuple):
    """Channels of a projection: `size` for each value head, for each key head, or once for all heads."""

    owner: Literal["head", "key head", "all"]
    size: int


@dataclass(frozen=True)
class RecurrentShape:
    """The shape of a recurrent layer on a tensor-parallel rank.

    Attributes:
        heads: The number H of value heads.
        key_heads: The number of key heads, which divides `heads`.
        key_dim: The channels K of a key.
        value_dim: The channels V of a value.
        map_columns: The columns of A in a map of states: K, or 1 if A is diagonal.
        conv_width: The tokens W of the convolution.
        conv_channels: The convolved channels, in order.
        gate_channels: The channels of each projection of gates, in order.
    """

    heads: int
    key_heads: int
    key_dim: int
    value_dim: int
    map_columns: int
    conv_width: int
    conv_channels: tuple[Channels, ...]
    gate_channels: tuple[tuple[Channels, ...], ...]

    def num_owners(self, channels: Channels) -> int:
        """Return how often `channels.size` channels follow each other."""
        return {"head": self.heads, "key head": self.key_heads, "all": 1}[channels.owner]

    @property
    def num_convolved(self) -> int:
        """The number C of convolved channels."""
        return sum(self.num_owners(channels) * channels.size for channels in self.conv_channels)


@dataclass(frozen=True)
class HeadSharding:
    """The heads of each cp rank after the exchange. cp must divide the value heads."""

    shape: RecurrentShape
    cp_size: int

    @property
    def local_heads(self) -> int:
        """The number of value heads of a rank."""
        return self.shape.heads // self.cp_size

    @property
    def key_heads(self) -> list[int]:
        """The key heads of all ranks, in order of the ranks; heads that ranks share occur several times."""
        heads_per_key_head = self.shape.heads // self.shape.key_heads
        heads_per_copy = gcd(self.local_heads, heads_per_key_head)  # that share a key head on every rank
        return [head // heads_per_key_head for head in range(0, self.shape.heads, heads_per_copy)]

    @property
    def local_channels(self) -> int:
        """The channels c that a rank has after the exchange."""
        owners = {"head": self.local_heads, "key head": len(self.key_heads) // self.cp_size, "all": 1}
        parts = (self.shape.conv_channels, *self.shape.gate_channels)
        return sum(owners[channels.owner] * channels.size for part in parts for channels in part)

    def value_heads(self, rank: int) -> slice:
        """Return the value heads of a rank."""
        return slice(rank * self.local_heads, (rank + 1) * self.local_heads)

    def by_rank(self, x: Tensor, parts: tuple[Channels, ...]) -> Tensor:
        """Return the channels of each rank [..., cp, c] from those of all heads [..., f]."""
        sizes = [self.shape.num_owners(channels) * channels.size for channels in parts]
        pieces = []
        for piece, channels in zip(x.split(sizes, -1), parts, strict=True):
            if channels.owner == "all":
                pieces.append(piece.unsqueeze(-2).expand(*piece.shape[:-1], self.cp_size, -1))
                continue
            by_owner = piece.unflatten(-1, (-1, channels.size))
            if channels.owner == "key head" and len(self.key_heads) != self.shape.key_heads:
                by_owner = by_owner.index_select(-2, torch.tensor(self.key_heads, device=x.device))
            pieces.append(by_owner.unflatten(-2, (self.cp_size, -1)).flatten(-2))
        return torch.cat(pieces, -1)


@functools.lru_cache(maxsize=256)
def received_bytes(shape: RecurrentShape, sharding: SequenceSharding, dtype: torch.dtype) -> tuple[int, int]:
    """Return the bytes that a rank receives in forward for each sample: of maps of states, and of heads.

    The second number is only valid if the number of ranks divides the value heads.
    """
    cp = len(sharding.seq_chunks_by_rank)
    chunks_per_rank, chunk_size = len(sharding.seq_chunks_by_rank[0]), sharding.seq_chunk_size
    state_size = max(4, dtype.itemsize)  # of the dtype of sums
    maps = count_exchange(tuple(sharding.range_ranks()), shape.map_columns, shape.value_dim).received
    borders = (cp - 1) * chunks_per_rank * min(shape.conv_width - 1, chunk_size) * shape.num_convolved
    heads = HeadSharding(shape, cp)
    channels = heads.local_channels + heads.local_heads * shape.value_dim
    return (
        shape.heads * shape.key_dim * maps * state_size + borders * dtype.itemsize,
        (cp - 1) * chunks_per_rank * chunk_size * channels * dtype.itemsize,
    )


def exchanges_heads(comm_type: str, shape: RecurrentShape, sharding: SequenceSharding, dtype: torch.dtype) -> bool:
    """Return True if heads are exchanged, and False if maps of states are.

    Args:
        comm_type: "a2a" (heads), "allgather" (maps), or "auto": heads if cp divides them and they are fewer bytes.
        shape: The shape of the layer.
        sharding: The sharding of the samples.
        dtype: The dtype of activations.
    """
    if comm_type != "auto":
        return comm_type == "a2a"
    if shape.heads % len(sharding.seq_chunks_by_rank):
        return False
    maps, heads = received_bytes(shape, sharding, dtype)
    return heads < maps


@dataclass(frozen=True)
class HeadExchange:
    """The exchange of this rank's tokens for heads, and back."""

    shape: RecurrentShape
    cp: Axis
    sharding: SequenceSharding

    @property
    def heads(self) -> HeadSharding:
        return HeadSharding(self.shape, self.cp.size)

    @property
    def value_heads(self) -> slice:
        """The value heads of this rank."""
        return self.heads.value_heads(self.cp.rank)

    def to_heads(self, projected: list[Tensor]) -> list[Tensor]:
        """Return the convolved channels and gates [T, B, c] of this rank's heads. Collective over cp.

        Args:
            projected: The convolved channels and each projection of gates, [S, B, f], of this rank's tokens.
        """
        layouts = [self.shape.conv_channels, *self.shape.gate_channels]
        by_rank = [self.heads.by_rank(x, layout) for x, layout in zip(projected, layouts, strict=True)]
        x_SBRc = torch.cat(by_rank, -1)
        x_TBc = sequence_to_heads(x_SBRc, self.cp, self.sharding)
        return list(x_TBc.split([x.shape[-1] for x in by_rank], -1))

    def to_tokens(self, o_TBhV: Tensor) -> Tensor:
        """Return o_SBHV of this rank's tokens from that of its heads. Collective over cp."""
        return heads_to_sequence(o_TBhV, self.cp, self.sharding)

    def own_rows(self, weight: Tensor) -> Tensor:
        """Return the rows [c, ...] of this rank's heads of a weight with a row for each convolved channel."""
        rows = weight.movedim(0, -1)
        return self.heads.by_rank(rows, self.shape.conv_channels)[..., self.cp.rank, :].movedim(-1, 0)
