"""The groups of keys and values that tp ranks share, and the mistakes in choosing them that a small run shows.

If tp ranks share groups, the group of a rank is a function of its number. On few ranks a wrong function can give the
right groups: with one group all functions do, on 4 ranks with two groups `rank // groups` does.
"""

from __future__ import annotations

from dataclasses import dataclass

from megalite.config.options import Config
from megalite.config.problems import divisors


@dataclass(frozen=True)
class KVSharing:
    """tp ranks that share groups of keys and values, because there are fewer groups than ranks."""

    tp: int
    groups: int
    heads: int  # query heads per rank

    @classmethod
    def from_config(cls, config: Config, tp: int) -> KVSharing | None:
        """Return the sharing with `tp` ranks, or None if each rank has groups of its own."""
        model = config.model
        if model.num_kv_groups >= tp:
            return None
        return cls(tp, model.num_kv_groups, model.num_attention_heads // tp)

    @property
    def wrong_maps(self) -> set[str]:
        """The wrong functions from a rank to its group that differ from the right one: remainders and quotients."""
        ranks = range(self.tp)
        ranks_per_group = self.tp // self.groups
        sizes = {
            "groups": self.groups,
            "each": ranks_per_group,
            "heads": self.heads,
            "group_heads": ranks_per_group * self.heads,
            "tp": self.tp,
        }
        maps: dict[str, list[int]] = {}
        for name, size in sizes.items():
            maps[f"% {name}"] = [rank % size for rank in ranks]
            maps[f"// {name}"] = [rank // size for rank in ranks]
        maps["first"] = [0 for _ in ranks]
        maps["reversed"] = [(self.tp - 1 - rank) // ranks_per_group for rank in ranks]
        right_map = maps["// each"]
        return {name for name, groups in maps.items() if groups != right_map}

    def mistakes_hidden_in(self, small: KVSharing | None) -> set[str]:
        """Return the functions that are wrong here, but right in a small run."""
        return self.wrong_maps - (small.wrong_maps if small else set())

    def shrink(self, tp: int) -> KVSharing:
        """Return a small sharing on `tp` ranks.

        It hides as few mistakes as possible, then has as many ranks per group, and then as many different sizes.
        """
        if tp < 4 or self.groups == 1:
            return KVSharing(tp, 1, min(self.heads, 2))
        groups = [self.groups]
        if tp != self.tp:
            groups = [n for n in divisors(tp) if 2 <= n < tp] or [1]
        heads = [1] if self.heads == 1 else [2, 3, 4]

        def cost(sharing: KVSharing) -> tuple[int, ...]:
            ranks_per_group = sharing.tp // sharing.groups
            num_hidden = len(self.mistakes_hidden_in(sharing))
            has_other_ratio = ranks_per_group != self.tp // self.groups
            num_sizes = len({sharing.groups, ranks_per_group, sharing.heads})
            return num_hidden, has_other_ratio, -num_sizes, sharing.heads

        return min((KVSharing(tp, n, h) for n in groups for h in heads), key=cost)
