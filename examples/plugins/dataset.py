"""A dataset: sums to learn, "17+25=42;" again and again, made when they are asked for.

megalite train --plugin examples/plugins/dataset.py --dataset sums --tokenizer-type ByteTokenizer --preset tiny \
  --train-iters 20 --eval-iters 2 --micro-batch-size 2 --global-batch-size 8 --save runs/sums

A dataset is samples by number: len, and [i], which gives seq_length + 1 token ids, always the same ones. So a run that
resumes sees what it would have seen, dp ranks share the samples, and the ledger counts epochs.
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
        draw, ids = random.Random(f"{self.split} {i}"), list[int]()
        while len(ids) < self.length:
            a, b = draw.randrange(100), draw.randrange(100)
            ids += self.tokenizer.encode(f"{a}+{b}={a + b};")
        return ids[: self.length]


@megalite.register("dataset", "sums")
def sums(split: str, seq_length: int, tokenizer: Tokenizer | None) -> Sums | None:
    if tokenizer is None:
        raise ValueError("dataset='sums' needs a tokenizer; give --tokenizer-type ByteTokenizer")
    return Sums(split, seq_length, tokenizer) if split in SAMPLES else None
