"""A dataset of sums to learn, such as "17+25=42;", generated when they are read.

megalite train --plugin examples/plugins/dataset.py --dataset sums --tokenizer-type ByteTokenizer --preset tiny \
  --train-iters 20 --eval-iters 2 --micro-batch-size 2 --global-batch-size 8 --save runs/sums

A dataset has a length, and [i] returns the seq_length + 1 token ids of sample i, the same ones at every call. Resuming,
sharding over dp and counting epochs need nothing else.
"""

import random

import megalite
from megalite.data.tokenizers.tokenizer import Tokenizer

SAMPLES = {"train": 10_000, "valid": 500}  # there is no test set


class Sums:
    def __init__(self, split: str, seq_length: int, tokenizer: Tokenizer):
        self.split, self.length, self.tokenizer = split, seq_length + 1, tokenizer

    def __len__(self) -> int:
        return SAMPLES[self.split]

    def __getitem__(self, i: int) -> list[int]:
        rng, ids = random.Random(f"{self.split} {i}"), list[int]()
        while len(ids) < self.length:
            a, b = rng.randrange(100), rng.randrange(100)
            ids += self.tokenizer.encode(f"{a}+{b}={a + b};")
        return ids[: self.length]


@megalite.register("dataset", "sums")
def sums(split: str, seq_length: int, tokenizer: Tokenizer | None) -> Sums | None:
    if tokenizer is None:
        raise ValueError("dataset='sums' needs a tokenizer; give --tokenizer-type ByteTokenizer")
    return Sums(split, seq_length, tokenizer) if split in SAMPLES else None
